"""How small the peak can be: what an error names, and where a search begins for which nothing else fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError, SolverError
from autopar.planner.memory.active_set import ActiveSet
from autopar.planner.search.candidates import seed
from autopar.planner.search.descent import descended
from autopar.planner.search.rounds import Result, Rounds
from autopar.solver import Problem, peak_usage, smallest_choice
from autopar.solver.clock import now

MOST_S = 20.0
"""Seconds, at most, for each answer to how small the peak can be."""
SHARE = 0.4
LEAST_S = 0.5
"""Of the time left, and at least, for each of these answers, and for the plan that follows from it."""
GAP = 0.01
"""How good each is."""

NEARLY = 1.005
"""Times the rows' smallest peak, within which the cheapest choice is taken: cheap ones hold little besides."""

TO_THE_BYTE_MOST, TO_THE_BYTE_ALONE_MOST, MOST_PASSES = 300, 2000, 4
"""Variables up to which the smallest peak is looked for to the byte, on several devices and on one, in so many passes
at most: of more they gain less than a thousandth, for seconds."""


@dataclass(frozen=True)
class _Pass:
    """Rounds in which rows become tighter.

    Args:
        most: that find nothing smaller, or where they are not ``renewed`` by what is, of all.
        smaller: share of the best peak by which the next one should be smaller; at 0 by a byte.
        gap: how good the rows' smallest peak is.
        cost_gap: how good the cheapest choice near that is.
    """

    most: int
    renewed: bool
    smaller: float
    gap: float
    cost_gap: float


ROUGH = _Pass(8, renewed=True, smaller=0.01, gap=GAP, cost_gap=0.3)
ROUGH_ALONE = _Pass(2, renewed=True, smaller=0.01, gap=GAP, cost_gap=0.0)
EXACT = _Pass(12, renewed=True, smaller=0.0, gap=1e-6, cost_gap=0.3)


def of_smallest_peak(
    rounds: Rounds, rows: ActiveSet, deadline: float, begin: Sequence[int] | None
) -> tuple[Result, ActiveSet]:
    """From ``begin``, or else from the baseline of the smallest peak, on: the choice of the rows' smallest peak, then
    rows for what its program holds beyond the best so far, and again, until one fits the budget, or the time is up. Of
    small problems from the best so far on with rows anew, as long as that finds a smaller one: what has been set aside
    for an option may have been due to others; and from there on by single decisions. The rows are the last ones."""
    best: Result | None = None
    known: Sequence[Sequence[int]] = () if begin is None else (begin,)
    if begin is None and rounds.baselines:
        known = seed(rounds.objective, rounds.options, min(rounds.baselines, key=lambda r: r.peak_bytes).name)
    for choice in known:
        best = rounds.of_choice(choice)
    alone = rounds.decisions.mesh.size == 1
    best, _ = _smaller(rounds, rows, best, deadline, ROUGH_ALONE if alone else ROUGH)
    if len(rounds.decisions.variables) > (TO_THE_BYTE_ALONE_MOST if alone else TO_THE_BYTE_MOST):
        return _from_anew(rounds, rows, best, deadline, replace(ROUGH, cost_gap=0.0))
    if alone:  # there is little time, and this finds more in it
        best = descended(rounds, rows, best, deadline)
    best, rows = _from_anew(rounds, rows, best, deadline, EXACT)
    return (best if alone else descended(rounds, rows, best, deadline)), rows


def _from_anew(rounds: Rounds, rows: ActiveSet, best: Result, deadline: float, how: _Pass) -> tuple[Result, ActiveSet]:
    """From ``best`` on with rows anew, as long as that finds a smaller one; and the last rows."""
    for _ in range(MOST_PASSES):
        if now() > deadline or best.memory.peak_bytes <= rounds.budget:
            break
        rows, before = rows.emptied(), best
        best, least = _smaller(rounds, rows, best, deadline, how)
        if best is before or least:
            break
    return best, rows


def _smaller(rounds: Rounds, rows: ActiveSet, best: Result | None, deadline: float, how: _Pass) -> tuple[Result, bool]:
    """The smallest that is found from ``best`` on, which it is where none is smaller, and whether the rows say so."""
    if best is None:
        best = _near_smallest(rounds, rows, best, deadline, how)
        assert best is not None
    _tighten(rows, best, best, how)
    left = how.most
    while left and now() <= deadline and best.memory.peak_bytes > rounds.budget:
        found = _near_smallest(rounds, rows, best, deadline, how)
        if found is None:
            return best, True
        left -= 1
        if found.memory.peak_bytes < best.memory.peak_bytes:
            best, left = found, how.most if how.renewed else left
        if not _tighten(rows, found, best, how):
            break
    return best, False


def _aim(best: Result, how: _Pass) -> float:
    """Bytes that the next peak should not be above."""
    return min(best.memory.peak_bytes * (1 - how.smaller), best.memory.peak_bytes - 1)


def _tighten(rows: ActiveSet, found: Result, best: Result, how: _Pass) -> bool:
    timeline = found.memory.timeline
    return rows.separate(found.solution.choice, found.program, timeline, _aim(best, how), per_option=True)


def _near_smallest(rounds: Rounds, rows: ActiveSet, best: Result | None, deadline: float, how: _Pass) -> Result | None:
    """The cheapest choice whose rows are hardly higher than they have to be; None where these are too high, to the
    byte."""
    known = () if best is None else (best.solution.choice,)
    # Rows of transfers need a limit that they are a share of; where the next peak is below that, they hide.
    limit = math.inf if best is None or math.isinf(rounds.hideable_s) else _aim(best, how)
    asked, choice = smallest_rows(rounds, rows, known, seconds_for(deadline), limit, how.gap)
    least = peak_usage(asked, choice)
    limit = least * NEARLY
    if best is not None and not how.smaller:
        if least > _aim(best, how):
            return None
        limit = min(limit, _aim(best, how))
    try:
        latest = now() + seconds_for(deadline)
        return rounds.once(rows, limit, latest, rows.restrict(choice), how.cost_gap)
    except (InfeasibleError, SolverError):
        own = rows.restrict(choice)
        return rounds.of_choice(own) if rounds.hides(own) else None


def seconds_for(deadline: float) -> float:
    """For one answer."""
    return min(max(SHARE * (deadline - now()), LEAST_S), MOST_S)


def smallest_rows(
    rounds: Rounds,
    rows: ActiveSet,
    known: Sequence[Sequence[int]],
    seconds: float,
    limit: float = math.inf,
    gap: float = GAP,
) -> tuple[Problem, tuple[int, ...]]:
    """The problem with ``rows``, and its choice of the smallest peak, states and all."""
    asked = rows.extend(rounds.problem(rows, limit))
    found = [rows.extend_choice(choice) for choice in known]
    return asked, smallest_choice(asked, seconds, backend=rounds.options.solver, known=found, gap=gap)
