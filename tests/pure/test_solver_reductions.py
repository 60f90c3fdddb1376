"""Each reduction alone keeps the optimum and finds its way back; ILP and dual bound hold without any of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.settings import AT_ONCE
from autopar.solver import Edge, Problem, Usage, evaluate, solve
from autopar.solver.clock import only_counted
from autopar.solver.dual.dual import Dual
from autopar.solver.integer import highs as highs_backend
from autopar.solver.integer.highs import solve_highs
from autopar.solver.integer.ilp import IlpLimits, build
from autopar.solver.integer.pulp_backend import solve_pulp
from autopar.solver.phases import LinearProgram
from autopar.solver.problem import Messages
from autopar.solver.reduce.alike import alike
from autopar.solver.reduce.dominance import WorkBudget, drop_dominated
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.reductions import (
    absorb_separable,
    drop_forbidden,
    eliminate,
    merge_determined,
    min_plus,
    reduce,
)
from tests.brute_force import brute_force
from tests.pure.solver_problems import problems
from tests.pure.test_solver import hard_problem

REDUCTIONS: list[Callable[[Graph], object]] = [
    drop_forbidden,
    absorb_separable,
    merge_determined,
    eliminate,
    lambda graph: drop_dominated(graph, WorkBudget(1e9)),
    lambda graph: reduce(graph, WorkBudget(1e9)),
]
NAMES = ["forbidden", "separable", "determined", "eliminate", "dominated", "all"]


def optimum(problem: Problem) -> float:
    try:
        return brute_force(problem).objective
    except InfeasibleError:
        return math.inf


def rest(graph: Graph) -> Problem:
    """The graph as a problem of its own; the constant is left out, limits become the room of one more node each."""
    nodes = graph.nodes()
    place = {node: index for index, node in enumerate(nodes)}
    edges = tuple(Edge(place[u], place[v], graph.neighbours[u][v]) for u, v in graph.pairs())
    usages = [Usage(place[n], row.amount, row.start, row.end) for n in nodes for row in graph.rows[n]]
    limit = float(graph.limits.max(initial=0.0))
    fillers = tuple(np.zeros(1) for _ in graph.limits)
    for time, room in enumerate(graph.limits):
        usages.append(Usage(len(nodes) + time, np.array([limit - room]), time, time + 1))
    return Problem(tuple(graph.costs[node] for node in nodes) + fillers, edges, tuple(usages), limit)


def settled_graph(problem: Problem) -> Graph:
    """A graph whose forbidden options are gone; an infeasible problem is no example."""
    try:
        graph = Graph(problem)
        drop_forbidden(graph)
        graph.drop_loose_times()
        drop_forbidden(graph)
        graph.drop_loose_times()
    except InfeasibleError:
        assert optimum(problem) == math.inf
        assume(False)
    return graph


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=NAMES)
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_keeps_the_optimum(reduction: Callable[[Graph], object], problem: Problem) -> None:
    graph = settled_graph(problem)
    try:
        reduction(graph)
        graph.drop_loose_times()
    except InfeasibleError:
        assert optimum(problem) == math.inf
        return
    try:
        best = brute_force(rest(graph))
    except InfeasibleError:
        assert optimum(problem) == math.inf
        return
    assert best.objective + graph.offset == pytest.approx(optimum(problem))
    choice = graph.expand(dict(zip(graph.nodes(), best.choice, strict=False)))
    objective, feasible = evaluate(problem, choice)
    assert feasible
    assert objective == pytest.approx(optimum(problem))


@settings(max_examples=60, deadline=None)
@given(problem=problems(), steps=st.integers(1, 8))
def test_dual_bounds_are_bounds(problem: Problem, steps: int) -> None:
    graph = settled_graph(problem)
    best = optimum(problem)
    assume(math.isfinite(best))
    chosen = brute_force(problem).choice
    dual = Dual.of(graph, np.random.default_rng(steps).exponential(1.0, len(graph.limits)))
    for step in range(steps):
        result = dual.sweep(forward=step % 2 == 1)
        assert result.lower_bound <= best + 1e-9 * (1 + best)
        for u, v in graph.pairs():
            bounds = dual.pair_bounds(u, v, graph.neighbours[u][v], result.lower_bound)
            at = tuple(int(np.searchsorted(graph.options[node], chosen[node])) for node in (u, v))
            assert bounds[at] <= best + 1e-9 * (1 + best)
        for node, marginal in result.marginals.items():
            at_node = int(np.searchsorted(graph.options[node], chosen[node]))
            assert marginal[at_node] <= best + 1e-9 * (1 + best)


def test_dual_bound_is_tight_on_a_tree() -> None:
    random = np.random.default_rng(1)
    edges = tuple(Edge(node // 2, node, random.random((4, 4))) for node in range(1, 7))
    problem = Problem(tuple(random.random(4) for _ in range(7)), edges)
    dual = Dual.of(Graph(problem))
    for step in range(60):
        result = dual.sweep(forward=step % 2 == 1)
    assert result.lower_bound == pytest.approx(brute_force(problem).objective, rel=1e-6)


@pytest.mark.parametrize("backend", ["cbc"] + ["highs"] * highs_backend.is_installed())
@settings(max_examples=25, deadline=None)
@given(problem=problems(limited=True))
def test_ilp_alone_equals_brute_force(backend: str, problem: Problem) -> None:
    graph = settled_graph(problem)
    assume(graph.nodes())
    model = build(graph, 100.0)
    limits = IlpLimits(10.0, 0.0)
    result = solve_highs(model, limits, None) if backend == "highs" else solve_pulp(model, limits, None, "cbc")
    best = optimum(problem)
    if result.choice is None:
        assert best == math.inf
    else:
        assert result.finished
        objective, feasible = evaluate(problem, graph.expand(result.choice))
        assert feasible
        assert objective == pytest.approx(best)
        assert result.lower_bound + graph.offset <= best + 1e-6 * (1 + best)


def test_min_plus_is_the_minimum_over_paths() -> None:
    random = np.random.default_rng(2)
    left, cost, right = random.random((5, 3)), random.random(5), random.random((5, 4))
    expected = (left[:, :, None] + cost[:, None, None] + right[:, None, :]).min(axis=0)
    np.testing.assert_allclose(min_plus(left, cost, right), expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_equal_rows_and_columns_are_merged_without_a_difference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(40, 60, 3)
    left, right = (rng.integers(0, 2, (sizes[0], 4)).astype(float) for _ in range(2))
    left, right = left[:, rng.integers(0, 4, sizes[1])], right[:, rng.integers(0, 4, sizes[2])]
    left[rng.random(left.shape) < 0.05] = math.inf
    cost = rng.random(sizes[0])
    assert left.size * sizes[2] > AT_ONCE
    expected = (left[:, :, None] + cost[:, None, None] + right[:, None, :]).min(axis=0)
    np.testing.assert_array_equal(min_plus(left, cost, right), expected)
    number = alike(left).number
    equal = (left[:, None] == left[None, :]).all(axis=2)
    np.testing.assert_array_equal(number[:, None] == number[None, :], equal)


def with_less(graph: Graph, masks: dict[int, np.ndarray], known: Messages) -> Dual:
    """What goes on from messages when options, and those that then have no partner, have left a graph."""
    for node, mask in masks.items():
        graph.keep(node, mask)
    drop_forbidden(graph)
    return Dual.of(graph, known=known)


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(1, 6), st.integers(0, 10**6))
def test_a_dual_bounds_the_optimum_and_so_does_what_is_left_of_it(problem: Problem, sweeps: int, seed: int) -> None:
    graph = settled_graph(problem)
    best = optimum(problem)
    assume(math.isfinite(best))
    rng = np.random.default_rng(seed)
    dual = Dual.of(graph)
    for count in range(sweeps):
        assert dual.sweep(forward=count % 2 == 1).lower_bound <= best + 1e-9 * (1 + best)
    chosen = graph.project(brute_force(problem).choice)
    masks = {n: rng.random(len(graph.costs[n])) < 0.5 for n in graph.nodes()}
    for node, mask in masks.items():
        mask[chosen[node]] = True
    dual = with_less(graph, masks, dual.messages())
    assert dual.sweep(forward=False).lower_bound <= best + 1e-9 * (1 + best)


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(1, 6), st.integers(0, 10**6))
def test_an_ascent_goes_on_where_another_one_ended(problem: Problem, sweeps: int, seed: int) -> None:
    """Also where options have gone meanwhile: messages then bound what is left."""
    graph = settled_graph(problem)
    best = optimum(problem)
    assume(math.isfinite(best))
    dual = Dual.of(graph)
    for count in range(sweeps):
        bound = dual.sweep(forward=count % 2 == 1).lower_bound
    assert Dual.of(graph, known=dual.messages()).sweep(forward=sweeps % 2 == 1).lower_bound >= bound - 1e-9 * (1 + best)
    known, rng = dual.messages(), np.random.default_rng(seed)
    masks = {n: rng.random(len(graph.costs[n])) < 0.5 for n in graph.nodes()}
    for node, option in graph.project(brute_force(problem).choice).items():
        masks[node][option] = True
    later = with_less(graph, masks, known).sweep(forward=sweeps % 2 == 1).lower_bound
    assert bound - 1e-9 * (1 + best) <= later <= best + 1e-9 * (1 + best)


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(1, 6), st.integers(0, 10**6))
def test_messages_of_other_costs_bound_too(problem: Problem, sweeps: int, seed: int) -> None:
    """Also where what they are of had lost other options."""
    best, rng = optimum(problem), np.random.default_rng(seed)
    assume(math.isfinite(best))
    other = settled_graph(replace(problem, costs=tuple(c * rng.random(len(c)) for c in problem.costs)))
    dual = Dual.of(other)
    for count in range(sweeps):
        dual.sweep(forward=count % 2 == 1)
    masks = {n: rng.random(len(other.costs[n])) < 0.7 for n in other.nodes()}
    for node, option in other.project(brute_force(problem).choice).items():
        masks[node][option] = True
    known = with_less(other, masks, dual.messages()).messages()
    bound = Dual.of(settled_graph(problem), known=known).sweep(forward=True).lower_bound
    assert bound <= best + 1e-9 * (1 + best)


def test_a_solve_goes_on_from_the_messages_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where time ends it, the bound is higher after as much more of it."""
    problem = hard_problem(60, 5)
    monkeypatch.setattr(LinearProgram, "applies", lambda *_: False)
    with only_counted():
        first = solve(problem, time_limit=0.2, gap=1e-9)
        again = solve(problem, time_limit=0.2, gap=1e-9, duals=first.duals)
    assert len(problem.costs) in first.duals.messages
    assert again.lower_bound > first.lower_bound


def test_a_tree_is_solved_by_elimination() -> None:
    random = np.random.default_rng(3)
    edges = tuple(Edge(node // 2, node, random.random((5, 5))) for node in range(1, 30))
    graph = Graph(Problem(tuple(random.random(5) for _ in range(30)), edges))
    eliminate(graph)
    assert graph.nodes() == []


def test_edges_that_share_a_matrix_still_do_after_pruning() -> None:
    matrix = np.random.default_rng(4).random((4, 4))
    matrix[:, 2] = matrix[2, :] = math.inf
    edges = (Edge(0, 1, matrix), Edge(2, 3, matrix))
    graph = Graph(Problem(tuple(np.zeros(4) for _ in range(4)), edges))
    drop_forbidden(graph)
    assert graph.neighbours[0][1].shape == (3, 3)
    assert graph.neighbours[0][1] is graph.neighbours[2][3]
