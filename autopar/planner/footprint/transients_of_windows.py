"""What ops with windows (convolution, pooling, interpolation) hold besides their results while they run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.planner.footprint.layouts import Layout, with_length
from autopar.planner.footprint.local_op import Formulas, LocalOp, wide


def _resized(x: Layout, dims: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the number of elements with other lengths along ``dims``."""
    return math.prod(dict(zip(dims, sizes, strict=True)).get(d, n) for d, n in enumerate(x.shape))


def _padded_gradient(op: LocalOp, wide: int, made: int) -> int:
    """Return the bytes of a gradient with more rows than the rank's own.

    It is made beside an operand of the same size that gives only its shape, or beside its own part, whose rows are
    copied.
    """
    return max(2 * wide, wide + (made if made != wide else 0)) - op.written


def _convolution_part_backward(op: LocalOp) -> int:
    (grad, _), (x, size), (weight, _) = op.operands[:3]
    given = op.call[2]
    if not given["mask"][0]:
        return 0
    dims = given["dims"]
    rows = [
        (grad.shape[d] - 1) * given["stride"][d - 2] + given["dilation"][d - 2] * (weight.shape[d] - 1) + 1
        for d in dims
    ]
    return _padded_gradient(op, _resized(x, dims, rows) * size, op.nbytes(op.results[0]))


def _avg_pool_part(op: LocalOp) -> int:
    """The divisors of averages at an end of a cut dim, one dim after the other."""
    made, size = op.results[0]
    given, held = op.call[2], [0]
    for dim, pad, start, n in zip(*(given[k] for k in ("dims", "pads", "starts", "whole")), strict=True):
        at = dim - len(made.shape)
        kernel, stride = given["kernel"][at], given["stride"][at]
        first, last = start * stride - pad, (start + made.shape[dim] - 1) * stride - pad + kernel
        end = n + pad if given["include"] else n
        if last > end or (first < 0 and not given["include"]):
            held.append(made.shape[dim] * wide(size))
    return max(held)


def _avg_pool_part_backward(op: LocalOp) -> int:
    (grad, _), (x, size) = op.operands
    given = op.call[2]
    dims, first = given["dims"], len(x.shape) - len(given["kernel"])
    rows = [(grad.shape[d] - 1) * given["stride"][d - first] + given["kernel"][d - first] for d in dims]
    counted = grad.numel * size if given["pads"] else 0
    return counted + _padded_gradient(op, _resized(x, dims, rows) * size, op.written)


def _convolution_transposed_part(op: LocalOp) -> int:
    """The result with more rows than the rank's own."""
    (x, _), (weight, _), (made, size) = op.operands[0], op.operands[1], op.results[0]
    given = op.call[2]
    each = (given[k] for k in ("stride", "padding", "dilation", "output_padding"))
    rows = [
        (n - 1) * stride - 2 * padding + dilation * (k - 1) + more + 1
        for n, k, stride, padding, dilation, more in zip(x.shape[2:], weight.shape[2:], *each, strict=True)
    ]
    wide = math.prod((*made.shape[:2], *rows))
    return wide * size if wide != made.numel else 0


def _convolution_transposed_part_backward(op: LocalOp) -> int:
    (grad, size), given = op.operands[0], op.call[2]
    shape = grad.shape
    for dim, n in zip(given["dims"], given["size"], strict=True):
        shape = with_length(shape, dim, n)
    whole = Layout(shape, grad.strides).is_contiguous
    return 0 if whole or not any(given["mask"][:2]) else math.prod(shape) * size


POSITION_BYTES = 26
"""Bytes for each position in an image that is found in another: integers, and flags of what is inside."""


def _max_pool_part(op: LocalOp) -> int:
    return op.results[1][0].numel * POSITION_BYTES


def _max_pool_part_backward(op: LocalOp) -> int:
    (index, _), (_, size) = op.operands[2], op.operands[0]
    return max(index.numel * POSITION_BYTES - op.written, index.numel * (17 + size))


def _interpolate_part(op: LocalOp) -> int:
    """Dim by dim, weighted rows are added to others."""
    (x, size), given = op.operands[0], op.call[2]
    several = not given["kind"].startswith("nearest")
    held = 0 if not several or size >= 4 else x.numel * 4
    wide_size, shape, most = wide(size) if several else size, x.shape, 0
    for dim, n in enumerate(given["size"], len(shape) - len(given["size"])):
        shape = with_length(shape, dim, n)
        made = math.prod(shape) * wide_size
        most = max(most, held + made * (1 + several) + ROW_BYTES[given["kind"]] * n)
        held = made
    if wide_size != size:
        return max(most, held + op.written) - op.written
    return most - op.written


def _interpolate_part_backward(op: LocalOp) -> int:
    (grad, size), given = op.operands[0], op.call[2]
    shape, now, most = grad.shape, grad.numel * wide(size), 0
    held = now if size < 4 else 0
    for dim, n in enumerate(given["size"], len(shape) - len(given["size"])):
        rows, shape = shape[dim], with_length(shape, dim, n)
        made = math.prod(shape) * wide(size)
        most = max(most, held + made + now + ROW_BYTES[given["kind"]] * rows)
        held = now = made
    return max(most, held + op.written if size < 4 else 0) - op.written


ROW_BYTES = {"nearest": 48, "nearest_exact": 48, "linear": 64, "cubic": 136}
"""Bytes for each row of a result: positions and weights of what it comes from."""


FORMULAS: Formulas = {
    "autopar.convolution_part_backward": _convolution_part_backward,
    "autopar.convolution_transposed_part": _convolution_transposed_part,
    "autopar.convolution_transposed_part_backward": _convolution_transposed_part_backward,
    "autopar.avg_pool_part": _avg_pool_part,
    "autopar.avg_pool_part_backward": _avg_pool_part_backward,
    "autopar.max_pool_part": _max_pool_part,
    "autopar.max_pool_part_backward": _max_pool_part_backward,
    "autopar.interpolate_part": _interpolate_part,
    "autopar.interpolate_part_backward": _interpolate_part_backward,
}
