"""What norms and softmax hold besides their results while they run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


SAMPLES = 4
"""From how many samples on the kernels for GPUs sum; as in ``autopar.ops.batch_norm``."""


def _kernels_take(op: LocalOp, x: tuple[Layout, int], statistics: Iterable[int] = ()) -> bool:
    """Whether the parts of a batch norm run by torch's kernels for GPUs.

    Args:
        statistics: positions of operands, whose dtype must be that of sums.
    """
    fits = op.kind != "cpu" and 0 < x[0].numel < 2**31 - 1
    return fits and all(op.operands[i][1] == wide(x[1]) for i in statistics)


def _sums_pay(x: Layout) -> bool:
    return x.shape[0] >= SAMPLES or x.shape[0] * x.shape[1] == x.numel


def _places(x: tuple[Layout, int]) -> int:
    """Return the bytes of a sum for every place of every channel."""
    return x[0].numel // x[0].shape[0] * wide(x[1])


def _staged(x: tuple[Layout, int], sums: int) -> int:
    """Return the bytes in which blocks of threads hand ``sums`` sums for every place to the last of them. As
    ``flexible_launch_configs`` of torch's Normalization.cuh."""
    n = x[0].shape[0]
    columns = x[0].numel // n
    wanted = _power_of_two(-(-n // 16))
    height = min(wanted, 512 // min(_power_of_two(columns), 32))
    blocks = min(-(-n // (16 * height)), 128)
    return sums * blocks * _places(x) + 4 * columns if blocks >= 8 else 0


def _power_of_two(n: int) -> int:
    """Return the largest power of two up to ``n``."""
    return 1 << (n.bit_length() - 1)


def _copied(op: LocalOp, *operands: tuple[Layout, int]) -> int:
    return sum(op.nbytes(x) for x in operands if not x[0].is_contiguous)


def _batch_var_mean(op: LocalOp) -> int:
    x = op.operands[0]
    if _kernels_take(op, x) and _sums_pay(x[0]):
        return _copied(op, x) + 2 * _places(x) + max(_staged(x, 4), _channels(op))
    return x[0].numel * wide(x[1])


def _batch_norm(op: LocalOp) -> int:
    x, (*parameters, _, _) = op.operands[0], op.operands[1:]
    if _kernels_take(op, x, (-2, -1)):
        return _copied(op, x) + _channels(op) * sum(size != wide(x[1]) for _, size in parameters)
    return _in_single_precision(op, x) + 5 * _channels(op)


def _in_single_precision(op: LocalOp, x: tuple[Layout, int]) -> int:
    """For a half-precision operand: two tensors in single precision, which are freed before the result is made, or one
    beside it. For others: the result before it is made contiguous."""
    if x[1] < 4:
        return max(2 * x[0].numel * 4 - op.written, x[0].numel * 4)
    return 0 if x[0].is_contiguous else op.written


def _batch_norm_backward_reduce(op: LocalOp) -> int:
    grad, x = op.operands[:2]
    if op.device == "cpu" and x[1] >= 4:
        return _channels(op)
    if _kernels_take(op, x, (-2, -1)) and grad[1] == x[1] and _sums_pay(x[0]):
        means = _places(x) if x[0].numel > x[0].shape[0] * x[0].shape[1] else 0
        return _copied(op, grad, x) + means + 2 * _places(x) + _staged(x, 2)
    return x[0].numel * wide(x[1]) + 2 * _channels(op)


def _batch_norm_backward_input(op: LocalOp) -> int:
    grad, x = op.operands[:2]
    if _kernels_take(op, x, (-4, -3, -2, -1)) and grad[1] == x[1]:
        weight = 1 if len(op.operands) > 6 and op.operands[2][1] != wide(x[1]) else 0
        return _copied(op, grad, x) + (1 + weight) * _channels(op) + SCALARS
    if op.device == "cpu" and x[1] < 4:  # the gradient is added as it is
        return x[0].numel * 4 + 6 * _channels(op)
    return _in_single_precision(op, x) + 6 * _channels(op)


FORMULAS: Formulas = {
    "autopar.batch_var_mean": _batch_var_mean,
    "autopar.batch_norm": _batch_norm,
    "autopar.batch_norm_backward_reduce": _batch_norm_backward_reduce,
    "autopar.batch_norm_backward_input": _batch_norm_backward_input,
}
