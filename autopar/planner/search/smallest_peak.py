"""How small the peak can be: what an error names, and where a search begins for which nothing else fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from autopar import settings
from autopar.errors import InfeasibleError, SolverError
from autopar.planner.memory.active_set import ActiveSet
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.transfers import hides_transfers
from autopar.planner.search.candidates import seed
from autopar.planner.search.rounds import constrained, solve_round
from autopar.planner.search.state import Choice, Result, Search, SearchState
from autopar.solver import peak_usage, smallest_choice
from autopar.solver.clock import now

Within = Callable[[Result, float], Result | None]
"""Finds a plan within so many bytes, from one that holds more; None where it finds none."""


def search_smallest_peak(
    search: Search,
    state: SearchState,
    until: float,
    within: Sequence[Within],
    others: Sequence[Result] = (),
    begin: Sequence[int] | None = None,
) -> Iterator[Result]:
    """Plans of ever smaller peaks: near the smallest that constraints allow, then by searches within a little less than
    the peak so far, and again until nothing finds any. The way depends on no budget.

    Args:
        state: with no more than the free optimum and the joint problem.
        within: searches within a budget, which set nothing aside for what other plans hold.
        others: plans that hold little, which constraints do not begin with.
        begin: a choice that holds little; else that of the leanest baseline.
    """
    assert state.joint is not None
    yield from others
    best = _first(search, state.joint, begin)
    if best is not None:
        yield best
    while now() < until:
        last = best
        for found in _by_constraints(search, state, until, best, known=min(map(_peak, others), default=math.inf)):
            yield (best := found)
        best = min(filter(None, (*others, best)), key=_peak, default=None)
        for find in within:
            for found in _descending(find, until, best):
                yield (best := found)
        if best is last:
            break
    for find in within:  # what is smaller by less than that
        smaller = None if best is None or now() > until else find(best, aim(best, 1.0))
        if smaller is not None:
            yield (best := smaller)


def _peak(found: Result) -> int:
    return found.memory.peak_bytes


def _first(search: Search, objective: Objective, begin: Sequence[int] | None) -> Result | None:
    if begin is None and search.baselines:
        leanest = min(search.baselines, key=lambda b: b.least_bytes)
        begin = next(iter(seed(objective, search.options, leanest.name)), None)
    return None if begin is None else search.measure(objective, begin, "smallest peak")


def _by_constraints(
    search: Search, state: SearchState, until: float, best: Result | None, known: float
) -> Iterator[Result]:
    """The cheapest choice near the smallest peak that the constraints allow, then constraints for what its program
    holds beyond the best so far, and again. A round that ends above the ``known`` peak of another plan counts as
    idle."""
    assert state.joint is not None
    constraints, idle = search.constraints(state.joint.decisions), 0
    if best is not None:
        _tighten(constraints, best, best)
    while now() < until and idle < settings.FEW:
        found, state = _near_smallest(search, state, constraints, best, until)
        if found is None:
            return
        idle += 1
        if best is None or _peak(found) < _peak(best):
            best, idle = found, 0 if _peak(found) < known else idle
            yield best
        if not _tighten(constraints, found, best):
            return


def _descending(find: Within, until: float, best: Result | None) -> Iterator[Result]:
    """Plans that each hold less than the last one: after each that is found about twice as much less."""
    share = 1 - settings.NEAR
    while best is not None and now() < until:
        found = find(best, aim(best, share))
        if found is not None:
            yield (best := found)
            share *= share
        elif share == 1 - settings.NEAR:
            return
        else:
            share = 1 - settings.NEAR


def aim(best: Result, share: float = 1 - settings.NEAR) -> float:
    """Bytes that the next peak should not be above."""
    return min(_peak(best) * share, _peak(best) - 1)


def _tighten(constraints: ActiveSet, found: Result, best: Result) -> bool:
    timeline = found.memory.timeline
    return constraints.separate(found.solution.choice, found.program, timeline, aim(best), per_option=True)


def _seconds(until: float) -> float:
    return max(settings.PART_SHARE * (until - now()), settings.LEAST_S)


def _near_smallest(
    search: Search, state: SearchState, constraints: ActiveSet, best: Result | None, until: float
) -> tuple[Result | None, SearchState]:
    """The cheapest choice whose constrained usage is hardly higher than it has to be; None where none hides."""
    objective = state.joint
    assert objective is not None
    known: Sequence[Choice] = () if best is None else (best.solution.choice,)
    # Transfers hide within a share of the limit; where the next peak is below that, they hide.
    limit = math.inf if best is None or math.isinf(state.hideable_s) else aim(best)
    problem = constraints.extend(constrained(search, state, objective, constraints, limit))
    choice = smallest_choice(
        problem,
        _seconds(until),
        backend=search.options.solver,
        known=[constraints.extend_choice(c) for c in known],
        gap=settings.NEAR,
    )
    own = constraints.restrict(choice)
    try:
        return solve_round(
            search,
            state,
            objective,
            constraints,
            peak_usage(problem, choice) * (1 + settings.NEAR),
            now() + _seconds(until),
            seeds=(own,),
            gap=settings.COST_GAP,
        )
    except (InfeasibleError, SolverError):
        rates, parts = search.prices.rates, state.hiding_parts
        hides = math.isinf(state.hideable_s) or hides_transfers(
            objective.decisions, own, rates, state.hideable_s, parts
        )
        return (search.measure(objective, own, "smallest peak") if hides else None), state
