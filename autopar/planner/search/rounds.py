"""One round of the search: state the problem, solve it, schedule the solution, and measure what it holds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir import Graph
from autopar.planner.memory.active_set import ActiveSet
from autopar.planner.memory.exact import MemoryProfile, profile
from autopar.planner.options import Options
from autopar.planner.pricing.objective import MAX_SOLVES, Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.pricing.transfers import hides_transfers, host_usages
from autopar.planner.problem.decide import Decisions
from autopar.planner.schedule.schedule import schedule
from autopar.planner.schedule.timeline import simulate_streams
from autopar.planner.search.candidates import BaselineCandidate
from autopar.planner.search.fitting import fitted, scheduled
from autopar.planner.search.random_plans import random_solution
from autopar.program import Program
from autopar.solver import Basis, Problem, Solution, TraceEntry, UsagePrices, solve
from autopar.solver.clock import now

MOST_SEEDS = 2
"""Known choices beside the best one, without a budget: which of them is cheaper hardly matters to what is found."""

SOLVE_SHARE = 0.6
"""Of the time left, for each of several weightings."""

HOST_TIME = 10_000
"""Of the rows by which transfers hide: beyond those of memory, so that prices of rows keep their times."""

Progress = Callable[[str], None]


@dataclass
class Result:
    """``wished``: as it would run, and what it would hold, if its transfers did not have to give way to the budget."""

    program: Program
    solution: Solution
    memory: MemoryProfile
    timings: dict[str, float]
    wished: tuple[Program, MemoryProfile] | None = None


@dataclass
class Rounds:
    """What all rounds share, and what each leaves for the next.

    Args:
        seeds: choices to begin with.
        prices_of_memory: what the limit cost in the last round.
        basis: where its linear program of blocks ended.
        bound: on all plans, in seconds.
        baselines: the baselines, the cheapest first.
        hideable_s: beside which transfers of the host hide, in so many parts of the forward.
        free: the optimum without a budget.
        weighted_s: what the last choice costs under the weights for which it was found.
        reweigh: the gap down to which weights are looked for under rows too; infinite where they are not.
    """

    graph: Graph
    objective: Objective
    options: Options
    budget: float
    say: Progress
    timings: dict[str, float] = field(default_factory=lambda: {"build": 0.0, "solve": 0.0, "lower": 0.0, "verify": 0.0})
    seeds: tuple[tuple[int, ...], ...] = ()
    prices_of_memory: UsagePrices = field(default_factory=UsagePrices)
    basis: Basis | None = None
    bound: float = 0.0
    baselines: Sequence[BaselineCandidate] = ()
    hideable_s: float = math.inf
    hiding_parts: int = 1
    free: Result | None = None
    weighted_s: float = math.inf
    reweigh: float = math.inf
    _rows: ActiveSet | None = None

    @property
    def decisions(self) -> Decisions:
        return self.objective.decisions

    @property
    def prices(self) -> Prices:
        return self.objective.prices

    def first_rows(self) -> ActiveSet:
        """Those for the moments at which the free optimum is over the budget."""
        if self._rows is None or self._rows.decisions is not self.decisions:
            self._rows = ActiveSet(self.decisions, self.options)
        rows = self._rows.emptied()
        if self.free is not None:
            rows.add_peaks_of(self.free.program, self.free.memory.timeline, self.budget, self.objective.depth)
        return rows

    def once(
        self, rows: ActiveSet | None, limit: float, deadline: float, warm: Sequence[int] | None, gap: float = 0.0
    ) -> Result:
        """``gap``: how good the choice has to be, where that is less than what is asked of a plan."""
        start = time.perf_counter()
        asked = self.problem(rows, limit)
        built = time.perf_counter()
        self.say("solve")
        solution = self._choose(asked, rows, deadline, warm, max(gap, self.options.gap))
        solved = time.perf_counter()
        program = schedule(self.decisions, solution.choice, self.prices)
        lowered = time.perf_counter()
        wished = program, profile(program, self.graph, self.decisions.mesh, self.options)
        program, memory = fitted(*wished, self.graph, self.decisions.mesh, self.options, limit)
        ends = {"build": built, "solve": solved, "lower": lowered, "verify": time.perf_counter()}
        for stage, end in ends.items():
            self.timings[stage] += end - start
            start = end
        return Result(program, solution, memory, self.timings, wished)

    def problem(self, rows: ActiveSet | None, limit: float) -> Problem:
        used = rows.usages() if rows else ()
        if rows and math.isfinite(limit) and math.isfinite(self.hideable_s):
            host = self.prices.cluster.host
            used += host_usages(self.decisions, host, self.hideable_s, HOST_TIME, limit, self.hiding_parts)
        return self.objective.problem(used, limit)

    def hides(self, choice: Sequence[int]) -> bool:
        """Whether all that ``choice`` offloads can."""
        host, parts = self.prices.cluster.host, self.hiding_parts
        return math.isinf(self.hideable_s) or hides_transfers(self.decisions, choice, host, self.hideable_s, parts)

    def _choose(
        self, asked: Problem, rows: ActiveSet | None, deadline: float, warm: Sequence[int] | None, gap: float
    ) -> Solution:
        kind, _, seed = self.options.search.partition(":")
        if kind.startswith("random"):
            return random_solution(asked, int(seed))
        seeds = self.seeds if warm is None else (warm, *self.seeds)

        def solve_from(problem: Problem, best: Sequence[Sequence[int]]) -> Solution:
            begin = (*best, *(seeds if rows else seeds[:MOST_SEEDS]))
            if rows:
                problem, begin = rows.extend(problem), tuple(map(rows.extend_choice, begin))
            left_s = (deadline - now()) * (1.0 if most == 1 else SOLVE_SHARE)
            found = solve(
                problem,
                time_limit=max(left_s, 1.0),
                backend=self.options.solver,
                gap=gap,
                warm_starts=begin,
                usage_prices=self.prices_of_memory,
                basis=self.basis,
                folding=self.objective.fold,
                progress=self._say_gap,
                refuses=refuses,
            )
            self.prices_of_memory, self.basis, self.weighted_s = found.usage_prices, found.basis, found.objective
            return replace(found, choice=rows.restrict(found.choice)) if rows else found

        def refuses(choice: Sequence[int]) -> bool:
            """Whether its program holds more than its rows say: they change before a better choice is of use."""
            if rows is None or asked.limit != self.budget:
                return False
            _, memory = scheduled(self.decisions, rows.restrict(choice), self.prices, self.options, self.budget)
            return memory.peak_bytes > self.budget

        # Under rows, each solve of which takes long, the weights that are best without them will do at first.
        once = rows is not None and math.isinf(self.reweigh)
        known, most = ((), 1) if once else (self.seeds, MAX_SOLVES)
        wanted = gap if once or rows is None else max(gap, self.reweigh)
        bound = self.bound if asked.limit <= self.budget else -math.inf
        return self.objective.minimize(asked, solve_from, wanted, known, most, lambda: now() > deadline, bound)

    def _say_gap(self, found: TraceEntry) -> None:
        if math.isfinite(found.objective) and found.objective > 0:
            gap = 1 - max(found.lower_bound, 0.0) / found.objective
            self.say(f"solve: {found.objective * 1e3:.4g} ms, gap {gap:.2%}")

    def of_choice(self, choice: Sequence[int], limit: float = 0.0, method: str = "smallest peak") -> Result:
        program, memory = scheduled(self.decisions, choice, self.prices, self.options, limit)
        solution = Solution(tuple(choice), self.objective.seconds(choice), self.bound, False, method=method)
        return Result(program, solution, memory, self.timings)

    def step_seconds(self, program: Program) -> float:
        return simulate_streams(program, self.prices.overlap).seconds
