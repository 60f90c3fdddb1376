"""How small the peak can be: what an error names, and where a search begins for which nothing else fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from autopar.errors import InfeasibleError, SolverError
from autopar.planner.memory.active_set import ActiveSet
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.transfers import hides_transfers
from autopar.planner.search.candidates import seed
from autopar.planner.search.rounds import constrained, solve_round
from autopar.planner.search.state import Choice, Result, Search, SearchState
from autopar.solver import peak_usage, smallest_choice
from autopar.solver.clock import now

MOST_S, LEAST_S, SHARE = 20.0, 0.5, 0.4
"""Seconds of work at most and at least for one answer to how small the peak can be, and its share of the work left."""

GAP, COST_GAP = 0.01, 0.3
"""Relative gap of each of these answers, and of the cheapest choice near it."""

NEARLY = 1.005
"""Times the smallest peak within which the cheapest choice is taken: cheap ones hold little besides."""

STEP = 0.01
"""Share of the smallest peak so far by which the next should be smaller."""

IDLE_ROUNDS = 1
"""Rounds in which nothing smaller is found, after which the joint problem is asked."""


def search_smallest_peak(
    search: Search,
    state: SearchState,
    until: float,
    below: Callable[[Result, float], Result | None],
    begin: Sequence[int] | None = None,
) -> Iterator[Result]:
    """Plans of ever smaller peaks: the cheapest choice near the smallest peak that the constraints allow, then
    constraints for what its program holds beyond the best so far, and again. The way depends on no budget.

    Args:
        state: with no more than the free optimum and the joint problem.
        below: a plan within so many bytes, found from a larger one by the joint problem, which sets nothing aside for
            what other plans hold; None where it finds none.
        begin: a choice that holds little; else that of the leanest baseline.
    """
    objective = state.joint
    assert objective is not None
    best = _first(search, objective, begin)
    if best is not None:
        yield best
    constraints, idle = search.constraints(objective.decisions), 0
    while now() < until:
        if best is not None:
            _tighten(constraints, best, best)
        found, state = _near_smallest(search, state, constraints, best, until)
        if found is not None:
            idle += 1
            if best is None or found.memory.peak_bytes < best.memory.peak_bytes:
                best, idle = found, 0
                yield best
            if _tighten(constraints, found, best) and idle <= IDLE_ROUNDS:
                continue
        # What is set aside for other plans bars leaner ones.
        if best is None or (best := below(best, aim(best))) is None:
            break
        yield best
        constraints, idle = constraints.emptied(), 0


def _first(search: Search, objective: Objective, begin: Sequence[int] | None) -> Result | None:
    if begin is None and search.baselines:
        leanest = min(search.baselines, key=lambda b: b.least_bytes)
        begin = next(iter(seed(objective, search.options, leanest.name)), None)
    return None if begin is None else search.measure(objective, begin, "smallest peak")


def aim(best: Result) -> float:
    """Bytes that the next peak should not be above."""
    return min(best.memory.peak_bytes * (1 - STEP), best.memory.peak_bytes - 1)


def _tighten(constraints: ActiveSet, found: Result, best: Result) -> bool:
    timeline = found.memory.timeline
    return constraints.separate(found.solution.choice, found.program, timeline, aim(best), per_option=True)


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
    seconds = min(max(SHARE * (until - now()), LEAST_S), MOST_S)
    choice = smallest_choice(
        problem,
        seconds,
        backend=search.options.solver,
        known=[constraints.extend_choice(c) for c in known],
        gap=GAP,
    )
    own = constraints.restrict(choice)
    latest = now() + min(max(SHARE * (until - now()), LEAST_S), MOST_S)
    try:
        return solve_round(
            search,
            state,
            objective,
            constraints,
            peak_usage(problem, choice) * NEARLY,
            latest,
            seeds=(own,),
            gap=COST_GAP,
        )
    except (InfeasibleError, SolverError):
        rates, parts = search.prices.rates, state.hiding_parts
        hides = math.isinf(state.hideable_s) or hides_transfers(
            objective.decisions, own, rates, state.hideable_s, parts
        )
        return (search.measure(objective, own, "smallest peak") if hides else None), state
