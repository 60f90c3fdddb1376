"""Attention on a ring: queries, keys and values are all cut by their sequences, and blocks of keys and values go round.

While a rank attends one block the next is on its way to it, so at no time does it hold more than these two and its own.
Results are merged by the logarithms of their sums (Liu et al., "Ring Attention with Blockwise Transformers", 2023).
Blocks come from their owners. In the backward their gradients go back there, where they are summed.

For causal attention the ranks first bring their rows into zigzag order, see ``sharding.zigzag``. All of a block that a
rank reads is then before its rows, so but for its own block no kernel needs a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar import _torch
from autopar.mesh import Mesh
from autopar.sharding.loan import number
from autopar.sharding.zigzag import Block, halves, holder, shards, zigzag
from autopar.spmd.ranks import Exchange, Rank
from autopar.spmd.rings import Receive, Ring, Send, run_ring


def ring_attention(
    rank: Rank,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    length: int,
    axes: Sequence[int],
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return ``autopar.attention`` of this rank's queries.

    Args:
        q: [b, h, s / n, d]; k [b, g, t / n, d] and v [b, g, t / n, e], of n ranks.
        mask: [..., s / n, t]; none if attention is causal.
        length: t, the length of the keys, which ``axes`` cut.
        options: those of ``autopar.attention``.
    """
    ring = _attending(rank, q, k, v, mask, seed, length=length, axes=axes, **options)
    found: tuple[Tensor, Tensor] = run_ring(rank, ring)
    return found


