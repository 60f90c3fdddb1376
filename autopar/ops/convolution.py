"""Gradient of a convolution of which each rank has some rows of the first dim of space.

The gradient of the result comes with rows of the neighbours, those that the rank's own rows of x went into; x with the
rows that the rank's own results came from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.registration import define, once_differentiable

aten = torch.ops.aten


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, *, bias_sizes: list[int] | None, stride: list[int], padding: list[int],
    dilation: list[int], groups: int, mask: list[bool], at: int, rows: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x0, x1, o0, o1, g0 = rows[5 * at : 5 * at + 5]
    whole = [0, *padding[1:]]
    rest = (stride, whole, dilation, False, [0] * len(stride), groups)
    dx = x.new_empty(0)
    if mask[0]:
        # As many rows of x as these rows of the gradient come from; the first of them is row ``first`` of x.
        reach = (grad.shape[2] - 1) * stride[0] + dilation[0] * (weight.shape[2] - 1) + 1
        like = x.new_empty([*x.shape[:2], reach, *x.shape[3:]])
        wide = aten.convolution_backward(grad, like, weight, None, *rest, [True, False, False])[0]
        first = g0 * stride[0] - padding[0]
        dx = _rows_of(wide, x0 - first, x1 - first)
    dw, db = weight.new_empty(0), weight.new_empty(0)
    if mask[1] or mask[2]:
        own = grad.narrow(2, o0 - g0, o1 - o0)
        _, dw_, db_ = aten.convolution_backward(own, x, weight, bias_sizes, *rest, [False, mask[1], mask[2]])
        dw, db = (dw if dw_ is None else dw_), (db if db_ is None else db_)
    return dx.contiguous(), dw.contiguous(), db.contiguous()


def _rows_of(x: Tensor, start: int, stop: int) -> Tensor:
    """Rows ``start`` to ``stop`` of dim 2, zeros where there are none."""
    pads = [0, 0] * (x.ndim - 3) + [-start, stop - x.shape[2]]
    return torch.nn.functional.pad(x, pads)


def _fake(
    grad: Tensor, x: Tensor, weight: Tensor, *, bias_sizes: list[int] | None, mask: list[bool], at: int,
    rows: list[int], **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x0, x1 = rows[5 * at : 5 * at + 2]
    return (
        x.new_empty([*x.shape[:2], x1 - x0, *x.shape[3:]] if mask[0] else [0]),
        weight.new_empty(weight.shape if mask[1] else [0]),
        weight.new_empty((bias_sizes or [0]) if mask[2] else [0]),
    )


define(
    "convolution_rows_backward(Tensor grad, Tensor x, Tensor weight, *, SymInt[]? bias_sizes, int[] stride,"
    " int[] padding, int[] dilation, int groups, bool[] mask, SymInt at, SymInt[] rows) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake,
)
once_differentiable("convolution_rows_backward")
