"""Convolutions in which each rank holds a part of some spatial dims, ``dims``.

Operands include the rows of the neighbours that the kernel reads, and the padding. For each of ``dims``, ``first`` is
where the rank's own rows begin in what is computed from such a window, and ``size`` is their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ops.registration import define, once_differentiable

aten = torch.ops.aten


def rows_of(x: Tensor, dims: Sequence[int], first: Sequence[int], size: Sequence[int]) -> Tensor:
    """Return a copy of ``size`` rows from ``first`` on of each of ``dims``, with zeros outside ``x``.

    Returns ``x`` itself if these are all its rows.
    """
    shape, there = list(x.shape), x
    for dim, start, n in zip(dims, first, size, strict=True):
        shape[dim] = n
        begin, end = max(start, 0), min(start + n, x.shape[dim])
        there = there.narrow(dim, begin, max(end - begin, 0))
    if list(x.shape) == shape and list(there.shape) == shape:
        return x.contiguous()
    if list(there.shape) == shape:
        return there.clone(memory_format=torch.contiguous_format)
    out = x.new_zeros(shape)
    into = out
    for dim, start in zip(dims, first, strict=True):
        into = into.narrow(dim, max(-start, 0), there.shape[dim])
    into.copy_(there)
    return out


def _narrowed(x: Tensor, dims: Sequence[int], first: Sequence[int], size: Sequence[int]) -> Tensor:
    for dim, start, n in zip(dims, first, size, strict=True):
        x = x.narrow(dim, start, n)
    return x


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    mask: list[bool],
    dims: list[int],
    first: list[int],
    size: list[int],
    made_first: list[int],
    made_size: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias.

    ``grad`` has the rows that the rank's own rows of x contribute to, ``x`` those that its own results depend on.
    ``made_first`` is where these results begin in ``grad``.
    """
    rest = (stride, padding, dilation, False, [0] * len(stride), groups)
    dx = x.new_empty(0)
    if mask[0]:
        shape = list(x.shape)
        for dim in dims:  # as many rows of x as those of the gradient depend on
            i = dim - 2
            shape[dim] = (grad.shape[dim] - 1) * stride[i] + dilation[i] * (weight.shape[dim] - 1) + 1
        wide = aten.convolution_backward(grad, x.new_empty(shape), weight, None, *rest, [True, False, False])[0]
        dx = rows_of(wide, dims, first, size)
        del wide
    dw, db = weight.new_empty(0), weight.new_empty(0)
    if mask[1] or mask[2]:
        own = _narrowed(grad, dims, made_first, made_size)
        _, dw_, db_ = aten.convolution_backward(own, x, weight, bias_sizes, *rest, [False, mask[1], mask[2]])
        dw, db = (dw if dw_ is None else dw_), (db if db_ is None else db_)
    return dx, dw.contiguous(), db.contiguous()


def _sized(x: Tensor, dims: Sequence[int], size: Sequence[int]) -> list[int]:
    given = dict(zip(dims, size, strict=True))
    return [given.get(i, n) for i, n in enumerate(x.shape)]


def _backward_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    bias_sizes: list[int] | None,
    mask: list[bool],
    dims: list[int],
    size: list[int],
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(_sized(x, dims, size) if mask[0] else [0]),
        weight.new_empty(weight.shape if mask[1] else [0]),
        weight.new_empty((bias_sizes or [0]) if mask[2] else [0]),
    )


def _transposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    output_padding: list[int],
    groups: int,
    dims: list[int],
    first: list[int],
    size: list[int],
) -> Tensor:
    wide = aten.convolution(x, weight, None, stride, padding, dilation, True, output_padding, groups)
    own = rows_of(wide, dims, first, size)
    return own if bias is None else own.add_(bias.view(-1, *[1] * (x.ndim - 2)))


def _transposed_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    output_padding: list[int],
    groups: int,
    dims: list[int],
    first: list[int],
    size: list[int],
) -> Tensor:
    like = aten.convolution(x, weight, None, stride, padding, dilation, True, output_padding, groups)
    return x.new_empty(_sized(like, dims, size))


def _transposed_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    output_padding: list[int],
    groups: int,
    mask: list[bool],
    dims: list[int],
    first: list[int],
    size: list[int],
    made_first: list[int],
    made_size: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias.

    ``grad`` has the rows that the rank's own x contributes to, from ``first`` on, and its own, from ``made_first`` on.
    """
    dx, dw, db = x.new_empty(0), weight.new_empty(0), weight.new_empty(0)
    if mask[0] or mask[1]:
        rows = _narrowed(grad, dims, first, size).contiguous()
        rest = (stride, padding, dilation, True, output_padding, groups)
        dx_, dw_, _ = aten.convolution_backward(rows, x, weight, None, *rest, [mask[0], mask[1], False])
        dx, dw = (dx if dx_ is None else dx_), (dw if dw_ is None else dw_)
    if mask[2]:
        own = _narrowed(grad, dims, made_first, made_size)
        db = own.sum([0, *range(2, x.ndim)])
    return dx.contiguous(), dw.contiguous(), db.contiguous()


def _transposed_backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor, *, bias_sizes: list[int] | None, mask: list[bool], **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if mask[0] else [0]),
        weight.new_empty(weight.shape if mask[1] else [0]),
        weight.new_empty((bias_sizes or [0]) if mask[2] else [0]),
    )


define(
    "convolution_part_backward(Tensor grad, Tensor x, Tensor weight, *, SymInt[]? bias_sizes, int[] stride,"
    " int[] padding, int[] dilation, int groups, bool[] mask, int[] dims, SymInt[] first, SymInt[] size,"
    " SymInt[] made_first, SymInt[] made_size) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
define(
    "convolution_transposed_part(Tensor x, Tensor weight, Tensor? bias, *, int[] stride, int[] padding, int[] dilation,"
    " int[] output_padding, int groups, int[] dims, SymInt[] first, SymInt[] size) -> Tensor",
    _transposed,
    _transposed_fake,
)
define(
    "convolution_transposed_part_backward(Tensor grad, Tensor x, Tensor weight, *, SymInt[]? bias_sizes, int[] stride,"
    " int[] padding, int[] dilation, int[] output_padding, int groups, bool[] mask, int[] dims, SymInt[] first,"
    " SymInt[] size, SymInt[] made_first, SymInt[] made_size) -> (Tensor, Tensor, Tensor)",
    _transposed_backward,
    _transposed_backward_fake,
)
for _name in ("convolution_part_backward", "convolution_transposed_part", "convolution_transposed_part_backward"):
    once_differentiable(_name)
