"""What an op asks of its device: the kind of kernel, the share of its FLOPs that it executes, and the bytes that it
moves."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache

from autopar.cost_models import ComputeKind
from autopar.ir import Node, TensorMeta
from autopar.mesh import Mesh
from autopar.sharding import ShardingSpec, Strategy

VIEWS = frozenset(
    f"aten.{n}"
    for n in (
        "view",
        "reshape",
        "t",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "unbind",
        "alias",
        "detach",
        "diagonal",
        "as_strided",
        "movedim",
        "unfold",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "view_as_real",
        "view_as_complex",
        "_conj",
    )
)
"""Ops whose result shares the memory of their operand."""

GATHERS = frozenset(
    {"autopar.lookup", "autopar.nll", "aten.embedding", "aten.gather", "aten.index", "aten.index_select", "aten.take"}
)
"""Ops that read from their first operand only what they write."""


def kernel_kind(node: Node, flops: float) -> ComputeKind:
    """Return the curve or roof by which an op with these FLOPs is priced."""
    if node.packet in VIEWS:
        return "view"
    if not flops:
        return "memory"
    return "attention" if "attention" in node.packet else "matmul"


MASKED_BLOCK = 512
"""Keys that attention kernels skip together where a causal mask hides them, as torch's kernels for CPUs do."""


def executed_share(node: Node) -> float:
    """Return the share of the op's FLOPs that it executes.

    Attention kernels skip what a causal mask hides, in whole blocks: half of the FLOPs for long rows.
    """
    length = _causal_rows(node)
    return min(1.0, 0.5 + MASKED_BLOCK / 2 / length) if length else 1.0


def hidden_share(node: Node) -> float:
    """Return the share of the op's FLOPs that a causal mask hides: row i needs i + 1 keys of all."""
    length = _causal_rows(node)
    return (length - 1) / (2 * length) if length else 0.0


def _causal_rows(node: Node) -> int:
    """Return the length of the sequence of causal attention; 0 for other ops."""
    if "attention" not in node.packet or not node.kwarg("is_causal"):
        return 0
    return max((m.shape[-2] for m in node.outputs if m and len(m.shape) == 4), default=1)


@lru_cache(maxsize=65536)
def local_bytes(meta: TensorMeta, spec: ShardingSpec, mesh: Mesh) -> int:
    """Return the bytes of the largest shard."""
    return math.prod(meta.local_shape(spec, mesh)) * meta.itemsize


def bytes_moved(
    node: Node,
    option: Strategy,
    metas: Sequence[TensorMeta],
    mesh: Mesh,
    reads: Collection[int] | None = None,
    writes: Collection[int] | None = None,
) -> float:
    """Return the bytes that the op reads and writes on the fullest rank.

    Args:
        metas: of its operands; ``option`` gives their shards.
        reads: positions of the operands that count; None for all.
        writes: positions of the results that count; None for all.
    """
    written = [local_bytes(m, s, mesh) if m and s else 0 for m, s in zip(node.outputs, option.outputs, strict=True)]
    read = [local_bytes(m, s, mesh) for m, s in zip(metas, option.inputs, strict=True)]
    if node.packet in GATHERS and read and not node.kwarg("each"):  # with smoothed labels every class counts
        read[0] = min(read[0], sum(written))
    return float(
        sum(b for i, b in enumerate(read) if reads is None or i in reads)
        + sum(b for i, b in enumerate(written) if writes is None or i in writes)
    )
