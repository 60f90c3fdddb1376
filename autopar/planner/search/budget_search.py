"""The search within a budget: the free optimum where it fits, else rounds and what is known, else the smallest peak."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError
from autopar.planner.memory.active_set import ActiveSet
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.transfers import forward_seconds
from autopar.planner.problem.decide import Decisions
from autopar.planner.search import named_budgets
from autopar.planner.search.budget_rounds import NEARLY_FITS, SMALL_MOST, BudgetRounds, bounded, in_share
from autopar.planner.search.candidates import Candidate, seed
from autopar.planner.search.known_shardings import GAP_ANEW, among, cheapest, kept_as_sharded
from autopar.planner.search.rounds import Result
from autopar.planner.search.smallest_peak import LEAST_S, TO_THE_BYTE_MOST, of_smallest_peak
from autopar.planner.search.two_stage import SMALLEST_MOST, Checkpointed, CheckpointSearch, Open, sharded_as
from autopar.solver import UsagePrices, sum_of_least
from autopar.solver.clock import now

JOINT_SHARE = 0.8
SHARDED_SHARE = 0.3
SHARDED_TIMES = 0.5
"""Of the time, and times what the joint search took, for what to keep and recompute with shardings that are known."""
LEAN = 1.25
"""Times the least that a baseline holds: of those up to there the cheapest is the first of which values run again."""
KEEPING_SHARE = 0.3
"""Of the time, for plans that recompute nothing."""
SMALLEST_SHARE, HARD_SHARE, LEAST_KEPT_BACK_S = 0.25, 0.5, 1.5
"""Of the time, and seconds at least, for the smallest peak, the second where no baseline fits a small problem: a budget
that an error names leaves as long for it."""
ROUND = 6.0
"""Times what the optimum without a budget takes, for one round of a large problem: 2.4 to 8 of deep models."""
SECOND_STAGE_GAP = 0.02
"""A wider gap is left to what is known."""
AGAIN_GAP = 0.005
"""A wider gap is left to further rounds, with other weights."""
AGAIN_SHARE = 0.5
"""Of the time left, for a plan whose gap is wide once more."""
ROWS_SHARE = 0.8
"""Of the time for the smallest peak of a small problem on one device, for rows; the exact search goes on from there."""
TIES_LEAST = 600
"""Variables of problems whose ties are told apart by other paths: small ones are solved to the end, which that bars."""
EXACT_MOST = 200
"""Up to so many the exact search also breaks ties on one device."""

TO_LISTING, TO_KNOWN = 2.4, 1.6
"""Where no baseline fits a deep model's budget, the first plan is there after so many times what passed before ways to
run ops again are listed, and before known shardings are tried: 2.4 to 4.4 and 1.6 to 2.2 times for 8B to 405B."""

OVERRUN_S, COUNTED, LONGER = 2.0, 1.6, 1.8
"""A first plan is waited for that comes so many seconds late, of a clock that runs so many times as fast as the wall.
The time limit that an error suggests is so many times what is expected at the least."""


@dataclass
class BudgetSearch(BudgetRounds):
    """The rounds that lead to a choice within the budget, or to an error that names the smallest.

    Args:
        with_reruns: the decisions, with what can be made again among them.
        over_budget: is told the deadline where the optimum without a budget is over it, and gives the one from then on.
        began: when the search did.
        free_s: seconds that the optimum without a budget took.
        kept_back_s: seconds for the smallest peak, where no baseline fits.
    """

    with_reruns: Callable[[], Decisions] = field(kw_only=True)
    over_budget: Callable[[float], float] = field(kw_only=True)
    began: float = field(kw_only=True)
    free_s: float = 0.0
    kept_back_s: float = 0.0

    def run(self, deadline: float) -> Result | None:
        """The free optimum when it fits, else the best that is found within the budget, else the smallest; None where
        nothing was found within it, and a baseline is.

        Raises:
            InfeasibleError: even the smallest plan is over the budget.
        """
        began = now()
        free = self.once(None, math.inf, deadline, None)
        self.free_s = now() - began
        if self._has_room_for(free) or self.options.search.startswith("random"):
            return free
        deadline = self.over_budget(deadline)
        self.free, self.hideable_s = free, forward_seconds(free.program)
        self.bound = free.solution.lower_bound
        hard = self.decisions.mesh.size > 1 and len(self.decisions.variables) < TIES_LEAST and not self.baseline
        share = HARD_SHARE if hard else SMALLEST_SHARE
        self.kept_back_s, self.latest = share * max(deadline - now(), 0.0), deadline
        deadline -= self.kept_back_s
        if self.options.search == "two-stage" or self.decisions.mesh.size == 1:
            return self._with_shardings_of(free, deadline)
        if now() > deadline and self.baseline:
            return None
        if self._comes_too_late(TO_LISTING):
            return self._known_or_late(free, TO_LISTING)
        self.say("over the budget: keep or recompute")
        keeping, checkpoints = self.objective, self._checkpoints(free)
        self.seeds = ()
        began = now()
        result = self.within_budget(deadline, JOINT_SHARE) if self._has_time_for_rounds(deadline) else None
        barred = result is None and self._is_barred()
        if not barred and result is None and self._comes_too_late(TO_KNOWN):
            return self._known_or_late(free, TO_KNOWN)
        if not barred and (result is None or self._is_wide(result.solution.objective)):
            result = self._from_what_is_known(result, keeping, checkpoints, deadline, now() - began)
        if result is not None and self._leaves_much_open(result) and now() < deadline:
            result = self._again(result, deadline)
        if result is None and self.baseline:
            return None
        late = now() > deadline
        if result is None:
            deadline = self._until_smallest()
            if now() > self.latest + OVERRUN_S / 2:
                return self._known_or_late(free, TO_KNOWN, barred)
            result = named_budgets.or_kept(self, self._smallest(deadline, checkpoints.still))
        if result.memory.peak_bytes > self.budget:
            self.baseline = next((r.name for r in self.baselines if self.fits(r)), "")
            if self.baseline:
                return None
            raise self._infeasible(result, late=late or now() > deadline, barred=barred)
        return result

    def _has_room_for(self, free: Result) -> bool:
        """Whether the free optimum fits, as it is or as it is told where there is no budget: with its collectives
        arranged, which may hold a little less."""
        peak = free.memory.peak_bytes
        if self.budget < peak <= NEARLY_FITS * self.budget:
            options = replace(self.options, memory_budget_bytes=None)
            told = Candidate.of("free", self.decisions, free.solution, free.program, self.prices, options)
            peak = told.memory.peak_bytes
        return peak <= self.budget

    def _has_time_for_rounds(self, deadline: float) -> bool:
        """Whether one of a large problem may end in time: it cannot be cut short."""
        small = len(self.decisions.variables) <= SMALL_MOST
        return small or deadline - now() > ROUND * self.free_s

    def _known_or_late(self, free: Result, times: float, barred: bool = False) -> Result | None:
        """The plan behind a budget that an error has named, where that fits; None where a baseline does, arranged.

        Raises:
            InfeasibleError: there is none, and the first would come after so many times what the search took so far.
        """
        kept = named_budgets.or_kept(self, free)
        if kept.memory.peak_bytes <= self.budget:
            return replace(kept, solution=bounded(kept.solution, self.bound, self.options.gap))
        self.baseline = next((r.name for r in self.baselines if self.fits(r)), "")
        if self.baseline:
            return None
        raise self._infeasible(kept, late=True, barred=barred, first_s=times * (now() - self.began))

    def _comes_too_late(self, times: float) -> bool:
        """Whether the first plan would, where it is there after so many times what the search took so far."""
        limit_s = max(self.latest - self.began, self.options.time_limit_s)
        return times * (now() - self.began) > COUNTED * (limit_s + OVERRUN_S) and not self.baseline

    def _is_wide(self, seconds: float) -> bool:
        """Whether the gap of what costs so many seconds is."""
        return 1 - self.bound / seconds > SECOND_STAGE_GAP

    def _leaves_much_open(self, result: Result) -> bool:
        """Whether the gap is wide, where reruns are among the choices, and not for the sake of transfers that hide."""
        joint = self.hiding_parts == 1 and any(v.kind == "hold" for v in self.decisions.variables)
        return joint and 1 - self.bound / result.solution.objective > max(AGAIN_GAP, self.options.gap)

    def _again(self, best: Result, deadline: float) -> Result:
        """Once more from ``best`` with the weights of the paths that it shows, and setting aside what rows do not see
        for the options behind it alone, which takes more rounds."""
        self.say("over the budget: weights and rows anew")
        self.reweigh, self.seeds = AGAIN_GAP, (best.solution.choice,)
        found = self.within_budget(deadline, AGAIN_SHARE, alone=True)
        self.reweigh = math.inf
        best = cheapest(best, found) or best
        return replace(best, solution=bounded(best.solution, self.bound, self.options.gap))

    def _is_barred(self) -> bool:
        """Whether what is held at the least, whatever is chosen, is over the budget."""
        return sum_of_least(self.problem(self.first_rows(), self.budget)) > self.budget

    def _from_what_is_known(
        self, joint: Result | None, keeping: Objective, checkpoints: CheckpointSearch, deadline: float, joint_s: float
    ) -> Result | None:
        """Where the joint search, which took ``joint_s``, found nothing or left much open: the best ways to hold values
        with shardings that are known. Where it found nothing, or left much of its weighted problem open, once more from
        there; then plans that recompute nothing, of fewer variables; then ``checkpoints``."""
        assert self.free is not None
        self.say("over the budget: known shardings")
        deadline = self.latest if self.baseline else deadline
        known = (self.free.solution.choice, *(r.choice for r in self.baselines))
        until = min(in_share(SHARDED_SHARE, deadline), now() + max(self.free_s, SHARDED_TIMES * joint_s))
        rescuing = joint is None and not self.baseline
        if rescuing:  # any plan that fits is worth more than a cheaper one: those that hold little go first
            lean = LEAN * min((r.estimated_peak_bytes for r in self.baselines), default=0.0)
            lean_first = sorted(self.baselines, key=lambda r: max(r.estimated_peak_bytes, lean))
            known = (*(r.choice for r in lean_first), known[0])
            until = deadline = in_share(JOINT_SHARE, self.latest)
        found = [joint, kept_as_sharded(self, keeping, known, until, first=rescuing)]
        if joint is not None and not self._is_wide(self.weighted_s):
            least = cheapest(*found)
            return least and replace(least, solution=bounded(least.solution, self.bound, self.options.gap))
        if joint is None:
            self.seeds = seed(self.objective, self.options, self.baseline) if self.baseline else ()
            self.seeds += tuple(r.solution.choice for r in found if r is not None)
            found.append(self.within_budget(deadline, JOINT_SHARE) if self.seeds and now() < deadline else None)
        best = cheapest(*found)
        if now() < deadline:
            with_reruns, self.objective, self.seeds = self.objective, keeping, tuple(r.choice for r in self.baselines)
            kept = self.within_budget(deadline, KEEPING_SHARE)
            self.objective, self.seeds = with_reruns, ()
            if kept is not None and (best is None or kept.solution.objective < best.solution.objective):
                again = kept_as_sharded(self, keeping, [kept.solution.choice], deadline, gap=GAP_ANEW)
                if again is None or again.solution.objective > kept.solution.objective:
                    self.objective = keeping
                    return replace(kept, solution=bounded(kept.solution, self.bound, self.options.gap))
                best = again
        needed = best is None and not self.baseline
        if len(self.decisions.variables) <= SMALL_MOST and (needed or now() < deadline):
            best = self._better(best, checkpoints.within(self.budget, deadline))
        return best and replace(best, solution=bounded(best.solution, self.bound, self.options.gap))

    def _until_smallest(self, share: float = 1.0) -> float:
        """As long for each budget, so that one that an error names is found again; passes to the byte end by rounds."""
        small = self.decisions.mesh.size > 1 and len(self.decisions.variables) <= TO_THE_BYTE_MOST
        kept_back_s = math.inf if small else share * max(self.kept_back_s, LEAST_KEPT_BACK_S)
        return max(now() + LEAST_S, min(now() + kept_back_s, self.latest))

    def _checkpoints(self, free: Result) -> CheckpointSearch:
        """The search that leaves the shardings as they are; from here on reruns are among the decisions."""
        sharded, joint = self.decisions, Objective(self.with_reruns(), self.prices)
        large = len(joint.decisions.variables) >= TIES_LEAST
        joint.start_from(self.objective, free.solution.choice if large else None)
        self.objective = joint
        still = sharded_as(sharded, free.solution.choice, self.decisions)
        return CheckpointSearch(self.objective, self.options, still, self.hideable_s)

    def _with_shardings_of(self, free: Result, deadline: float) -> Result | None:
        """The two-stage search; and that on one device, where there are no other shardings: there the joint search
        goes first, and of problems that are small the exact one proves its result, or breaks ties.

        Raises:
            InfeasibleError: nothing was found within the budget, and no baseline is.
        """
        self.say("over the budget: keep or recompute")
        keeping, checkpoints, result = self.objective, self._checkpoints(free), None
        whole, large = self.decisions.mesh.size == 1, len(self.decisions.variables) > SMALL_MOST
        if self.options.search != "two-stage" or (whole and large):
            self.seeds = ()
            if self._has_time_for_rounds(self.latest + OVERRUN_S / 2):  # rules are quick, where it comes to nothing
                result = self.within_budget(deadline, JOINT_SHARE)
        elif not whole:
            result = kept_as_sharded(self, keeping, [free.solution.choice], deadline, gap=GAP_ANEW)
        most = EXACT_MOST if result is not None and result.solution.proven else SMALL_MOST
        deadline = self.latest if self.baseline else deadline
        lean, ended = None, False
        if result is None and whole and not self.baseline and len(self.decisions.variables) <= SMALLEST_MOST:
            # First, since what follows may take longer than it should, and begins with it.
            begin = checkpoints.smallest_by_rules()
            until = self._until_smallest(ROWS_SHARE)
            lean = self._smallest(until, checkpoints.still, begin, self.hideable_s)
            ended = now() > until
        if len(self.decisions.variables) <= most:
            starts = [r.solution.choice for r in (result, lean) if r is not None]
            result = self._better(result, checkpoints.within(self.budget, deadline, starts))
        if result is None and self.baseline:
            return None
        late = now() > deadline or ended
        if result is None:
            result, ended = self._leanest(checkpoints, deadline, None if lean is None else lean.solution.choice)
            result, late = named_budgets.or_kept(self, result), late or ended
        if result.memory.peak_bytes > self.budget:
            raise self._infeasible(result, late=late)
        if self.decisions.mesh.size == 1:
            return result
        bound = min(self.bound, result.solution.objective)  # other shardings may be better
        proven = result.solution.objective - bound <= self.options.gap * result.solution.objective
        return replace(result, solution=replace(result.solution, lower_bound=bound, proven=proven))

    def _leanest(
        self, checkpoints: CheckpointSearch, deadline: float, begin: Sequence[int] | None
    ) -> tuple[Result, bool]:
        """Where no round found what fits: what does by simple rules or by rows, else what holds the least; and whether
        the time was up before that was all. Small problems are searched exactly, to the byte, from ``begin`` on."""
        whole, small = self.decisions.mesh.size == 1, len(self.decisions.variables) <= SMALLEST_MOST
        if small or not whole:
            until = self._until_smallest(1.0 if begin is None else 1 - ROWS_SHARE)
            least = self._better(None, checkpoints.smallest(until, begin))
            assert least is not None
            return least, now() > until
        ruled = checkpoints.by_rules(self.objective.depth, deadline)
        lean = self._better(None, min(ruled, key=lambda c: c.memory.peak_bytes))
        assert lean is not None
        fitting = [c for c in ruled if c.memory.peak_bytes <= self.budget]
        best = self._better(None, min(fitting, key=lambda c: c.solution.objective, default=None))
        if now() > (deadline if best else self.latest + OVERRUN_S / 2):
            return best or lean, True
        until = self._until_smallest()
        rows = self._smallest(until, checkpoints.still, lean.solution.choice)
        fits = rows.memory.peak_bytes <= self.budget
        return cheapest(best, rows if fits or best is None else None) or rows, now() > until

    def _better(self, joint: Result | None, second: Checkpointed | None) -> Result | None:
        """The second stage's choice where it is better, of equals that of the lower peak, with the bound that holds for
        all shardings."""
        if second is None:
            return joint
        found = Result(second.program, second.solution, second.memory, self.timings)
        of_all = second.exact and self.decisions.mesh.size == 1
        known = self.bound if joint is None else joint.solution.lower_bound
        bound = max(known, second.solution.lower_bound if of_all else 0.0)
        better = min(filter(None, (found, joint)), key=lambda r: (r.solution.objective, r.memory.peak_bytes))
        return replace(better, solution=bounded(better.solution, bound, self.options.gap))

    def _smallest(
        self, deadline: float, still: Open, begin: Sequence[int] | None = None, hideable_s: float = math.inf
    ) -> Result:
        """The plan of the smallest peak that was found; where it fits the budget, the cheapest plan near it that does.

        The way to it knows neither the budget nor what was tried before, so a budget that an error names works.

        Args:
            still: what the shardings of the optimum without a budget leave open.
            begin: a choice that holds little, where one is known.
            hideable_s: beside which transfers have to hide, as they do in the exact search.
        """
        self.hideable_s, self.hiding_parts, self.prices_of_memory, self.seeds = hideable_s, 1, UsagePrices(), ()
        self.basis = None
        self.objective = Objective(self.decisions, self.prices)
        rows = ActiveSet(self.decisions, self.options)
        begin = self._free_choice(still) if begin is None else begin
        best, rows = of_smallest_peak(self, rows, deadline, begin)
        if best.memory.peak_bytes <= self.budget:
            best = self.within_budget(deadline, 1.0, rows, best.solution.choice) or best
        # A bound of other limits is none within this one.
        return replace(best, solution=bounded(best.solution, self.bound, self.options.gap))

    def _free_choice(self, still: Open) -> tuple[int, ...] | None:
        """The optimum without a budget, where it holds less than every baseline; nothing runs again in it."""
        assert self.free is not None
        if self.free.memory.peak_bytes >= min((r.peak_bytes for r in self.baselines), default=math.inf):
            return None
        once = [(0,) if v.kind == "rerun" else s for v, s in zip(self.decisions.variables, still, strict=True)]
        return among(self, self.objective.problem(), once, LEAST_S)

    def _infeasible(
        self, smallest: Result, *, late: bool, barred: bool = False, first_s: float = math.nan
    ) -> InfeasibleError:
        """``first_s``: when a first plan might be there."""
        leanest = min(self.baselines, key=lambda r: r.estimated_peak_bytes, default=None)
        least = math.inf if leanest is None else leanest.peak_bytes
        least = least if self.free is None else min(least, self.free.memory.peak_bytes)
        if smallest.memory.peak_bytes < least:
            least = min(least, named_budgets.named(self, smallest))
        two_stage = self.options.search == "two-stage" and self.decisions.mesh.size > 1
        longer = "..." if math.isnan(first_s) else str(math.ceil(LONGER * first_s))
        more = f"more time may find smaller ones: time_limit={longer}; " if late else ""
        return InfeasibleError(
            f"No plan {'was found in time that ' if late and not barred else ''}fits the memory budget.",
            found=f"a budget of {_text(self.budget)} a device on mesh {self.decisions.mesh}",
            hint=f"the smallest budget that works{' so far' if late else ''} is {_text(least)}: "
            f"memory_budget={math.ceil(least)}; {more}"
            + ('search="joint" also shards for the budget.' if two_stage else "more ranks need less each."),
        )


def _text(size: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"
