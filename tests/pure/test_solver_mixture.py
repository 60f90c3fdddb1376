"""A limit on equal blocks: its price by cutting planes, and blocks of two kinds where all alike would waste room."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.solver import Edge, Problem, Usage, evaluate, solve
from autopar.solver.reduce.usage import UsageTable
from tests.brute_force import brute_force
from tests.pure.test_solver_folding import chain


def knapsack(copies: int, limit: float, seam: float = 0.0) -> Problem:
    """Blocks in a row that each use 10 bytes, or cost a second; neighbours of two kinds cost ``seam``."""
    costs, edges, usages = [np.zeros(1)], [], []
    as_one, differ = np.where(np.eye(2) > 0, 0.0, math.inf), seam * (1 - np.eye(2))
    for copy in range(copies):
        first = len(costs)
        costs += [np.array([0.0, 1.0]), np.zeros(2)]
        edges.append(Edge(first, first + 1, as_one))
        if copy:
            edges.append(Edge(first - 1, first, differ))
        usages.append(Usage(first, np.array([10.0, 0.0]), 0, 1))
    edges.append(Edge(0, 1, np.zeros((1, 2))))
    return Problem(tuple(costs), tuple(edges), tuple(usages), limit)


@pytest.mark.parametrize("limit", [25.0, 55.0, 100.0, 119.0])
def test_as_many_blocks_as_fit_take_what_is_cheap(limit: float) -> None:
    found = solve(knapsack(12, limit), gap=1e-9)
    assert found.objective == pytest.approx(12 - limit // 10)
    assert found.proven
    assert found.lower_bound >= 12 - limit / 10 - 1e-6
    assert found.duals.usage_prices.total() == pytest.approx(0.1)


def test_blocks_of_two_kinds_hardly_meet() -> None:
    """Once in the run."""
    assert solve(knapsack(12, 55.0, seam=0.25), gap=1e-9).objective == pytest.approx(7.25)


def test_what_no_block_can_keep_is_infeasible() -> None:
    asked = knapsack(12, 55.0)
    used = tuple(Usage(u.node, np.array([10.0, 9.0]), 0, 1) for u in asked.usages)
    with pytest.raises(InfeasibleError):
        solve(Problem(asked.costs, asked.edges, used, 55.0))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_the_bound_lies_below_the_optimum_and_the_choice_within_the_limit(seed: int) -> None:
    random = np.random.default_rng(seed)
    problem = chain(random, 7, width=1, options=3, limit=float(random.integers(5, 25)))
    try:
        best = brute_force(problem).objective
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            solve(problem, gap=1e-9)
        return
    solution = solve(problem, gap=1e-9)
    assert evaluate(problem, solution.choice) == (pytest.approx(solution.objective), True)
    assert solution.lower_bound <= best + 1e-9
    assert solution.objective >= best - 1e-9
    assert solution.objective == pytest.approx(best), "small problems are solved to the end"


def test_usage_of_many_choices_at_once() -> None:
    usages = (
        Usage(0, np.array([1.0, 2.0]), 0, 2),
        Usage(1, np.array([4.0, 8.0]), 1, 3),
        Usage(1, np.array([1.0, 1.0]), 2, 2),
    )
    table = UsageTable(Problem((np.zeros(2), np.zeros(2)), (), usages, 9.0))
    assert table.times.tolist() == [0, 1]
    assert table.of((0, 1)).tolist() == [1.0, 9.0]
    assert table.of((1, 0)).tolist() == [2.0, 6.0]
