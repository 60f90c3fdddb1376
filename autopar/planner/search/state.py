"""What a search is about, and what its phases hand on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar import settings
from autopar.ir import Graph
from autopar.planner.memo import Memo
from autopar.planner.memory.active_set import ActiveSet
from autopar.planner.memory.exact import MemoryProfile, profile
from autopar.planner.memory.points import ProgramPoint
from autopar.planner.options import Options
from autopar.planner.overlap.arrange import TriedArrangements
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.decide import Decisions
from autopar.planner.schedule.copied_parts import copied_seconds
from autopar.planner.schedule.schedule import schedule
from autopar.planner.schedule.timeline import simulate_streams
from autopar.planner.search.candidates import BaselineCandidate, Candidate
from autopar.planner.search.fitting import fitted
from autopar.planner.search.keeping import layer_boundaries
from autopar.planner.search.offload_order import offloading_first
from autopar.plans.records import SearchRecord
from autopar.program import Program
from autopar.solver import NO_DUALS, Duals, Gap, Solution, gap_of
from autopar.solver.clock import now

Choice = tuple[int, ...]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """A choice as a scheduled program with its exact memory.

    Args:
        objective: whose variables ``solution.choice`` decides.
        early: the program, and what it holds, if its transfers did not have to give way to the budget.
    """

    objective: Objective
    program: Program
    solution: Solution
    memory: MemoryProfile
    early: tuple[Program, MemoryProfile] | None = None

    @property
    def cost(self) -> float:
        """Seconds of a step, by the objective."""
        return self.solution.objective

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step, by simulation."""
        return simulate_streams(self.program, self.objective.prices.overlap).seconds


