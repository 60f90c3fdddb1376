"""Narrow problems without a limit are solved by eliminating one node after the other, however long they are."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.solver import Edge, Problem, evaluate, solve
from autopar.solver.reduce.elimination import eliminate, narrow_elimination
from autopar.solver.reduce.graph import Graph
from tests.brute_force import brute_force
from tests.elimination import eliminated
from tests.pure.solver_problems import problems
from tests.pure.test_solver_folding import chain


@given(problems(limited=False))
@examples(max_examples=100)
def test_it_finds_what_brute_force_finds(problem: Problem) -> None:
    graph = Graph(problem)
    order = narrow_elimination(graph)
    assert order is not None
    least, choice = eliminate(graph, order)
    try:
        best = brute_force(problem).objective
    except InfeasibleError:
        best = math.inf
    assert least == pytest.approx(best)
    if math.isfinite(best):
        assert evaluate(problem, graph.expand(choice))[0] == pytest.approx(best)


@given(st.integers(0, 2**32 - 1))
@example(190)  # where only the last copy takes an option in which no copy finds the one before
@examples(max_examples=30)
def test_wide_blocks_are_solved_to_the_end_without_any_program(seed: int) -> None:
    random = np.random.default_rng(seed)
    problem = chain(random, int(random.integers(12, 30)), width=3, options=5, hub=bool(seed % 2))
    best = eliminated(problem)
    if math.isinf(best):
        with pytest.raises(InfeasibleError):
            solve(problem, gap=0.0)
        return
    found = solve(problem, gap=0.0)
    assert found.objective == pytest.approx(best)
    assert found.proven
    assert "ILP" not in found.method
    assert "linear program" not in found.method


def grid(side: int, options: int) -> Problem:
    random = np.random.default_rng(0)
    costs = tuple(random.random(options) for _ in range(side * side))
    pairs = [(side * i + j, side * i + j + 1) for i in range(side) for j in range(side - 1)]
    pairs += [(side * i + j, side * i + side + j) for i in range(side - 1) for j in range(side)]
    return Problem(costs, tuple(Edge(u, v, random.random((options, options))) for u, v in pairs))


def test_no_table_is_made_where_all_would_be_too_large() -> None:
    assert narrow_elimination(Graph(grid(4, 4))) is not None
    assert narrow_elimination(Graph(grid(40, 8))) is None


def test_a_hub_has_any_number_of_leaves() -> None:
    """So many that it would take far longer if each leaf looked at all the others."""
    random, leaves = np.random.default_rng(0), 30_000
    hub, costs, pair = random.random(3), random.random((leaves, 3)), random.random((3, 3))
    graph = Graph(Problem((hub, *costs), tuple(Edge(0, 1 + n, pair) for n in range(leaves))))
    order = narrow_elimination(graph)
    assert order is not None
    least, choice = eliminate(graph, order)
    expected = hub + (pair[:, None] + costs).min(axis=2).sum(axis=1)
    assert least == pytest.approx(expected.min())
    assert choice[0] == expected.argmin()


def test_more_nodes_around_one_than_an_array_has_axes_are_too_many() -> None:
    pairs = [(u, v) for u in range(70) for v in range(u)]
    problem = Problem((np.zeros(1),) * 70, tuple(Edge(u, v, np.ones((1, 1))) for u, v in pairs))
    assert narrow_elimination(Graph(problem)) is None
    assert solve(problem).objective == len(pairs)
