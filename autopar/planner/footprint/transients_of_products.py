"""What products hold besides their results while they run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.mesh import Mesh
from autopar.planner.footprint.contraction import terms
from autopar.planner.footprint.layouts import Layout, contiguous, narrowed, permuted, reshaped, with_length
from autopar.planner.footprint.local_op import Formulas, LocalOp
from autopar.sharding import ShardingSpec, Step

BLOCKS = 3
"""Parts that are there at least while a decomposed product runs: of an operand that is gathered the rank's own and two
on their way, of a result that is scattered its own and two others."""


def least_share(spec: ShardingSpec, mesh: Mesh, *, made: bool, blocks: int = BLOCKS) -> float:
    """Return the least share of the operand or result of a contraction that is there at once, if it may be decomposed.

    Args:
        spec: in which the contraction reads the operand whole, or makes the result before it is scattered.
        made: whether it is the result.
        blocks: parts that are there.
    """
    axes = [a for a, _ in spec.partial] if made else [a for a in range(mesh.ndim) if a not in spec.axes]
    return min([1.0, *(blocks / mesh.shape[a] for a in axes)])


def ring_bytes(op: LocalOp, step: Step, operand: int, group_size: int) -> int:
    """Return the bytes of a contraction decomposed beside ``step``, besides what it reads and makes.

    These are blocks on their way, one part of the product, and what making it holds, as in ``spmd.products``.

    Args:
        op: the contraction; the operand of a gather is as it is before.
        operand: the one that is cut.
    """
    found = terms(op.node)
    assert found is not None
    (layout, size), (result, result_size) = op.operands[operand], op.results[0]
    gathers = step.kind == "all_gather"
    out_dim = found.becomes(operand, step.dim) if gathers else step.dim
    assert out_dim is not None
    dim = step.dim if gathers else found.operands[operand].index(found.out[out_dim])
    length = -(-result.shape[out_dim] // group_size)
    block = contiguous(with_length(layout.shape, dim, length)) if gathers else narrowed(layout, dim, length)
    part = contiguous(with_length(result.shape, out_dim, length))
    operands = tuple((block, size) if i == operand else o for i, o in enumerate(op.operands))
    product_bytes = _contract(replace(op, operands=operands, results=((part, result_size),)))
    if not gathers:
        return 2 * part.numel * result_size + product_bytes
    copied = 0 if layout.is_contiguous else layout.numel * size
    return copied + min(group_size - 1, 2) * block.numel * size + part.numel * result_size + product_bytes


def _contract(op: LocalOp) -> int:
    """Copies of operands whose dims no view can merge, and the product before its dims are reordered.

    Neither is made if nothing is summed.
    """
    equation = next(a for a in (*op.node.args, *(a for _, a in op.node.kwargs)) if isinstance(a, str))
    left, out = equation.replace(" ", "").split("->")
    x, w = left.split(",")
    batch = [c for c in out if c in x and c in w]
    rows, columns = [c for c in out if c not in w], [c for c in out if c not in x]
    summed = [c for c in x if c not in out]
    if not summed:
        return 0
    operands = {"x": (op.operands[0], x), "w": (op.operands[1], w)}
    if out == "".join(batch + columns + rows):
        operands, rows, columns = {"x": operands["w"], "w": operands["x"]}, columns, rows
    groups = {"x": [batch, rows, summed], "w": [batch, summed, columns]}
    if not batch:
        groups = {k: g[1:] for k, g in groups.items()}
    copies = sum(_merged(*operands[k], groups[k]) for k in "xw")
    order = "".join(batch + rows + columns)
    if order == out:
        return copies
    sizes = dict(zip(out, op.results[0][0].shape, strict=True))
    product = contiguous(tuple(sizes[c] for c in order))
    if permuted(product, [order.index(c) for c in out]).is_contiguous:
        return copies
    return max(copies, op.written)


def _merged(x: tuple[Layout, int], letters: str, groups: Sequence[Sequence[str]]) -> int:
    """Return the bytes of the copy that brings the dims of each group together; 0 if a view does."""
    order = [letters.index(c) for group in groups for c in group]
    y = permuted(x[0], order)
    if all(len(g) == 1 for g in groups):
        return 0
    ends = np.cumsum([0, *map(len, groups)]).tolist()
    shape = tuple(math.prod(y.shape[a:b]) for a, b in zip(ends, ends[1:], strict=False))
    return 0 if reshaped(y, shape) is not None else x[0].numel * x[1]


def _factors(op: LocalOp) -> int:
    """At most a copy of the matrix in the requested layout, and a copy of each result in that of LAPACK."""
    a, size = op.operands[0]
    order = (*range(len(a.shape) - 2), len(a.shape) - 1, len(a.shape) - 2)
    there = a if op.call[2]["contiguous"] else permuted(a, order)
    return op.written + (0 if there.is_contiguous else a.numel * size)


POSITION_BYTES = 8
"""Bytes of a position among the rows that are sorted by expert."""


def _experts_mm(op: LocalOp) -> int:
    """The sorting of ids; then rows in the order of their experts, the product in that order, and the product in its
    own."""
    (rows, size), (weight, _), (ids, _) = op.operands
    if not ids.numel or not weight.numel:
        return 0
    places = ids.numel * (4 if op.kind == "cuda" else 1) * POSITION_BYTES + weight.shape[0] * 4
    taken = ids.numel * rows.shape[-1] * size
    return max(_sorting(ids.numel, weight.shape[0]) - op.written, places + max(taken, op.written))


def _experts_mm_weight(op: LocalOp) -> int:
    (rows, size), (grad, _), (ids, _) = op.operands
    experts = op.results[0][0].shape[0]
    if not ids.numel or not op.written:
        return 0
    taken = ids.numel * (rows.shape[-1] + grad.shape[-1]) * size
    return max(_sorting(ids.numel, experts) - op.written, ids.numel * POSITION_BYTES + experts * 4 + taken)


def _sorting(n: int, experts: int) -> int:
    """Return the bytes while n ids are sorted and the ends of ``experts`` are found: ids, sorted ids, their
    positions."""
    return 3 * n * POSITION_BYTES + experts * (POSITION_BYTES + 4)


FORMULAS: Formulas = {
    "autopar.contract": _contract,
    "autopar.experts_mm": _experts_mm,
    "autopar.experts_mm_weight": _experts_mm_weight,
    **dict.fromkeys(("autopar.linalg_det", "autopar.linalg_slogdet", "autopar.linalg_solve"), _factors),
}