@dataclass(frozen=True, eq=False)
class Search:
    """What is searched, which no phase changes.

    Args:
        objective: of the decisions without reruns.
        budget: bytes on each device.
        baselines: known ways to train, the cheapest first.
        with_reruns: lists the decisions again, with what can be run again among them.
        began, ends: of the search, on ``clock.now``.
        timings: seconds on the wall by stage, which add up.
    """

    graph: Graph
    objective: Objective
    options: Options
    budget: float
    report: Progress
    with_reruns: Callable[[], Decisions]
    began: float
    ends: float
    baselines: Sequence[BaselineCandidate] = ()
    timings: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("build", "solve", "lower", "verify"), 0.0))
    memo: Memo = field(default_factory=Memo)
    _lowered: list[tuple[Objective, Choice, Program, MemoryProfile]] = field(default_factory=list)

    @property
    def prices(self) -> Prices:
        return self.objective.prices

    @property
    def one_device(self) -> bool:
        return self.objective.decisions.mesh.size == 1

    @cached_property
    def smallest_peak_s(self) -> float:
        """Work that is kept back for the smallest peak."""
        return max(settings.SIDE_SHARE * (self.ends - self.began), settings.LEAST_S)

    def constraints(self, decisions: Decisions) -> ActiveSet:
        """Memory constraints at the first points only."""
        may_decompose = self.prices.decomposition.may_gain
        made = self.memo.of("constraints", (decisions,), lambda: ActiveSet(decisions, self.options, may_decompose))
        return made.emptied()

    def boundaries(self, objective: Objective) -> frozenset[int]:
        """The hold variables of what crosses from layer to layer."""
        d = objective.decisions
        return self.memo.of("boundaries", (d,), lambda: layer_boundaries(d, objective.runs))

    def lowered(self, objective: Objective, choice: Sequence[int]) -> tuple[Program, MemoryProfile]:
        """The program of ``choice`` before transfers give way, and its exact memory. The last one is kept: whether a
        choice fits is asked before it is taken."""
        wanted = tuple(choice)
        for known, chosen, program, memory in self._lowered:
            if known is objective and chosen == wanted:
                return program, memory
        program = schedule(objective.decisions, wanted, self.prices)
        memory = profile(program, self.graph, objective.decisions.mesh, self.options)
        self._lowered[:] = [(objective, wanted, program, memory)]
        return program, memory

    def within(self, objective: Objective, choice: Sequence[int], limit: float) -> tuple[Program, MemoryProfile]:
        """The program of ``choice`` and its exact memory, within ``limit`` bytes where transfers can see to it."""
        return fitted(*self.lowered(objective, choice), self.graph, self.prices, self.options, limit)

    def measure(self, objective: Objective, choice: Sequence[int], method: str, limit: float = 0.0) -> Result:
        """The program of ``choice``, whose transfers give way to ``limit`` bytes where they must."""
        started, choice = time.perf_counter(), offloading_first(objective, choice)
        program, memory = self.within(objective, choice, limit)
        self.timings["lower"] += time.perf_counter() - started
        cost = objective.seconds(choice) + copied_seconds(program)
        return Result(objective, program, Solution(tuple(choice), cost, 0.0, proven=False, method=method), memory)

    def arranged(self, result: Result) -> Candidate:
        """``result`` as a complete plan, with its collectives arranged."""

        def made() -> Candidate:
            started, d = time.perf_counter(), result.objective.decisions
            tried = self.tried(result)
            own = Candidate.of("chosen", d, result.solution, result.program, self.prices, self.options, tried)
            self.timings["arrange"] = self.timings.get("arrange", 0.0) + time.perf_counter() - started
            return own

        return self.memo.of("arranged", (result,), made)

    def tried(self, result: Result) -> TriedArrangements:
        """Arrangements of the collectives of ``result``."""

        def made() -> TriedArrangements:
            return Candidate.tried(result.program, result.objective.decisions.graph, self.prices, self.options)

        return self.memo.of("tried", (result,), made)

    @cached_property
    def known_ways(self) -> Sequence[BaselineCandidate]:
        """The baselines that are worth a look, the cheapest first: to measure a program takes long."""
        most_s = settings.KNOWN_WAYS_TIMES * min((b.objective for b in self.baselines), default=0.0)
        return [b for b in self.baselines if b.objective <= most_s]

    @cached_property
    def fitting_way(self) -> BaselineCandidate | None:
        """The cheapest of these that fits."""
        return next((b for b in self.known_ways if b.fits(self.budget)), None)

    def ending_gap(self, least: float | Gap) -> Gap:
        """The relative gap at which a solve ends: ``least``, or that at which it pays to end."""
        wanted = gap_of(least)
        return lambda cost: max(wanted(cost), self.worthless_gap(cost))

    def worthless_gap(self, cost: float) -> float:
        """The relative gap at which it pays to end: that which was asked, or that at which a run of
        ``options.training_steps`` steps of ``cost`` seconds would gain less than the search has cost, after its first
        second."""
        taken_s, most_s = now() - self.began, self.options.training_steps * cost
        return max(self.options.gap, taken_s / most_s if most_s and taken_s > settings.LEAST_S else 0.0)

    def fits(self, baseline: BaselineCandidate) -> bool:
        """Whether its program fits, as it is or, where it is a little too large, with its collectives arranged."""
        if baseline.fits(self.budget):
            return True
        nearly = baseline.fits(settings.NEARLY * self.budget)
        return nearly and baseline.candidate.memory.peak_bytes <= self.budget


