"""What lookups and scatters hold besides their results while they run."""

from __future__ import annotations

import math

from autopar.ir import TensorMeta
from autopar.planner.footprint.layouts import Layout, contiguous, narrowed, with_length
from autopar.planner.footprint.local_op import BLOCKS, SCALARS, Formulas, LocalOp


def _has_part(table: Layout, whole: TensorMeta | None) -> bool:
    """Whether the vocabulary is cut."""
    return whole is not None and table.shape[0] != whole.shape[0]


def _lookup(op: LocalOp) -> int:
    """With a cut vocabulary: the local indices, and which of them are on this rank."""
    n = op.operands[1][0].numel
    return 26 * n + SCALARS if _has_part(op.operands[0][0], op.metas[0]) else max(0, 3 * n - op.written)


def _lookup_backward(op: LocalOp) -> int:
    grad, n = op.operands[0], op.operands[1][0].numel
    masked = op.nbytes(grad) + 18 * n if _has_part(op.results[0][0], op.node.outputs[0]) else 0
    if grad[1] >= 4:
        return masked + SCALARS
    made = op.results[0][0].numel * 4
    return max(masked + grad[0].numel * 4 + made - op.written, masked + made) + SCALARS


def _random(op: LocalOp) -> int:
    """Positions of the rank's elements in the whole tensor, and what is drawn at a time.

    The first are runs of elements that are neighbours in the whole tensor. The second are words of random bits, what
    they are mixed with, and the numbers or masks that they become.
    """
    (made, size), block = op.results[0], BLOCKS[op.kind][2]
    whole, cut, n = op.node.kwarg("global_shape", ()), len(made.shape), 1
    assert isinstance(whole, tuple)
    while cut and (n == math.prod(whole[cut:]) or made.shape[cut - 1] == 1):  # type: ignore[arg-type]
        cut, n = cut - 1, n * made.shape[cut - 1]
    runs = made.numel // max(1, n)
    rows, width = (min(block // n, runs), n) if n <= block else (1, block)
    dropout = op.node.packet == "autopar.dropout"
    copy = 0 if not dropout or op.operands[0][0].is_contiguous else op.written
    becomes = 4 + (0 if dropout and size == 4 else 14)
    return copy + 16 * runs + 24 * rows + rows * (16 * (width // 2 + 1) + becomes * width) + SCALARS


INDEX_SCRATCH = 17
"""Bytes for each index of a cut dim: its local position, twice, and whether it is on this rank."""


def _gather_part(op: LocalOp) -> int:
    return INDEX_SCRATCH * op.operands[1][0].numel


def _index_of(op: LocalOp, position: int) -> int:
    """Return the number of elements of the cut dim's index, which is argument ``position``. Operands are in that
    order."""
    indices = op.call[1][1]
    return op.operands[1 + sum(i is not None for i in indices[: op.call[1][position]])][0].numel


def _index_part(op: LocalOp) -> int:
    """Also a flag for each element of the result that is on this rank."""
    return INDEX_SCRATCH * _index_of(op, 2) + op.results[0][0].numel + 2


def _spilling(op: LocalOp) -> tuple[Layout, int]:
    """Return the layout of a copy of the first operand with one more row along the cut dim, and that dim."""
    dim = op.call[1][SPILLING[op.call[0]]]
    shape = op.results[0][0].shape
    return contiguous(with_length(shape, dim, shape[dim] + 1)), dim


def excess_bytes(op: LocalOp) -> int:
    """Return the bytes by which the memory of a result is larger than the result, which is its first rows."""
    if op.call[0] not in SPILLING or not op.operands:
        return 0
    big, dim = _spilling(op)
    size = op.results[0][1]
    return 0 if _is_copied_out(big, dim) else big.numel * size - op.written


def _is_copied_out(big: Layout, dim: int) -> bool:
    return not narrowed(big, dim, big.shape[dim] - 1).is_contiguous


def _spill_bytes(op: LocalOp, n: int, beside: int) -> int:
    """Return the bytes with ``n`` indices, whose positions are found while the copy is there if ``beside``."""
    big, dim = _spilling(op)
    held = big.numel * op.results[0][1]
    if _is_copied_out(big, dim):
        return max(INDEX_SCRATCH * n + (held if beside else 0) - op.written, 8 * n + held)
    return max(INDEX_SCRATCH * n - (0 if beside else held), 8 * n)


def _index_put_part(op: LocalOp) -> int:
    return _spill_bytes(op, _index_of(op, 4), 0)


def _scatter_part(op: LocalOp) -> int:
    return _spill_bytes(op, op.operands[1][0].numel, 1)


SPILLING = {"autopar.scatter_part": 1, "autopar.index_write_part": 1, "autopar.index_put_part": 4}
"""Ops that write what lies on other ranks into an extra row, and which of their arguments is the dim."""


FORMULAS: Formulas = {
    "autopar.lookup": _lookup,
    "autopar.lookup_backward": _lookup_backward,
    "autopar.gather_part": _gather_part,
    "autopar.index_part": _index_part,
    "autopar.index_put_part": _index_put_part,
    "autopar.index_write_part": _scatter_part,
    "autopar.scatter_part": _scatter_part,
    "autopar.dropout": _random,
    "autopar.uniform": _random,
    "autopar.checked_length": lambda op: 1,
}