def ring_attention_backward(
    rank: Rank,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None = None,
    *,
    length: int,
    axes: Sequence[int],
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``ring_attention``, each cut as its operand is."""
    ring = _differentiating(rank, grad_out, q, k, v, mask, out, lse, seed, length=length, axes=axes, **options)
    found: tuple[Tensor, Tensor, Tensor] = run_ring(rank, ring)
    return found


@dataclass(frozen=True)
class _Piece:
    """Rows of queries and of a block's keys that attend each other in one call."""

    rows: slice
    keys: slice
    options: Mapping[str, Any]


Started = tuple[Tensor, tuple[int, ...]]
"""What a ``Send`` returned, and the shape in which it arrives: [b, rows, h, d], or [b, h, rows] of row sums."""

_ALL, _NONE = slice(None), slice(0, 0)


@dataclass(frozen=True)
class _Place:
    """A rank's place on a ring.

    Args:
        here: its number along ``axes``.
        blocks: the keys of each rank, in zigzag order if attention is causal.
    """

    mesh: Mesh
    axes: tuple[int, ...]
    here: int
    length: int
    blocks: tuple[Block, ...]
    options: Mapping[str, Any]

    @staticmethod
    def of(rank: Rank, length: int, axes: Sequence[int], options: Mapping[str, Any]) -> _Place:
        mesh, cut = rank.mesh, tuple(axes)
        blocks = zigzag(length, cut, mesh) if options["is_causal"] else shards(length, cut, mesh)
        return _Place(mesh, cut, number(cut, mesh, rank.coordinate), length, blocks, options)

    @property
    def ways(self) -> int:
        return len(self.blocks)

    @property
    def is_causal(self) -> bool:
        return bool(self.options["is_causal"])

    def at(self, distance: int) -> int:
        """Return the number of the rank this far behind."""
        return (self.here - distance) % self.ways

    def read(self, reader: int, owner: int) -> int:
        """Return how many rows of the block of ``owner`` a rank reads: the first half where it comes later."""
        block = self.blocks[owner]
        return block.parts[0].length if self.is_causal and owner < reader else block.rows

    def pieces(self, there: int) -> list[_Piece]:
        """Return the calls for the block of rank ``there``."""
        read = self.read(self.here, there)
        return [p for p in self._pieces(there) if read and _NONE not in (p.rows, p.keys)]

    def _pieces(self, there: int) -> Iterator[_Piece]:
        own, other = self.blocks[self.here], self.blocks[there]
        if not self.is_causal:
            yield _Piece(_ALL, _ALL, self._options(is_causal=False, key=other.parts[0].start))
        elif self.options.get("dropout_p"):
            # Dropout draws by global position, which does not go on from one half to the other.
            for part, rows in zip(own.parts, _slices(own), strict=True):
                for keys, columns in zip(other.parts, _slices(other), strict=True):
                    if keys.start <= part.start:
                        yield _Piece(rows, columns, self._options(is_causal=True, query=part.start, key=keys.start))
        elif there == self.here:
            yield _Piece(_ALL, _ALL, self._options(is_causal=True, query=0))
        elif there < self.here:
            yield _Piece(_ALL, _ALL, self._options(is_causal=False))  # no more than the first half has been sent
        else:
            yield _Piece(_slices(own)[1], _ALL, self._options(is_causal=False))

    def _options(self, *, is_causal: bool, query: int | None = None, key: int = 0) -> dict[str, Any]:
        batch, head, first = self.options.get("offset", (0, 0, 0))[:3]
        offset = [batch, head, first if query is None else query, key]
        return {**self.options, "is_causal": is_causal, "offset": offset}

    def columns(self, mask: Tensor | None, there: int) -> Tensor | None:
        """Return the columns of a mask for the block of rank ``there``."""
        if mask is None or mask.shape[-1] == 1:
            return mask
        part = self.blocks[there].parts[0]
        return mask[..., part.start : part.start + part.length]

    def send(self, tensors: Sequence[Tensor], distance: int) -> Generator[Any, Any, list[Started]]:
        """Start to send this rank's block to the rank ``distance`` ahead, and to receive that of the one behind."""
        sent = self.read((self.here + distance) % self.ways, self.here)
        received = self.read(self.here, self.at(distance))
        sources = _permutation(self.mesh, self.axes, tuple((i - distance) % self.ways for i in range(self.ways)))
        return (yield from _launched([(x[:, :, :sent], received) for x in tensors], sources))

    def send_back(self, gradients: Sequence[Tensor], distance: int) -> Generator[Any, Any, list[Started]]:
        """Start to send gradients to the owner of their block, and to receive those of this rank's block."""
        received = self.read((self.here + distance) % self.ways, self.here)
        sources = _permutation(self.mesh, self.axes, tuple((i + distance) % self.ways for i in range(self.ways)))
        return (yield from _launched([(x, received) for x in gradients], sources))

    def to_zigzag(self, tensors: Sequence[Tensor]) -> Generator[Any, Any, list[Tensor]]:
        """Return tensors of this rank's shard of the sequence as tensors of its rows in zigzag order."""
        if not self.is_causal:
            return list(tensors)
        parts, n = halves(self.length, self.axes, self.mesh), self.ways
        own = self.here, 2 * n - 1 - self.here
        split = parts[2 * self.here].length
        started = []
        for parity in (0, 1):
            sources = tuple((i if i % 2 == parity else 2 * n - 1 - i) // 2 for i in range(n))
            rows = slice(split, None) if parity else slice(0, split)
            received = parts[next(h for h in own if h % 2 == parity)].length
            moving = [(x[:, :, rows], received) for x in tensors]
            started.append((yield from _launched(moving, _permutation(self.mesh, self.axes, sources))))
        return (yield from _joined(started if self.here % 2 == 0 else started[::-1]))

    def to_shards(self, tensors: Sequence[Tensor]) -> Generator[Any, Any, list[Tensor]]:
        """Return tensors of this rank's rows in zigzag order as tensors of its shard of the sequence."""
        if not self.is_causal:
            return list(tensors)
        parts, n = halves(self.length, self.axes, self.mesh), self.ways
        low, high = _slices(self.blocks[self.here])
        started = []
        for parity in (0, 1):
            sources = tuple(holder(2 * i + parity, n) for i in range(n))
            rows = low if self.here % 2 == parity else high
            moving = [(x[:, :, rows], parts[2 * self.here + parity].length) for x in tensors]
            started.append((yield from _launched(moving, _permutation(self.mesh, self.axes, sources))))
        return (yield from _joined(started))


def _slices(block: Block) -> list[slice]:
    """Return the rows of each part in the block."""
    found, start = [], 0
    for part in block.parts:
        found.append(slice(start, start + part.length) if part.length else _NONE)
        start += part.length
    return found


def _launched(moving: Sequence[tuple[Tensor, int]], sources: tuple[int, ...]) -> Generator[Any, Any, list[Started]]:
    """Start to send each tensor, and to receive one of as many rows as stand beside it."""
    started: list[Started] = []
    for x, rows in moving:
        b, h, _, *d = x.shape
        shape = (b, rows, h, *d) if d else (b, h, rows)
        sent = x.transpose(1, 2) if d else x
        received = yield Send(sent.contiguous(), Exchange("permute", -1, "sum", sources, shape))
        started.append((received, shape))
    return started


def _arrived(started: Sequence[Started]) -> Generator[Any, Any, list[Tensor]]:
    arrived = []
    for received, shape in started:
        x = yield Receive(received, shape)
        arrived.append(x.transpose(1, 2) if len(shape) > 3 else x)
    return arrived


def _joined(started: Sequence[Sequence[Started]]) -> Generator[Any, Any, list[Tensor]]:
    """Return what has been sent in two parts."""
    first = yield from _arrived(started[0])
    second = yield from _arrived(started[1])
    pairs = zip(first, second, strict=True)
    return [_torch.joined_by_rows(parts) if parts[0].dim() > 3 else torch.cat(parts, 2) for parts in pairs]


@lru_cache(maxsize=1024)
def _permutation(mesh: Mesh, axes: tuple[int, ...], sources: tuple[int, ...]) -> tuple[int, ...]:
    """Return the rank of the mesh from which each receives, given the numbers of those along ``axes``."""
    found = []
    for r in range(mesh.size):
        coordinate = list(mesh.coordinate(r))
        source = sources[number(axes, mesh, coordinate)]
        for a in reversed(axes):
            source, coordinate[a] = divmod(source, mesh.shape[a])
        found.append(mesh.rank(tuple(coordinate)))
    return tuple(found)


class _Softmax:
    """The results of attention to the keys that have arrived so far: sums weighted by exp(score - ``highest``)."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.out = _torch.zeros_by_rows(q, [*q.shape[:3], v.shape[3]], self.wide)
        self.total = q.new_zeros(q.shape[:3], dtype=self.wide)
        self.highest = q.new_full(q.shape[:3], -math.inf, dtype=self.wide)

    def add(self, rows: slice, out: Tensor, lse: Tensor, mask: Tensor | None) -> None:
        """Add the results of a call. A row that the mask lets read nothing there adds nothing."""
        if mask is not None:
            nothing = ~mask.any(-1) if mask.dtype == torch.bool else (mask == -math.inf).all(-1)
            lse = lse.masked_fill(nothing, -math.inf)
        before, total = self.highest[:, :, rows], self.total[:, :, rows]
        highest = torch.maximum(before, lse)
        shift = highest.masked_fill(highest == -math.inf, 0)
        kept, added = before.sub(shift).exp_(), lse.sub(shift).exp_()
        self.out[:, :, rows].mul_(kept.unsqueeze(-1)).add_(out.to(self.wide).mul_(added.unsqueeze(-1)))
        total.mul_(kept).add_(added)
        before.copy_(highest)

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        nothing = self.total == 0
        total = self.total.masked_fill_(nothing, 1)
        lse = total.log().add_(self.highest).masked_fill_(nothing, 0)
        return self.out.div_(total.unsqueeze(-1)).to(dtype), lse


def _attending(
    rank: Rank,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    length: int,
    axes: Sequence[int],
    **options: Any,
) -> Ring:
    place = _Place.of(rank, length, axes, options)
    dtype = q.dtype
    q, k, v = yield from place.to_zigzag((q, k, v))
    softmax, block = _Softmax(q, v), [k, v]
    for distance in range(place.ways):
        there, last = place.at(distance), distance + 1 == place.ways
        coming = [] if last else (yield from place.send((k, v), distance + 1))
        columns = place.columns(mask, there)
        for p in place.pieces(there):
            found = torch.ops.autopar.attention(
                q[:, :, p.rows], block[0][:, :, p.keys], block[1][:, :, p.keys], columns, seed, **p.options
            )
            out, lse = found
            softmax.add(p.rows, out, lse, columns)
            del found, out, lse
        block = yield from _arrived(coming)
    del q, k, v, block
    return tuple((yield from place.to_shards(softmax.result(dtype))))


def _differentiating(
    rank: Rank,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None = None,
    *,
    length: int,
    axes: Sequence[int],
    **options: Any,
) -> Ring:
    place = _Place.of(rank, length, axes, options)
    grad_out, q, k, v, out, lse = yield from place.to_zigzag((grad_out, q, k, v, out, lse))
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (_torch.zeros_by_rows(x, x.shape, wide) for x in (q, k, v))
    block: list[Tensor] = [k, v]
    returning: list[Started] = []
    for distance in range(place.ways):
        there, last = place.at(distance), distance + 1 == place.ways
        coming = [] if last else (yield from place.send((k, v), distance + 1))
        columns, pieces = place.columns(mask, there), place.pieces(there)
        made: list[Tensor] = []
        if not distance:
            made = [dk, dv]
        elif [p.keys for p in pieces] != [_ALL]:
            made = [_torch.zeros_by_rows(x, x.shape, wide) for x in block]
        for p in pieces:
            # No name is left that would keep memory until the end of the ring.
            found = torch.ops.autopar.attention_backward(
                *(x[:, :, p.rows] for x in (grad_out, q)),
                *(x[:, :, p.keys] for x in block),
                columns,
                *(x[:, :, p.rows] for x in (out, lse)),
                seed,
                **p.options,
            )
            _add((dq,), found[:1], p.rows)
            _add(made, found[1:], p.keys)
            made = made or list(found[1:])
            del found
        _add((dk, dv), (yield from _arrived(returning)), _ALL)
        returning = []
        if distance:
            returning = yield from place.send_back([x.to(k.dtype) for x in made], distance)
        del made
        block = yield from _arrived(coming)
    dtype = out.dtype
    del grad_out, q, k, v, out, lse, block
    _add((dk, dv), (yield from _arrived(returning)), _ALL)
    return tuple((yield from place.to_shards([x.to(dtype) for x in (dq, dk, dv)])))


def _add(gradients: Sequence[Tensor], parts: Sequence[Tensor], rows: slice) -> None:
    """Add parts to the gradients of these rows, or of the first of them: of another rank's keys not all are read."""
    for total, part in zip(gradients, parts, strict=False):
        total[:, :, rows][:, :, : part.shape[2]] += part


RING_ATTENTION: Mapping[Callable[..., Any], Callable[..., Ring]] = {
    ring_attention: _attending,
    ring_attention_backward: _differentiating,
}
"""The ring of each function."""
