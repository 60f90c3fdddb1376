"""Random plans: every variable takes any option that its neighbours can reach.

Searched plans avoid odd combinations, so random ones find the errors that searched ones hide.
"""

from __future__ import annotations

import random

import numpy as np

from autopar.errors import SolverError
from autopar.solver import Problem, Solution, evaluate

TRIES = 50


def random_solution(problem: Problem, seed: int) -> Solution:
    """A choice without forbidden pairs, drawn variable by variable in program order.

    Raises:
        SolverError: every try ended where no option was left.
    """
    generator = random.Random(seed)  # noqa: S311  nobody is to be kept from guessing it
    for _ in range(TRIES):
        choice = _draw(problem, generator)
        if choice is not None:
            objective, _ = evaluate(problem, choice)
            return Solution(choice, objective, 0.0, proven=False, method=f"random, seed {seed}")
    raise SolverError("No random plan was found.", found=f"{TRIES} tries", hint="try another seed.")


def _draw(problem: Problem, generator: random.Random) -> tuple[int, ...] | None:
    allowed = [np.isfinite(c) for c in problem.costs]
    edges: dict[int, list[tuple[int, np.ndarray]]] = {}
    for edge in problem.edges:
        finite = np.isfinite(edge.cost)
        edges.setdefault(edge.u, []).append((edge.v, finite))
        edges.setdefault(edge.v, []).append((edge.u, finite.T))
    choice = [-1] * len(problem.costs)
    # Looking one step ahead: an option is taken only if every neighbour keeps one.
    for node in range(len(choice)):
        options = [int(o) for o in np.flatnonzero(allowed[node])]
        generator.shuffle(options)
        taken = next((o for o in options if _leaves_room(o, node, edges, allowed, choice)), None)
        if taken is None:
            return None
        choice[node] = taken
        for other, finite in edges.get(node, ()):
            if choice[other] < 0:
                allowed[other] = allowed[other] & finite[taken]
    return tuple(choice)


def _leaves_room(
    option: int, node: int, edges: dict[int, list[tuple[int, np.ndarray]]], allowed: list[np.ndarray], choice: list[int]
) -> bool:
    for other, finite in edges.get(node, ()):
        if choice[other] >= 0 and not finite[option, choice[other]]:
            return False
        if choice[other] < 0 and not (allowed[other] & finite[option]).any():
            return False
    return True
