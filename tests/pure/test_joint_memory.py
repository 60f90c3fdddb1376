"""Keep, recompute and offload in one problem with the shardings: what constraints count, where transfers are placed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.holding import KEEP, OFFLOAD
from autopar.mesh import Cluster, Mesh
from autopar.planner import Options, plan_graph
from autopar.planner.memory.active_set import ActiveSet
from autopar.planner.memory.pair_nodes import PairNodes
from autopar.planner.memory.points import ProgramPoint
from autopar.planner.memory.redistributed_operands import redistributed_operands
from autopar.planner.memory.usages import MemoryUsages
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.pricing.transfers import (
    HIDING_SHARE,
    hides_transfers,
    host_usages,
    place_transfers,
    store_seconds,
)
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.program import LocalTensor, Op
from autopar.sharding import ShardingSpec
from autopar.solver import UsagePrices, evaluate, peak_usage
from tests.infeasible import smallest_budget
from tests.random_plans import random_solution

from .memory_graphs import chain, tensor

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule")

MESH = Mesh((4,))
CLUSTER = Cluster.load("dgx-h100:4")


def parts(length: int = 4):
    graph, options = chain(length), Options()
    d = decide(graph, MESH, options, resolve(graph, MESH, {}, {}), recompute=True)
    return graph, options, d, Prices(MESH, CLUSTER)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_copies_hold_what_is_read_in_another_spec_than_it_is_made(seed: int) -> None:
    graph, options, d, prices = parts()
    problem = Objective(d, prices).problem()
    choice = random_solution(problem, seed).choice
    positions = tuple(map(ProgramPoint, range(0, len(graph.nodes), 3)))
    operands = PairNodes(redistributed_operands(d))
    usages = MemoryUsages.of(d, options)
    extended = operands.extend(replace(problem, usages=usages.at_points(positions), limit=math.inf), positions)
    states = operands.extend_choice(choice, positions)
    assert evaluate(extended, states)[0] == pytest.approx(evaluate(problem, choice)[0])
    held = [
        sum(float(u.option[choice[u.node]]) for u in usages.at_points((p,))) + operands.bytes(choice, p)
        for p in positions
    ]
    assert peak_usage(extended, states) == pytest.approx(max(held))


def test_a_copy_cannot_claim_to_be_what_it_is_not() -> None:
    """Only where maker and reader have one spec may a node of ``extend`` say that nothing is copied."""
    _, _, d, prices = parts()
    problem = Objective(d, prices).problem()
    choice = random_solution(problem, 1).choice
    operands = PairNodes(redistributed_operands(d))
    extended = operands.extend(problem, (ProgramPoint(2),))
    states = list(operands.extend_choice(choice, (ProgramPoint(2),)))
    for node in range(len(problem.costs), len(states)):
        least = min(
            float(next((u.option[o] for u in extended.usages if u.node == node), 0.0))
            for o in range(len(extended.costs[node]))
            if evaluate(extended, [*states[:node], o, *states[node + 1 :]])[1]
        )
        assert least == next((float(u.option[states[node]]) for u in extended.usages if u.node == node), 0.0)


def test_transfers_hide_as_far_as_rows_allow() -> None:
    """To the one that is one too many for the seconds of the forward."""
    _, _, d, prices = parts()
    rates = prices.rates
    offloading = [(i, v) for i, v in enumerate(d.variables) if v.kind == "hold" and OFFLOAD in v.actions]
    choice, seconds = [0] * len(d.variables), 0.0
    for i, v in offloading:
        choice[i] = v.actions.index(KEEP)
    assert hides_transfers(d, choice, rates, 1e-9, parts=1)
    for i, v in offloading:
        choice[i] = v.actions.index(OFFLOAD)
        seconds += store_seconds(d, v, rates)[choice[i]]
        assert hides_transfers(d, choice, rates, 1.01 * seconds / HIDING_SHARE, parts=1)
        assert not hides_transfers(d, choice, rates, 0.99 * seconds / HIDING_SHARE, parts=1)


def test_what_is_made_late_has_less_time_to_be_offloaded_in() -> None:
    _, _, d, prices = parts(8)
    rows = host_usages(d, prices.rates, 1.0, 0, 100.0)
    assert rows
    for u in rows:
        v = d.variables[u.node]
        assert all(size == 0 for size, action in zip(u.option, v.actions, strict=True) if action != OFFLOAD)
        assert all(size > 0 for size, action in zip(u.option, v.actions, strict=True) if action == OFFLOAD)
    first, last = ([u for u in rows if u.start == t] for t in (0, max(u.start for u in rows)))
    assert len(first) >= len(last) and {u.node for u in last} <= {u.node for u in first}


def test_transfers_take_latency_and_bandwidth_of_one_direction() -> None:
    host = CLUSTER.host
    size = host.bandwidth_bytes_per_s * host.efficiency
    assert host.copy_seconds(size) == pytest.approx(1.0 + host.latency_s)


def local(name: str, *, host: bool = False) -> LocalTensor:
    return LocalTensor(name, tensor(1), ShardingSpec.replicated(1), 4, host=host)


def compute(name: str, reads: tuple[str, ...], seconds: float, phase: str) -> Op:
    return Op(name, "compute", name, reads, (local(name),), phase, seconds=seconds)  # type: ignore[arg-type]


def program_with_a_transfer(seconds: float) -> list[Op]:
    return [
        compute("a", (), 1.0, "forward"),
        Op("a|offload", "offload", "a", ("a",), (local("a|host", host=True),), "forward", seconds=seconds),
        *(compute(f"f{i}", ("a",) if not i else (f"f{i - 1}",), 1.0, "forward") for i in range(4)),
        *(compute(f"b{i}", ("f3",) if not i else (f"b{i - 1}",), 1.0, "backward") for i in range(4)),
        Op("a|fetch", "fetch", "a", ("a|host",), (local("a|back"),), "backward", seconds=seconds),
        compute("last", ("b3", "a|back"), 1.0, "backward"),
    ]


@pytest.mark.parametrize(
    ("seconds", "done_after", "begun_before"), [(0.5, "f0", "b3"), (2.0, "f1", "b2"), (9.0, "f3", "b0")]
)
def test_a_transfer_has_as_long_as_it_takes(seconds: float, done_after: str, begun_before: str) -> None:
    """It is waited for when computation has taken as long, and begun as long before its reader; within its phase."""
    names = [op.name for op in place_transfers(program_with_a_transfer(seconds))]
    assert names[names.index("a|offload|done") - 1] == done_after
    assert names[names.index("a|fetch") + 1] == begun_before


def test_nothing_is_offloaded_that_is_not_fetched() -> None:
    ops = [op for op in program_with_a_transfer(1.0) if op.kind != "fetch" and op.name != "last"]
    assert [op.name for op in place_transfers(ops)] == [op.name for op in ops if op.kind != "offload"]


@pytest.mark.parametrize("host_bytes_per_s", [1e15, 1.0])
def test_offloading_is_for_hosts_that_are_fast_enough(host_bytes_per_s: float) -> None:
    host = replace(CLUSTER.host, bandwidth_bytes_per_s=host_bytes_per_s, latency_s=1e-9)
    cluster, graph = replace(CLUSTER, host=host), chain(8)
    free = plan_graph(graph, MESH, cluster, Options(), compare=False)
    budget = int(free.memory.peak_bytes * 0.8)
    plan = plan_graph(graph, MESH, cluster, Options(memory_budget_bytes=budget, time_limit_s=10.0), compare=False)
    offloads = sum(op.kind == "offload" for op in plan.program.ops)
    assert plan.memory.peak_bytes <= budget
    assert (offloads > 0) == (host_bytes_per_s > 1.0)


def test_the_budget_that_an_error_names_is_enough() -> None:
    graph = chain(8)
    with pytest.raises(InfeasibleError, match="memory_budget=") as raised:
        plan_graph(graph, MESH, CLUSTER, Options(memory_budget_bytes=1, time_limit_s=10.0), compare=False)
    budget = smallest_budget(raised.value)
    plan = plan_graph(graph, MESH, CLUSTER, Options(memory_budget_bytes=budget, time_limit_s=10.0), compare=False)
    assert plan.memory.peak_bytes <= budget


def test_prices_of_memory_follow_their_program_points() -> None:
    """Another search adds the same points in another order, or lacks some; times of other limits stay what they are."""
    _, options, d, _ = parts()
    one, other, neither = (ActiveSet(d, options) for _ in range(3))
    first, second = ProgramPoint(1), ProgramPoint(2)
    for active, order in ((one, (first, second)), (other, (second, first))):
        for point in order:
            active.add_points([point])
    prices = one.prices_by_point(UsagePrices(np.array([2.0, 3.0, 10_000.0]), np.array([0.2, 0.3, 0.5])))
    assert prices == {first: 0.2, second: 0.3, 10_000: 0.5}
    asked = np.array([0, 2, 3, 10_000])
    assert one.usage_prices(prices).at(asked).tolist() == [0.0, 0.2, 0.3, 0.5]
    assert other.usage_prices(prices).at(asked).tolist() == [0.0, 0.3, 0.2, 0.5]
    assert neither.usage_prices(prices).at(asked).tolist() == [0.0, 0.0, 0.0, 0.5]
    assert not neither.usage_prices({}).total()
