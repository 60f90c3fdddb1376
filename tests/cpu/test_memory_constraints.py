"""What the memory constraints count of a choice, compared with what its program holds, point by point."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar import planner
from autopar.errors import InfeasibleError
from autopar.holding import ABSENT, KEEP, RECOMPUTE
from autopar.ir import Graph, Value
from autopar.mesh import Cluster, Mesh
from autopar.planner import Options
from autopar.planner.footprint.op_work import local_bytes
from autopar.planner.memory.active_set import ActiveSet, held_by_point
from autopar.planner.memory.exact import profile
from autopar.planner.memory.points import ProgramPoint
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import Decisions, decide, hold_key, rerun_key, spec_made, spec_read
from autopar.planner.schedule.schedule import schedule
from autopar.planner.search.search import Planned
from autopar.solver import Problem, solve
from tests.cpu.model_checks import cluster_where_sharding_pays, subject
from tests.zoo import ZOO as ARCHITECTURES
from tests.zoo.measure import captured

CASES = [
    *(("mlp", share, shape, False) for share in (0.6, 0.85) for shape in ((4,), (2, 2))),
    *(("mlp", share, (8,), True) for share in (0.6, 0.9)),
    *(pytest.param("mlp", share, (2, 4), True, marks=pytest.mark.slow) for share in (0.6, 0.9)),
    ("mlp", 1.0, (4,), False),
    ("gpt2", 1.0, (2, 2), False),
    ("llama", 1.0, (4,), False),
    pytest.param("llama", 0.55, (4,), False, marks=pytest.mark.slow),
    pytest.param("bert", 1.0, (2, 4), False, marks=pytest.mark.slow),
    *(
        pytest.param(name, share, shape, False, marks=pytest.mark.slow)
        for name, share in [("mlp", 0.7), *((name, share) for name in ("gpt2", "llama") for share in (0.4, 0.45))]
        for shape in ((4,), (2, 2))
    ),
    *(
        pytest.param(name, share, shape, True, marks=pytest.mark.slow)
        for name in ("gpt2", "llama", "bert")
        for share in (0.6, 0.9)
        for shape in ((8,), (2, 4))
    ),
    pytest.param("mixtral", 0.5, (2, 2), False, marks=pytest.mark.slow),
    pytest.param("outside", 0.5, (4,), False, marks=pytest.mark.slow),
]
"""Budgets as shares of the free plan's peak (where that is 1, nothing is run again), meshes, and whether products are
decomposed wherever they can be."""

ROUNDING = 1e-9
"""Share of the peak: the constraints count shares of views, in floating point."""


def plainly(d: Decisions, choice: Sequence[int]) -> list[int]:
    """Return ``choice`` without copies that are kept in the spec in which the value is there anyway, and without values
    that are held and ops that are run again for nobody; and with views of what is kept made again. The program holds
    the same."""
    plain = list(choice)
    for v in [v for v in d.variables if v.kind == "hold" and v.value is not None and v.value.node in d.views]:
        _make_views_again(d, plain, v.value)
    for h in d.uses:
        target = d.variables[h.target]
        if target.kept and not h.kept and target.kept[choice[h.target]]:
            option = target.options[choice[h.target]]
            if spec_made(d.variables[h.source].options[choice[h.source]], h.out) == option.outputs[0]:
                plain[h.target] = choice[h.target] - len(target.options) // 2
    for node in reversed(d.graph.nodes):
        held = [at for i in range(len(node.outputs)) if (at := d.index.get(hold_key(Value(node.name, i)))) is not None]
        for at in held:
            readers = (h.target for h in d.uses if h.source == at)
            if not any(d.variables[t].options[plain[t]].inputs for t in readers):
                plain[at] = d.variables[at].actions.index(ABSENT)
        if held and not any(d.variables[at].actions[plain[at]].remakes for at in held):
            plain[d.index[rerun_key(node.name)]] = 0
    _copy_nothing_for_nobody(d, plain)
    return plain


def _copy_nothing_for_nobody(d: Decisions, choice: list[int]) -> None:
    """Take a value as it is made where nobody reads a copy of it in another spec, or what the forward gathered."""
    for h in d.uses:
        copy = d.variables[h.target]
        if h.kept or copy.kind != "copy":
            continue
        made = spec_made(d.variables[h.source].options[choice[h.source]], h.out)
        readers = d.readers.get(h.target, ())
        read = {spec_read(d.variables[u.target].options[choice[u.target]], u.position) for u in readers}
        if read <= {None, made}:
            ways = enumerate(zip(copy.options, copy.kept or [False] * len(copy.options), strict=True))
            as_made = (i for i, (o, kept) in ways if not kept and spec_made(o, 0) == made)
            choice[h.target] = next(as_made, choice[h.target])


def _make_views_again(d: Decisions, choice: list[int], view: Value) -> None:
    """Make a view again that ``choice`` keeps beside what it is a view of."""
    chain = [view]
    while chain[-1].node in d.views:
        chain.append(d.graph.by_name[chain[-1].node].inputs[0])
    held = [d.index.get(hold_key(value), -1) for value in chain]
    ends = [(held[0], chain[0]), (held[-1], chain[-1])]
    base = d.variables[d.index[chain[-1].node]]
    if base.kind == "parameter":  # which is there anyway
        view = d.index[chain[-2].node]
        if spec_read(d.variables[view].options[choice[view]], 0) != base.options[choice[d.index[base.key]]].outputs[0]:
            return
        ends.pop()
    for at, value in ends:
        made = d.variables[d.index[value.node]].options[choice[d.index[value.node]]]
        v = d.variables[at]
        if at < 0 or v.actions[choice[at]] != KEEP or v.options[choice[at]].outputs[0] != spec_made(made, value.index):
            return
    for at, value in zip(held[:-1], chain, strict=False):
        v, op = d.variables[at], d.index[value.node]
        spec = spec_made(d.variables[op].options[choice[op]], value.index)
        again = [i for i, a in enumerate(v.actions) if a == RECOMPUTE and v.options[i].outputs == (spec,)]
        if v.actions[choice[at]] == RECOMPUTE or not again:
            return
        choice[at], choice[d.index[rerun_key(value.node)]] = again[0], 1 + choice[op]


def modelled_and_held(
    d: Decisions, choice: Sequence[int], prices: Prices, options: Options
) -> tuple[dict[ProgramPoint, float], dict[ProgramPoint, int]]:
    """Return the bytes at every point as the constraints count them for ``choice``, and as its program holds them."""
    program = schedule(d, choice, prices)
    held = held_by_point(program, d, profile(program, d.graph, d.mesh, options).timeline)
    constraints = ActiveSet(d, options, prices.decomposition.may_gain)
    modelled = {point: constraints.pairs.bytes(choice, point) for point in held}
    points = tuple(held)
    for usage in constraints.memory_usages.at_points(points):
        for time in range(usage.start, usage.end):
            modelled[points[time]] += float(usage.option[choice[usage.node]])
    return modelled, {point: at.bytes for point, at in held.items()}


def highest_over(d: Decisions, choice: Sequence[int], prices: Prices, options: Options) -> float:
    """Return by how much the constraints count more than the program holds, at the point where that is the most, as a
    share of the program's peak."""
    modelled, held = modelled_and_held(d, plainly(d, choice), prices, options)
    return max(modelled[p] - held[p] for p in held) / max(held.values())


