"""Exchange of the rows that windows along a cut dim read of the neighbours' shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from autopar.spmd.collectives import Pending, _carried, _launch, _unpack_permuted
from autopar.spmd.ranks import Exchange, Rank


def shift(rank: Rank, x: Tensor, dim: int, axis: int, rows: int, towards: int) -> Pending:
    """Send the last ``rows`` of ``dim`` to the next rank along ``axis`` (``towards=1``), or the first to the one
    before (``-1``), in a ring."""
    start = x.shape[dim] - rows if towards > 0 else 0
    buffer = _carried(x.narrow(dim, start, rows)).contiguous()
    sources = []
    for other in range(rank.mesh.size):
        coordinate = list(rank.mesh.coordinate(other))
        coordinate[axis] = (coordinate[axis] - towards) % rank.mesh.shape[axis]
        sources.append(rank.mesh.rank(tuple(coordinate)))
    exchange = Exchange("permute", -1, "sum", tuple(sources), tuple(buffer.shape))
    return _launch(rank, buffer, exchange, partial(_unpack_permuted, shape=tuple(buffer.shape), dtype=x.dtype))


def window(
    rank: Rank, x: Tensor, before: Tensor | None, after: Tensor | None, dim: int, axis: int,
    windows: Sequence[tuple[int, int]], n: int, fill: float,
) -> Tensor:  # fmt: skip
    """This rank's window: its own rows ``x`` between those of its neighbours, padded beyond the dim's ends."""
    at, ways = rank.coordinate[axis], rank.mesh.shape[axis]
    size = -(-n // ways)
    own_start = at * size
    parts = [*([before] if before is not None else []), x, *([after] if after is not None else [])]
    held = own_start - (before.shape[dim] if before is not None else 0)
    joined = torch.cat(parts, dim) if len(parts) > 1 else x
    start, stop = windows[at]
    first, last = max(start, 0), min(stop, n)
    inner = joined.narrow(dim, first - held, last - first)
    if (first, last) == (start, stop):
        return inner.contiguous()
    pads = [0, 0] * (x.ndim - 1 - dim) + [first - start, stop - last]
    return torch.nn.functional.pad(inner, pads, value=fill if math.isfinite(fill) else _lowest(x))


def _lowest(x: Tensor) -> float:
    """Below every number, of integers too."""
    return -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
