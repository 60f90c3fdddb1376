"""How long a schedule takes and what it holds, from the seconds and bytes of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import inf

from autopar.errors import PlanError
from autopar.pipelines.actions import Action, Schedule


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of the stages of a pipeline, for one micro-batch.

    What is left out is zero.

    Args:
        forward: seconds by stage.
        backward_input: seconds of a backward up to the gradient of the stage's input, by stage. The first stage has no
            such gradient: all of its backward is that of the weights.
        backward_weight: seconds of the rest of the backward, by stage.
        send: seconds of a message by seam, from stage s to s + 1, and of the gradient back.
        held: bytes that a micro-batch holds between its forward and its backward, by stage.
        kept: of these, the bytes that are still held between I and W, by stage.
        last_backward: seconds that the last backward of a stage in its rank's order takes in addition, for the delivery
            of gradients, by stage.
        tail: seconds after a rank's last action, by rank.
        first_forward: seconds that the first forward of a stage takes in addition, for what all micro-batches share, by
            stage. That is made before its input arrives, where the rank has nothing else to do.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    send: tuple[float, ...] = ()
    held: tuple[float, ...] = ()
    kept: tuple[float, ...] = ()
    last_backward: tuple[float, ...] = ()
    tail: tuple[float, ...] = ()
    first_forward: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward)
        for name in ("backward_input", "backward_weight", "send", "held", "kept", "last_backward", "first_forward"):
            length = stages - (name == "send")
            values = getattr(self, name) or (0.0,) * length
            if len(values) != length:
                raise PlanError(
                    f"The costs of a pipeline have {name} of another number of stages.",
                    found=f"{len(values)} in {name}, {stages} in forward",
                    hint=f"give {length} of them",
                )
            object.__setattr__(self, name, values)
        if any(kept > held for kept, held in zip(self.kept, self.held, strict=True)):
            raise PlanError(
                "A stage of a pipeline keeps more for W than it held for its backward.",
                found=f"kept {self.kept}, held {self.held} bytes by stage",
                hint="count in kept only what is in held",
            )

    @property
    def stages(self) -> int:
        return len(self.forward)

    def seconds(self, action: Action) -> float:
        """Of an action that is not the last backward of its stage."""
        kind, stage, _ = action
        if kind == "F":
            return self.forward[stage]
        if kind == "I":
            return self.backward_input[stage]
        if kind == "W":
            return self.backward_weight[stage]
        return self.backward_input[stage] + self.backward_weight[stage]

    def delays(self, rank_of: Sequence[int]) -> tuple[float, ...]:
        """Seconds of a message by seam; none where both stages are on one rank."""
        seams = zip(self.send, rank_of[:-1], rank_of[1:], strict=True)
        return tuple(seconds if here != there else 0.0 for seconds, here, there in seams)

    def depths(self, rank_of: Sequence[int]) -> tuple[float, ...]:
        """By stage: a micro-batch's seconds from there to the end and back, over those that the slowest rank needs for
        one. So many in flight keep that rank busy."""
        work = [f + i + w for f, i, w in zip(self.forward, self.backward_input, self.backward_weight, strict=True)]
        period, on_the_way = max(by_rank(rank_of, work)), [2 * seconds for seconds in self.delays(rank_of)]
        seconds = (sum(work[stage:]) + sum(on_the_way[stage:]) for stage in range(self.stages))
        return tuple(each / period if period else inf for each in seconds)

    @property
    def every_action_alike(self) -> bool:
        """Whether no first or last action takes longer than others of its kind and stage."""
        return not any((*self.first_forward, *self.last_backward, *self.tail))

    def tails(self, ranks: int) -> tuple[float, ...]:
        return self.tail or (0.0,) * ranks


def by_rank(rank_of: Sequence[int], of_stages: Sequence[float]) -> list[float]:
    """Return the sums over the stages of each rank."""
    found = [0.0] * (max(rank_of) + 1)
    for rank, amount in zip(rank_of, of_stages, strict=True):
        found[rank] += amount
    return found


@dataclass(frozen=True)
class Timeline:
    """When each action runs.

    Args:
        seconds: until the last rank is done.
        starts: seconds at which each action begins.
        ends: seconds at which each action ends.
        busy: seconds of work by rank, its tail included.
        bubble: share of the ranks' time in which they wait.
    """

    seconds: float
    starts: Mapping[Action, float]
    ends: Mapping[Action, float]
    busy: tuple[float, ...]
    bubble: float


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The longest path through the actions: of each rank in its order, and from stage to stage by messages.

    A message takes its seconds on the way and none of the ranks' own. Takes time linear in the number of actions.
    """
    _fit(schedule.rank_of, costs)
    rank_of, count, last_stage = schedule.rank_of, schedule.micro_batches, schedule.stages - 1
    delays = costs.delays(rank_of)
    by_kind = {
        "F": costs.forward,
        "I": costs.backward_input,
        "W": costs.backward_weight,
        "B": tuple(i + w for i, w in zip(costs.backward_input, costs.backward_weight, strict=True)),
    }
    last = set(schedule.last_backwards.values()) if any(costs.last_backward) else set()
    forward_ends = [0.0] * (schedule.stages * count)
    gradient_ends = list(forward_ends)
    free, busy = [0.0] * schedule.ranks, [0.0] * schedule.ranks
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    for action in schedule.topological:
        kind, stage, micro_batch = action
        rank, place = rank_of[stage], stage * count + micro_batch
        start = free[rank]
        seconds = by_kind[kind][stage]
        if kind == "F":
            before = costs.first_forward[stage] if micro_batch == 0 else 0.0
            if stage:
                start = max(start, forward_ends[place - count] + delays[stage - 1] - before)
            seconds += before
        elif kind != "W" and stage < last_stage:
            start = max(start, gradient_ends[place + count] + delays[stage])
        if action in last:
            seconds += costs.last_backward[stage]
        end = start + seconds
        starts[action], ends[action], free[rank] = start, end, end
        busy[rank] += seconds
        if kind == "F":
            forward_ends[place] = end
        elif kind != "W":
            gradient_ends[place] = end
    tails = costs.tails(schedule.ranks)
    total = max(map(sum, zip(free, tails, strict=True)))
    busy = list(map(sum, zip(busy, tails, strict=True)))
    bubble = 1.0 - sum(busy) / (schedule.ranks * total) if total else 0.0
    return Timeline(total, starts, ends, tuple(busy), bubble)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """By stage, the most micro-batches that are between their F and the end of their B or W."""
    now, most = [0] * schedule.stages, [0] * schedule.stages
    for row in schedule.order:
        for kind, stage, _ in row:
            if kind == "F":
                now[stage] += 1
                most[stage] = max(most[stage], now[stage])
            elif kind != "I":
                now[stage] -= 1
    return tuple(most)


