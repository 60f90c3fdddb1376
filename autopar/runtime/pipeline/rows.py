"""The rows of all micro-batches in the order of the batch, and the other way round.

A rank has a shard of the rows of each micro-batch, its *chunks*, and wants its shard of the batch, or has that and
wants the chunks. No rank ever has more than its shard: chunks go to their ranks in one all-to-all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from autopar.spmd.collectives import _carried, _restored
from autopar.spmd.ranks import Exchange, Rank


@dataclass(frozen=True)
class Rows:
    """How the ranks of a stage share rows.

    Args:
        axes: mesh axes that cut the rows of the batch, as those of each micro-batch, evenly.
        batches: local batches that make up the batch, each rank's after the other's: a micro-batch has rows of every
            one, in the same order. 1 where all ranks are given one batch.
    """

    rank: Rank
    axes: tuple[int, ...]
    micro_batches: int
    batches: int

    def joined(self, values: list[Tensor]) -> Tensor:
        """Return this rank's shard of the batch. ``values`` are its shards of the micro-batches, and are released."""
        if self.batches > 1:
            rows = torch.stack([_split(v, self.batches // self._shards) for v in values], 1).flatten(0, 2)
        else:
            rows = torch.cat(values)
        values.clear()
        if self.batches > 1 or self._shards == 1:
            return rows
        arrived = self._exchanged(rows, self._owners, self._makers)
        del rows
        return self._in_order(arrived, sorted(range(self.micro_batches), key=self._arriving.__getitem__))

    def dealt(self, shard: Tensor) -> list[Tensor]:
        """Return this rank's shards of the micro-batches, from its shard of the batch."""
        if self.batches > 1:
            batches = _split(shard, self.batches // self._shards)
            return [rows.flatten(0, 1) for rows in batches.chunk(self.micro_batches, 1)]
        if self._shards > 1:
            shard = self._exchanged(self._in_order(shard, self._arriving), self._makers, self._owners)
        return list(shard.chunk(self.micro_batches))

    # Chunk c is the shard c % shards of micro-batch c // shards, and lies in the shard c // micro_batches of the batch.

    @cached_property
    def _shards(self) -> int:
        return math.prod(self.rank.mesh.shape[a] for a in self.axes)

    @cached_property
    def _here(self) -> int:
        found = 0
        for a in self.axes:
            found = found * self.rank.mesh.shape[a] + self.rank.coordinate[a]
        return found

    @cached_property
    def _owners(self) -> list[int]:
        """The shard of the batch in which this rank's chunk of each micro-batch lies."""
        return [(i * self._shards + self._here) // self.micro_batches for i in range(self.micro_batches)]

    @cached_property
    def _makers(self) -> list[int]:
        """The shard of a micro-batch that each chunk of this rank's shard of the batch is."""
        return [(self._here * self.micro_batches + i) % self._shards for i in range(self.micro_batches)]

    @cached_property
    def _arriving(self) -> list[int]:
        """The chunks of this rank's shard of the batch by their makers, as they arrive."""
        return sorted(range(self.micro_batches), key=self._makers.__getitem__)

    def _in_order(self, rows: Tensor, places: Sequence[int]) -> Tensor:
        chunks = _split(rows, self.micro_batches)
        return chunks.index_select(0, torch.tensor(places, device=rows.device)).flatten(0, 1)

    def _exchanged(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send each chunk to the rank with its shard of ``sent``, and return those that come from ``received``."""
        carried, each = _carried(rows).contiguous(), rows.shape[0] // self.micro_batches
        exchange = Exchange(
            "all_to_all", shape=carried.shape, sent=self._by_rank(sent, each), received=self._by_rank(received, each)
        )
        return _restored(self.rank.finish(self.rank.launch(carried, exchange)), rows.dtype)

    def _by_rank(self, shards: Sequence[int], rows: int) -> tuple[int, ...]:
        """Return the rows for each rank of the mesh: those for a shard go to the rank at the same place otherwise."""
        mesh, coordinate = self.rank.mesh, list(self.rank.coordinate)
        found = [0] * mesh.size
        for shard, count in Counter(shards).items():
            rest = shard
            for a in reversed(self.axes):
                rest, coordinate[a] = divmod(rest, mesh.shape[a])
            found[mesh.rank(tuple(coordinate))] = count * rows
        return tuple(found)


def _split(rows: Tensor, parts: int) -> Tensor:
    return rows.reshape(parts, -1, *rows.shape[1:])
