"""Linear programs from their nearest columns: bounds hold for all options, and the optimum is that of all columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.solver import Problem, Solution, evaluate, solve
from autopar.solver.dual import nearest
from autopar.solver.dual.nearest import Relaxed, relax_nearest
from autopar.solver.integer import highs
from autopar.solver.integer.equations import coupled, paid
from autopar.solver.integer.ilp import build, magnitude_of
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.incumbent import Incumbent
from autopar.solver.reduce.reductions import drop_forbidden
from tests.brute_force import brute_force
from tests.pure.solver_problems import problems
from tests.pure.test_solver_blocks_linear import relaxed as of_blocks
from tests.pure.test_solver_folding import chain
from tests.pure.test_solver_mixture import knapsack

pytestmark = pytest.mark.skipif(not highs.is_installed(), reason="needs HiGHS")

FOREVER_S = 60.0


@pytest.fixture
def every_program_has_many_columns() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.settings.MANY_FLOWS", -1)
        yield


def relaxed(graph: Graph, gap: float = 1e-6, taken: Iterable[Mapping[int, int]] = ()) -> Relaxed | None:
    known = np.zeros(len(graph.limits))
    return relax_nearest(graph, (), magnitude_of(graph, math.inf), known, taken, gap, lambda: FOREVER_S)


def limited(problem: Problem) -> tuple[Graph, Solution] | None:
    """Return the network of a problem, as it gets to these programs, and the optimum; None where nothing is allowed or
    no limit can bind."""
    try:
        graph = Graph(problem)
        drop_forbidden(graph)
        best = brute_force(problem)
    except InfeasibleError:
        return None
    return (graph, best) if len(graph.limits) else None


@settings(max_examples=150)
@given(problems(limited=True), st.sampled_from([0.25, 1.0]))
def test_the_bound_holds_and_the_optimum_is_no_better_than_with_all_columns(problem: Problem, share: float) -> None:
    asked = limited(problem)
    if asked is None:
        return
    graph, best = asked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.settings.NEAREST", share)
        found = relaxed(graph)
    if found is None:
        assert share < 1.0, "with all options there is a choice"
        return
    whole = build(graph, 1.0)
    vertex = highs.solve_relaxation(whole, FOREVER_S)
    assert vertex is not None
    least = vertex.objective * whole.scale + graph.offset
    assert found.bound <= least * (1 + 1e-7) + 1e-9
    assert found.optimum >= least * (1 - 1e-7) - 1e-9
    if share == 1.0:
        assert found.optimum == pytest.approx(least, rel=1e-6, abs=1e-9)
    for node, far in found.reduced.items():
        assert (far >= 0).all()
        assert found.values[node].sum() == pytest.approx(1.0)
    taken = graph.project(best.choice)
    dearest = max(found.bound + far[taken[node]] for node, far in found.reduced.items())
    assert dearest <= best.objective * (1 + 1e-7) + 1e-9, "no option is told to be dearer than a choice that has it"


@settings(max_examples=60)
@given(problems(limited=True))
def test_a_known_choice_is_in_every_program(problem: Problem) -> None:
    asked = limited(problem)
    if asked is None:
        return
    graph, best = asked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.settings.NEAREST", 0.0)
        found = relaxed(graph, taken=[graph.project(best.choice)])
    assert found is not None
    assert found.optimum <= best.objective * (1 + 1e-7) + 1e-9


@settings(max_examples=60)
@given(problems(limited=True))
def test_what_is_dearer_is_so_beside_the_bound_that_is_told(problem: Problem) -> None:
    """Also where the last program's prices prove less than those of the one before."""
    asked = limited(problem)
    if asked is None:
        return
    graph, best = asked
    proven, calls = nearest._proven, []

    def worse(*arguments):
        least, bound = proven(*arguments)
        calls.append(bound)
        return least, bound - 5.0 * (len(calls) > 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nearest, "_proven", worse)
        found = relaxed(graph, gap=-math.inf)
    if found is None:
        return
    assert found.bound >= calls[0] - 1e-9
    taken = graph.project(best.choice)
    assert all(found.bound + far[taken[node]] <= best.objective + 1e-6 for node, far in found.reduced.items())


