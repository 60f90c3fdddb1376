"""Causal attention of queries that are cut by their sequence, in which ranks lend rows to their mirrors.

Keys and values are whole. While the lent rows are on their way a rank attends those that it keeps, and then its guests,
whose results it sends back. Rows attend keys from the first to that of the last row, so each call is one kernel whose
causal mask ends in the lower right corner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar import _torch
from autopar.mesh import Mesh
from autopar.sharding.loan import Share, mirrored, share
from autopar.spmd.ranks import Exchange, Rank
from autopar.spmd.rings import Receive, Ring, Send, run_ring


def balanced_attention(
    rank: Rank,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: None = None,
    seed: Tensor | None = None,
    *,
    length: int,
    axes: Sequence[int],
    lent: Sequence[int],
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return ``autopar.attention`` of this rank's queries.

    Args:
        q: [b, h, s / n, d], this rank's rows; k [b, g, s, d] and v [b, g, s, e] are whole.
        length: of the whole sequence, which ``axes`` cut.
        lent: the number of rows that each rank along ``axes`` lends to its mirror.
        options: those of ``autopar.attention``.
    """
    ring = _attending(rank, q, k, v, mask, seed, length=length, axes=axes, lent=lent, **options)
    found: tuple[Tensor, Tensor] = run_ring(rank, ring)
    return found


def balanced_attention_backward(
    rank: Rank,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None = None,
    *,
    length: int,
    axes: Sequence[int],
    lent: Sequence[int],
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``balanced_attention``; those of k and v are this rank's part of their sums."""
    given = (grad_out, q, k, v, mask, out, lse, seed)
    ring = _differentiating(rank, *given, length=length, axes=axes, lent=lent, **options)
    found: tuple[Tensor, Tensor, Tensor] = run_ring(rank, ring)
    return found


def _attending(
    rank: Rank,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: None = None,
    seed: Tensor | None = None,
    *,
    length: int,
    axes: Sequence[int],
    lent: Sequence[int],
    **options: Any,
) -> Ring:
    own = share(length, axes, lent, rank.mesh, rank.coordinate)
    sources = _mirrors(rank.mesh, tuple(axes))

    def attend(rows: Tensor, first: int) -> tuple[Tensor, Tensor]:
        stop = first + rows.shape[2]
        placed = _placed(options, first)
        found: tuple[Tensor, Tensor] = torch.ops.autopar.attention(
            rows, k[:, :, :stop], v[:, :, :stop], mask, seed, **placed
        )
        return found

    coming = yield _send(q[:, :, own.kept :], own.guests, sources)
    kept = attend(q[:, :, : own.kept], own.start)
    guests = yield from _received(coming, _rows(q, own.guests))
    made = attend(guests, own.first)
    del coming, guests
    returned = yield from _returned(made, own, sources)
    return tuple(_joined(mine, back) for mine, back in zip(kept, returned, strict=True))


def _differentiating(
    rank: Rank,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None = None,
    *,
    length: int,
    axes: Sequence[int],
    lent: Sequence[int],
    **options: Any,
) -> Ring:
    own = share(length, axes, lent, rank.mesh, rank.coordinate)
    sources = _mirrors(rank.mesh, tuple(axes))
    widths = [grad_out.shape[3], q.shape[3], out.shape[3]]

    def attend(rows: Sequence[Tensor], first: int) -> tuple[Tensor, Tensor, Tensor]:
        grad, queries, made, logs = rows
        stop = first + queries.shape[2]
        placed = _placed(options, first)
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.autopar.attention_backward(
            grad, queries, k[:, :, :stop], v[:, :, :stop], mask, made, logs, seed, **placed
        )
        return found

    going = torch.cat([x[:, :, own.kept :].transpose(1, 2) for x in (grad_out, q, out)], -1).transpose(1, 2)
    rows = yield _send(going, own.guests, sources)
    logs = yield _send(lse[:, :, own.kept :], own.guests, sources)
    del going
    dq, *kept = attend([x[:, :, : own.kept] for x in (grad_out, q, out, lse)], own.start)
    parts = (yield from _received(rows, (*q.shape[:2], own.guests, sum(widths)))).split(widths, -1)
    logs = yield from _received(logs, _rows(lse, own.guests))
    guest, *lent_ = attend([*map(_torch.by_rows, parts), logs], own.first)
    del rows, parts, logs
    (returned,) = yield from _returned((guest,), own, sources)
    dk, dv = (_summed(a, b, length) for a, b in zip(kept, lent_, strict=True))
    return _joined(dq, returned), dk, dv


def _placed(options: Mapping[str, Any], first: int) -> dict[str, Any]:
    """Return the options of a call whose queries begin at row ``first``, and whose keys at the first one."""
    batch, head = options.get("offset", (0, 0))[:2]
    return {**options, "offset": [batch, head, first, 0]}


def _returned(made: Sequence[Tensor], own: Share, sources: tuple[int, ...]) -> Ring:
    """Return the guests' results, and receive those of the rows that this rank has lent."""
    coming = []
    for x in made:
        coming.append((yield _send(x, own.lent, sources)))  # noqa: PERF401  a comprehension cannot yield
    received = []
    for x, started in zip(made, coming, strict=True):
        received.append((yield from _received(started, _rows(x, own.lent))))
    return received


def _send(x: Tensor, received: int, sources: tuple[int, ...]) -> Send:
    """Return the request to send [b, h, rows, ...], and to receive other rows."""
    sent = x.transpose(1, 2) if x.dim() > 3 else x
    return Send(sent.contiguous(), Exchange("permute", -1, "sum", sources, _sent(_rows(x, received))))


def _received(started: Tensor, shape: tuple[int, ...]) -> Ring:
    """Return [b, h, rows, ...] of this shape."""
    found = yield Receive(started, _sent(shape))
    return found.transpose(1, 2) if len(shape) > 3 else found


def _sent(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which rows are sent: [b, rows, h, d] for [b, h, rows, d], and [b, h, rows] as it is."""
    b, h, rows, *d = shape
    return (b, rows, h, *d) if d else shape


def _rows(x: Tensor, rows: int) -> tuple[int, ...]:
    """Return the shape of ``x`` with this many rows."""
    return (*x.shape[:2], rows, *x.shape[3:])


def _joined(kept: Tensor, returned: Tensor) -> Tensor:
    if not returned.shape[2]:
        return kept
    return _torch.joined_by_rows([kept, returned]) if kept.dim() > 3 else torch.cat([kept, returned], 2)


def _summed(one: Tensor, other: Tensor, rows: int) -> Tensor:
    """Return the sum of two gradients of the first of ``rows`` keys, with zeros for the rest."""
    longer, shorter = (one, other) if one.shape[2] >= other.shape[2] else (other, one)
    longer[:, :, : shorter.shape[2]] += shorter
    if longer.shape[2] == rows:
        return longer
    b, h, _, d = longer.shape
    whole = _torch.zeros_by_rows(longer, [b, h, rows, d])
    whole[:, :, : longer.shape[2]] = longer
    return whole


@lru_cache(maxsize=256)
def _mirrors(mesh: Mesh, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the mirror of each rank of the mesh."""
    return tuple(mesh.rank(mirrored(axes, mesh, mesh.coordinate(r))) for r in range(mesh.size))


LENDING: Mapping[Callable[..., Any], Callable[..., Ring]] = {
    balanced_attention: _attending,
    balanced_attention_backward: _differentiating,
}
"""The ring of each function."""