@dataclass(frozen=True)
class SearchState:
    """What the phases so far have found.

    Args:
        plans: those that fit the budget, the cheapest first.
        leanest: the plan of the smallest peak, of those that were found by a way that depends on no budget.
        bound: seconds that no plan can beat.
        cutoff: seconds of a plan that is known from elsewhere, which a better one has to beat.
        free: the optimum without a budget.
        given: whether choices of another plan stand for it.
        free_s: work that it took.
        joint: the objective over decisions with reruns.
        listed_s: work that listing its decisions took.
        round_s: work that the last round of its problem took.
        hideable_s, hiding_parts: seconds of the forward beside which transfers of the host hide, in so many parts.
        near: choices of the joint problem that cost less than the best plan, and hold more than the budget.
        points: program points at which choices of the joint problem were found to hold more than the budget.
        duals: those of the last solve, but for prices of the limit.
        prices: of a byte at each program point, in seconds, and at times of other limits, of the last solve within one.
        earlier: the best plan each time that the limit was raised.
        trace: a record for each phase.
        used_up: whether the last phase used all the work that it was given.
    """

    plans: tuple[Result, ...] = ()
    leanest: Result | None = None
    bound: float = 0.0
    cutoff: float = math.inf
    free: Result | None = None
    given: bool = False
    free_s: float = 0.0
    joint: Objective | None = None
    listed_s: float = 0.0
    round_s: float = 0.0
    hideable_s: float = math.inf
    hiding_parts: int = 1
    near: tuple[Choice, ...] = ()
    points: frozenset[ProgramPoint] = frozenset()
    duals: Duals = NO_DUALS
    prices: Mapping[ProgramPoint | int, float] = field(default_factory=dict)
    earlier: tuple[Candidate, ...] = ()
    trace: tuple[SearchRecord, ...] = ()
    used_up: bool = False

    @property
    def best(self) -> Result | None:
        """The cheapest plan that fits the budget."""
        return self.plans[0] if self.plans else None

    @property
    def cost(self) -> float:
        """Seconds of the best plan that is known."""
        return min(self.cutoff, math.inf if self.best is None else self.best.cost)

    def with_plan(self, search: Search, found: Result | None) -> SearchState:
        """With a plan that was found, if it fits and is not known already."""
        if found is None:
            return self
        if found.memory.peak_bytes > search.budget or _rank(found) in map(_rank, self.plans):
            return self
        return replace(self, plans=tuple(sorted((*self.plans, found), key=_rank)))

    def with_leaner(self, search: Search, found: Result) -> SearchState:
        """With a plan that was found by a way that depends on no budget."""
        least = self.leanest is None or found.memory.peak_bytes < self.leanest.memory.peak_bytes
        return replace(self, leanest=found if least else self.leanest).with_plan(search, found)

    def with_more_time(self, best: Candidate | None) -> SearchState:
        """For phases that go on: also with the optimum without a budget, where that is the plan."""
        earlier = self.earlier if best is None else (*self.earlier, best)
        return replace(self, free=None if self.joint is None else self.free, earlier=earlier)

    def free_comes_first(self, search: Search) -> bool:
        """Whether the optimum without a budget is given, or holds so little beyond it, that its shardings are tried
        first."""
        if self.free is None:
            return False
        return self.given or self.free.memory.peak_bytes <= settings.LEAN * search.budget

    def wanted_gap(self, search: Search) -> float:
        """The relative gap at which it pays to end."""
        known = [r.cost for r in (self.best, self.free) if r is not None] + [b.objective for b in search.baselines]
        step_s = self.cost if math.isfinite(self.cost) else min(known, default=0.0)
        return search.worthless_gap(step_s)

    def worth_until(self, search: Search) -> float:
        """When a run of ``options.training_steps`` steps can gain no more than the search will have cost, but for
        its first second."""
        worth_s = search.options.training_steps * (self.cost - self.bound)
        return search.began + max(worth_s, settings.LEAST_S) if math.isfinite(worth_s) and worth_s else math.inf

    def is_done(self, search: Search) -> bool:
        """Whether what is left to gain is worth less than the search."""
        if not math.isfinite(self.cost):
            return False
        return self.cost - self.bound <= search.options.gap * self.cost or now() >= self.worth_until(search)


def _rank(result: Result) -> tuple[float, int]:
    return result.cost, result.memory.peak_bytes


def first_constraints(state: SearchState, search: Search, objective: Objective) -> ActiveSet:
    """Memory constraints at the points where the free optimum is over the budget, and where other choices were."""
    active = search.constraints(objective.decisions)
    if state.free is not None:
        active.add_peaks_of(state.free.program, state.free.memory.timeline, search.budget, objective.depth)
    if objective is state.joint:
        active.add_points(state.points)
    return active