@settings(max_examples=100)
@given(problems(limited=True))
def test_solving_by_them_gives_an_allowed_choice_and_a_bound(problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.settings.MANY_FLOWS", -1)
        try:
            found = solve(problem, gap=1e-3)
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                brute_force(problem)
            return
    best = brute_force(problem).objective
    assert evaluate(problem, found.choice)[1]
    assert found.lower_bound <= best * (1 + 1e-7) + 1e-9
    assert found.objective >= best * (1 - 1e-7) - 1e-9
    assert found.proven == (found.gap <= 1e-3)


@pytest.mark.usefixtures("every_program_has_many_columns")
@pytest.mark.parametrize("seam", [0.0, 0.25])
@pytest.mark.parametrize("limit", [25.0, 55.0, 100.0])
def test_repeated_blocks_too(limit: float, seam: float) -> None:
    incumbent = of_blocks(knapsack(12, limit, seam))
    assert incumbent.objective == pytest.approx(12 - limit // 10 + (seam if limit > 10 else 0.0))
    assert 12 - limit / 10 - 0.1 <= incumbent.lower_bound <= incumbent.objective + 1e-9


@pytest.mark.usefixtures("every_program_has_many_columns")
@pytest.mark.parametrize("seed", range(8))
def test_bounds_of_repeated_blocks_hold_whatever_is_left_out(seed: int) -> None:
    random = np.random.default_rng(seed)
    problem = chain(random, 7, width=1, options=3, limit=float(random.integers(5, 25)))
    try:
        best = brute_force(problem).objective
    except InfeasibleError:
        return
    found = solve(problem, gap=1e-3)
    assert found.lower_bound <= best * (1 + 1e-7) + 1e-9
    assert found.objective >= best * (1 - 1e-9)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_whatever_equations_are_paid_a_choice_that_keeps_them_costs_the_same(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = [3, 3, 3]
    graph = Graph(Problem(tuple(random.random(size) for size in sizes), ()))
    equations = [[(0, 2.0), (1, -1.0), (2, -1.0)]]
    priced = paid(graph, graph, equations, random.normal(size=3))
    option = int(random.integers(3))
    alike = sum(float(graph.costs[node][option]) for node in range(3))
    assert sum(float(priced.costs[node][option]) for node in range(3)) == pytest.approx(alike)
    assert any((priced.costs[node] != graph.costs[node]).any() for node in range(3))


def test_equations_hold_in_the_program() -> None:
    """Two nodes that would choose apart, made to choose alike."""
    graph = Graph(Problem((np.array([0.0, 1.0]), np.array([3.0, 0.0])), ()))
    model = build(graph, 1.0)
    tied = coupled(model, graph, [[(0, 1.0), (1, -1.0)]])
    apart, alike = (highs.solve_relaxation(m, FOREVER_S) for m in (model, tied))
    assert apart is not None
    assert alike is not None
    assert apart.objective * model.scale == pytest.approx(0.0)
    assert alike.objective * model.scale == pytest.approx(1.0)


def test_a_choice_near_what_is_expected_settles_a_search_and_proves_nothing() -> None:
    problem = Problem((np.array([1.0, 2.0]),), ())
    incumbent = Incumbent(problem, FOREVER_S, 0.01, None)
    assert not incumbent.settled()
    incumbent.offer((1,), "test")
    incumbent.expected = 1.99
    assert incumbent.settled()
    assert not incumbent.proven()
    incumbent.expected = 1.5
    assert not incumbent.settled()
    incumbent.expected = 2.5  # of a program that lacks the columns of this choice
    assert not incumbent.settled()
