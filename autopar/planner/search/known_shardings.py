"""What to keep, recompute and offload where the shardings are known: those of the free optimum, or of a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.errors import SolverError
from autopar.planner.memory.active_set import ActiveSet
from autopar.planner.pricing.objective import Objective
from autopar.planner.problem.restricted import Folding, solve_sliced
from autopar.planner.search.rounds import Result, Rounds
from autopar.planner.search.two_stage import Open, sharded_as
from autopar.solver import Problem, Tied, fold
from autopar.solver.clock import now

LEAST_S = 1.0
ROUNDS, ROUNDS_ANEW = 4, 2
"""Seconds at least for one of them, and with tighter rows so many times; where a choice is only mended, fewer."""

GAP, GAP_ANEW = 0.01, 1e-3
"""How good each has to be: the joint search goes on from it; and where it ends there."""

MOST_ALONE = 3000
"""Nodes of a problem without repeated blocks, up to which a choice is mended: 5,414 took longer than a round."""

ROOM = 0.1
"""Of the budget, set aside everywhere where the first that fits will do. Programs of 70B, 175B and 405B hold up to 7%
more than their first rows say; what fits in a tenth less costs up to 1.1% more."""


def kept_as_sharded(
    rounds: Rounds,
    keeping: Objective,
    choices: Sequence[Sequence[int]],
    until: float,
    *,
    first: bool = False,
    gap: float = GAP,
) -> Result | None:
    """The best that is found to keep, recompute and offload with the shardings of each of ``choices``: what the joint
    search begins with, and what there is where its time is too short.

    Args:
        keeping: of the decisions without reruns, whose choices these are, the best guess first.
        until: when to begin no other.
        first: whether the first that fits will do.
        gap: how good each has to be.
    """
    best: Result | None = None
    tried: set[tuple[object, ...]] = set()
    for choice in choices:
        if now() > until or (first and best is not None):
            break
        if best is not None and keeping.seconds(choice) >= best.solution.objective:
            continue
        still = tuple(sharded_as(keeping.decisions, choice, rounds.decisions))
        if still in tried:
            continue
        tried.add(still)
        if first:
            found = _kept_roomily(rounds, still, until)
        else:
            found = fitting(rounds, rounds.first_rows(), still, until, gap=gap)
        best = cheapest(best, found)
    return best


def cheapest(*results: Result | None) -> Result | None:
    """Of those that were found."""
    return min((r for r in results if r is not None), key=lambda r: r.solution.objective, default=None)


def _kept_roomily(rounds: Rounds, still: Open, until: float) -> Result | None:
    """Hardly worse than the best, for fewer rounds."""
    rows = rounds.first_rows()
    rows.equalise(ROOM * rounds.budget)
    found = fitting(rounds, rows, still, until)
    return found or (fitting(rounds, rounds.first_rows(), still, until, level=True) if now() < until else None)


def kept_anew(rounds: Rounds, rows: ActiveSet, result: Result, until: float) -> Result | None:
    """The shardings of ``result``, which is over the budget, with values kept, recomputed and offloaded in other ways
    that fit: less work than another round with all that is open, unless they are many and repeat nowhere."""
    still = tuple(sharded_as(rounds.decisions, result.solution.choice, rounds.decisions))
    found = fitting(rounds, rows, still, until, most=ROUNDS_ANEW, gap=GAP_ANEW, level=True, folding=_quick)
    return found and replace(found, solution=replace(found.solution, method=f"{result.solution.method}; kept anew"))


def fitting(
    rounds: Rounds,
    rows: ActiveSet,
    still: Open,
    until: float,
    *,
    most: int = ROUNDS,
    gap: float = GAP,
    level: bool = False,
    folding: Folding = fold,
) -> Result | None:
    """The best choice among options that are ``still`` open, with ``rows`` for what its program holds over the budget,
    ``level`` ones for fewer rounds, until it fits; None where none was found that does in ``most`` rounds."""
    for _ in range(most):
        asked = rows.extend(rounds.problem(rows, rounds.budget))
        choice = among(rounds, asked, still, max(until - now(), LEAST_S), gap, folding)
        if choice is None:
            break
        found = rounds.of_choice(rows.restrict(choice), rounds.budget, "known shardings")
        if found.memory.peak_bytes <= rounds.budget:
            return found
        own, timeline = found.solution.choice, found.memory.timeline
        if now() > until or not rows.separate(own, found.program, timeline, rounds.budget):
            break
        if level:
            rows.equalise()
    return None


def among(
    rounds: Rounds, asked: Problem, still: Open, seconds: float, gap: float = GAP, folding: Folding = fold
) -> tuple[int, ...] | None:
    """The best choice among options that are ``still`` open; None where there is none or time is out."""
    every = [np.arange(len(c)) for c in asked.costs]
    kept = [k if s is None else np.array(s) for k, s in zip(every, still, strict=False)]
    kept += every[len(kept) :]
    return solve_sliced(asked, kept, seconds, rounds.options.solver, gap, folding)


def _quick(problem: Problem) -> Tied | None:
    tied = fold(problem)
    if tied is None and len(problem.costs) > MOST_ALONE:
        raise SolverError("Nothing repeats.")
    return tied
