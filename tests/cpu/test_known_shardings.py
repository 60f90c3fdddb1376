"""Where the joint search is over the budget or out of time, known shardings with other ways to keep values will do."""

from __future__ import annotations

import math

import pytest
import torch

from autopar import planner
from autopar.mesh import Mesh
from autopar.planner import Options, budget_rounds, search
from autopar.planner.search import _Search
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
    monkeypatch.setattr(_Search, "_from_what_is_known", lambda self, joint, *_: joint)
    plan = planned(0.85)
    assert plan.solution.method.endswith("kept anew")
    assert plan.memory.peak_bytes <= 0.85 * planned(None).memory.peak_bytes
    assert plan.solution.lower_bound <= plan.solution.objective


def test_where_the_joint_search_finds_nothing_a_baseline_with_values_run_again_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "SMALL_MOST", 0)
    monkeypatch.setattr(_Search, "within_budget", lambda *_, **__: None)
    monkeypatch.setattr(_Search, "baseline", "")
    plan = planned(0.8)
    assert plan.solution.method == "known shardings"
    assert plan.memory.peak_bytes <= 0.8 * planned(None).memory.peak_bytes
    assert plan.solution.lower_bound <= plan.solution.objective


def test_the_plan_of_the_smallest_peak_has_no_bound_of_other_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to it solves with smaller limits than the budget, whose bounds say nothing of plans within it."""
    monkeypatch.setattr(_Search, "within_budget", lambda *_, **__: None)
    monkeypatch.setattr(_Search, "_from_what_is_known", lambda *_, **__: None)
    monkeypatch.setattr(_Search, "baseline", "")
    plan, free = planned(0.8), planned(None)
    assert plan.memory.peak_bytes <= 0.8 * free.memory.peak_bytes
    assert plan.solution.lower_bound <= free.solution.objective


@pytest.mark.parametrize(("times", "begun"), [(0.0, True), (1e9, False)])
def test_a_round_of_a_large_problem_is_begun_only_where_it_may_end_in_time(
    times: float, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SMALL_MOST", 0)
    monkeypatch.setattr(search, "ROUND", times)
    said: list[str] = []
    plan = planned(0.8, said)
    after = said[said.index("over the budget: keep or recompute") + 1]
    assert after.startswith("solve") == begun
    assert begun or after == "over the budget: known shardings"
    assert plan.memory.peak_bytes <= 0.8 * planned(None).memory.peak_bytes


def test_a_baseline_that_fits_is_the_plan_where_the_time_is_up_already() -> None:
    said: list[str] = []
    plan = planned(0.9, said, ends=0.0)
    assert "over the budget: keep or recompute" not in said
    assert plan.solution.method.startswith("nothing was found that fits; ")
    assert plan.memory.peak_bytes <= 0.9 * planned(None).memory.peak_bytes
    assert plan.solution.lower_bound <= plan.solution.objective
