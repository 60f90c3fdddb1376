"""The solver equals brute force, its bound is a bound, and it keeps its time, on every back end."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError, SolverError
from autopar.solver import Edge, Problem, Solution, Usage, evaluate, peak_usage, smallest_choice, solve
from autopar.solver.clock import only_counted
from autopar.solver.integer import highs as highs_backend
from tests.brute_force import brute_force
from tests.pure.solver_problems import problems

BACKENDS = ["cbc"] + ["highs"] * highs_backend.is_installed()


def solve_or_none(problem: Problem, **options: object) -> Solution | None:
    try:
        return solve(problem, gap=0.0, **options)  # type: ignore[arg-type]
    except InfeasibleError:
        return None


def brute_force_or_none(problem: Problem) -> Solution | None:
    try:
        return brute_force(problem)
    except InfeasibleError:
        return None


def assert_optimal(problem: Problem, solution: Solution | None) -> None:
    expected = brute_force_or_none(problem)
    assert (solution is None) == (expected is None)
    if solution is not None and expected is not None:
        assert solution.objective == pytest.approx(expected.objective)
        assert evaluate(problem, solution.choice) == (solution.objective, True)
        assert solution.lower_bound <= solution.objective
        assert solution.lower_bound <= expected.objective * (1 + 1e-9)
        assert solution.proven


@settings(max_examples=150, deadline=None)
@given(problems())
def test_equals_brute_force(problem: Problem) -> None:
    assert_optimal(problem, solve_or_none(problem, backend="auto"))


@settings(max_examples=40, deadline=None)
@given(problems(limited=True))
def test_back_ends_agree(problem: Problem) -> None:
    for backend in BACKENDS:
        assert_optimal(problem, solve_or_none(problem, backend=backend))


@settings(max_examples=40, deadline=None)
@given(problems(limited=True), st.floats(1, 10))
def test_more_limit_never_costs_more(problem: Problem, extra: float) -> None:
    tight, loose = solve_or_none(problem), solve_or_none(replace(problem, limit=problem.limit + extra))
    if tight is not None:
        assert loose is not None
        assert loose.objective <= tight.objective * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(problems())
def test_is_deterministic(problem: Problem) -> None:
    first, second = solve_or_none(problem), solve_or_none(problem)
    assert (first and first.choice) == (second and second.choice)


@settings(max_examples=60, deadline=None)
@given(problems(limited=True))
def test_the_peak_of_the_smallest_choice_is_the_least_limit(problem: Problem) -> None:
    if brute_force_or_none(replace(problem, limit=math.inf)) is None:
        with pytest.raises(InfeasibleError):
            smallest_choice(problem, 10.0)
        return
    limit = peak_usage(problem, smallest_choice(problem, 10.0))
    brute_force(replace(problem, limit=limit))
    if limit > 0:
        with pytest.raises(InfeasibleError):
            brute_force(replace(problem, limit=limit * (1 - 1e-6)))


def test_infeasible_limit_raises() -> None:
    usage = Usage(0, np.array([3.0, 2.0]), 0, 1)
    with pytest.raises(InfeasibleError, match="limit"):
        solve(Problem((np.zeros(2),), (), (usage,), limit=1.0))


def test_contradicting_edges_raise() -> None:
    equal = np.array([[0.0, math.inf], [math.inf, 0.0]])
    with pytest.raises(InfeasibleError):
        solve(Problem((np.zeros(2), np.zeros(2)), (Edge(0, 1, equal), Edge(0, 1, equal[::-1]))))


def test_first_option_among_equals() -> None:
    assert solve(Problem((np.ones(3), np.zeros(2)), (Edge(0, 1, np.ones((3, 2))),))).choice == (0, 0)


def hard_problem(nodes: int, options: int, *, limit_share: float = math.inf) -> Problem:
    """A random grid-like graph of unstructured costs, whose relaxation is far from integral."""
    random = np.random.default_rng(0)
    pairs = {(u, v) for u in range(nodes) for v in random.integers(0, nodes, 4).tolist() if u < v}
    edges = tuple(Edge(u, v, random.random((options, options))) for u, v in sorted(pairs))
    usages = tuple(Usage(node, random.random(options), node, node + 20) for node in range(nodes))
    limit = limit_share * 10 if math.isfinite(limit_share) else math.inf
    return Problem(tuple(random.random(options) for _ in range(nodes)), edges, usages, limit)


@pytest.mark.parametrize("backend", BACKENDS)
def test_time_limit_yields_a_choice_and_a_bound(backend: str) -> None:
    problem = hard_problem(60, 8, limit_share=0.5)
    solution = solve(problem, time_limit=2.0, backend=backend)
    assert evaluate(problem, solution.choice) == (solution.objective, True)
    assert 0 < solution.lower_bound < solution.objective
    assert not solution.proven
    assert 0 < solution.gap < 0.5
    bounds = [entry.lower_bound for entry in solution.trace]
    assert bounds == sorted(bounds)


def test_warm_start_is_never_lost() -> None:
    problem = hard_problem(40, 6)
    good = solve(problem, time_limit=2.0)
    again = solve(problem, time_limit=0.0, warm_starts=[good.choice])
    assert again.objective <= good.objective


def test_a_problem_too_large_for_the_ilp_still_improves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.settings.FLOWS", 10)
    monkeypatch.setattr("autopar.settings.PART_PAIRS", 300)
    problem = hard_problem(30, 5, limit_share=0.5)
    with only_counted():
        solution = solve(problem, time_limit=2.0)
    assert "solving parts" in solution.method
    assert evaluate(problem, solution.choice) == (solution.objective, True)
    assert 0 < solution.lower_bound <= solution.objective


def test_a_choice_must_fit() -> None:
    problem = Problem((np.zeros(2),), (), (Usage(0, np.array([1.0, 5.0]), 0, 2), Usage(0, np.ones(2), 1, 3)), 5.0)
    assert peak_usage(problem, [1]) == 6.0
    assert evaluate(problem, [1]) == (0.0, False)
    assert evaluate(problem, [0]) == (0.0, True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Problem((np.zeros(2), np.zeros(3)), (Edge(0, 1, np.zeros((3, 2))),)),
        lambda: Problem((np.zeros(2),), (), (Usage(0, np.zeros(3), 0, 1),)),
        lambda: Problem((np.array([-1.0]),), ()),
        lambda: Problem((np.array([math.nan]),), ()),
        lambda: Problem((np.zeros(0),), ()),
    ],
    ids=["edge shape", "usage shape", "negative", "nan", "no option"],
)
def test_malformed_problems_raise(make: object) -> None:
    with pytest.raises(SolverError):
        make()  # type: ignore[operator]


def test_missing_cbc_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.solver.integer.pulp_backend.os.access", lambda path, mode: False)
    with pytest.raises(SolverError, match="hint:"):
        solve(hard_problem(12, 6, limit_share=0.5), backend="cbc", time_limit=5.0, gap=0.0)
