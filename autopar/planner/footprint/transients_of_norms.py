"""What norms and softmax hold besides their results while they run."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.planner.footprint.layouts import Layout
from autopar.planner.footprint.local_op import SCALARS, Formulas, LocalOp, wide

_NORM, _NORM_BACKWARD, _SCAN, _SOFTMAX = (0, 1, 1, 2), (3, 2, 3, 3.5), (0, 1, 1, 2), (0, 0, 1, 1.5)


SCRATCH: Mapping[str, tuple[float, float, float, float]] = {
    **dict.fromkeys(("aten._softmax", "aten._log_softmax", "aten._safe_softmax"), _SOFTMAX),
    "aten._softmax_backward_data": (1, 0, 2, 2),
    "aten._log_softmax_backward_data": (0, 1, 1, 2.5),
    **dict.fromkeys(("aten.cumsum", "aten.cumprod", "aten.logcumsumexp"), _SCAN),
    **dict.fromkeys(("aten.var", "aten.std", "aten.var_mean", "aten.std_mean"), (0, 0, 1, 0)),
    "aten.native_layer_norm": _NORM,
    "aten.native_group_norm": _NORM,
    "aten._fused_rms_norm": _SOFTMAX,
    **dict.fromkeys(
        (
            "aten.native_layer_norm_backward",
            "aten.native_group_norm_backward",
            "aten._fused_rms_norm_backward",
        ),
        _NORM_BACKWARD,
    ),
}
"""Scratch of ops along a cut dim, as multiples of the largest operand in the accumulation dtype.

The numbers are what is held at once while ranks make their summaries, and beside the results while they finish the op
with the summaries of all; then the same two for operands in half precision.
"""


EXTREMA = frozenset({"aten.cummax", "aten.cummin"})
"""Ops that hold values and positions."""


def summary_bytes(op: LocalOp, gathered: int) -> int:
    """Return the transients of an op whose ranks exchange summaries.

    These are the summaries, also combined, and what the formulas before and after make of the largest operand.

    Args:
        gathered: bytes of all summaries.
    """
    if not gathered:
        return 0
    x, size = max(op.operands, key=op.nbytes)
    if op.node.packet in EXTREMA:
        before, after = x.numel * (size + 8), x.numel * (size + 10)
    else:
        copies = SCRATCH.get(op.node.packet, (0, 0, 0, 0))[2 if size < 4 else 0 :]
        before, after = (int(c * x.numel * wide(size)) for c in copies[:2])
    return max(before - op.written, after) + 5 * gathered // 2 + SCALARS


def _channels(op: LocalOp) -> int:
    return op.operands[0][0].shape[1] * wide(op.operands[0][1])


def _batch_var_mean(op: LocalOp) -> int:
    x = op.operands[0]
    return x[0].numel * wide(x[1])


def _batch_norm(op: LocalOp) -> int:
    return _in_single_precision(op, op.operands[0]) + 5 * _channels(op)


def _in_single_precision(op: LocalOp, x: tuple[Layout, int]) -> int:
    """For a half-precision operand: two tensors in single precision, which are freed before the result is made, or one
    beside it. For others: the result before it is made contiguous."""
    if x[1] < 4:
        return max(2 * x[0].numel * 4 - op.written, x[0].numel * 4)
    return 0 if x[0].is_contiguous else op.written


def _batch_norm_backward_reduce(op: LocalOp) -> int:
    x = op.operands[1]
    if op.device == "cpu" and x[1] >= 4:
        return _channels(op)
    return x[0].numel * wide(x[1]) + 2 * _channels(op)


def _batch_norm_backward_input(op: LocalOp) -> int:
    x = op.operands[1]
    if op.device == "cpu" and x[1] < 4:  # the gradient is added as it is
        return x[0].numel * 4 + 6 * _channels(op)
    return _in_single_precision(op, x) + 6 * _channels(op)


FORMULAS: Formulas = {
    "autopar.batch_var_mean": _batch_var_mean,
    "autopar.batch_norm": _batch_norm,
    "autopar.batch_norm_backward_reduce": _batch_norm_backward_reduce,
    "autopar.batch_norm_backward_input": _batch_norm_backward_input,
}