def planned_within(
    budget: int, graph: Graph, mesh: Mesh, cluster: Cluster, options: Options
) -> tuple[Planned, Options]:
    """The plan within a budget in bytes, and the options with it; skips the test if nothing fits."""
    options = replace(options, memory_budget_bytes=budget)
    try:
        return planner.plan_graph(graph, mesh, cluster, options, compare=False), options
    except InfeasibleError:
        pytest.skip("nothing fits")


@pytest.mark.parametrize(("name", "share", "shape", "decomposed"), CASES, ids=str)
def test_constraints_never_count_more_than_the_program_holds(
    name: str, share: float, shape: tuple[int, ...], decomposed: bool
) -> None:
    """Else the bound on all plans within a budget would not hold."""
    graph, mesh = subject(name, torch.float32, 0.0).capture.graph, Mesh(shape)
    cluster = cluster_where_sharding_pays().sized(mesh.size)
    options = Options(gap=0.01, async_tensor_parallel="always" if decomposed else "auto", time_limit_s=60.0)
    free = planner.plan_graph(graph, mesh, cluster, options, compare=False)
    plan, options = planned_within(int(free.memory.peak_bytes * share), graph, mesh, cluster, options)
    prices = Prices(mesh, cluster, options.backend, options.decomposed)
    assert highest_over(plan.decisions, plan.solution.choice, prices, options) <= ROUNDING


