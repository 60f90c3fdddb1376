"""With a limit the solver begins with a linear program: what it proves is what brute force finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from autopar.errors import InfeasibleError
from autopar.settings import NEAR
from autopar.solver import Edge, Problem, Usage, peak_usage, solve
from autopar.solver.dual import linear
from autopar.solver.integer import highs, ilp
from autopar.solver.reduce.dominance import WorkBudget
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.incumbent import Incumbent
from autopar.solver.reduce.reductions import reduce
from tests.brute_force import brute_force
from tests.pure.solver_problems import problems

pytestmark = pytest.mark.skipif(not highs.is_installed(), reason="needs HiGHS")


def relaxed(problem: Problem) -> Incumbent:
    incumbent = Incumbent(problem, 30.0, 1e-9, None)
    try:
        graph = Graph(problem)
        reduce(graph, WorkBudget(1e6))
        if graph.nodes():
            linear.relax(graph, incumbent, 30.0)
    except InfeasibleError:
        incumbent.raise_bound(incumbent.objective)
    return incumbent


@settings(max_examples=200, deadline=None)
@given(problems())
def test_bound_and_choices_enclose_the_optimum(problem: Problem) -> None:
    found = relaxed(problem)
    try:
        best = brute_force(problem)
    except InfeasibleError:
        assert found.choice is None
        return
    solved = solve(problem, gap=1e-9)
    assert found.lower_bound <= best.objective * (1 + 1e-7) + 1e-12
    if found.choice is not None:
        assert found.objective >= best.objective * (1 - 1e-7) - 1e-12
    assert solved.objective == pytest.approx(best.objective, rel=1e-6, abs=1e-12)
    assert peak_usage(problem, solved.choice) <= problem.limit * (1 + 1e-6)


def test_without_a_limit_it_settles_what_is_too_wide_to_eliminate() -> None:
    random, side = np.random.default_rng(0), 16
    costs = tuple(random.random(4) for _ in range(side * side))
    pairs = [(i, i + 1) for i in range(side * side) if (i + 1) % side] + [
        (i, i + side) for i in range(side * (side - 1))
    ]
    mismatch = 1.0 - np.eye(4)
    found = solve(Problem(costs, tuple(Edge(u, v, 0.2 * mismatch) for u, v in pairs)), gap=1e-6)
    assert found.proven
    assert "linear program" in found.method


def knapsack(nodes: int = 40) -> Problem:
    """A chain whose options cost the less the more they use; its linear program is fractional."""
    random = np.random.default_rng(0)
    uses = [np.sort(random.random(4)) for _ in range(nodes)]
    costs = tuple(3 - u - 0.3 * random.random(4) for u in uses)
    edges = tuple(Edge(i, i + 1, 0.2 * random.random((4, 4))) for i in range(nodes - 1))
    return Problem(costs, edges, tuple(Usage(i, u, 0, 1) for i, u in enumerate(uses)), 0.45 * nodes)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("refuses", [False, True])
def test_a_slow_proof_is_not_begun_for_a_choice_that_is_refused(
    slow: bool, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, asked = knapsack(), []
    best = solve(problem, gap=1e-9)
    assert best.proven
    monkeypatch.setattr("autopar.settings.FLOWS_A_SECOND", 0 if slow else 10**9)

    def is_refused(choice: Sequence[int]) -> bool:
        asked.append(choice)
        return refuses

    found = solve(problem, gap=1e-9, refuses=is_refused)
    assert bool(asked) == slow
    assert len(set(asked)) == len(asked), "each choice is asked about once"
    assert found.proven == (not slow or not refuses)
    assert found.lower_bound <= best.objective * (1 + 1e-9) <= found.objective * (1 + 2e-9)
    if slow and refuses:
        assert found.choice == asked[-1]
        assert found.objective <= (1 + 2 * NEAR) * found.lower_bound
    else:
        assert found.objective == pytest.approx(best.objective)


def test_a_copy_of_a_graph_shrinks_alone() -> None:
    one = Graph(Problem((np.array([1.0, 2.0]), np.array([3.0, 4.0])), ()))
    other = one.copy()
    other.keep(0, np.array([True, False]))
    other.remove(1)
    assert one.size() == (2, 4, 0) and other.size() == (1, 1, 0)


@pytest.mark.parametrize("in_time", [False, True])
def test_an_integer_program_is_begun_only_where_its_root_is_expected_to_end(
    in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The linear program at the root cannot be cut short by counted work: one of 2 s took 8."""
    begun, solve_highs = [], highs.solve_highs

    def begin(*given: Any) -> ilp.IlpResult:
        begun.append(given)
        return solve_highs(*given)

    monkeypatch.setattr(highs, "solve_highs", begin)
    monkeypatch.setattr(highs, "root_seconds", lambda entries: 0.0 if in_time else 60.0)
    problem = knapsack()
    graph, incumbent = Graph(problem), Incumbent(problem, 30.0, 1e-9, None)
    linear.relax(graph, incumbent, 30.0)
    assert bool(begun) == in_time
