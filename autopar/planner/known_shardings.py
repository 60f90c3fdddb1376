"""What to keep, recompute and offload where the shardings are known: those of the free optimum, or of a baseline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.planner.decisions import Decisions
from autopar.planner.rounds import Result, Rounds
from autopar.planner.sliced import solve_sliced
from autopar.planner.two_stage import Open, sharded_as
from autopar.solver import fold
from autopar.solver.clock import now

LEAST_S = 1.0
ROUNDS = 4
"""Seconds at least for one of them, and with tighter rows so many times."""

GAP = 0.01
"""How good each has to be: the joint search goes on from it."""


def kept_as_sharded(
    rounds: Rounds, d: Decisions, choices: Sequence[Sequence[int]], until: float, *, first: bool = False
) -> Result | None:
    """The best that is found to keep, recompute and offload with the shardings of each of ``choices``: what the joint
    search begins with, and what there is where its time is too short.

    Args:
        d: the decisions without reruns, whose choices these are.
        until: when to begin no other.
        first: whether the first that fits will do.
    """
    best: Result | None = None
    for still in dict.fromkeys(tuple(sharded_as(d, choice, rounds.decisions)) for choice in choices):
        if now() > until or (first and best is not None):
            break
        found = _fitting(rounds, still, until, level=first)
        if found is not None and (best is None or found.solution.objective < best.solution.objective):
            best = found
    return best


def _fitting(rounds: Rounds, still: Open, until: float, *, level: bool) -> Result | None:
    """The best choice among options that are ``still`` open, with rows for what its program holds over the budget
    until it fits, ``level`` ones for fewer rounds; None where none was found that does."""
    rows = rounds.first_rows()
    for _ in range(ROUNDS):
        asked = rows.extend(rounds.problem(rows, rounds.budget))
        every = [np.arange(len(c)) for c in asked.costs]
        kept = [k if s is None else np.array(s) for k, s in zip(every, still, strict=False)]
        kept += every[len(kept) :]
        seconds = max(until - now(), LEAST_S)
        choice = solve_sliced(asked, kept, seconds, rounds.options.solver, GAP, fold)
        if choice is None:
            break
        found = rounds.of_choice(rows.own(choice), rounds.budget, "known shardings")
        if found.memory.peak_bytes <= rounds.budget:
            return found
        own, timeline = found.solution.choice, found.memory.timeline
        if now() > until or not rows.tighten(own, found.program, timeline, rounds.budget):
            break
        if level:
            rows.level()
    return None
