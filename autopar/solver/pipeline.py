"""The solver on one page: reduce, bound and search, take out what is superfluous, and leave the rest to an ILP.

``phases`` has the table of what is done, in order; ``run_phases`` is its driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from autopar.errors import SolverError
from autopar.solver.blocks.folding import Attempt, Part, fold
from autopar.solver.blocks.parts import Tied
from autopar.solver.clock import limited
from autopar.solver.integer import highs
from autopar.solver.integer.pulp_backend import check_solver
from autopar.solver.phases import FLAT, PHASES, State, run_phases
from autopar.solver.problem import NO_DUALS, Duals, Problem, Solution, TraceEntry
from autopar.solver.reduce.incumbent import Fallback, Gap, Incumbent, Refuses


def solve(
    problem: Problem,
    *,
    time_limit: float = 60.0,
    backend: str = "auto",
    gap: float | Gap = 1e-4,
    warm_starts: Sequence[Sequence[int]] = (),
    progress: Callable[[TraceEntry], None] | None = None,
    folding: Callable[[Problem], Tied | None] = fold,
    duals: Duals = NO_DUALS,
    refuses: Refuses | None = None,
    fallback: Fallback | None = None,
) -> Solution:
    """The cheapest choice, or the best one found in time, with a bound that no choice can beat.

    Args:
        problem: what to choose.
        time_limit: seconds; kept within two.
        backend: of the integer program: "highs", "cbc", any name that PuLP knows, or "auto": HiGHS when installed.
        gap: relative; the search ends when (objective - bound) / objective is no larger. A function of the
            objective is asked anew each time, and may grow with the work done.
        warm_starts: choices to begin with; infeasible ones are ignored.
        progress: called with each better objective or bound.
        folding: what ties repeated blocks together, for who has done so already or knows that there are none.
        duals: of a similar problem, to begin with.
        refuses: is asked about a choice that is nearly the best before that is proven; where it says yes the search
            ends.
        fallback: is asked for a choice to go on from where none is found by prices. To begin with it leads to worse
            ones than to begin with nothing.

    Raises:
        InfeasibleError: no choice is allowed.
        SolverError: the back end is missing or failed, or time ended before any choice was found.
    """
    chosen = backend if backend != "auto" else "highs" if highs.is_installed() else "cbc"
    if chosen != "highs":
        check_solver(chosen)
    with limited(time_limit):
        incumbent = Incumbent(problem, time_limit, gap, progress, refuses)
        incumbent.begin_with(duals)
        for choice in warm_starts:
            incumbent.offer(choice, "warm start")
        begin_part = partial(_begin_part, chosen)
        tied = folding(problem)
        state = State(incumbent, chosen, warm_starts, tied, solve=solve, begin_part=begin_part, fallback=fallback)
        run_phases(PHASES, state)
        return _solution(state)


def _begin_part(backend: str, part: Part) -> Attempt:
    """What solves the tied problem, by everything but folding; each attempt goes on from the last."""
    incumbent = Incumbent(part.problem, 0.0, part.gap, None)
    incumbent.messages = part.messages
    for choice in part.warm_starts:
        incumbent.offer(choice, "warm start")
    state = State(incumbent, backend, part.warm_starts, None, False, part.size, solve=solve)

    def attempt(seconds: float, *, exact: bool, aim: float) -> Incumbent:
        incumbent.time_limit, incumbent.aim = incumbent.seconds() + seconds, aim
        state.exact, state.done = exact, False
        run_phases(FLAT, state)
        return incumbent

    return attempt


def _solution(state: State) -> Solution:
    incumbent = state.incumbent
    if incumbent.choice is None:
        spent = f"{incumbent.seconds():.3g} s"
        raise SolverError("No choice was found in time.", found=spent, hint="raise time_limit, or pass a warm start")
    return Solution(
        incumbent.choice,
        incumbent.objective,
        incumbent.bound(),
        incumbent.proven(),
        state.size,
        incumbent.seconds_on_the_wall(),
        f"{', '.join(state.method)}; found by {incumbent.found_by}",
        tuple(incumbent.trace),
        incumbent.duals,
        incumbent.seconds_left() <= 0,
    )
