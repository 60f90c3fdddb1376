"""What the search compares at the end: its own best plan and the baselines, scheduled, timed and measured alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.planner.baselines import restricted_choices
from autopar.planner.decisions import Decisions
from autopar.planner.liveness import MemoryProfile, profile
from autopar.planner.objective import Objective
from autopar.planner.options import Options
from autopar.planner.pricing import Prices
from autopar.planner.schedule import schedule
from autopar.planner.timeline import Timeline, simulate_streams
from autopar.plans.records import BaselineRecord
from autopar.program import Program
from autopar.solver import Problem, Solution

SHARE_OF_TIME = 0.2
LEAST_S = 5.0
"""All baselines together take at most this share of the time limit, or so many seconds if that is more; those that are
left then are not compared. It is far more than they need, so that what is compared does not hang on the clock."""


@dataclass(frozen=True)
class Finalist:
    """A complete plan. ``name`` is the baseline's, or ``chosen`` for the search's own. Seconds and bytes."""

    name: str
    decisions: Decisions
    solution: Solution
    program: Program
    memory: MemoryProfile
    timeline: Timeline

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
            self.name, self.solution.objective, self.timeline.seconds, sum(op.wire_bytes for op in self.program.ops),
            self.memory.peak_bytes, self.memory.peak_bytes <= budget,
        )  # fmt: skip


def baseline_finalists(d: Decisions, prices: Prices, options: Options, only: str | None = None) -> list[Finalist]:
    """Every baseline that applies to this graph and mesh, completed as cheaply as it can be without a budget."""
    started = time.perf_counter()
    problem = Objective(d, prices).problem()
    found = []
    allowed_s = max(options.time_limit_s * (SHARE_OF_TIME if only is None else 1.0), LEAST_S)
    choices = restricted_choices(
        d, problem, time_limit=max(allowed_s / 4, 0.5), backend=options.solver, gap=options.gap, only=only
    )
    for baseline, choice in choices:
        found.append(finalist(baseline.name, d, prices, options, choice, problem))
        if time.perf_counter() - started > allowed_s:
            break
    return found


def seed(d: Decisions, prices: Prices, options: Options, name: str) -> tuple[tuple[int, ...], ...]:
    """The choice of one baseline in a problem of other variables, to begin a search with."""
    problem = Objective(d, prices).problem()
    limit = max(options.time_limit_s * SHARE_OF_TIME / 4, 0.5)
    choices = restricted_choices(d, problem, time_limit=limit, backend=options.solver, gap=options.gap, only=name)
    return tuple(choice for _, choice in choices)


def finalist(
    name: str, d: Decisions, prices: Prices, options: Options, choice: Sequence[int], problem: Problem
) -> Finalist:
    """The program of a choice, and what it takes."""
    objective = Objective(d, prices).seconds(choice, problem)
    program = schedule(d, choice, prices)
    memory = profile(program, d.graph, d.mesh, options)
    solution = Solution(tuple(choice), objective, 0.0, proven=False, method=f"baseline {name}")
    timeline = simulate_streams(program, prices.overlap)
    return Finalist(name, d, solution, program, memory, timeline)
