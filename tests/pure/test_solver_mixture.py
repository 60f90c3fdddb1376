"""A limit on equal blocks: its price by cutting planes, and blocks of two kinds where all alike would waste room."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.solver import Edge, Problem, Usage, brute_force, evaluate, solve
from autopar.solver.blocks.folding import fold, solve_folded
from autopar.solver.blocks.mixture import few_rows
from autopar.solver.dual.multipliers import Multipliers, Plane
from autopar.solver.pipeline import _part_solver
from autopar.solver.reduce.incumbent import Incumbent
from autopar.solver.reduce.usage import UsageTable
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


def folded(problem: Problem) -> Incumbent:
    """What folding finds by itself."""
    incumbent, tied = Incumbent(problem, 60.0, 1e-9, None), fold(problem)
    assert tied is not None
    solve_folded(incumbent, tied, _part_solver("auto"), {})
    return incumbent


@pytest.mark.parametrize("limit", [25.0, 55.0, 100.0, 119.0])
def test_as_many_blocks_as_fit_take_what_is_cheap(limit: float) -> None:
    found = folded(knapsack(12, limit))
    assert found.objective == pytest.approx(12 - limit // 10)
    assert found.bound() == pytest.approx(12 - limit / 10)
    assert found.usage_prices.total() == pytest.approx(0.1)


def test_blocks_of_two_kinds_hardly_meet() -> None:
    """Once in the run, and once where it ends; looking at every node on its own saves the latter."""
    assert folded(knapsack(12, 55.0, seam=0.25)).objective == pytest.approx(7.5)
    assert solve(knapsack(12, 55.0, seam=0.25), gap=1e-9).objective == pytest.approx(7.25)


def test_what_no_block_can_keep_is_infeasible() -> None:
    asked = knapsack(12, 55.0)
    used = tuple(Usage(u.node, np.array([10.0, 9.0]), 0, 1) for u in asked.usages)
    with pytest.raises(InfeasibleError):
        solve(Problem(asked.costs, asked.edges, used, 55.0))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
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


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=6))
@settings(max_examples=50, deadline=None)
def test_the_best_prices_are_the_highest_point_under_all_planes(triples: list[tuple[int, int, int]]) -> None:
    planes = [Plane((i,), float(c), np.array([a, b], dtype=float)) for i, (c, a, b) in enumerate(triples)]
    planes.append(Plane((len(planes),), 10.0, np.array([-1.0, -1.0])))

    def oracle(prices: np.ndarray) -> Plane:
        return min(planes, key=lambda p: (p.at(prices), p.choice))

    dual = Multipliers(2, oracle)
    dual.maximise(np.zeros(2), lambda: 1.0)
    reached = oracle(dual.prices).at(dual.prices)
    for prices in product(np.linspace(0, 20, 21), repeat=2):
        assert reached >= oracle(np.array(prices)).at(np.array(prices)) - 1e-3 * max(abs(reached), 1.0)


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


def test_only_few_rows_are_priced_by_planes() -> None:
    assert few_rows(knapsack(12, 55.0))
    assert not few_rows(knapsack(12, math.inf))
    many = tuple(Usage(0, np.array([1.0, 2.0]), t, t + 1) for t in range(100))
    assert not few_rows(Problem((np.zeros(2),), (), many, 1.0))
