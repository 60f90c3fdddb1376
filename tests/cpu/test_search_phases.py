"""The search as a table of phases: what each adds, and the laws that hold for all of them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar import planner, settings
from autopar.errors import AutoparError, InfeasibleError
from autopar.holding import KEEP, RECOMPUTE
from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh
from autopar.planner import Options
from autopar.planner.memory import active_set
from autopar.planner.search import search as searching
from autopar.planner.search.phases import (
    Baselines,
    Free,
    Joint,
    KnownShardings,
    Layers,
    Phase,
    Reruns,
    Rules,
    SmallestPeak,
)
from autopar.planner.search.search import JOINT
from autopar.planner.search.state import Result, Search, SearchState
from autopar.planner.search.two_stage import Open, axes_as_one, sharded_as
from autopar.solver.clock import now, only_counted
from autopar.tracer import ColoTracer
from tests.baseline_laws import captured
from tests.cpu.model_checks import cluster_where_sharding_pays
from tests.infeasible import smallest_budget
from tests.zoo import ZOO

LONG = 40.0
CASES = [("mlp", (4,), 0.8), ("mlp", (2, 2), 0.7), ("gpt2", (2, 2), 0.6)]


def planned(
    name: str,
    mesh: tuple[int, ...],
    share: float | None,
    phases: tuple[Phase, ...] = JOINT,
    *,
    compare: bool = False,
    **options: object,
) -> planner.Planned:
    """A small model within a share of what its free plan holds, by some phases."""
    graph, on = captured(name), Mesh(mesh)
    cluster = cluster_where_sharding_pays().sized(on.size)
    budget = None if share is None else int(share * free_peak(name, mesh))
    run = {"training_steps": settings.TRAINING_STEPS, "time_limit_s": LONG}
    given = {"memory_budget_bytes": budget, "gap": 1e-3, **run, **options}
    asked = Options(**given)  # type: ignore[arg-type]
    before, searching.SEARCHES["joint"] = searching.SEARCHES["joint"], lambda _: phases
    try:
        return planner.plan_graph(graph, on, cluster, asked, compare=compare)
    finally:
        searching.SEARCHES["joint"] = before


@cache
def free_peak(name: str, mesh: tuple[int, ...]) -> int:
    return planned(name, mesh, None, training_steps=math.inf).memory.peak_bytes


@pytest.mark.parametrize(("name", "mesh", "share"), CASES)
def test_one_phase_more_never_makes_the_plan_worse(name: str, mesh: tuple[int, ...], share: float) -> None:
    costs = []
    for most in range(4, len(JOINT) + 1):
        try:
            costs.append(planned(name, mesh, share, JOINT[:most]).solution.objective)
        except InfeasibleError:
            costs.append(math.inf)
    assert math.isfinite(costs[-1])
    assert all(after <= before * (1 + 1e-9) for before, after in zip(costs, costs[1:], strict=False))


@pytest.mark.parametrize(("name", "mesh", "share"), CASES)
def test_more_work_never_gives_a_worse_plan(name: str, mesh: tuple[int, ...], share: float) -> None:
    costs = [planned(name, mesh, share, time_limit_s=seconds).solution.objective for seconds in (4.0, 16.0, 64.0)]
    assert all(after <= before * (1 + 1e-9) for before, after in zip(costs, costs[1:], strict=False))


@pytest.mark.parametrize(("limit_s", "limits"), [(10, [10]), (60, [60]), (150, [60, 150]), (400, [60, 120, 400])])
def test_more_time_goes_on_from_what_less_time_finds(limit_s: float, limits: list[float]) -> None:
    assert searching._limits(limit_s) == limits


@pytest.mark.parametrize(
    ("name", "mesh", "share"),
    [CASES[0], *(pytest.param(*c, marks=pytest.mark.slow) for c in CASES[1:]), ("gpt2", (2, 2), None)],
)
def test_a_search_of_twice_the_limit_finds_what_the_shorter_one_does(
    name: str, mesh: tuple[int, ...], share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans of the shorter search come first, and the last step is no longer."""
    monkeypatch.setattr(settings, "FIRST_LIMIT_S", 1.0)
    run = {"gap": 0.0, "training_steps": math.inf}
    with only_counted():  # the wall would end one of a second sooner
        plans = [planned(name, mesh, share, time_limit_s=seconds, **run) for seconds in (1.0, 2.0, 4.0)]
    for shorter, longer in pairwise(plans):
        assert [(r.phase, r.cost) for r in shorter.trace] == [
            (r.phase, r.cost) for r in longer.trace[: len(shorter.trace)]
        ]
        assert longer.timeline.seconds <= shorter.timeline.seconds * (1 + 1e-9)
        assert longer.solution.lower_bound >= shorter.solution.lower_bound * (1 - 1e-9)


