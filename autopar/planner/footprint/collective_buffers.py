"""Bytes that a collective holds around the exchange itself: what it packs, receives and unpacks, as ``spmd`` does it.

The wire carries contiguous buffers of equal size, so a rank with a short shard pads a copy of it. What is sent stays
alive until the collective is waited for: the packed buffer, or the tensor itself if nothing had to be packed. What is
received becomes the result, or is copied into it. All sizes are those of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir import TensorMeta
from autopar.mesh import Mesh
from autopar.planner.footprint.layouts import Layout, contiguous, with_length
from autopar.sharding import ShardingSpec, Step

REDUCED_BYTES = {
    "bool": 4,
    "int16": 4,
    "uint16": 4,
    "uint32": 8,
    "uint64": 8,
    "float8_e4m3fn": 4,
    "float8_e5m2": 4,
}
"""Bytes of an element while it is reduced, for dtypes that back ends cannot reduce."""


@dataclass(frozen=True)
class Packing:
    """Bytes of a collective on one rank.

    Args:
        sent: of a buffer made for sending, which lives until the wait; 0 if the tensor itself is sent.
        launch: held besides what is sent and received, while the first is made and the second begins.
        received: held from the launch on.
        unpacked: of the result if it is copied from what was received, which is then freed.
        keeps_source: whether the tensor itself is sent, and so lives until the wait.
    """

    sent: int
    launch: int
    received: int
    unpacked: int
    keeps_source: bool


def packing(step: Step, meta: TensorMeta, mesh: Mesh, x: Layout, after: tuple[int, ...]) -> Packing:
    """Return the bytes that ``step`` holds.

    Args:
        x: the rank's shard.
        after: the shape of the shard that it holds afterwards.
    """
    kinds = {
        "all_gather": _all_gather,
        "all_to_all": _all_to_all,
        "all_reduce": _all_reduce,
        "reduce_scatter": _reduce_scatter,
    }
    if step.kind in kinds:
        return kinds[step.kind](step, meta, mesh, x, after)
    size = x.numel * meta.itemsize
    sent = 0 if x.is_contiguous else size
    return Packing(sent, 0, math.prod(after) * meta.itemsize, 0, keeps_source=not sent)


@dataclass(frozen=True)
class BucketPacking:
    """Bytes on one rank of a collective of several tensors, which always makes a buffer for sending.

    Args:
        sent, launch, received: as in ``Packing``.
        unpacked: of each result that is copied out of what was received; 0 for one that is a view of it.
    """

    sent: int
    launch: int
    received: int
    unpacked: tuple[int, ...]


def bucket_packing(
    steps: Sequence[Step],
    metas: Sequence[TensorMeta],
    mesh: Mesh,
    shards: Sequence[Layout],
    after: Sequence[tuple[int, ...]],
) -> BucketPacking:
    """Return the bytes that a bucket holds; shards and shapes are as in ``packing``.

    All tensors have one dtype, a floating-point one.
    """
    each = [_in_bucket(*one) for one in zip(steps, metas, [mesh] * len(steps), shards, after, strict=True)]
    sent = sum(one.sent for one in each)
    launch, received = sum(one.launch for one in each), sum(one.received for one in each)
    in_place = steps[0].kind == "all_reduce"
    return BucketPacking(0 if in_place else sent, launch, received, tuple(one.unpacked for one in each))


def _in_bucket(step: Step, meta: TensorMeta, mesh: Mesh, x: Layout, after: tuple[int, ...]) -> Packing:
    """Return the share of one tensor. ``launch`` is a copy of it if the buffer cannot be filled from it directly."""
    size = x.numel * meta.itemsize
    if step.kind == "all_reduce":
        return Packing(size, 0 if x.is_contiguous else size, size, 0, keeps_source=False)
    group_size, result = mesh.shape[step.axis], math.prod(after) * meta.itemsize
    if step.kind == "reduce_scatter":
        one = _reduce_scatter(step, meta, mesh, x, after)
        return Packing(one.received * group_size, one.sent, one.received, one.unpacked, keeps_source=False)
    part = -(-after[step.dim] // group_size)
    wire = _numel(after, step.dim, part) * meta.itemsize
    copied = wire if x.shape[step.dim] != part or not x.is_contiguous else 0
    return Packing(wire, copied, group_size * wire, result, keeps_source=False)


def _all_gather(step: Step, meta: TensorMeta, mesh: Mesh, x: Layout, after: tuple[int, ...]) -> Packing:
    group_size, length = mesh.shape[step.axis], after[step.dim]
    part = -(-length // group_size)
    wire = _numel(after, step.dim, part) * meta.itemsize
    packed = wire if x.shape[step.dim] != part or not x.is_contiguous else 0
    joins = step.dim != 0 and (_moves_data(after[: step.dim], group_size) or part * group_size != length)
    joined = math.prod(after) * meta.itemsize if joins else 0
    return Packing(packed, 0, group_size * wire, joined, keeps_source=not packed)


def _all_to_all(step: Step, meta: TensorMeta, mesh: Mesh, x: Layout, after: tuple[int, ...]) -> Packing:
    group_size, gathered = mesh.shape[step.axis], after[step.dim]
    part = -(-gathered // group_size)
    padded = 0
    if x.shape[step.dim] != part:
        x = contiguous(with_length(x.shape, step.dim, part))
        padded = x.numel * meta.itemsize
    packed, launch = _stacked(x, step.to_dim, group_size, meta.itemsize)
    received = packed or x.numel * meta.itemsize
    cut = after[step.to_dim] != -(-x.shape[step.to_dim] // group_size)
    joined = _moves_data(after[: step.dim], group_size) or cut or part * group_size != gathered
    result = math.prod(after) * meta.itemsize if joined else 0
    if packed:
        return Packing(packed, max(padded + launch - received, 0), received, result, keeps_source=False)
    return Packing(padded, 0, received, result, keeps_source=not padded)


def _all_reduce(step: Step, meta: TensorMeta, mesh: Mesh, x: Layout, after: tuple[int, ...]) -> Packing:
    wide = REDUCED_BYTES.get(meta.dtype, meta.itemsize)
    size = x.numel * wide
    converted = wide != meta.itemsize
    launch = size if converted or not x.is_contiguous else 0
    mean = size if step.reduction == "avg" and mesh.shape[step.axis] > 1 else 0
    return Packing(0, launch, size, mean or (x.numel * meta.itemsize if converted else 0), keeps_source=False)


def _reduce_scatter(step: Step, meta: TensorMeta, mesh: Mesh, x: Layout, after: tuple[int, ...]) -> Packing:
    group_size, wide = mesh.shape[step.axis], REDUCED_BYTES.get(meta.dtype, meta.itemsize)
    size = x.numel * wide
    converted = wide != meta.itemsize
    sent, launch = _stacked(x, step.dim, group_size, wide)
    if converted:
        sent, launch = sent or size, launch + (size if sent else 0)
    received = (sent or size) // group_size
    result = math.prod(after) * meta.itemsize
    short = after[step.dim] != -(-x.shape[step.dim] // group_size) and _moves_data(x.shape[: step.dim], group_size)
    copied = short or converted or (step.reduction == "avg" and group_size > 1)
    return Packing(sent, max(launch - received, 0), received, result if copied else 0, keeps_source=not sent)


def _stacked(x: Layout, dim: int, group_size: int, itemsize: int) -> tuple[int, int]:
    """Return the bytes of ``x`` cut into ``group_size`` parts along ``dim`` and stacked, and those held while this is
    made."""
    part = -(-x.shape[dim] // group_size)
    size = _numel(x.shape, dim, part * group_size) * itemsize
    padded = x.shape[dim] != part * group_size
    if padded:
        return size, size if _moves_data(x.shape[:dim], group_size) else 0
    if x.is_contiguous and not _moves_data(x.shape[:dim], group_size):
        return 0, 0
    return size, 0


def _numel(shape: tuple[int, ...], dim: int, n: int) -> int:
    """Return the number of elements with length ``n`` along ``dim``."""
    return math.prod(with_length(shape, dim, n))


def needs_packing(step: Step, after: ShardingSpec, meta: TensorMeta, mesh: Mesh) -> bool:
    """Whether a gather or a reduce-scatter of one contiguous tensor by itself packs or unpacks it."""
    return _moves_data(after.local_shape(meta.shape, mesh)[: step.dim], mesh.shape[step.axis])


def _moves_data(before: tuple[int, ...], group_size: int) -> bool:
    """Whether stacking or joining parts along a dim moves data: not if all dims before it have length 1."""
    return group_size > 1 and math.prod(before) != 1


SUMMED = frozenset({"sum", "max", "min"})
"""Reductions that may be done in place, and for several tensors together."""
