"""Where the joint search is over the budget or out of time, known shardings with other ways to keep values will do."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from autopar import planner
from autopar.errors import InfeasibleError
from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh
from autopar.planner import Options
from autopar.planner.search import budget_rounds, budget_search, rounds
from autopar.planner.search.budget_search import BudgetSearch
from autopar.solver import Problem, Solution, solve
from autopar.tracer import ColoTracer
from tests.cpu.model_checks import cluster_where_sharding_pays, subject

MESH = Mesh((4,))


def planned(share: float | None, said: list[str] | None = None, ends: float = math.inf) -> planner.Planned:
    """The MLP of the zoo within a share of what its free plan holds. ``said`` gets what the search says, which ``ends``
    then by its clock, once the free plan is over the budget."""
    graph = subject("mlp", torch.float32, 0.0).capture.graph
    options = Options(gap=0.01, time_limit_s=60.0)
    free = planner.plan_graph(graph, MESH, cluster_where_sharding_pays().sized(4), options, compare=False)
    if share is None:
        return free
    options = Options(int(free.memory.peak_bytes * share), gap=0.01, time_limit_s=60.0)
    cluster, say = cluster_where_sharding_pays().sized(4), ([] if said is None else said).append
    return planner.plan_graph(graph, MESH, cluster, options, say, over_budget=lambda deadline: min(deadline, ends))


def test_a_choice_that_is_over_the_budget_is_mended_with_its_own_shardings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_rounds, "TIGHTEN_ROUNDS", 1)
    monkeypatch.setattr(BudgetSearch, "_from_what_is_known", lambda self, joint, *_: joint)
    plan = planned(0.85)
    assert plan.solution.method.endswith("kept anew")
    assert plan.memory.peak_bytes <= 0.85 * planned(None).memory.peak_bytes
    assert plan.solution.lower_bound <= plan.solution.objective


def test_a_proof_is_refused_for_a_choice_whose_program_is_over_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows say that it fits: before they have changed nothing is worth proving."""
    refused: list[bool] = []

    def solved(problem: Problem, **options: Any) -> Solution:
        found = solve(problem, **options)
        refused.append(options["refuses"](found.choice))
        return found

    monkeypatch.setattr(rounds, "solve", solved)
    monkeypatch.setattr(BudgetSearch, "_from_what_is_known", lambda self, joint, *_: joint)
    planned(None)
    assert refused and not any(refused)
    said: list[str] = []
    planned(0.85, said)
    assert 0 < sum(refused) == sum(step.startswith("over the budget by") for step in said) < len(refused)


def test_where_the_joint_search_finds_nothing_a_baseline_with_values_run_again_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget_search, "SMALL_MOST", 0)
    monkeypatch.setattr(BudgetSearch, "within_budget", lambda *_, **__: None)
    monkeypatch.setattr(BudgetSearch, "baseline", "")
    plan = planned(0.8)
    assert plan.solution.method == "known shardings"
    assert plan.memory.peak_bytes <= 0.8 * planned(None).memory.peak_bytes
    assert plan.solution.lower_bound <= plan.solution.objective


def test_the_plan_of_the_smallest_peak_has_no_bound_of_other_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to it solves with smaller limits than the budget, whose bounds say nothing of plans within it."""
    monkeypatch.setattr(BudgetSearch, "within_budget", lambda *_, **__: None)
    monkeypatch.setattr(BudgetSearch, "_from_what_is_known", lambda *_, **__: None)
    monkeypatch.setattr(BudgetSearch, "baseline", "")
    plan, free = planned(0.8), planned(None)
    assert plan.memory.peak_bytes <= 0.8 * free.memory.peak_bytes
    assert plan.solution.lower_bound <= free.solution.objective


@pytest.mark.parametrize(("times", "begun"), [(0.0, True), (1e9, False)])
def test_a_round_of_a_large_problem_is_begun_only_where_it_may_end_in_time(
    times: float, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_search, "SMALL_MOST", 0)
    monkeypatch.setattr(budget_search, "ROUND", times)
    said: list[str] = []
    plan = planned(0.8, said)
    after = said[said.index("over the budget: keep or recompute") + 1]
    assert after.startswith("solve") == begun
    assert begun or after == "over the budget: known shardings"
    assert plan.memory.peak_bytes <= 0.8 * planned(None).memory.peak_bytes


@pytest.mark.parametrize(("early", "late"), [(1e9, 0.0), (0.0, 1e9)])
def test_a_deep_model_whose_first_plan_comes_too_late_is_told_how_long_it_takes(
    early: float, late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_search, "SMALL_MOST", 0)
    monkeypatch.setattr(budget_search, "ROUND", 1e9)
    monkeypatch.setattr(BudgetSearch, "baseline", "")
    monkeypatch.setattr(budget_search, "TO_LISTING", early)
    monkeypatch.setattr(budget_search, "TO_KNOWN", late)
    with pytest.raises(InfeasibleError, match=r"No plan was found in time (.|\n)* budget that works so far") as raised:
        planned(0.8)
    suggested = re.search(r"time_limit=(\d+)", str(raised.value))
    assert suggested is not None and int(suggested[1]) > 60


def test_a_baseline_that_fits_is_the_plan_where_the_time_is_up_already() -> None:
    said: list[str] = []
    plan = planned(0.9, said, ends=0.0)
    assert "over the budget: keep or recompute" not in said
    assert plan.solution.method.startswith("nothing was found that fits; ")
    assert plan.memory.peak_bytes <= 0.9 * planned(None).memory.peak_bytes
    assert plan.solution.lower_bound <= plan.solution.objective


@cache
def language_model(batch: int) -> Graph:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=64, n_head=2, n_positions=64, vocab_size=256))
        ids = torch.empty(batch, 64, dtype=torch.int64)
    return ColoTracer().capture(model, {"input_ids": ids, "labels": ids}).graph


@pytest.mark.parametrize(("batch", "share"), [(64, 0.7), (1, 0.75)], ids=["activations", "optimizer state"])
def test_on_one_device_rules_find_a_plan_where_there_is_no_time_for_a_round(
    batch: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer runs again; where that is not enough, optimizer state goes to the host."""
    monkeypatch.setattr(budget_search, "SMALL_MOST", 0)
    monkeypatch.setattr(budget_search, "SMALLEST_MOST", 0)
    monkeypatch.setattr(budget_search, "ROUND", 1e9)
    graph, cluster = language_model(batch), Cluster.load("dgx-h100").sized(1)

    def within(budget: int) -> planner.Planned:
        options = Options(budget, time_limit_s=1.0)
        return planner.plan_graph(graph, Mesh((1,)), cluster, options, over_budget=lambda _: 0.0)

    free = within(10**12)
    plan = within(int(share * free.memory.peak_bytes))
    assert plan.solution.method == "rules"
    assert plan.memory.peak_bytes <= share * free.memory.peak_bytes
    assert free.solution.lower_bound == plan.solution.lower_bound < plan.solution.objective
    on_host = any(
        v.host_state_bytes and v.host_state_bytes[o]
        for v, o in zip(plan.decisions.variables, plan.solution.choice, strict=True)
    )
    assert on_host == (batch == 1)