@pytest.mark.parametrize(("name", "mesh", "share"), CASES)
def test_the_trace_tells_cost_and_bound_of_every_phase(name: str, mesh: tuple[int, ...], share: float) -> None:
    plan = planned(name, mesh, share)
    costs = [math.inf if r.cost is None else r.cost for r in plan.trace]
    assert plan.trace[0].phase == Free().name
    assert costs == sorted(costs, reverse=True)
    for before, after in zip(plan.trace, plan.trace[1:], strict=False):
        assert before.work <= after.work
        assert before.bound <= after.bound
    assert plan.trace[-1].cost == plan.solution.objective
    assert plan.solution.lower_bound <= plan.solution.objective


@pytest.mark.parametrize(("name", "mesh", "share"), CASES)
def test_a_first_plan_comes_from_known_shardings_and_is_decent(name: str, mesh: tuple[int, ...], share: float) -> None:
    """At most a quarter dearer than what is found in the end."""
    known = (Free(), Baselines(), Reruns(), KnownShardings())
    first, last = (planned(name, mesh, share, phases, compare=True) for phases in (known, JOINT))
    assert first.memory.peak_bytes <= share * free_peak(name, mesh)
    assert first.solution.objective <= 1.25 * last.solution.objective


@pytest.mark.slow
def test_the_search_ends_when_a_run_gains_less_than_it_costs() -> None:
    """So a plan for few steps takes no more work, and says how far from the bound it is. But for the first second."""
    few, many = (planned("gpt2", (2, 2), 0.35, training_steps=steps, gap=1e-6) for steps in (1.0, 500_000))
    assert settings.LEAST_S <= few.trace[-1].work < many.trace[-1].work
    assert few.solution.objective >= many.solution.objective
    assert few.memory.peak_bytes <= 0.35 * free_peak("gpt2", (2, 2))


def test_known_shardings_leave_work_to_the_joint_problem_where_a_baseline_fits() -> None:
    """They took 9.5 of 10 seconds of work for StarCoder2 in small, whose plan was then 55 % above the free one."""
    model, inputs = ZOO["starcoder2"].made()
    free = autopar.plan(model, inputs, mesh=(2, 2), cluster="dgx-h100")
    budget = int(0.6 * free.peak_memory)
    with only_counted():
        found = autopar.plan(model, inputs, mesh=(2, 2), cluster="dgx-h100", memory_budget=budget, time_limit=10)
    assert "joint" in [record.phase for record in found.trace]
    assert found.objective <= 1.25 * free.objective


def test_where_nothing_else_fits_the_smallest_peak_is_the_plan() -> None:
    phases = (Free(), Reruns(), SmallestPeak())
    with pytest.raises(InfeasibleError) as error:
        planned("mlp", (4,), 0.01, phases)
    named = smallest_budget(error.value)
    share = (named + 0.5) / free_peak("mlp", (4,))
    plan = planned("mlp", (4,), share, phases)
    assert plan.memory.peak_bytes <= named
    assert plan.solution.lower_bound <= planned("mlp", (4,), None).solution.objective


def test_a_baseline_is_the_plan_where_no_phase_finds_one() -> None:
    found = planned("gpt2", (2, 2), 0.6, (Free(), Baselines()), compare=True)
    assert found.solution.method.startswith("nothing was found that fits; baseline")
    assert found.memory.peak_bytes <= 0.6 * free_peak("gpt2", (2, 2))
    assert found.solution.lower_bound <= found.solution.objective


def test_an_unknown_search_is_refused_by_name() -> None:
    with pytest.raises(AutoparError, match="no search='exhaustive'"):
        planned("mlp", (2,), None, search="exhaustive")


@cache
def language_model(batch: int, layers: int = 4) -> Graph:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=64, n_head=2, n_positions=64, vocab_size=256))
        ids = torch.empty(batch, 64, dtype=torch.int64)
    return ColoTracer().capture(model, {"input_ids": ids, "labels": ids}).graph


