"""One round of the search: state the problem, solve it, schedule the choice, and measure what it holds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from autopar import settings
from autopar.planner.memory.active_set import ActiveSet
from autopar.planner.memory.exact import profile
from autopar.planner.options import Options
from autopar.planner.pricing.objective import MAX_SOLVES, Objective
from autopar.planner.pricing.transfers import FORWARD_PARTS, exposed_seconds, host_usages
from autopar.planner.problem.restricted import solve_alike, solve_sliced
from autopar.planner.schedule.copied_parts import copied_seconds
from autopar.planner.search.fitting import fitted
from autopar.planner.search.offload_order import offloading_first
from autopar.planner.search.state import Choice, Result, Search, SearchState
from autopar.planner.search.two_stage import Open
from autopar.solver import NO_DUALS, Fallback, Gap, Problem, Solution, TraceEntry, peak_usage, relative_gap, solve
from autopar.solver.clock import now

HOST_TIME = 10_000
"""Index of the constraints by which transfers hide: beyond those of memory, so that usage prices keep their times."""


def constrained(
    search: Search,
    state: SearchState,
    objective: Objective,
    active: ActiveSet | None,
    limit: float,
) -> Problem:
    """The problem with memory constraints, without the redistributed operands that they do not see."""
    used = active.usages() if active else ()
    if active and math.isfinite(limit) and math.isfinite(state.hideable_s):
        rates = search.prices.rates
        used += host_usages(objective.decisions, rates, state.hideable_s, HOST_TIME, limit, state.hiding_parts)
    return objective.problem(used, limit)


def without_recomputing(objective: Objective, problem: Problem, boundaries: Collection[int]) -> Problem:
    """The problem in which the values of some hold variables are not recomputed."""
    if not boundaries:
        return problem
    costs = list(problem.costs)
    for i in boundaries:
        recomputed = np.array([action.remakes for action in objective.decisions.variables[i].actions])
        costs[i] = np.where(recomputed, math.inf, costs[i])
    return replace(problem, costs=tuple(costs), trusted=True)


def solve_round(
    search: Search,
    state: SearchState,
    objective: Objective,
    active: ActiveSet | None,
    limit: float,
    until: float,
    *,
    seeds: Sequence[Choice] = (),
    gap: float | Gap = 0.0,
    reweigh: float | None = None,
    boundaries: Collection[int] = (),
    longer: Callable[[Choice], float] | None = None,
) -> tuple[Result, SearchState]:
    """The best choice under ``limit`` bytes, scheduled and measured, and the state with what the solve leaves.

    Args:
        seeds: choices to begin with.
        gap: relative gap at which the solve ends, where that is more than was asked.
        reweigh: the gap down to which weights of the paths are tried; None for those that the objective has, where
            there are constraints.
        boundaries: hold variables of values that are not to be recomputed.
        longer: until when the paths get other weights, given the best choice, where that may be later.

    Raises:
        InfeasibleError, SolverError: the constraints allow nothing, or nothing was found in time.
    """
    started = time.perf_counter()
    problem = constrained(search, state, objective, active, limit)
    built = time.perf_counter()
    search.report("solve")
    solution, state = _solve(search, state, objective, problem, active, until, seeds, gap, reweigh, boundaries, longer)
    solution = replace(solution, choice=offloading_first(objective, solution.choice))
    solved = time.perf_counter()
    early = search.lowered(objective, solution.choice)
    lowered = time.perf_counter()
    program, memory = fitted(*early, search.graph, search.prices, search.options, limit)
    solution = replace(solution, objective=solution.objective + copied_seconds(program))
    ends = {"build": built, "solve": solved, "lower": lowered, "verify": time.perf_counter()}
    for stage, end in ends.items():
        search.timings[stage] += end - started
        started = end
    return Result(objective, program, solution, memory, early), state


def _solve(
    search: Search,
    state: SearchState,
    objective: Objective,
    asked: Problem,
    active: ActiveSet | None,
    until: float,
    seeds: Sequence[Choice],
    gap: float | Gap,
    reweigh: float | None,
    boundaries: Collection[int],
    longer: Callable[[Choice], float] | None,
) -> tuple[Solution, SearchState]:
    duals, last_s = state.duals, 0.0
    if active:
        duals = duals._replace(usage_prices=active.usage_prices(state.prices))
    extended = asked
    # Each solve under constraints takes long, so there the weights that are best without them do at first.
    most = 1 if active is not None and reweigh is None else MAX_SOLVES
    ends = search.ending_gap(gap)
    reweighed = ends if reweigh is None else lambda cost: max(ends(cost), reweigh)

    def solve_from(problem: Problem, best: Sequence[Sequence[int]]) -> Solution:
        nonlocal duals, extended, last_s
        begin = (*best, *(seeds if active else seeds[: settings.FEW]))
        problem = without_recomputing(objective, problem, boundaries)
        if active:
            problem, begin = active.extend(problem), tuple(map(active.extend_choice, begin))
            extended = problem
        began = now()
        left_s = (until - began) * (1.0 if most == 1 else settings.MAIN_SHARE)
        found = solve(
            problem,
            time_limit=max(left_s, settings.LEAST_S),
            backend=search.options.solver,
            gap=ends,
            warm_starts=begin,
            duals=duals,
            folding=objective.fold,
            progress=lambda entry: _report_gap(search, entry),
            refuses=refuses,
        )
        duals, last_s = found.duals, now() - began
        return replace(found, choice=active.restrict(found.choice)) if active else found

    def refuses(choice: Sequence[int]) -> bool:
        """Whether its program holds more than its constraints say: they change before a better choice is of use."""
        if active is None or asked.limit != search.budget:
            return False
        _, memory = search.within(objective, active.restrict(choice), search.budget)
        return memory.peak_bytes > search.budget

    def out_of_time(best: Choice) -> bool:
        """Whether another solve would have much less work than the last one."""
        nonlocal until

        def is_late() -> bool:
            return settings.MAIN_SHARE * (until - now()) < settings.LEAST_ROUND * last_s

        if longer is not None and is_late():
            until = longer(best)
        return is_late()

    def used(choice: Sequence[int]) -> float:
        """What redistributed operands are counted in, if any."""
        return peak_usage(extended, active.extend_choice(choice)) if active else 0.0

    bound = state.bound if asked.limit <= search.budget else -math.inf
    found = objective.minimize(asked, solve_from, reweighed, seeds, most, out_of_time, bound, used)
    proven = relative_gap(found.objective, found.lower_bound) <= search.options.gap
    prices = active.prices_by_point(duals.usage_prices) if active else state.prices
    return replace(found, proven=proven, duals=NO_DUALS), replace(state, duals=duals, prices=prices)


def _report_gap(search: Search, found: TraceEntry) -> None:
    if math.isfinite(found.objective) and found.objective > 0:
        gap = 1 - max(found.lower_bound, 0.0) / found.objective
        search.report(f"solve: {found.objective * 1e3:.4g} ms, gap {gap:.2%}")


def solve_with_shardings(
    search: Search,
    state: SearchState,
    still: Open,
    active: ActiveSet,
    until: float,
    *,
    gap: float,
    method: str,
    boundaries: Collection[int] = (),
    known: Choice | None = None,
    fallback: Fallback | None = None,
) -> Result | None:
    """The best way to keep, recompute and offload among the options that are ``still`` open, over some rounds: one that
    fits, or the last that does not. The largest margin is set aside at all points once it grows, for fewer rounds, but
    where nothing is found so.

    Args:
        boundaries: hold variables of values that are not to be recomputed.
        known: a choice to begin with.
        fallback: is asked for one to go on from where none is found.
    """
    objective = state.joint
    assert objective is not None
    enough, found, unequal = search.ending_gap(gap), None, None
    for left in range(settings.REPAIR_ROUNDS, 0, -1):
        problem = constrained(search, state, objective, active, search.budget)
        problem = active.extend(without_recomputing(objective, problem, boundaries))
        # A choice that is over the budget needs another round, however near the best it may be.
        seconds = max((until - now()) * (settings.MAIN_SHARE if left > 1 else 1.0), settings.LEAST_S)
        begin = None if known is None else active.extend_choice(known)
        instead = partial(_extended, active, fallback)
        solution = solve_open(problem, still, seconds, search.options.solver, enough, begin, instead)
        if solution is None and unequal is not None:
            active.margins, unequal = unequal, None
            continue
        if solution is None:
            break
        found = search.measure(objective, active.restrict(solution.choice), method, search.budget)
        found = replace(found, solution=replace(found.solution, duals=solution.duals))
        if found.memory.peak_bytes <= search.budget:
            break
        own, timeline, most = found.solution.choice, found.memory.timeline, max(active.margins.values())
        if now() > until or not active.separate(own, found.program, timeline, search.budget):
            break
        more = max(active.margins.values()) > most  # else the points that are new say what they hold
        unequal = active.equalise() if more else None
    return found


def _extended(active: ActiveSet, fallback: Fallback | None) -> Choice | None:
    found = None if fallback is None else fallback()
    return None if found is None else active.extend_choice(found)


def solve_open(
    problem: Problem,
    still: Open,
    seconds: float,
    backend: str,
    gap: float | Gap,
    known: Choice | None = None,
    fallback: Fallback | None = None,
) -> Solution | None:
    """The best choice among options that are ``still`` open; None where there is none or time is out."""
    return solve_sliced(problem, _kept(problem, still), seconds, backend, gap, known, fallback)


def solve_open_alike(objective: Objective, still: Open, until: float, options: Options, gap: float) -> Choice | None:
    """The best choice among options that are ``still`` open, without a budget; of equal layers that it leaves the same,
    all choose alike. None where there is none or time is out."""
    problem = objective.problem()
    kept, folded = _kept(problem, still), objective.fold(problem)
    return solve_alike(problem, kept, until - now(), options.solver, gap, folded)


def _kept(problem: Problem, still: Open) -> list[npt.NDArray[np.int64]]:
    every = [np.arange(len(c)) for c in problem.costs]
    kept = [k if s is None else np.array(s) for k, s in zip(every, still, strict=False)]
    return kept + every[len(kept) :]


def hides_more(search: Search, state: SearchState, active: ActiveSet, result: Result) -> tuple[bool, SearchState]:
    """Whether what a plan that fits sends leaves the step waiting, and constraints that let it hide are new: for copies
    to the host that find no time in the forward, and for what is fetched or gathered late since there is no room
    sooner."""
    least = settings.EXPOSED_SHARE * result.cost
    parts = FORWARD_PARTS if exposed_seconds(result.program) > least else 1
    tighter = False
    if result.early is not None:
        early = replace(result, program=result.early[0], memory=result.early[1], early=None)
        if result.step_s > early.step_s + least:
            tighter = active.separate(result.solution.choice, early.program, early.memory.timeline, search.budget)
    tried = search.tried(result)
    if search.arranged(result).arranged_s > tried.least_s() + least:
        program = tried.shortest(search.prices.overlap)
        held = profile(program, search.graph, result.objective.decisions.mesh, search.options)
        tighter |= active.separate(result.solution.choice, program, held.timeline, search.budget)
    more = max(state.hiding_parts, parts)
    return tighter or more > state.hiding_parts, replace(state, hiding_parts=more)
