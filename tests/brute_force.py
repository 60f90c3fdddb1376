"""Every choice of a small problem, one after the other: the oracle that tests compare with."""

from __future__ import annotations

import itertools
import math

from autopar.errors import InfeasibleError, SolverError
from autopar.solver.problem import Problem, Solution, evaluate

MAX_CHOICES = 2_000_000


def brute_force(problem: Problem) -> Solution:
    """The first of the cheapest choices in lexicographic order.

    Raises:
        InfeasibleError: no choice is allowed.
        SolverError: more than two million choices.
    """
    sizes = [len(cost) for cost in problem.costs]
    if math.prod(sizes) > MAX_CHOICES:
        raise SolverError("The problem is too large to try every choice.", found=f"{math.prod(sizes):,} choices")
    best: tuple[float, tuple[int, ...]] | None = None
    for choice in itertools.product(*map(range, sizes)):
        objective, feasible = evaluate(problem, choice)
        if feasible and (best is None or objective < best[0]):
            best = objective, choice
    if best is None:
        raise InfeasibleError("No choice is allowed.")
    return Solution(best[1], best[0], best[0], proven=True, method="every choice")