def test_a_first_plan_of_a_deep_model_recomputes_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What crosses from layer to layer is kept, and weights are gathered again. A problem under constraints takes
    longer, and may find nothing."""
    graph, on, cluster = language_model(32, layers=6), Mesh((2, 2)), cluster_where_sharding_pays().sized(4)
    free = planner.plan_graph(graph, on, cluster, Options(10**12), compare=False)
    monkeypatch.setitem(searching.SEARCHES, "joint", lambda _: (Free(), Reruns(), Layers()))
    found = planner.plan_graph(graph, on, cluster, Options(int(0.6 * free.memory.peak_bytes)))
    assert found.memory.peak_bytes <= 0.6 * free.memory.peak_bytes
    assert found.trace[-1].phase == found.solution.method == "layers recomputed"
    held = list(zip(found.decisions.variables, found.solution.choice, strict=True))
    assert not any(v.kept[option] for v, option in held if v.kept and not all(v.kept))
    actions = Counter(v.actions[option] for v, option in held if v.kind == "hold")
    assert 4 <= actions[KEEP] <= 12 < actions[RECOMPUTE]


@pytest.mark.slow
def test_an_error_names_no_more_than_recomputed_layers_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constraints alone found 107 GiB for OLMo 2 7B on 16 ranks, where all layers are recomputed at once."""
    graph, on, cluster = language_model(32, layers=6), Mesh((2, 2)), cluster_where_sharding_pays().sized(4)
    free = planner.plan_graph(graph, on, cluster, Options(10**12), compare=False)
    with pytest.raises(InfeasibleError) as error:
        planner.plan_graph(graph, on, cluster, Options(1000, time_limit_s=8.0))
    named = smallest_budget(error.value)
    monkeypatch.setitem(searching.SEARCHES, "joint", lambda _: (Free(), Reruns(), Layers()))
    found = planner.plan_graph(graph, on, cluster, Options(int(0.6 * free.memory.peak_bytes)))
    assert named <= found.memory.peak_bytes


