"""How small the peak can be: what an error names, and where a search begins for which nothing else fits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.errors import InfeasibleError, SolverError
from autopar.planner.finalists import seed
from autopar.planner.rounds import Result, Rounds
from autopar.planner.tightening import Rows
from autopar.solver import Problem, peak_usage, smallest_choice
from autopar.solver.clock import now

MOST_ROUNDS = 8
SMALLER = 0.99
NEARLY = 1.005
"""Times the smallest usage, within which the cheapest choice is taken."""

MOST_S = 20.0
GAP = 0.01
"""Seconds, at most, for each answer to how small the peak can be, and how good it is."""
SHARE = 0.4
LEAST_S = 0.5
"""Of the time left, and at least, for each of these answers, and for the plan that follows from it."""


def of_smallest_peak(rounds: Rounds, rows: Rows, deadline: float) -> Result:
    """From the baseline of the smallest peak on: the choice of the rows' smallest peak, then rows for what its
    program holds beyond the best so far, and again, until one fits the budget, or the time is up."""
    best: Result | None = None
    name = min(rounds.rivals, key=lambda r: r.peak_bytes).name if rounds.rivals else ""
    for choice in seed(rounds.objective, rounds.options, name) if name else ():
        best = rounds.of_choice(choice)
        rows.tighten(choice, best.program, best.memory.timeline, best.memory.peak_bytes * SMALLER, alone=True)
    for _ in range(MOST_ROUNDS):
        if best is not None and now() > deadline:
            break
        result = _near_smallest(rounds, rows, () if best is None else (best.solution.choice,), deadline)
        if best is None or result.memory.peak_bytes < best.memory.peak_bytes:
            best = result
        aim = best.memory.peak_bytes * SMALLER
        if best.memory.peak_bytes <= rounds.budget:
            break
        if not rows.tighten(result.solution.choice, result.program, result.memory.timeline, aim, alone=True):
            break
    assert best is not None
    return best


def _near_smallest(rounds: Rounds, rows: Rows, known: Sequence[Sequence[int]], deadline: float) -> Result:
    """The cheapest choice whose rows are hardly higher than they have to be: cheap ones hold little besides."""
    asked, choice = smallest_rows(rounds, rows, known, seconds_for(deadline))
    try:
        latest = now() + seconds_for(deadline)
        return rounds.once(rows, peak_usage(asked, choice) * NEARLY, latest, rows.own(choice))
    except (InfeasibleError, SolverError):
        return rounds.of_choice(rows.own(choice))


def seconds_for(deadline: float) -> float:
    """For one answer."""
    return min(max(SHARE * (deadline - now()), LEAST_S), MOST_S)


def smallest_rows(
    rounds: Rounds, rows: Rows, known: Sequence[Sequence[int]], seconds: float, limit: float = math.inf
) -> tuple[Problem, tuple[int, ...]]:
    """The problem with ``rows``, and its choice of the smallest peak, states and all."""
    asked = rows.extend(rounds.problem(rows, limit))
    found = [rows.states(choice) for choice in known]
    return asked, smallest_choice(asked, seconds, backend=rounds.options.solver, known=found, gap=GAP)
