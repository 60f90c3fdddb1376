"""Collectives that carry several tensors in one launch.

The tensors are packed into a flat buffer. After a reduction the results are views of its parts; after a gather, which
groups tensors by rank, they are copied out. Short shards are padded as in a collective of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.mesh import Mesh
from autopar.sharding.redistribution import Step
from autopar.sharding.spec import Reduction, ShardingSpec, chunk
from autopar.spmd import collectives
from autopar.spmd.collectives import Pending, _joined, _launch, _padded, _rows, step_call
from autopar.spmd.halos import shift
from autopar.spmd.ranks import Exchange, Rank


def all_reduce_bucket(rank: Rank, tensors: Sequence[Tensor], axis: int, reduction: Reduction = "sum") -> Pending:
    """Reduce each of ``tensors``, all of one dtype, over the ranks along ``axis``."""
    flat = torch.cat([x.reshape(-1) for x in tensors])
    shapes = tuple(tuple(x.shape) for x in tensors)
    return _launch(rank, flat, Exchange("all_reduce", axis, reduction, in_place=True), partial(_parts, shapes=shapes))


def reduce_scatter_bucket(
    rank: Rank, tensors: Sequence[Tensor], dims: Sequence[int], axis: int, reduction: Reduction = "sum"
) -> Pending:
    """Reduce each of ``tensors`` over the ranks along ``axis``, which becomes the innermost cut of its dim."""
    size, here = rank.mesh.shape[axis], rank.coordinate[axis]
    rows = [_rows(x, dim, size) for x, dim in zip(tensors, dims, strict=True)]
    mine = tuple(chunk(x.shape[dim], size, here)[1] for x, dim in zip(tensors, dims, strict=True))
    shapes = tuple(tuple(row.shape[1:]) for row in rows)
    flat = torch.cat([row.flatten(1) for row in rows], 1)
    unpack = partial(_unpack_scattered, shapes=shapes, dims=tuple(dims), mine=mine)
    return _launch(rank, flat, Exchange("reduce_scatter", axis, reduction), unpack)


def all_gather_bucket(
    rank: Rank, tensors: Sequence[Tensor], dims: Sequence[int], axis: int, lengths: Sequence[int]
) -> Pending:
    """Undo the innermost cut, by ``axis``, of a dim of each of ``tensors``.

    Args:
        lengths: length of that dim of each tensor after the step, the same on all ranks of the group.
    """
    size = rank.mesh.shape[axis]
    padded = [_padded(x, dim, -(-n // size)) for x, dim, n in zip(tensors, dims, lengths, strict=True)]
    shapes = tuple(tuple(x.shape) for x in padded)
    flat = torch.cat([x.reshape(-1) for x in padded]).unsqueeze(0)
    unpack = partial(_unpack_gathered, shapes=shapes, dims=tuple(dims), lengths=tuple(lengths))
    return _launch(rank, flat, Exchange("all_gather", axis), unpack)


def bucket_call(
    steps: Sequence[Step], specs: Sequence[ShardingSpec], shapes: Sequence[Sequence[int]], mesh: Mesh
) -> tuple[Callable[..., Pending], dict[str, Any]]:
    """Return the call as ``step_call`` does, for several tensors whose steps share kind, axis and reduction.

    Args:
        specs, shapes: spec before the step, and global shape, of each tensor.
    """
    first, dims = steps[0], [step.dim for step in steps]
    if first.kind == "all_reduce":
        return all_reduce_bucket, {"axis": first.axis, "reduction": first.reduction}
    if first.kind == "reduce_scatter":
        return reduce_scatter_bucket, {"dims": dims, "axis": first.axis, "reduction": first.reduction}
    each = (step_call(*one, mesh)[1]["length"] for one in zip(steps, specs, shapes, strict=True))
    return all_gather_bucket, {"dims": dims, "axis": first.axis, "lengths": tuple(each)}


def _parts(flat: Tensor, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Return the parts of a flat tensor as views."""
    sizes = [torch.Size(s).numel() for s in shapes]
    return tuple(part.view(s) for part, s in zip(torch.split(flat, sizes), shapes, strict=True))


def _unpack_scattered(
    buffer: Tensor, shapes: Sequence[Sequence[int]], dims: Sequence[int], mine: Sequence[int]
) -> tuple[Tensor, ...]:
    parts = zip(_parts(buffer.view(-1), shapes), dims, mine, strict=True)
    return tuple(part.narrow(dim, 0, n).contiguous() for part, dim, n in parts)


def _unpack_gathered(
    buffer: Tensor, shapes: Sequence[Sequence[int]], dims: Sequence[int], lengths: Sequence[int]
) -> tuple[Tensor, ...]:
    sizes = [torch.Size(s).numel() for s in shapes]
    rows = zip(torch.split(buffer, sizes, 1), shapes, dims, lengths, strict=True)
    return tuple(_joined(row.view(row.shape[0], *s), dim, n) for row, s, dim, n in rows)


COLLECTIVES = collectives.COLLECTIVES | {all_reduce_bucket, reduce_scatter_bucket, all_gather_bucket, shift}
"""All functions that exchange data between ranks, with one tensor or several."""