@pytest.mark.parametrize(("batch", "share"), [(64, 0.7), (1, 0.75)], ids=["activations", "optimizer state"])
def test_on_one_device_rules_alone_find_a_plan(batch: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer runs again; where that is not enough, optimizer state goes to the host."""
    monkeypatch.setitem(searching.SEARCHES, "joint", lambda _: (Free(), Reruns(), Rules()))
    graph, cluster = language_model(batch), Cluster.load("dgx-h100").sized(1)

    def within(budget: int) -> planner.Planned:
        return planner.plan_graph(graph, Mesh((1,)), cluster, Options(budget), compare=False)

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


def test_a_choice_over_the_budget_is_repaired_with_its_own_shardings() -> None:
    phases, long = (Free(), Reruns(), Joint()), {"training_steps": math.inf, "time_limit_s": 6.0}
    found = [planned("mlp", (4,), share, phases, **long) for share in (0.75, 0.8, 0.85, 0.9)]
    assert any(plan.solution.method.endswith("repaired") for plan in found)


@pytest.mark.parametrize("share", [0.6, 0.75])
def test_margins_that_leave_nothing_are_not_set_aside_everywhere(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_set, "EQUALISE_FACTOR", 1e6)
    found = planned("mlp", (4,), share, (Free(), Reruns(), KnownShardings()), training_steps=math.inf, time_limit_s=8.0)
    assert found.solution.method == "known shardings"


@dataclass(frozen=True)
class NotingLayers(KnownShardings):
    """Notes whether what crosses from layer to layer is kept."""

    kept: list[bool] = field(default_factory=list)

    def _solved(self, *args: Any, **kwargs: Any) -> tuple[SearchState, Result | None]:
        *_, boundaries = args
        self.kept.append(bool(boundaries))
        return super()._solved(*args, **kwargs)


@pytest.mark.slow
def test_what_crosses_from_layer_to_layer_is_kept_until_nothing_fits_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Gemma 2 2B within the least budget it was recomputed as soon as nothing fitted with a margin; then all layers
    run at once, and no plan came of it."""
    graph, on, cluster = language_model(32, layers=6), Mesh((2, 2)), cluster_where_sharding_pays().sized(4)
    free = planner.plan_graph(graph, on, cluster, Options(10**12), compare=False)
    monkeypatch.setattr(settings, "MARGIN", 0.95)  # within which nothing fits
    phase = NotingLayers()
    monkeypatch.setitem(searching.SEARCHES, "joint", lambda _: (Free(), Reruns(), phase))
    with only_counted():
        found = planner.plan_graph(graph, on, cluster, Options(int(0.15 * free.memory.peak_bytes), time_limit_s=20.0))
    assert phase.kept == [True, True, False]
    assert found.solution.method == "known shardings"


@dataclass(frozen=True)
class Noting(KnownShardings):
    """Notes what it leaves open, and whether that is the free optimum's shardings or any that take the axes as one."""

    tried: list[str] = field(default_factory=list)

    def _kept(self, search: Search, state: SearchState, still: Open, until: float) -> SearchState:
        assert state.free is not None and state.joint is not None
        of_free = sharded_as(search.objective.decisions, state.free.solution.choice, state.joint.decisions)
        kinds = {of_free: "free", axes_as_one(state.joint.decisions): "as one"}
        self.tried.append(kinds.get(still, "baseline"))
        return super()._kept(search, state, still, until)


@pytest.mark.parametrize(
    ("name", "share", "first"),
    [("mlp", 0.92, "free"), ("gpt2", 0.5, "as one")],  # hardly more than the budget, and much more
)
def test_what_nearly_fits_is_tried_before_what_holds_little(name: str, share: float, first: str) -> None:
    noting = Noting()
    planned(name, (2, 2), share, (Free(), Reruns(), noting), compare=True, training_steps=math.inf, time_limit_s=8.0)
    assert noting.tried[0] == first


def test_options_that_take_the_axes_as_one_cut_by_all_axes_or_none() -> None:
    d = planned("gpt2", (2, 2), None).decisions
    still = axes_as_one(d)
    assert still is not None
    for v, options in zip(d.variables, still, strict=True):
        for option in (v.options[o] for o in options):
            for spec in (s for s in (*option.inputs, *option.outputs) if s is not None):
                assert all(axes in ((), (0, 1)) for axes in spec.dims)
                assert len(spec.partial) in (0, 2)
    assert axes_as_one(planned("gpt2", (4,), None).decisions) is None


@pytest.mark.parametrize("share", [0.7, 0.5])
def test_more_axes_do_not_make_a_plan_of_known_shardings_worse(share: float) -> None:
    """A mesh of one axis has the same shardings as one of several whose axes are taken as one."""
    phases = (Free(), Reruns(), KnownShardings())
    budget = int(share * free_peak("gpt2", (8,)))
    costs = [
        planned("gpt2", mesh, None, phases, memory_budget_bytes=budget, compare=True).solution.objective
        for mesh in ((8,), (2, 2, 2))
    ]
    assert costs[1] <= 1.02 * costs[0]


@dataclass(frozen=True)
class Listing(Reruns):
    """Notes that it ran."""

    def applies(self, search: Search, state: SearchState) -> bool:
        return True

    def run(self, search: Search, state: SearchState, until: float) -> SearchState:
        return replace(state, listed_s=1.0)


def test_what_can_be_run_again_is_listed_although_only_work_for_the_smallest_peak_is_left() -> None:
    search: Any = SimpleNamespace(
        began=now(), ends=now() + LONG / 2, smallest_peak_s=LONG, report=lambda _: None, options=Options()
    )
    free: Any = object()
    assert searching.run_phases(search, SearchState(free=free), (Listing(),)).listed_s == 1.0


@dataclass
class KnownWay:
    """A known way to train as the last comparison sees it: its cost, and its step, which takes work to find out."""

    name: str
    objective: float
    least_s: float
    may_defer: bool = False

    @property
    def candidate(self) -> str:
        return self.name


@pytest.mark.parametrize(
    ("late_s", "looked_at"),
    [(-LONG, ["cheap and quick", "quick"]), (settings.LEAST_S, ["cheap and quick"]), (LONG, [])],
)
def test_known_ways_are_compared_for_some_time_until_one_may_be_quicker(late_s: float, looked_at: list[str]) -> None:
    """The search's own plan costs .74 s and takes .79 s."""
    ways = [
        KnownWay("cheap and slow", 0.75, 0.85),
        KnownWay("cheap and quick", 0.76, 0.72),
        KnownWay("quick", 0.77, 0.72),
        KnownWay("dear", 0.9, 0.9),
    ]
    search = SimpleNamespace(
        options=SimpleNamespace(compare=False, gap=1e-4),
        objective=SimpleNamespace(decisions=SimpleNamespace(mesh=Mesh((2, 2, 4)))),
        baselines=ways,
        ends=now() - late_s,
        fits=lambda _: True,
    )
    assert list(searching._fitting(search, 0.79, 0.74)) == looked_at
