"""What ranks along a pipeline send each other, as data: which action reads and sends what, and what waits meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.pipelines.actions import Action


class Message(NamedTuple):
    """What a stage sends a neighbour for one micro-batch: activations (``F``) or their gradients (``B``)."""

    kind: str
    to: int
    micro_batch: int


@dataclass(frozen=True)
class Traffic:
    """What ranks along the pipeline exchange in one run of a schedule, as one of them sees it.

    Args:
        expected: from each position, the messages that it sends here, in its order.
        seen: for each of these, how many of this rank's messages its sender has taken before it sends that.
    """

    expected: Mapping[int, tuple[Message, ...]]
    seen: Mapping[Message, int]

    @classmethod
    def of(cls, order: Sequence[Sequence[Action]], rank_of: Sequence[int], here: int) -> Traffic:
        expected: dict[int, list[Message]] = {}
        seen: dict[Message, int] = {}
        for position, actions in enumerate(order):
            taken = 0
            for action in actions:
                reads, sends = read_by(action, len(rank_of)), sent_by(action, len(rank_of))
                if reads is not None and rank_of[source_of(reads)] == here:
                    taken += 1
                if position != here and sends is not None and rank_of[sends.to] == here:
                    expected.setdefault(position, []).append(sends)
                    seen[sends] = taken
        return cls({p: tuple(m) for p, m in expected.items()}, seen)


def read_by(action: Action, stages: int) -> Message | None:
    """Return the message that an action reads."""
    if action.kind == "F":
        return Message("F", action.stage, action.micro_batch) if action.stage else None
    if action.kind == "W" or action.stage == stages - 1:
        return None
    return Message("B", action.stage, action.micro_batch)


def sent_by(action: Action, stages: int) -> Message | None:
    """Return the message that an action sends."""
    if action.kind == "F":
        return Message("F", action.stage + 1, action.micro_batch) if action.stage < stages - 1 else None
    return Message("B", action.stage - 1, action.micro_batch) if action.kind != "W" and action.stage else None


def source_of(message: Message) -> int:
    """Return the stage that sends a message."""
    return message.to - 1 if message.kind == "F" else message.to + 1


def waiting(
    order: Sequence[Sequence[Action]], rank_of: Sequence[int], here: int
) -> Iterator[tuple[Action, tuple[Message, ...], tuple[Message, ...]]]:
    """Yield each action of a rank and the messages that it holds while the action runs, as ``spmd.pipeline`` does.

    The first are those that it has begun to receive: the next action's. The second are those that it has sent and that
    may not have arrived, or handed to a stage of its own.
    """
    count, traffic = len(rank_of), Traffic.of(order, rank_of, here)
    expected = {position: deque(messages) for position, messages in traffic.expected.items()}
    coming: list[Message] = []
    going: dict[int, deque[Message]] = {}
    arrived: dict[int, int] = {}
    for at, action in enumerate(order[here]):
        for reads in (read_by(each, count) for each in order[here][at : at + 2]):
            position = here if reads is None else rank_of[source_of(reads)]
            while position != here and reads not in coming:
                coming.append(expected[position].popleft())
        reads, sends = read_by(action, count), sent_by(action, count)
        if reads is not None and (position := rank_of[source_of(reads)]) == here:
            going[here].remove(reads)
        elif reads is not None:
            coming.remove(reads)
            for _ in range(traffic.seen[reads] - arrived.get(position, 0)):
                going[position].popleft()
            arrived[position] = max(traffic.seen[reads], arrived.get(position, 0))
        yield action, tuple(coming), tuple(m for messages in going.values() for m in messages)
        if sends is not None:
            going.setdefault(rank_of[sends.to], deque()).append(sends)
