"""Messages between ranks along a pipeline: for each ordered pair of them a group of its own, first in, first out.

A receiver knows from the schedule in which order a sender sends, so messages need no tags, and as no two directions
share a communicator, ranks never wait for each other in a circle that the schedule does not have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar import _torch
from autopar.pipelines.messages import Message, Traffic, source_of


class Shape(NamedTuple):
    """Local shape and dtype of a tensor of a message."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


def groups_of(sets: Iterable[Sequence[int]], here: int, of: Sequence[int]) -> dict[tuple[int, ...], Any]:
    """Create a process group for each set of positions along the pipeline that contains this rank's.

    torch names a group by its ranks and by how many groups a process has made, so all ranks make them in rounds, in
    each of which every rank makes one, by itself if need be. All ranks along the pipeline must call this at once.

    Args:
        here: this rank's position.
        of: the global rank of each position.
    """
    rounds: list[dict[int, tuple[int, ...]]] = []
    made: dict[tuple[int, ...], Any] = {}
    for each in sorted({*map(tuple, sets)}):
        free = next((r for r in rounds if not any(p in r for p in each)), None)
        if free is None:
            rounds.append(free := {})
        free.update((p, each) for p in each)
    for together in rounds:
        mine = together.get(here, (here,))
        group = dist.new_group([of[p] for p in mine], use_local_synchronization=True)
        if mine != (here,):
            made[mine] = group
    return made


@dataclass
class Links:
    """The links of this rank.

    Args:
        here: this rank's position along the pipeline.
        of: the global rank of each position.
        groups: the process group of each ordered pair of positions.
    """

    here: int
    of: Sequence[int]
    groups: dict[tuple[int, ...], Any]

    @classmethod
    def between(cls, pairs: Iterable[tuple[int, int]], here: int, of: Sequence[int]) -> Links:
        """Create the links of the ordered ``pairs`` of positions; all ranks along the pipeline must call it at once."""
        return cls(here, of, groups_of_pairs(pairs, here, of))

    def send(self, to: int, tensor: Tensor) -> Any:
        return dist.isend(tensor, self.of[to], group=self.groups[self.here, to])

    def receive(self, source: int, tensor: Tensor) -> Any:
        return dist.irecv(tensor, self.of[source], group=self.groups[source, self.here])

    def close(self) -> None:
        """Break all links, so that ranks that wait at the other end stop waiting."""
        groups, self.groups = list(self.groups.values()), {}
        _torch.close_groups(groups)


def groups_of_pairs(pairs: Iterable[tuple[int, int]], here: int, of: Sequence[int]) -> dict[tuple[int, ...], Any]:
    """Create a group for each ordered pair of positions: two for two ranks, one in each direction."""
    there = sorted({(min(p), max(p)) for p in pairs})
    up, down = groups_of(there, here, of), groups_of(there, here, of)
    return up | {pair[::-1]: group for pair, group in down.items()}


@dataclass
class Mailbox:
    """The messages of one run of a schedule on this rank.

    Args:
        links: to other ranks.
        rank_of: position of each stage along the pipeline.
        shapes: local shapes of the tensors of each kind of message to each of this rank's stages.
    """

    links: Links
    rank_of: Sequence[int]
    shapes: Mapping[tuple[str, int], Sequence[Shape]]
    device: torch.device
    traffic: Traffic
    posted: dict[Message, list[tuple[Any, Tensor]]] = field(default_factory=dict)
    handed: dict[Message, list[Tensor]] = field(default_factory=dict)
    sent: dict[int, deque[list[tuple[Any, Tensor]]]] = field(default_factory=dict)
    arrived: dict[int, int] = field(default_factory=dict)
    most_posted: int = 0

    def __post_init__(self) -> None:
        self.expected = {p: deque(messages) for p, messages in self.traffic.expected.items()}

    def post(self, message: Message) -> None:
        """Start to receive a message, if it comes from another rank, after those that its sender sends before."""
        position = self.rank_of[source_of(message)]
        if position == self.links.here:
            return
        while message not in self.posted:
            following = self.expected[position].popleft()
            buffers = self.buffers(following)
            self.posted[following] = [(self.links.receive(position, b) if b.numel() else None, b) for b in buffers]
        self.most_posted = max(self.most_posted, len(self.posted))

    def buffers(self, message: Message) -> list[Tensor]:
        """Return new tensors for what a message carries."""
        shapes = self.shapes[message.kind, message.to]
        return [torch.empty(s.sizes, dtype=s.dtype, device=self.device) for s in shapes]

    def take(self, message: Message) -> list[Tensor]:
        """Wait for a message and return its tensors."""
        position = self.rank_of[source_of(message)]
        if position == self.links.here:
            return self.handed.pop(message)
        self.post(message)
        taken = self.posted.pop(message)
        for work, _ in taken:
            if work is not None:
                work.wait()
        self._let_go(position, self.traffic.seen[message])
        return [tensor for _, tensor in taken]

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Send tensors to a stage, or hand them over on this rank."""
        to = self.rank_of[message.to]
        if to == self.links.here:
            self.handed[message] = list(tensors)
            return
        dense = [t.contiguous() for t in tensors]
        self.sent.setdefault(to, deque()).append([(self.links.send(to, t), t) for t in dense if t.numel()])

    def _let_go(self, position: int, count: int) -> None:
        """Let go of the first ``count`` messages to a position, which is known to have taken them."""
        for _ in range(count - self.arrived.get(position, 0)):
            for work, _ in self.sent[position].popleft():
                work.wait()
        self.arrived[position] = max(count, self.arrived.get(position, 0))

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for position, waiting in self.sent.items():
            self._let_go(position, self.arrived.get(position, 0) + len(waiting))

    def drop(self) -> None:
        """Let go of all messages."""
        self.posted.clear()
        self.handed.clear()
        self.sent.clear()
