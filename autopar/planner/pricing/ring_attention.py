"""What ranks send each other for attention on a ring, as ``spmd.ring_attention`` sends it, and what else it costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.ir import Node, TensorMeta
from autopar.mesh import Mesh
from autopar.planner.footprint.local_op import wide
from autopar.planner.footprint.op_work import local_bytes
from autopar.sharding import ShardingSpec, Strategy
from autopar.sharding.strategy import ring_axes
from autopar.sharding.zigzag import holder


@dataclass(frozen=True)
class RingTraffic:
    """Bytes of one attention on a ring.

    Args:
        ways: the ranks on the ring, and so the blocks that each of them attends.
        keys: position of the keys among the operands.
        there, back: rows of operands and of results that change ranks, so that causal attention is balanced.
        block: what a rank sends while it attends one block: keys and values, and in the backward gradients as well.
        passes: what is read and written to bring rows into another order and to sum what the blocks give.
    """

    axes: tuple[int, ...]
    ways: int
    keys: int
    there: int
    back: int
    block: int
    passes: int


def ring_traffic(node: Node, metas: Sequence[TensorMeta], option: Strategy, mesh: Mesh) -> RingTraffic | None:
    """Return what an attention on a ring sends, or None for any other op."""
    axes = ring_axes(option)
    if not axes:
        return None
    ways, backward = math.prod(mesh.shape[a] for a in axes), node.packet.endswith("_backward")
    operands = list(zip(metas, option.inputs, strict=True))
    results = [(m, s) for m, s in zip(node.outputs, option.outputs, strict=True) if m is not None and s is not None]
    keys = 2 if backward else 1
    moves = bool(node.kwarg("is_causal"))
    # Of the two halves of each rank's shard, those that go elsewhere.
    going = max(sum(holder(h, ways) != i for h in (2 * i, 2 * i + 1)) for i in range(ways)) if moves else 0
    there, back = (_bytes(tensors, axes, mesh) * going // 2 for tensors in (operands, results))
    block = _bytes(operands[keys : keys + 2], axes, mesh)
    passes = 4 * (there + back)
    for meta, spec in results if backward else results[:1]:
        nbytes = local_bytes(meta, spec, mesh)
        passes += ways * (nbytes + 2 * nbytes // meta.itemsize * wide(meta.itemsize))
    return RingTraffic(axes, ways, keys, there, back, block * (2 if backward else 1), passes)


def _bytes(tensors: Iterable[tuple[TensorMeta, ShardingSpec]], axes: Sequence[int], mesh: Mesh) -> int:
    """Return the bytes of the shards of those tensors that ``axes`` cut."""
    cut = ((m, s) for m, s in tensors if any(a in dim for dim in s.dims for a in axes))
    return sum(local_bytes(m, s, mesh) for m, s in cut)
