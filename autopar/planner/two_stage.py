"""What to keep, recompute or offload while the shardings stay as they are.

As the second stage after a search for the shardings alone this is the two-stage search, what planners do that know
checkpointing only as an afterthought; on one device, where nothing can be sharded, it is the whole search. Memory is
exact here (`planner.moments`): whatever moment of a scheduled choice is over the budget joins the problem, until none
is, and the last choice is then the best there is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.errors import InfeasibleError, SolverError
from autopar.planner.liveness import MemoryProfile, profile
from autopar.planner.moments import Exact, Moment, moments_over
from autopar.planner.objective import Objective
from autopar.planner.options import Options
from autopar.planner.pricing import Prices
from autopar.planner.schedule import schedule
from autopar.planner.transfers import host_usages
from autopar.planner.variables import Decisions
from autopar.program import Program
from autopar.solver import Problem, Solution, peak_usage, smallest_choice, solve

ROUNDS = 60
SMALLEST_S = 5.0

Fixed = Sequence["int | None"]
"""The option of each variable that is decided already."""


@dataclass(frozen=True)
class Checkpointed:
    """A choice within the budget, as a program. ``exact``: the bound holds for every choice of this form."""

    solution: Solution
    program: Program
    memory: MemoryProfile
    exact: bool


def fixed_as(free: Decisions, choice: Sequence[int], d: Decisions) -> Fixed:
    """The shardings of ``choice`` for the variables of ``d``: those of ops, inputs, parameters and results, and what
    is run again as it was run before. How values are held and handed on stays open."""
    options = {v.key: v.options[o] for v, o in zip(free.variables, choice, strict=True)}
    return [
        v.options.index(options[v.key]) if v.kind not in ("copy", "hold", "rerun") and v.key in options else None
        for v in d.variables
    ]


@dataclass
class CheckpointSearch:
    """The search among ways to hold what the backward needs, with ``fixed`` shardings."""

    decisions: Decisions
    prices: Prices
    options: Options
    fixed: Fixed
    hideable_s: float = math.inf

    @cached_property
    def exact(self) -> Exact:
        return Exact(self.decisions, self.options, tied=self.decisions.mesh.size == 1)

    @cached_property
    def objective(self) -> Objective:
        return Objective(self.decisions, self.prices)

    def within(self, budget: float, deadline: float, starts: Sequence[Sequence[int]] = ()) -> Checkpointed | None:
        """The best choice whose exact peak fits ``budget`` bytes; None where none fits, or none was found in time."""
        moments = [Moment(len(self.decisions.graph.nodes))]
        limit, bound, exact = budget, 0.0, True
        starts = list(starts)
        for _ in range(ROUNDS):
            try:
                solution = self._solve(moments, limit, deadline, starts)
            except (InfeasibleError, SolverError):
                return None
            bound = max(bound, solution.lower_bound) if exact else bound
            program, memory = self.measured(solution.choice)
            over = memory.peak_bytes - budget
            if over <= 0:
                bound = min(bound, solution.objective)
                proven = solution.objective - bound <= self.options.gap * solution.objective
                return Checkpointed(replace(solution, lower_bound=bound, proven=proven), program, memory, exact)
            starts.append(solution.choice)
            fresh = [
                m for m in moments_over(program, self.decisions.graph, memory.timeline, budget) if m not in moments
            ]
            moments += fresh
            if not fresh:  # redistributed copies and transfers under way, which no row knows of
                limit, exact = limit - over, False
            if limit <= 0 or time.perf_counter() > deadline:
                break
        return None

    def smallest(self, deadline: float) -> Checkpointed:
        """The choice of the smallest peak that was found."""
        moments = [Moment(len(self.decisions.graph.nodes))]
        best: tuple[MemoryProfile, Program, Sequence[int]] | None = None
        end = min(deadline, time.perf_counter() + 4 * SMALLEST_S)
        for _ in range(ROUNDS):
            asked = self._asked(moments, math.inf)
            choice = smallest_choice(asked, SMALLEST_S, backend=self.options.solver)
            program, memory = self.measured(choice[: len(self.decisions.variables)])
            if best is None or memory.peak_bytes < best[0].peak_bytes:
                best = memory, program, choice[: len(self.decisions.variables)]
            reached = peak_usage(asked, choice)
            over = moments_over(program, self.decisions.graph, memory.timeline, reached * (1 + 1e-9))
            fresh = [m for m in over if m not in moments]
            if not fresh or time.perf_counter() > end:
                break
            moments += fresh
        assert best is not None
        found = self.within(best[0].peak_bytes, max(deadline, end + SMALLEST_S), [best[2]])
        if found is not None:
            return found
        objective = self.objective.seconds(best[2])
        return Checkpointed(Solution(tuple(best[2]), objective, 0.0, proven=False), best[1], best[0], False)

    def measured(self, choice: Sequence[int]) -> tuple[Program, MemoryProfile]:
        """The program of a choice, and its exact memory."""
        program = schedule(self.decisions, choice, self.prices)
        return program, profile(program, self.decisions.graph, self.decisions.mesh, self.options)

    def _solve(
        self, moments: Sequence[Moment], limit: float, deadline: float, starts: Sequence[Sequence[int]]
    ) -> Solution:
        """The best choice of the problem with ``moments``, without their states."""
        plain = len(self.decisions.variables)
        asked = self._asked(moments, limit)
        warm = [self.exact.states(s, moments) for s in starts]

        def best_of(problem: Problem, more: Sequence[Sequence[int]]) -> Solution:
            extended = asked if problem is base else self._asked(moments, limit, problem)
            found = solve(
                extended, time_limit=max(deadline - time.perf_counter(), 1.0), backend=self.options.solver,
                gap=self.options.gap, warm_starts=(*(self.exact.states(m, moments) for m in more), *warm),
            )  # fmt: skip
            return replace(found, choice=found.choice[:plain])

        base = self.objective.problem((), limit)
        return self.objective.minimize(base, best_of, self.options.gap)

    def _asked(self, moments: Sequence[Moment], limit: float, problem: Problem | None = None) -> Problem:
        problem = problem or self.objective.problem((), limit)
        costs = tuple(map(_fixed_cost, problem.costs, self.fixed))
        extended = self.exact.extend(replace(problem, costs=costs), moments)
        if not (math.isfinite(limit) and math.isfinite(self.hideable_s)):
            return extended
        host = host_usages(self.decisions, self.prices.cluster.host, self.hideable_s, len(moments), limit)
        return replace(extended, usages=(*extended.usages, *host))


def _fixed_cost(cost: np.ndarray, option: int | None) -> np.ndarray:
    """Only the one option is allowed."""
    if option is None or len(cost) == 1:
        return cost
    return np.where(np.arange(len(cost)) == option, cost, math.inf)
