"""Exchange the rows of the neighbours' shards that windows along a cut dim read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from autopar.spmd.collectives import Pending, _carried, _launch, _unpack_permuted
from autopar.spmd.ranks import Exchange, Rank


def shift(rank: Rank, x: Tensor, dim: int, axis: int, rows: int, towards: int) -> Pending:
    """Send the last ``rows`` of ``dim`` to the next rank along ``axis`` in a ring (``towards=1``), or the first to the
    previous rank (``-1``)."""
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
    rank: Rank,
    x: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    dim: int,
    axis: int,
    windows: Sequence[tuple[int, int]],
    n: int,
    fill: float,
) -> Tensor:
    """Return this rank's window in one copy: its own rows ``x`` between those of its neighbours, padded beyond the
    ends.

    Returns ``x`` itself if the window is exactly that.
    """
    at, ways = rank.coordinate[axis], rank.mesh.shape[axis]
    own_start = at * -(-n // ways)
    start, stop = windows[at]
    first, last = max(start, 0), min(stop, n)
    parts, held = [], own_start - (before.shape[dim] if before is not None else 0)
    for rows in (before, x, after):
        if rows is not None:
            low, high = max(first, held), min(last, held + rows.shape[dim])
            if low < high:
                parts.append(rows.narrow(dim, low - held, high - low))
            held += rows.shape[dim]
    shape, value = list(x.shape), fill if math.isfinite(fill) else _lowest(x)
    for place, missing in ((0, first - start), (len(parts), stop - last)):
        if missing:
            shape[dim] = missing
            parts.insert(place if place == 0 else len(parts), x.new_full(shape, value))
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


def _lowest(x: Tensor) -> float:
    """Return a value below all others, for integers too."""
    return -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
