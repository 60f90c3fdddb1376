"""The greedy first choice: allowed whenever it is given, and there when time ends before anything else."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from autopar.solver import Edge, Problem, evaluate, solve
from autopar.solver.reduce.greedy import greedy_choice
from tests.pure.solver_problems import problems


@given(problems(limited=False))
def test_a_greedy_choice_takes_nothing_forbidden(problem: Problem) -> None:
    choice = greedy_choice(problem)
    if choice is not None:
        assert evaluate(problem, choice)[1]


def test_it_looks_one_step_ahead() -> None:
    # The cheapest option of node 0 leaves node 1 nothing.
    blocked = np.array([[np.inf, np.inf], [1.0, 5.0]])
    problem = Problem((np.array([0.0, 9.0]), np.array([0.0, 0.0])), (Edge(0, 1, blocked),))
    assert greedy_choice(problem) == (1, 0)


def test_with_no_time_left_the_solver_still_has_a_choice() -> None:
    generator = np.random.default_rng(0)
    costs = tuple(generator.random(40) for _ in range(60))
    edges = tuple(Edge(u, v, generator.random((40, 40))) for u in range(60) for v in range(u + 1, min(u + 6, 60)))
    solution = solve(Problem(costs, edges), time_limit=0.001)
    assert solution.lower_bound <= solution.objective < np.inf