SHARED = ("ast", "bloom", "dinov2", "fnet")
"""Models where readers share a redistribution, results are redistributed early, or a parameter has no gradient."""


@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in SHARED)) for n in ARCHITECTURES])
def test_no_architecture_holds_less_than_the_constraints_count(name: str, share: float) -> None:
    graph, mesh = captured(ARCHITECTURES[name]).capture.graph, Mesh((2, 2))
    cluster, options = cluster_where_sharding_pays().sized(4), Options(gap=0.01, time_limit_s=20.0)
    plan = planner.plan_graph(graph, mesh, cluster, options, compare=False)
    if share < 1:
        plan, options = planned_within(int(share * plan.memory.peak_bytes), graph, mesh, cluster, options)
    prices = Prices(mesh, cluster, options.backend, options.decomposed)
    assert highest_over(plan.decisions, plan.solution.choice, prices, options) <= ROUNDING


@pytest.mark.parametrize("shape", [(1,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "llama"))])
def test_what_is_run_again_counts_while_it_is_there(name: str, shape: tuple[int, ...]) -> None:
    """Of what one node needs again each op has moments of its own, and what it alone read is gone when it has run. What
    is held costs something at random, so that some of it is run again."""
    graph, mesh = subject(name, torch.float32, 0.0).capture.graph, Mesh(shape)
    cluster = cluster_where_sharding_pays().sized(mesh.size)
    options = Options(device=cluster.device.kind)
    d = decide(graph, mesh, options, resolve(graph, mesh, {}, {}), recompute=True)
    prices = Prices(mesh, cluster, options.backend, options.decomposed)
    free = Objective(d, prices).problem()
    again = 0
    for seed in range(4):
        chosen = solve(_priced(d, free, random.Random(seed)), time_limit=20.0, gap=1e-3).choice
        assert highest_over(d, chosen, prices, options) <= ROUNDING
        again += sum(v.kind == "rerun" and o > 0 for v, o in zip(d.variables, chosen, strict=True))
    assert again


def test_views_that_are_made_again_hold_what_they_are_of() -> None:
    """Of the attention of ``nn.TransformerEncoderLayer`` queries, keys and values are views of one product, through
    views that are free to make again."""
    graph, mesh = subject("outside", torch.float32, 0.0).capture.graph, Mesh((2,))
    cluster = Cluster.load("dgx-h100").sized(2)
    options = Options(device=cluster.device.kind)
    d = decide(graph, mesh, options, resolve(graph, mesh, {}, {}), recompute=True)
    prices = Prices(mesh, cluster, options.backend, options.decomposed)
    free = Objective(d, prices).problem()
    views = [i for i, v in enumerate(d.variables) if v.kind == "hold" and v.value and v.value.node in d.views]
    dear = {i: np.array([1.0 * (a == KEEP) for a in d.variables[i].actions]) for i in views}
    problem = replace(free, costs=tuple(c + dear.get(i, 0.0) for i, c in enumerate(free.costs)))
    chosen = solve(problem, time_limit=20.0, gap=1e-3).choice
    modelled, held = modelled_and_held(d, plainly(d, chosen), prices, options)
    at = ProgramPoint(d.graph.order["attention_backward"])
    assert 0.98 * held[at] <= modelled[at] <= held[at]


def _priced(d: Decisions, problem: Problem, prices: random.Random) -> Problem:
    """``problem`` where each byte that is held for the backward costs some seconds, more of some values."""
    costs, scale = list(problem.costs), 10 ** prices.uniform(-8.0, -6.0)
    for i, v in enumerate(d.variables):
        if v.kind == "hold" and v.value is not None:
            price, meta = scale * prices.choice((0.1, 1.0, 10.0)), d.graph.meta(v.value)
            costs[i] = costs[i] + [
                price * local_bytes(meta, o.outputs[0], d.mesh) if a.of_forward else 0.0
                for a, o in zip(v.actions, v.options, strict=True)
            ]
    return replace(problem, costs=tuple(costs))
