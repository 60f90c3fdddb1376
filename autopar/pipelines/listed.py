"""An order made for the seconds and bytes at hand: each rank takes, of what it could begin first, what is preferred."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import product
from math import ceil, inf
from typing import NamedTuple, cast

from autopar.errors import PlanError
from autopar.pipelines.actions import Action, Kind, Schedule
from autopar.pipelines.makespan import Costs, bound, held_by, simulate
from autopar.pipelines.settings import DEPTHS, FINALISTS, PATIENCES, TRIAL

ROUNDING_DIGITS = 9
ROUNDING = 10.0**-ROUNDING_DIGITS  # of sums, as a share


class Preference(NamedTuple):
    """What a rank takes where it could begin several actions at once.

    Args:
        split: I and W instead of B.
        patience: see ``PATIENCES``.
        forward_first: F before backwards instead of after them.
        depth: see ``DEPTHS``.
    """

    split: bool
    patience: float
    forward_first: bool
    depth: float


def listed(
    costs: Costs,
    rank_of: Sequence[int],
    micro_batches: int,
    caps: Sequence[float] | None = None,
    *,
    split: bool | None = None,
) -> Schedule:
    """The shortest of several greedy orders, for stages of any seconds and any places.

    Args:
        caps: bytes by rank that micro-batches in flight may hold together; any number without.
        split: whether backwards are split; both are tried without, and whole ones are taken where they are as short.

    Raises:
        PlanError: a rank may not even hold one micro-batch of each of its stages.
    """
    ranks = max(rank_of) + 1
    caps = (inf,) * ranks if caps is None else tuple(caps)
    for rank, cap in enumerate(caps):
        least = sum(held for held, at in zip(costs.held, rank_of, strict=True) if at == rank)
        if least > cap:
            raise PlanError(
                f"Rank {rank} of the pipeline has no room for a single micro-batch.",
                found=f"{least:.0f} bytes, of {cap:.0f} for all micro-batches in flight",
                hint="cut the batch into more micro-batches, or the model into more stages",
            )
    preferences = _preferences(split)
    trial = TRIAL * ranks
    if micro_batches > trial:
        preferences = [preference for preference, _ in _runs(costs, rank_of, trial, caps, preferences)[:FINALISTS]]
    return _runs(costs, rank_of, micro_batches, caps, preferences)[0][1]


def _runs(
    costs: Costs, rank_of: Sequence[int], micro_batches: int, caps: Sequence[float], preferences: Iterable[Preference]
) -> list[tuple[Preference, Schedule]]:
    """The orders of some preferences, shortest first; no more of them once one meets the bound."""
    least = bound(costs, rank_of, micro_batches)
    runs: list[tuple[float, Preference, Schedule]] = []
    for preference in preferences:
        greedy = _Greedy(costs, rank_of, micro_batches, caps, preference)
        schedule = greedy.run()
        seconds = max(greedy.free) if costs.every_action_alike else simulate(schedule, costs).seconds
        excess = round(seconds / least - 1, ROUNDING_DIGITS) if least else 0.0
        runs.append((excess, preference, schedule))
        if excess <= 0:
            break
    return [(preference, schedule) for _, preference, schedule in sorted(runs, key=lambda run: run[0])]


def _preferences(split: bool | None) -> list[Preference]:
    whole = product((False,), PATIENCES[:1], (True, False), DEPTHS) if split is not True else ()
    halves = product((True,), PATIENCES, (True, False), DEPTHS) if split is not False else ()
    return [Preference(*values) for values in (*whole, *halves)]


class _Greedy:
    """Runs the pipeline event by event: next is always what can begin first on any rank.

    A forward begins only if what is then held leaves room for one micro-batch in each later stage of its rank that has
    none in flight. So the order never blocks: if no backward can run, nothing is in flight in the last stage that has a
    forward to do or behind it, and what the earlier stages of its rank hold has left room for it.
    """

    def __init__(
        self, costs: Costs, rank_of: Sequence[int], micro_batches: int, caps: Sequence[float], preference: Preference
    ) -> None:
        self.costs, self.rank_of, self.micro_batches, self.caps = costs, tuple(rank_of), micro_batches, caps
        self.forward_first, self.patience = preference.forward_first, preference.patience
        stages, ranks = costs.stages, len(caps)
        self.stages_of = [[stage for stage in range(stages) if rank_of[stage] == rank] for rank in range(ranks)]
        self.backward: list[Kind] = ["I" if preference.split and stage else "B" for stage in range(stages)]
        self.delays = costs.delays(rank_of)
        self.depths = self._depths(preference.depth)
        self.forward_ends: list[list[float]] = [[] for _ in range(stages)]
        self.gradient_ends: list[list[float]] = [[] for _ in range(stages)]
        self.input_arrives: list[float | None] = [0.0, *[None] * (stages - 1)]
        self.gradient_arrives: list[float | None] = [None] * stages
        self.free, self.held = [0.0] * ranks, [0.0] * ranks
        self.room = [cap * (1 + ROUNDING) for cap in caps]
        self.weights: list[deque[Action]] = [deque() for _ in range(ranks)]
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]

    def _depths(self, factor: float) -> list[float]:
        """By stage: how many micro-batches it may have in flight."""
        if factor == inf:
            return [inf] * self.costs.stages
        depths = (factor * depth for depth in self.costs.depths(self.rank_of))
        return [max(1, ceil(depth - ROUNDING)) if depth < inf else inf for depth in depths]

    def run(self) -> Schedule:
        choices = [self._choose(rank) for rank in range(len(self.rows))]
        while known := [(choice[0], rank, choice[1]) for rank, choice in enumerate(choices) if choice]:
            start, rank, action = min(known)
            self._take(rank, start, action)
            for near in set(self.rank_of[max(0, action.stage - 1) : action.stage + 2]):
                choices[near] = self._choose(near)
        return Schedule("listed", tuple(map(tuple, self.rows)), self.rank_of, self.micro_batches)

    def _take(self, rank: int, start: float, action: Action) -> None:
        end = start + self.costs.seconds(action)
        self.rows[rank].append(action)
        self.free[rank] = end
        self.held[rank] += held_by(action, self.costs)
        kind, stage, micro_batch = action
        if kind == "W":
            self.weights[rank].popleft()
            return
        (self.forward_ends if kind == "F" else self.gradient_ends)[stage].append(end)
        if kind == "I":
            self.weights[rank].append(Action("W", stage, micro_batch))
        if kind == "F":
            self.input_arrives[stage] = self._next_input(stage)
            if stage + 1 < self.costs.stages:
                self.input_arrives[stage + 1] = self._next_input(stage + 1)
        elif stage:
            self.gradient_arrives[stage - 1] = self._next_gradient(stage - 1)
        self.gradient_arrives[stage] = self._next_gradient(stage)

    def _choose(self, rank: int) -> tuple[float, Action] | None:
        """What a rank does next and when, as far as is known; None where it knows of nothing."""
        now, blocked = self.free[rank], False
        best: tuple[float, bool, int, str] | None = None
        for stage in self.stages_of[rank]:
            arrives = self.gradient_arrives[stage]
            if arrives is not None:
                candidate = (max(now, arrives), self.forward_first, -stage, self.backward[stage])
                best = candidate if best is None else min(best, candidate)
            arrives = self.input_arrives[stage]
            if arrives is not None:
                if self._has_room(stage, rank):
                    candidate = (max(now, arrives), not self.forward_first, -stage, "F")
                    best = candidate if best is None else min(best, candidate)
                else:
                    blocked = True
        if self.weights[rank]:
            weight = self.weights[rank][0]
            gap = best[0] - now if best else inf
            if gap >= self.patience * self.costs.seconds(weight) or (blocked and gap > 0):
                return now, weight
        if best is None:
            return None
        start, _, negative, kind = best
        ends = self.forward_ends if kind == "F" else self.gradient_ends
        return start, Action(cast(Kind, kind), -negative, len(ends[-negative]))

    def _next_input(self, stage: int) -> float | None:
        """When the next forward of a stage can begin, if that is known."""
        number = len(self.forward_ends[stage])
        if number == self.micro_batches:
            return None
        if stage == 0:
            return 0.0
        ends = self.forward_ends[stage - 1]
        return ends[number] + self.delays[stage - 1] if number < len(ends) else None

    def _next_gradient(self, stage: int) -> float | None:
        """When the next backward of a stage can begin, if that is known."""
        number = len(self.gradient_ends[stage])
        if number == len(self.forward_ends[stage]):
            return None
        if stage + 1 == self.costs.stages:
            return self.forward_ends[stage][number]
        ends = self.gradient_ends[stage + 1]
        return ends[number] + self.delays[stage] if number < len(ends) else None

    def _has_room(self, stage: int, rank: int) -> bool:
        if self._in_flight(stage) >= self.depths[stage]:
            return False
        if self.room[rank] == inf:
            return True
        held = self.held[rank] + self.costs.held[stage]
        for later in self.stages_of[rank]:
            if later > stage and not self._in_flight(later):
                held += self.costs.held[later]
        return held <= self.room[rank]

    def _in_flight(self, stage: int) -> int:
        return len(self.forward_ends[stage]) - len(self.gradient_ends[stage])
