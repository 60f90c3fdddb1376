"""What to keep, recompute or offload while the shardings stay as they are.

As the second stage after a search for the shardings alone this is the two-stage search, what planners do that know
checkpointing only as an afterthought; on one device, where nothing can be sharded, it is the whole search. Memory is
exact here (`planner.memory.exact_constraints`): whatever moment of a scheduled choice is over the budget joins the
problem, until none is, and the last choice is then the best there is. Where it is proven to be, what costs as much and
has a lower peak is taken instead: so more memory never costs time, and less is never exceeded by a higher peak.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from autopar import settings
from autopar.errors import InfeasibleError, SolverError
from autopar.holding import ABSENT, KEEP, RECOMPUTE, Action
from autopar.planner.footprint.op_work import local_bytes
from autopar.planner.memo import Memo
from autopar.planner.memory.exact import MemoryProfile
from autopar.planner.memory.exact_constraints import ExactMemory, points_over
from autopar.planner.memory.points import ProgramPoint, end
from autopar.planner.options import Options
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.pricing.transfers import host_usages
from autopar.planner.problem.variables import Decisions, Variable, rerun_key
from autopar.planner.schedule.copied_parts import copied_seconds
from autopar.planner.search.fitting import scheduled
from autopar.planner.search.keeping import Keeping
from autopar.program import Program
from autopar.sharding import ShardingSpec, Strategy
from autopar.solver import Problem, Solution, solve
from autopar.solver.clock import now

EQUAL = 1e-12
"""Relative difference of objectives that is none."""
Open = tuple["tuple[int, ...] | None", ...]
"""The options of each variable that are still open; None where all are."""


@dataclass(frozen=True)
class Checkpointed:
    """A choice within the budget, as a program. ``exact``: the bound holds for every choice of this form."""

    solution: Solution
    program: Program
    memory: MemoryProfile
    exact: bool


def sharded_as(free: Decisions, choice: Sequence[int], d: Decisions) -> Open:
    """What stays open in ``d`` with the shardings of ``choice``: ops, inputs, parameters and results are as there, and
    what is run again is run as before. How values and sums of gradients are held and handed on is open."""
    chosen = {v.key: v.options[o] for v, o in zip(free.variables, choice, strict=True)}
    still: list[tuple[int, ...] | None] = []
    memo = Memo()  # most variables share their options with others

    def same(v: Variable, option: Strategy) -> tuple[int, ...]:
        return memo.of("same", (v.options, option), lambda: tuple(i for i, o in enumerate(v.options) if o == option))

    for v in d.variables:
        if v.key in d.summing:
            still.append(None)
            continue
        if v.kind == "rerun" and v.node is not None:
            still.append((0, next(i for i in same(v, chosen[v.node.name]) if i > 0)))
        elif v.kind in ("copy", "hold") or v.key not in chosen:
            still.append(None)
        else:
            still.append(same(v, chosen[v.key]))
    return tuple(still)


def axes_as_one(d: Decisions) -> tuple[tuple[int, ...], ...] | None:
    """What stays open in ``d`` where the axes of the mesh are taken as one: each dim is cut by all of them in order, or
    by none. None where the mesh has one axis, or that leaves some variable nothing.

    Options grow as a power of the axes: a 26th is left of those of Gemma 2 27B on three axes, a fifth of those of Qwen3
    235B on two.
    """
    every = tuple(range(d.mesh.ndim))

    def is_alike(spec: ShardingSpec | None) -> bool:
        if spec is None:
            return True
        reductions = {reduction for _, reduction in spec.partial}
        whole = not spec.partial or (len(spec.partial) == len(every) and len(reductions) == 1)
        return whole and all(axes in ((), every) for axes in spec.dims)

    open_of: dict[int, tuple[int, ...]] = {}
    for v in d.variables:
        if id(v.options) not in open_of:
            alike = (i for i, o in enumerate(v.options) if all(map(is_alike, (*o.inputs, *o.outputs))))
            open_of[id(v.options)] = tuple(alike)
    still = tuple(open_of[id(v.options)] for v in d.variables)
    return still if d.mesh.ndim > 1 and all(still) else None


def with_lean_sums(d: Decisions, still: Open) -> Open:
    """What of ``still`` stays open where sums of gradients are held in the least bytes: each is reduced at once."""
    found = list(still)
    for i, v in enumerate(d.variables):
        if v.kind == "accumulator" and v.node is not None and v.node.outputs[0] is not None:
            allowed = still[i]
            among = range(len(v.options)) if allowed is None else allowed
            sizes = {o: local_bytes(v.node.outputs[0], v.options[o].outputs[0], d.mesh) for o in among}
            found[i] = tuple(o for o, size in sizes.items() if size == min(sizes.values()))
    return tuple(found)


def recomputed(d: Decisions, still: Open, kept: Collection[int]) -> Open:
    """What of ``still`` stays open where the hold variables ``kept`` keep their values, and all others recompute them,
    as far as that is possible and the backward needs them. What the forward gathered, the backward gathers again."""
    found = list(still)

    def held_as(actions: Sequence[Action], wanted: Action) -> tuple[int, ...] | None:
        return tuple(o for o, a in enumerate(actions) if a in (wanted, ABSENT)) if wanted in actions else None

    for i, v in enumerate(d.variables):
        if v.kind == "hold":
            wanted = KEEP if i in kept else RECOMPUTE
            make = partial(held_as, v.actions, wanted)
            found[i] = d.interned.memo.of("held as", (v.actions,), make, wanted) or still[i]
        elif not all(v.kept):
            found[i] = tuple(o for o, kept_gathered in enumerate(v.kept) if not kept_gathered)
    return tuple(found)


@dataclass
class CheckpointSearch:
    """The search among ways to hold what the backward needs, with the shardings that ``still`` leaves."""

    objective: Objective
    options: Options
    still: Open
    hideable_s: float = math.inf
    moments: dict[ProgramPoint, float] = field(init=False)

    def __post_init__(self) -> None:
        self.moments = {end(self.decisions.graph): 0.0}

    @property
    def decisions(self) -> Decisions:
        return self.objective.decisions

    @property
    def prices(self) -> Prices:
        return self.objective.prices

    @cached_property
    def exact(self) -> ExactMemory:
        return ExactMemory(self.decisions, self.options, views_tied=self.decisions.mesh.size == 1)

    def within(self, budget: float, deadline: float, starts: Sequence[Sequence[int]] = ()) -> Checkpointed | None:
        """The best choice whose exact peak fits ``budget`` bytes, of equals that of the lowest peak where time allows;
        None where none fits, or none was found in time."""
        found = self._search(budget, deadline, [*starts, *self.starts(budget, deadline)])
        while found is not None and found.solution.proven and now() < deadline:
            lower = self._search(found.memory.peak_bytes - 1, deadline, [])
            if lower is None or lower.solution.objective > found.solution.objective * (1 + EQUAL):
                break
            found = lower
        return found

    def _search(self, budget: float, deadline: float, starts: list[Sequence[int]]) -> Checkpointed | None:
        fitting = [f for f in (self._checkpointed(s, budget) for s in starts) if f.memory.peak_bytes <= budget]
        best = min(fitting, key=lambda f: f.solution.objective, default=None)
        bound, exact = 0.0, True
        for _ in range(settings.ROUNDS):
            try:
                solution = self._solve(self.moments, budget, deadline, starts)
            except (InfeasibleError, SolverError):
                break
            bound = max(bound, solution.lower_bound) if exact else bound
            program, memory = self.measured(solution.choice, budget)
            if memory.peak_bytes <= budget:
                solution = replace(solution, objective=solution.objective + copied_seconds(program))
                if best is None or solution.objective < best.solution.objective:
                    best = Checkpointed(solution, program, memory, exact)
                break
            starts = [*starts, solution.choice]
            fresh = self._unseen(points_over(program, self.decisions, memory.timeline, budget), solution.choice)
            exact = exact and not any(m in self.moments for m in fresh)
            known = all(self.moments.get(m, -1.0) >= unseen for m, unseen in fresh.items())
            if known or now() > deadline:
                break
            self.moments |= {m: max(unseen, self.moments.get(m, 0.0)) for m, unseen in fresh.items()}
        return best and self._bounded(best, bound, exact)

    def _bounded(self, found: Checkpointed, bound: float, exact: bool) -> Checkpointed:
        s = found.solution
        bound = min(bound, s.objective)
        proven = s.objective - bound <= self.options.gap * s.objective
        return replace(found, solution=replace(s, lower_bound=bound, proven=proven), exact=exact)

    def _unseen(self, moments: Mapping[ProgramPoint, int], choice: Sequence[int]) -> dict[ProgramPoint, float]:
        """What the schedule of ``choice`` holds at each moment beside what its row sees."""
        return {m: max(held - self.exact.used(choice, m), 0.0) for m, held in moments.items()}

    @cached_property
    def rules(self) -> Keeping | None:
        """Simple rules for what to keep; where tensors are sharded, how they are held and handed on goes together."""
        d = self.decisions
        if d.mesh.size > 1:
            return None
        costs = self.objective.problem().costs
        reruns = ((i, d.index.get(rerun_key(n.name))) for i, n in enumerate(d.graph.nodes))
        seconds = {i: float(costs[at][1]) for i, at in reruns if at is not None}
        return Keeping(d, tuple(o[0] if o else 0 for o in self.still), seconds)

    def starts(self, budget: float, deadline: float) -> list[Sequence[int]]:
        """Choices that fit the budget, by simple rules; the one of the smallest peak where none does."""
        if self.rules is None:
            return []
        until = now() + settings.SIDE_SHARE * max(deadline - now(), settings.LEAST_S)
        found = [(choice, self.measured(choice)[1].peak_bytes) for choice in self.rules.spread()]
        fitting = [choice for choice, peak in found if peak <= budget]
        if not fitting:
            return [min(found, key=lambda f: f[1])[0]]
        least = min((f for f in found if f[1] <= budget), key=lambda f: f[1])[0]
        bases = dict.fromkeys((min(fitting, key=self.objective.seconds), least))
        filled = []
        for left, base in zip(range(len(bases), 0, -1), bases, strict=True):
            end = now() + max(until - now(), 0.0) / left
            filled.append(self.rules.fill(base, budget, self.measured, partial(_before, end)))
        return [*sorted({*bases, *filled}, key=self.objective.seconds)[: settings.FEW]]

    def by_rules(self, layers: int, deadline: float) -> list[Checkpointed]:
        """Choices by simple rules, as many as there is time for: a piece for each of ``layers`` first, or the square
        root of what there is to keep, and each also with optimizer state on the host."""
        assert self.rules is not None
        found: list[Checkpointed] = []
        each = zip(self.decisions.variables, self.still, self.rules.choice, strict=True)
        host_state_bytes = tuple(still[-1] if v.host_state_bytes and still else own for v, still, own in each)
        ways = (
            [self.rules]
            if host_state_bytes == self.rules.choice
            else [self.rules, replace(self.rules, choice=host_state_bytes)]
        )
        few_or_many = sorted({2**k for k in range(7)} | {3 * 2**k for k in range(5)})
        for pieces in (layers or math.isqrt(len(self.rules.storages)) or 1, *few_or_many):
            found += [self._checkpointed(rules.choosing(rules.cuts(pieces))) for rules in ways]
            if now() > deadline:
                break
        return found

    def smallest(self, deadline: float, begin: Sequence[int] | None = None) -> Checkpointed:
        """The choice of the smallest peak that was found: from ``begin`` or rules on, each smaller than the last, by
        ever less; of small problems by a byte in the end, so that none is smaller."""
        best = self._checkpointed(self.smallest_by_rules() if begin is None else begin)
        exact = len(self.decisions.variables) <= settings.SMALL
        shares = [settings.LESS, settings.LESS / 4, settings.LESS / 16]
        for less in (*shares, 0.0) if exact else shares:
            while now() < deadline:
                budget = min(best.memory.peak_bytes * (1 - less), best.memory.peak_bytes - 1)
                smaller = self._search(budget, deadline, [best.solution.choice])
                if smaller is None:
                    break
                best = smaller
        return best

    def smallest_by_rules(self) -> Sequence[int]:
        assert self.rules is not None
        return min(self.rules.spread(), key=lambda choice: self.measured(choice)[1].peak_bytes)

    def _checkpointed(self, choice: Sequence[int], budget: float = 0.0) -> Checkpointed:
        program, memory = self.measured(choice, budget)
        cost = self.objective.seconds(choice) + copied_seconds(program)
        solution = Solution(tuple(choice), cost, 0.0, proven=False, method="rules")
        return Checkpointed(solution, program, memory, exact=False)

    def measured(self, choice: Sequence[int], budget: float = math.inf) -> tuple[Program, MemoryProfile]:
        """The program of a choice, within ``budget`` where its transfers can see to it, and its exact memory."""
        return scheduled(self.decisions, choice, self.prices, self.options, budget)

    def _solve(
        self, moments: Mapping[ProgramPoint, float], limit: float, deadline: float, starts: Sequence[Sequence[int]]
    ) -> Solution:
        """The best choice of the problem with ``moments``, without their states."""
        plain = len(self.decisions.variables)
        asked = self._asked(moments, limit)
        warm = [self.exact.extend_choice(s, moments) for s in starts]

        def best_of(problem: Problem, more: Sequence[Sequence[int]]) -> Solution:
            extended = asked if problem is base else self._asked(moments, limit, problem)
            found = solve(
                extended,
                time_limit=max(deadline - now(), settings.LEAST_S),
                backend=self.options.solver,
                gap=self.options.gap,
                warm_starts=(*(self.exact.extend_choice(m, moments) for m in more), *warm),
            )
            return replace(found, choice=found.choice[:plain])

        base = self.objective.problem((), limit)
        return self.objective.minimize(base, best_of, self.options.gap)

    def _asked(self, moments: Mapping[ProgramPoint, float], limit: float, problem: Problem | None = None) -> Problem:
        problem = problem or self.objective.problem((), limit)
        costs = tuple(map(_open_cost, problem.costs, self.still))
        extended = self.exact.extend(replace(problem, costs=costs, trusted=True), moments)
        if not (math.isfinite(limit) and math.isfinite(self.hideable_s)):
            return extended
        host = host_usages(self.decisions, self.prices.rates, self.hideable_s, len(moments), limit)
        return replace(extended, usages=(*extended.usages, *host))


def _before(end: float) -> bool:
    return now() < end


def _open_cost(cost: np.ndarray, still: tuple[int, ...] | None) -> np.ndarray:
    """Only the options that are open are allowed."""
    if still is None or len(still) == len(cost):
        return cost
    return np.where(np.isin(np.arange(len(cost)), still), cost, math.inf)
