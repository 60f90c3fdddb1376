"""Bytes that a collective holds around the exchange itself: what it packs, receives and unpacks. As ``spmd`` does it.

The wire carries contiguous buffers of equal size: a rank whose shard is short pads a copy of it, and then holds no more
than the fullest rank and, once more, its own shard. What is sent stays alive until the collective is waited for: the
packed buffer, or the tensor itself where nothing had to be packed. What is received becomes the result, or is copied
into it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir import TensorMeta
from autopar.mesh import Mesh
from autopar.planner.layouts import Layout
from autopar.sharding import ShardingSpec, Step

REDUCED_BYTES = {
    "bool": 4, "int16": 4, "uint16": 4, "uint32": 8, "uint64": 8, "float8_e4m3fn": 4, "float8_e5m2": 4,
}  # fmt: skip
"""Of an element while it is reduced, for dtypes that backends cannot reduce."""


@dataclass(frozen=True)
class Packing:
    """Bytes on the fullest rank.

    Args:
        sent: of a buffer made to be sent, which lives until the wait; 0 where the tensor itself is sent.
        launch: held besides, while the buffer is made.
        received: held from the launch on.
        unpacked: of the result where it is another tensor than what was received, which goes when it is made.
        keeps_source: the tensor itself is sent, and lives until the wait.
    """

    sent: int
    launch: int
    received: int
    unpacked: int
    keeps_source: bool


def packing(step: Step, before: ShardingSpec, meta: TensorMeta, mesh: Mesh, x: Layout) -> Packing:
    """What ``step`` holds; ``x`` is the shard on the fullest rank."""
    kinds = {
        "all_gather": _all_gather, "all_to_all": _all_to_all, "all_reduce": _all_reduce,
        "reduce_scatter": _reduce_scatter,
    }  # fmt: skip
    if step.kind in kinds:
        return kinds[step.kind](step, before, meta, mesh, x)
    size = x.numel * meta.itemsize
    sent = 0 if x.is_contiguous else size
    result = math.prod(step.apply(before).local_shape(meta.shape, mesh)) * meta.itemsize
    return Packing(sent, 0, max(size, result), 0, keeps_source=not sent)


@dataclass(frozen=True)
class BucketPacking:
    """Bytes of a collective of several tensors on the fullest rank, which always makes a buffer to be sent.

    Args:
        sent, launch, received: as in ``Packing``.
        unpacked: of each result that is copied out of what was received; 0 for one that is a view of it.
    """

    sent: int
    launch: int
    received: int
    unpacked: tuple[int, ...]


def bucket_packing(
    steps: Sequence[Step], specs: Sequence[ShardingSpec], metas: Sequence[TensorMeta], mesh: Mesh,
    shards: Sequence[Layout],
) -> BucketPacking:  # fmt: skip
    """What a bucket holds, whose tensors have one dtype, a floating-point one."""
    each = [_in_bucket(*one) for one in zip(steps, specs, metas, [mesh] * len(steps), shards, strict=True)]
    sent = sum(one.sent for one in each)
    launch, received = sum(one.launch for one in each), sum(one.received for one in each)
    in_place = steps[0].kind == "all_reduce"
    return BucketPacking(0 if in_place else sent, launch, received, tuple(one.unpacked for one in each))


def _in_bucket(step: Step, before: ShardingSpec, meta: TensorMeta, mesh: Mesh, x: Layout) -> Packing:
    """The share of one tensor. ``launch`` is a copy of it, made where the buffer cannot be filled from it directly."""
    size = x.numel * meta.itemsize
    if step.kind == "all_reduce":
        return Packing(size, 0 if x.is_contiguous else size, size, 0, keeps_source=False)
    ways = mesh.shape[step.axis]
    after = step.apply(before).local_shape(meta.shape, mesh)
    result = math.prod(after) * meta.itemsize
    if step.kind == "reduce_scatter":
        sent, launch = _rows(x, step.dim, ways, meta.itemsize)
        short = x.shape[step.dim] % ways != 0 and _copied(x.shape[: step.dim])
        return Packing(sent or size, sent + launch, (sent or size) // ways, result if short else 0, keeps_source=False)
    part = -(-after[step.dim] // ways)
    wire = x.numel // max(1, x.shape[step.dim]) * part * meta.itemsize
    packed = 0 if x.is_contiguous else wire
    # A rank whose shard is short pads a copy, and then holds as much as the fullest and, once more, its own shard.
    padded = wire // max(1, part) * (after[step.dim] % part) if after[step.dim] % ways else 0
    return Packing(wire, max(packed, padded), ways * wire, result, keeps_source=False)


def _all_gather(step: Step, before: ShardingSpec, meta: TensorMeta, mesh: Mesh, x: Layout) -> Packing:
    ways, length = mesh.shape[step.axis], step.apply(before).local_shape(meta.shape, mesh)[step.dim]
    rest = x.numel // max(1, x.shape[step.dim]) * meta.itemsize
    part = -(-length // ways)
    packed = 0 if x.is_contiguous else part * rest
    joined = length * rest if _copied(x.shape[: step.dim]) else 0
    padded = (length % part) * rest if length % ways else 0
    return Packing(packed or padded, 0, ways * part * rest, joined, keeps_source=not packed)


def _all_to_all(step: Step, before: ShardingSpec, meta: TensorMeta, mesh: Mesh, x: Layout) -> Packing:
    ways, after = mesh.shape[step.axis], step.apply(before).local_shape(meta.shape, mesh)
    gathered = after[step.dim]
    part = -(-gathered // ways)
    packed, launch = _rows(x, step.to_dim, ways, meta.itemsize)
    received = packed or x.numel * meta.itemsize
    padded = (gathered % part) * (x.numel // max(1, x.shape[step.dim])) * meta.itemsize if gathered % ways else 0
    cut = x.shape[step.to_dim] % ways != 0
    joined = _copied(after[: step.dim]) or cut or gathered % ways != 0
    result = math.prod(after) * meta.itemsize if joined else 0
    if packed:
        return Packing(packed, launch + padded, received, result, keeps_source=False)
    return Packing(padded, 0, received, result, keeps_source=True)


def _all_reduce(step: Step, before: ShardingSpec, meta: TensorMeta, mesh: Mesh, x: Layout) -> Packing:
    wide = REDUCED_BYTES.get(meta.dtype, meta.itemsize)
    size = x.numel * wide
    converted = wide != meta.itemsize
    launch = size if converted or not x.is_contiguous else 0
    mean = size if step.reduction == "avg" and mesh.shape[step.axis] > 1 else 0
    return Packing(0, launch, size, mean or (x.numel * meta.itemsize if converted else 0), keeps_source=False)


def _reduce_scatter(step: Step, before: ShardingSpec, meta: TensorMeta, mesh: Mesh, x: Layout) -> Packing:
    ways, wide = mesh.shape[step.axis], REDUCED_BYTES.get(meta.dtype, meta.itemsize)
    size = x.numel * wide
    converted = wide != meta.itemsize
    sent, launch = _rows(x, step.dim, ways, wide)
    if converted:
        sent, launch = sent or size, launch + (size if sent else 0)
    received = (sent or size) // ways
    result = math.prod(step.apply(before).local_shape(meta.shape, mesh)) * meta.itemsize
    short = x.shape[step.dim] % ways != 0 and _copied(x.shape[: step.dim])
    copied = short or converted or (step.reduction == "avg" and ways > 1)
    return Packing(sent, launch, received, result if copied else 0, keeps_source=not sent)


def _rows(x: Layout, dim: int, ways: int, itemsize: int) -> tuple[int, int]:
    """(bytes of ``x`` cut ``ways`` ways along ``dim`` and stacked, bytes held besides while that is made)."""
    part = -(-x.shape[dim] // ways)
    size = x.numel // max(1, x.shape[dim]) * part * ways * itemsize
    padded = x.shape[dim] != part * ways
    if padded:
        return size, size if _copied(x.shape[:dim]) else 0
    if x.is_contiguous and not _copied(x.shape[:dim]):
        return 0, 0
    return size, 0


def packs(step: Step, after: ShardingSpec, meta: TensorMeta, mesh: Mesh) -> bool:
    """Whether a gather or a reduce-scatter of one contiguous tensor by itself packs or unpacks it."""
    return _copied(after.local_shape(meta.shape, mesh)[: step.dim])


def _copied(before: tuple[int, ...]) -> bool:
    """Whether stacking or joining along a dim moves data: not where all dims before it have length 1."""
    return math.prod(before) != 1
