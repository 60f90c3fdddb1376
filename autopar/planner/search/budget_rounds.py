"""Rounds within a budget: what a program holds over it becomes rows, until one fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from autopar.errors import InfeasibleError, SolverError
from autopar.planner.memory.active_set import ActiveSet
from autopar.planner.pricing.transfers import FORWARD_PARTS, exposed_seconds
from autopar.planner.search.candidates import BaselineCandidate
from autopar.planner.search.known_shardings import kept_anew
from autopar.planner.search.rounds import Result, Rounds
from autopar.planner.search.smallest_peak import seconds_for, smallest_rows
from autopar.solver import Solution, evaluate
from autopar.solver.clock import now

TIGHTEN_ROUNDS, ALONE_ROUNDS = 12, 40
ROUND_SHARE = 0.5
"""Of the time left, for each round: a plan that fits is worth more than proving one that does not."""
SMALL_SHARE = 0.25
"""Of the time left, for each round of a small problem, which ends when its time is up."""
ROUND_LONGER = 1.6
"""Times what the last round took, the next one has at least, where so much is left."""
FEW_ROUNDS_SHARE = 0.2
"""Of the time left: after a round that took longer there is no time to learn moment by moment what rows do not see."""
NEARLY_OVER = 0.05
"""Of the budget: a program that is over by no more gets another round from the time of what would follow."""
RESCUE_TIMES = 0.7
"""Times what a round took, is left for known shardings where no baseline fits: any plan that fits is worth more than a
better one that comes too late."""
SMALL_MOST = 2000
"""Variables of the joint problem up to which: the moments of more take longer than they are worth."""
NEARLY_FITS = 1.1
"""Times the budget: up to there a baseline may fit once its collectives are arranged, which is how its peak is told."""

SOLVED_GAP = 5e-3
"""A weighted problem is solved where its choice is no further from its bound: a refused proof leaves it anywhere."""

MOST_EXPOSED = 5e-3
EXPOSED_ROUNDS = 2
"""Of the step: where transfers are exposed for longer than that, more rows see to it that they hide, so many times."""

EXPOSED_TIMES, EXPOSED_LEAST_S = 1.0, 2.0
"""Times what the round of a plan that fits took, and seconds at least, for those."""


class _Until(NamedTuple):
    """When all rounds end, and the next one."""

    all: float
    one: float


@dataclass
class BudgetRounds(Rounds):
    """Rounds that know until when others may follow.

    Args:
        latest: when the search ends, what follows these rounds included.
    """

    latest: float = field(default=math.inf, kw_only=True)

    @cached_property
    def baseline(self) -> str:
        """The cheapest that fits the budget."""
        return next((r.name for r in self.baselines if r.fits(self.budget)), "")

    def fits(self, baseline: BaselineCandidate) -> bool:
        """Whether its program does, as it is or, where that is a little too large, with its collectives arranged."""
        if baseline.fits(self.budget):
            return True
        return baseline.fits(NEARLY_FITS * self.budget) and baseline.candidate.memory.peak_bytes <= self.budget

    def within_budget(
        self,
        deadline: float,
        share: float = 1.0,
        rows: ActiveSet | None = None,
        warm: Sequence[int] | None = None,
        alone: bool = False,
    ) -> Result | None:
        """While the exact liveness is over the budget its moments become rows, with room for what rows do not see
        (redistributed copies and what an op holds while it runs); or with the shardings of the first choice, where
        another round could not be better by more than the gap, or there is no time for one. None where nothing was
        found in ``share`` of the time that is left. The bound is that of rows that set nothing aside."""
        deadline = in_share(share, deadline)
        rows = self.first_rows() if rows is None else rows
        bound = self.bound
        joint = any(v.kind == "hold" for v in self.decisions.variables)  # only then does the bound hold for all plans
        exposed: Result | None = None
        mended: Result | None = None
        turns_exposed, took, over = 0, 0.0, math.inf
        for _ in range(ALONE_ROUNDS if alone else TIGHTEN_ROUNDS):
            until = self._next_round(deadline, took, over if mended is None else math.inf)
            if until is None:
                break
            began, deadline = now(), until.all
            result = self._in_rows(rows, until.one, warm, needed=exposed is None)
            took = now() - began
            if result is None:
                break
            if not any(rows.margins.values()) and not rows.option_margins:
                bound = max(bound, result.solution.lower_bound)
                self.bound = bound if joint else self.bound
            over = result.memory.peak_bytes - self.budget
            if over <= 0:
                if mended is not None and mended.solution.objective < result.solution.objective:
                    result = mended
                result = replace(result, solution=bounded(result.solution, bound, self.options.gap))
                best = result if exposed is None else min(exposed, result, key=lambda r: self.step_seconds(r.program))
                if turns_exposed == EXPOSED_ROUNDS or not self._hides_more(rows, result):
                    return best
                exposed, turns_exposed = best, turns_exposed + 1
                deadline = min(deadline, now() + max(EXPOSED_TIMES * took, EXPOSED_LEAST_S))
                self.say("transfers that cannot hide")
                continue
            warm = result.solution.choice
            self.say(f"over the budget by {over / 2**20:.0f} MiB: tighter")
            if not rows.separate(warm, result.program, result.memory.timeline, self.budget, per_option=alone):
                break
            if joint and not alone and mended is None:
                mended = kept_anew(self, rows.copy(), result, min(deadline, now() + took))
                at = result.solution
                solved = at.lower_bound >= (1 - SOLVED_GAP) * self.weighted_s
                least = at.objective if solved else at.lower_bound
                if mended and bounded(mended.solution, least, self.options.gap).proven:
                    break  # all that another round could gain
            if not alone and now() - began > FEW_ROUNDS_SHARE * (deadline - now()):
                rows.equalise()
        found = exposed or mended
        return found and replace(found, solution=bounded(found.solution, bound, self.options.gap))

    def _next_round(self, deadline: float, took: float, over: float) -> _Until | None:
        """Until when it may take; None where there is no time for one. ``over``: by how many bytes the last one, which
        ``took`` so long, was over the budget."""
        began, left = now(), deadline - now()
        if len(self.decisions.variables) <= SMALL_MOST:  # ends when its time is up
            return _Until(deadline, in_share(SMALL_SHARE, deadline)) if left > 0 or not took else None
        if took > left:
            deadline = self.latest - (0.0 if self.baseline else RESCUE_TIMES * took)
            left = deadline - began
            if over > NEARLY_OVER * self.budget or took > left:
                return None
        share = min(1.0, max(ROUND_SHARE, ROUND_LONGER * took / max(left, 1.0)))
        return _Until(deadline, in_share(share, deadline))

    def _in_rows(self, rows: ActiveSet, deadline: float, warm: Sequence[int] | None, *, needed: bool) -> Result | None:
        """The best choice of ``rows``; the solver may find none near the smallest limit, and then begins with the one
        of the smallest peak, where one is ``needed``. None where that is over the budget too."""
        try:
            return self.once(rows, self.budget, deadline, warm)
        except (InfeasibleError, SolverError):
            if not needed:
                return None
            seeds = self.seeds if warm is None else (warm,)
            asked, least = smallest_rows(self, rows, seeds, seconds_for(deadline), self.budget)
        if not evaluate(asked, least)[1] or now() > deadline:
            return None
        try:
            return self.once(rows, self.budget, deadline, rows.restrict(least))
        except (InfeasibleError, SolverError):
            return None

    def _hides_more(self, rows: ActiveSet, result: Result) -> bool:
        """Whether transfers of a plan that fits are exposed, and rows that say so are new: for copies to the host that
        find no time in the forward, and for what comes back late because there is no room for it sooner."""
        least = MOST_EXPOSED * result.solution.objective
        parts, self.hiding_parts = self.hiding_parts, FORWARD_PARTS if exposed_seconds(result.program) > least else 1
        tighter = False
        if result.wished and self.step_seconds(result.program) > self.step_seconds(result.wished[0]) + least:
            program, memory = result.wished
            tighter = rows.separate(result.solution.choice, program, memory.timeline, self.budget)
        self.hiding_parts = max(parts, self.hiding_parts)
        return tighter or self.hiding_parts > parts


def in_share(share: float, deadline: float) -> float:
    at = now()
    return at + share * max(deadline - at, 1.0)


def bounded(solution: Solution, bound: float, gap: float) -> Solution:
    """The solution with a bound from elsewhere."""
    bound = min(bound, solution.objective)
    return replace(solution, lower_bound=bound, proven=solution.objective - bound <= gap * solution.objective)
