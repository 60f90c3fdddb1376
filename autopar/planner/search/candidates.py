"""What the search compares at the end: its own best plan and the baselines, scheduled, timed and measured alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from autopar import settings
from autopar.ir import Graph
from autopar.mesh import Cluster
from autopar.planner.baselines.roles import restricted_choices
from autopar.planner.graphs.accumulation import accumulation_program
from autopar.planner.memory.exact import MemoryProfile, profile
from autopar.planner.memory.usages import MemoryUsages
from autopar.planner.options import Options
from autopar.planner.overlap.arrange import EQUAL_SHARE, TriedArrangements, arrange
from autopar.planner.overlap.deferral import deferred, may_defer
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.decide import Decisions
from autopar.planner.schedule.schedule import schedule
from autopar.planner.schedule.timeline import Timeline, simulate_streams
from autopar.plans.records import BaselineRecord
from autopar.program import Program
from autopar.solver import Solution
from autopar.solver.clock import now
from autopar.solver.problem import USAGE_TOLERANCE


def budget_bytes(cluster: Cluster, options: Options) -> float:
    """Bytes that one device may hold."""
    if options.memory_budget_bytes is not None:
        return float(options.memory_budget_bytes)
    return float(cluster.device.memory_bytes)


@dataclass(frozen=True)
class Candidate:
    """A complete plan. ``name`` is the baseline's, or ``chosen`` for the search's own. Seconds and bytes.

    ``solution`` has the cost of collectives that are launched one by one. ``arranged_s``: of a step before what nothing
    waits for is deferred."""

    name: str
    decisions: Decisions
    solution: Solution
    program: Program
    memory: MemoryProfile
    timeline: Timeline
    arranged_s: float

    @staticmethod
    def of(
        name: str,
        d: Decisions,
        solution: Solution,
        program: Program,
        prices: Prices,
        options: Options,
        tried: TriedArrangements | None = None,
        memory: MemoryProfile | None = None,
    ) -> Candidate:
        """A scheduled solution with its collectives arranged for the budget, and what nothing waits for deferred.

        Args:
            tried: ways to arrange them, where they are known.
            memory: of ``program``, where it is known.
        """

        def profiled(arranged: Program) -> MemoryProfile:
            return profile(arranged, d.graph, d.mesh, options)

        budget = budget_bytes(prices.cluster, options)
        tried = tried or Candidate.tried(program, d.graph, prices, options)
        found = arrange(tried, profiled, budget, _arranged_by(options), memory)
        before, after = found.before, found.timeline
        if d.accumulation_steps > 1:
            before, after = (timeline(p, d, prices.overlap) for p in (program, found.program))
        if after.seconds < before.seconds:
            arranged = Candidate(name, d, solution, found.program, found.memory, after, after.seconds)
        else:
            memory = found.memory if found.program is program else profiled(program)
            arranged = Candidate(name, d, solution, program, memory, before, before.seconds)
        return arranged._deferred(prices, options)

    @staticmethod
    def tried(program: Program, graph: Graph, prices: Prices, options: Options) -> TriedArrangements:
        """Ways to arrange the collectives of a program."""
        return TriedArrangements.of(program, graph.likes, prices, _arranged_by(options))

    def _deferred(self, prices: Prices, options: Options) -> Candidate:
        """With the work that nothing waits for behind the collectives that the backward waits for, where its step is
        shorter so and it fits the budget."""
        d, moved = self.decisions, replace(self.program, ops=deferred(self.program, self.decisions.graph))
        if moved.ops == self.program.ops:
            return self
        after = timeline(moved, d, prices.overlap)
        gained_s = self.timeline.seconds - after.seconds
        if gained_s <= EQUAL_SHARE * self.timeline.seconds:
            return self
        memory = profile(moved, d.graph, d.mesh, options)
        if memory.peak_bytes > max(budget_bytes(prices.cluster, options), self.memory.peak_bytes):
            return self
        return replace(self, program=moved, memory=memory, timeline=after)

    def rank(self) -> tuple[float, float, int, int]:
        """Least step time, to a picosecond; then by cost."""
        return round(self.timeline.seconds, 12), *self.cost()

    def cost(self) -> tuple[float, int, int]:
        """Least cost, then the lowest peak, then the fewest redistributions."""
        moves = sum(op.step is not None for op in self.program.ops)
        return self.solution.objective, self.memory.peak_bytes, moves

    def record(self, budget: float) -> BaselineRecord:
        """The figures that a comparison shows."""
        return BaselineRecord(
            self.name,
            self.solution.objective,
            self.timeline.seconds,
            sum(op.wire_bytes for op in self.program.ops),
            self.memory.peak_bytes,
            self.memory.peak_bytes <= budget,
        )


def _arranged_by(options: Options) -> float:
    return now() + max(options.time_limit_s * settings.SIDE_SHARE, settings.LEAST_S)


@dataclass(frozen=True)
class BaselineCandidate:
    """A completed baseline: its choice and its cost in seconds. What it takes as a program is found out when asked.

    Args:
        usages: what the options of its variables hold.
    """

    name: str
    stated: Objective
    options: Options
    choice: tuple[int, ...]
    objective: float
    usages: Callable[[], MemoryUsages]

    @cached_property
    def program(self) -> Program:
        """Its program before the collectives are arranged."""
        return schedule(self.stated.decisions, self.choice, self.stated.prices)

    @cached_property
    def memory(self) -> MemoryProfile:
        """Of ``program``; arranging the collectives keeps to a budget that this fits."""
        d = self.stated.decisions
        return profile(self.program, d.graph, d.mesh, self.options)

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    @cached_property
    def least_bytes(self) -> float:
        """The least that ``peak_bytes`` can be, as ``MemoryUsages.peak`` tells it, which sees no program."""
        return self.usages().peak(self.choice)

    def fits(self, budget: float) -> bool:
        """Whether ``peak_bytes`` are within ``budget`` bytes; it is measured only where that may be."""
        return self.least_bytes <= (1 + USAGE_TOLERANCE) * budget and self.peak_bytes <= budget

    @cached_property
    def _tried(self) -> TriedArrangements:
        return Candidate.tried(self.program, self.stated.decisions.graph, self.stated.prices, self.options)

    @property
    def least_s(self) -> float:
        """The shortest step of its program, whatever it holds, with nothing deferred."""
        return self._tried.least_s() if self.stated.decisions.accumulation_steps == 1 else 0.0

    @property
    def may_defer(self) -> bool:
        """Whether its step may become shorter than ``least_s`` by what is deferred."""
        return may_defer(self.program, self.stated.decisions.graph)

    @cached_property
    def candidate(self) -> Candidate:
        """Scheduled, timed and measured."""
        d, prices, options = self.stated.decisions, self.stated.prices, self.options
        solution = Solution(self.choice, self.objective, 0.0, proven=False, method=f"baseline {self.name}")
        return Candidate.of(self.name, d, solution, self.program, prices, options, self._tried, self.memory)


def settled(candidates: Sequence[Candidate], baselines: Sequence[Candidate], gap: float) -> Candidate:
    """The candidate of the least simulated step among those no baseline beats, neither in cost, but for the ``gap``
    that was asked, nor in simulated seconds; where every one is beaten in something, of all.

    The two can differ: the cost is what a bound is proven for, the simulation knows what waits for what.
    """
    return min(undominated(candidates, baselines, gap) or candidates, key=Candidate.rank)


def undominated(candidates: Sequence[Candidate], baselines: Sequence[Candidate], gap: float) -> list[Candidate]:
    """Those that no baseline beats in cost or in step."""
    cost = min((b.solution.objective for b in baselines), default=math.inf) * (1 + gap)
    step_s = min((b.timeline.seconds for b in baselines), default=math.inf)
    return [f for f in candidates if f.solution.objective <= cost and f.timeline.seconds <= step_s]


def timeline(program: Program, d: Decisions, overlap: float) -> Timeline:
    """The streams of one step; where gradients add up over several, of the last, with the mean seconds of all."""
    last, n = simulate_streams(program, overlap), d.accumulation_steps
    if n == 1:
        return last
    before = simulate_streams(accumulation_program(program, d.graph), overlap)

    def mean(of: Callable[[Timeline], float]) -> float:
        return ((n - 1) * of(before) + of(last)) / n

    return replace(
        last,
        seconds=mean(lambda t: t.seconds),
        compute_s=mean(lambda t: t.compute_s),
        communication_s=mean(lambda t: t.communication_s),
        transfer_s=mean(lambda t: t.transfer_s),
    )


def baseline_candidates(objective: Objective, options: Options, only: str | None = None) -> list[BaselineCandidate]:
    """Every baseline that applies to this graph and mesh, completed as cheaply as it can be without a budget.

    Those near the cheapest are solved to the requested gap, and so are all if all are compared. Dearer ones are solved
    to ``NEAR``, and no further once their bound shows that they cost too much to be considered.
    """
    started, found = now(), list[BaselineCandidate]()

    @cache
    def usages() -> MemoryUsages:
        return MemoryUsages.of(objective.decisions, options, objective.prices.decomposition.may_gain)

    allowed_s = options.time_limit_s * (settings.SIDE_SHARE if only is None else 1.0)

    def gap(cost: float) -> float:
        cheapest = min((b.objective for b in found), default=math.inf)
        if options.compare or cost <= settings.NEARLY * cheapest:
            return options.gap
        return max(options.gap, settings.NEAR, 1 - settings.KNOWN_WAYS_TIMES * cheapest / cost)

    choices = restricted_choices(
        objective, time_limit=max(allowed_s / 4, settings.LEAST_S), backend=options.solver, gap=gap, only=only
    )
    for baseline, choice in choices:
        found.append(BaselineCandidate(baseline.name, objective, options, choice, objective.seconds(choice), usages))
        if now() - started > allowed_s:
            break
    return found


def seed(objective: Objective, options: Options, name: str) -> tuple[tuple[int, ...], ...]:
    """The choice of one baseline in a problem of other variables, to begin a search with."""
    limit = max(options.time_limit_s * settings.SIDE_SHARE / 4, settings.LEAST_S)
    choices = restricted_choices(objective, time_limit=limit, backend=options.solver, gap=options.gap, only=name)
    return tuple(choice for _, choice in choices)