def peak_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """By rank, the most bytes that all its micro-batches in flight hold together."""
    _fit(schedule.rank_of, costs)
    return tuple(max(accumulate(held_by(action, costs) for action in row), default=0.0) for row in schedule.order)


def held_by(action: Action, costs: Costs) -> float:
    """Bytes that an action adds to what its rank holds; below zero for what it releases."""
    kind, stage, _ = action
    if kind == "F":
        return costs.held[stage]
    if kind == "B":
        return -costs.held[stage]
    if kind == "I":
        return costs.kept[stage] - costs.held[stage]
    return -costs.kept[stage]


def bound(costs: Costs, rank_of: Sequence[int], micro_batches: int) -> float:
    """Seconds that no schedule of this cut undercuts.

    Of the actions of a rank, take those that begin no sooner than ``head`` and after which the step still takes
    ``rest`` at least: they run one after the other, so the step takes ``head``, all their seconds and ``rest``. The
    head of an action is the way of one micro-batch to it, its rest the way on to the first stage's gradients or to the
    end of its own W. A whole backward is an I and a W without a break that sends later, so the bound holds for it too.
    """
    _fit(rank_of, costs)
    f, i, w = costs.forward, costs.backward_input, costs.backward_weight
    delays, tails = costs.delays(rank_of), costs.tails(max(rank_of) + 1)
    stages = range(costs.stages)
    to_forward = [sum(f[:s]) + sum(delays[:s]) for s in stages]
    to_backward = [sum(f) + sum(delays) + sum(i[s + 1 :]) + sum(delays[s:]) for s in stages]
    first = w[0] + tails[rank_of[0]]
    after_backward = [
        max(w[s] + tails[rank_of[s]], sum(i[:s]) + sum(delays[:s]) + first if s else first) for s in stages
    ]
    after_forward = [
        sum(f[s + 1 :]) + sum(delays[s:]) + sum(i[s:]) + sum(delays[s:]) + after_backward[s] for s in stages
    ]
    best = 0.0
    for rank, tail in enumerate(tails):
        jobs = []
        for s in stages:
            if rank_of[s] == rank:
                jobs += [
                    (to_forward[s], micro_batches * f[s], after_forward[s]),
                    (to_backward[s], micro_batches * i[s], after_backward[s]),
                    (to_backward[s] + i[s], micro_batches * w[s] + costs.last_backward[s], tail),
                ]
        for (head, _, _), (_, _, rest) in product(jobs, jobs):
            work = [seconds for start, seconds, end in jobs if start >= head and end >= rest]
            if work:
                best = max(best, head + sum(work) + rest)
    return best


def _fit(rank_of: Sequence[int], costs: Costs) -> None:
    if len(rank_of) != costs.stages or len(costs.tail) not in {0, max(rank_of) + 1}:
        raise PlanError(
            "The costs are of another pipeline than the schedule.",
            found=f"costs of {costs.stages} stages and tails of {len(costs.tail)} ranks, "
            f"a schedule of {len(rank_of)} stages on {max(rank_of) + 1} ranks",
            hint="price the stages of this schedule",
        )
