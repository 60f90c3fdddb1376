"""What losses hold besides their results while they run."""

from __future__ import annotations

from autopar.planner.footprint.layouts import Layout
from autopar.planner.footprint.local_op import BLOCKS, SCALARS, Formulas, LocalOp, wide

CHUNKS = {"cpu": 1 << 22, "cuda": 1 << 26}
LEAST_CLASSES = 128
"""Logits of a chunk (``CHUNKS``), and the least number of its classes; as in ``autopar.ops.linear_nll``."""


def _rows_of(x: Layout) -> int:
    return x.numel // max(1, x.shape[-1] if x.shape else 1)


def _class_block(op: LocalOp, x: tuple[Layout, int]) -> int:
    """Return the elements of the logits that are worked on at a time."""
    v = max(1, x[0].shape[-1])
    return min(_rows_of(x[0]), max(1, BLOCKS[op.kind][1] // v)) * v


def _by_kernel(op: LocalOp, x: tuple[Layout, int]) -> bool:
    """Whether a Triton kernel reads the logits, and makes nothing but its result."""
    return op.kind == "cuda" and x[1] <= 4 and x[0].is_contiguous


def _sumexp(op: LocalOp) -> int:
    x = op.operands[0]
    if _by_kernel(op, x):
        return 0
    copy = 0 if x[0].is_contiguous else op.nbytes(x)
    narrow = op.operands[1][0].numel * 4 if op.operands[1][1] < 4 else 0
    return copy + narrow + _class_block(op, x) * wide(x[1])


def _nll(op: LocalOp) -> int:
    x = op.operands[0]
    n = _rows_of(x[0])
    chosen = 0 if _by_kernel(op, x) else n * (9 + x[1] + 2 * wide(op.operands[1][1])) + SCALARS
    weights = _class_weights(op, 3, x[1])
    if not op.call[2].get("each") and not weights:
        return chosen
    copy = 0 if x[0].is_contiguous else op.nbytes(x)
    block = _class_block(op, x) * 4 if x[1] < 4 else 0
    factors = n * wide(x[1]) if weights else 0
    return max(chosen, copy + weights + n * wide(x[1]) + max(n, block, factors))


def _class_weights(op: LocalOp, plain: int, itemsize: int) -> int:
    """Return the bytes of class weights in the accumulation dtype; they come after ``plain`` operands if there are
    any."""
    if op.node.packet.startswith("autopar.linear"):
        plain += len(op.operands) % 2 == 0
    return op.operands[-1][0].numel * wide(itemsize) + SCALARS if len(op.operands) > plain else 0


def _nll_backward(op: LocalOp) -> int:
    x = op.operands[1]
    if _by_kernel(op, x):
        return 0
    part = _class_block(op, x) * 4 if x[1] < 4 else 0
    copy = 0 if x[0].is_contiguous else op.nbytes(x)
    weights = _class_weights(op, 4, x[1])
    shares = _rows_of(x[0]) * wide(x[1]) if weights else 0
    return part + copy + weights + shares + _rows_of(x[0]) * (18 + 2 * wide(op.operands[0][1])) + SCALARS


def _chunk(op: LocalOp, x: Layout, classes: int) -> int:
    """Return the number of logits in a chunk of classes."""
    rows = _rows_of(x)
    step = max(LEAST_CLASSES, CHUNKS[op.kind] // max(1, rows) // LEAST_CLASSES * LEAST_CLASSES)
    return rows * min(step, classes)


def _linear_nll(op: LocalOp) -> int:
    (x, size), (weight, _) = op.operands[:2]
    chunk, rows = _chunk(op, x, weight.shape[0]), _rows_of(x)
    weights = _class_weights(op, 3, size)
    smoothed = bool(op.call[2].get("each") or weights)
    kernel = op.kind == "cuda" and size <= 4 and not (smoothed and size < 4)
    block = 0 if kernel else min(chunk, max(rows and chunk // rows, BLOCKS[op.kind][1])) * wide(size)
    copy = 0 if x.is_contiguous else x.numel * size
    shares = rows * 2 * wide(size) if weights else 0
    return (
        copy + weights + shares + chunk * size + block + rows * (26 + 2 * size + (5 + smoothed) * wide(size)) + SCALARS
    )


def _linear_nll_backward(op: LocalOp) -> int:
    """A chunk of logits and its gradient.

    In half precision also the gradient of x in the accumulation dtype, to which that of each chunk is added.
    """
    (x, size), (weight, _) = op.operands[1:3]
    mask, rows = op.call[2]["mask"], _rows_of(x)
    chunk = _chunk(op, x, weight.shape[0])
    kernel = op.kind == "cuda" and size <= 4
    block = min(chunk, max(rows and chunk // rows, BLOCKS[op.kind][1])) * 4 if size < 4 and not kernel else 0
    copy = 0 if x.is_contiguous else x.numel * size
    summed = x.numel * 4 if size < 4 and mask[0] else 0
    weights = _class_weights(op, 5, size)
    shares = rows * wide(size) if weights else 0
    return copy + summed + weights + shares + 2 * chunk * size + block + rows * (36 + 3 * wide(size)) + SCALARS


def _ctc(op: LocalOp) -> int:
    """A table of the widest labels for each frame, and the gradient, both at least in single precision."""
    (x, size), (targets, _) = op.operands[:2]
    frames, samples = x.shape[:2]
    table = samples * frames * (2 * targets.shape[1] + 1) * wide(size)
    widened = 2 * x.numel * 4 if size < 4 else 0
    return table + widened + samples * (3 * wide(size) + 16) + 4 * targets.numel + SCALARS


FORMULAS: Formulas = {
    "autopar.sumexp": _sumexp,
    "autopar.nll": _nll,
    "autopar.nll_backward": _nll_backward,
    "autopar.linear_nll": _linear_nll,
    "autopar.linear_nll_backward": _linear_nll_backward,
    "autopar.ctc": _ctc,
}
