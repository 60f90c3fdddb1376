"""An order made for the seconds and bytes at hand: each rank takes, of what it could begin first, what is preferred."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import product
from math import ceil, inf
from typing import NamedTuple

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
        schedule = _Greedy(costs, rank_of, micro_batches, caps, preference).run()
        excess = round(simulate(schedule, costs).seconds / least - 1, ROUNDING_DIGITS) if least else 0.0
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
        self.free, self.held = [0.0] * ranks, [0.0] * ranks
        self.weights: list[deque[Action]] = [deque() for _ in range(ranks)]
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]

    def _depths(self, factor: float) -> list[float]:
        """By stage: a micro-batch's seconds from there to the end and back, over those that the slowest rank needs for
        one."""
        costs = self.costs
        work = [f + i + w for f, i, w in zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True)]
        period = max(sum(work[stage] for stage in stages) for stages in self.stages_of)
        if factor == inf or period == 0:
            return [inf] * costs.stages
        return [max(1, ceil(factor * sum(work[stage:]) / period - ROUNDING)) for stage in range(costs.stages)]

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
        if kind == "F":
            self.forward_ends[stage].append(end)
        elif kind == "W":
            self.weights[rank].popleft()
        else:
            self.gradient_ends[stage].append(end)
            if kind == "I":
                self.weights[rank].append(Action("W", stage, micro_batch))

    def _choose(self, rank: int) -> tuple[float, Action] | None:
        """What a rank does next and when, as far as is known; None where it knows of nothing."""
        now, candidates, blocked = self.free[rank], [], False
        for stage in self.stages_of[rank]:
            backward = self._gradient_arrives(stage)
            if backward is not None:
                action = Action(self.backward[stage], stage, len(self.gradient_ends[stage]))
                candidates.append((max(now, backward), self.forward_first, -stage, action))
            forward = self._input_arrives(stage)
            if forward is not None:
                if self._has_room(stage, rank):
                    action = Action("F", stage, len(self.forward_ends[stage]))
                    candidates.append((max(now, forward), not self.forward_first, -stage, action))
                else:
                    blocked = True
        best = min(candidates, default=None)
        if self.weights[rank]:
            weight = self.weights[rank][0]
            gap = best[0] - now if best else inf
            if gap >= self.patience * self.costs.seconds(weight) or (blocked and gap > 0):
                return now, weight
        return (best[0], best[3]) if best else None

    def _input_arrives(self, stage: int) -> float | None:
        """When the next forward of a stage can begin, if that is known."""
        number = len(self.forward_ends[stage])
        if number == self.micro_batches:
            return None
        if stage == 0:
            return 0.0
        ends = self.forward_ends[stage - 1]
        return ends[number] + self.delays[stage - 1] if number < len(ends) else None

    def _gradient_arrives(self, stage: int) -> float | None:
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
        reserved = sum(
            self.costs.held[later] for later in self.stages_of[rank] if later > stage and not self._in_flight(later)
        )
        return self.held[rank] + self.costs.held[stage] + reserved <= self.caps[rank] * (1 + ROUNDING)

    def _in_flight(self, stage: int) -> int:
        return len(self.forward_ends[stage]) - len(self.gradient_ends[stage])
