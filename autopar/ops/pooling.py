"""Pooling of images of which each rank has some rows. Rows of the neighbours come with them, padding included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.registration import define, once_differentiable, without_gradient

aten = torch.ops.aten


def _max(
    x: Tensor, *, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], at: int,
    starts: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``starts``: the first row of each rank's window; indices are those of the whole image."""
    out, index = aten.max_pool2d_with_indices(x, kernel, stride, [0, padding[1]], dilation)
    return out.contiguous(), (index + starts[at] * x.shape[-1]).contiguous()


def _pooled_shape(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> list[int]:
    padded = (x.shape[-2], x.shape[-1] + 2 * padding[1])
    sizes = [(n - d * (k - 1) - 1) // s + 1 for n, d, k, s in zip(padded, dilation, kernel, stride, strict=True)]
    return [*x.shape[:-2], *sizes]


def _max_fake(
    x: Tensor, *, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], **_: Any
) -> tuple[Tensor, Tensor]:
    shape = _pooled_shape(x, kernel, stride, padding, dilation)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _max_backward(grad: Tensor, x: Tensor, index: Tensor, *, at: int, starts: list[int]) -> Tensor:
    """``starts``: of each rank's own rows, to which alone the gradient goes."""
    local = index - starts[at] * x.shape[-1]
    own = (local >= 0) & (local < x.shape[-2] * x.shape[-1])
    out = x.new_zeros([*x.shape[:-2], x.shape[-2] * x.shape[-1]])
    out.scatter_add_(-1, local.where(own, 0).flatten(-2), grad.where(own, 0).flatten(-2))
    return out.view(x.shape)


def _like_x(grad: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _mean_backward(
    grad: Tensor, x: Tensor, *, kernel: list[int], stride: list[int], padding: list[int], include: bool,
    divisor: int | None, at: int, rows: list[int],
) -> Tensor:  # fmt: skip
    """``rows``: for each rank the first of its own rows of x, and the first of its window of the gradient."""
    own, first = rows[2 * at : 2 * at + 2]
    reach = (grad.shape[-2] - 1) * stride[0] + kernel[0]
    like = x.new_empty([*x.shape[:-2], reach, x.shape[-1]])
    wide = aten.avg_pool2d_backward(grad, like, kernel, stride, [0, padding[1]], False, include, divisor)
    start = own - (first * stride[0] - padding[0])
    cut = torch.nn.functional.pad(wide, [0, 0, -start, start + x.shape[-2] - reach])
    return cut.contiguous()


define(
    "max_pool_rows(Tensor x, *, int[] kernel, int[] stride, int[] padding, int[] dilation, SymInt at, SymInt[] starts)"
    " -> (Tensor, Tensor)",
    _max,
    _max_fake,
)
without_gradient("max_pool_rows")
define(
    "max_pool_rows_backward(Tensor grad, Tensor x, Tensor index, *, SymInt at, SymInt[] starts) -> Tensor",
    _max_backward,
    _like_x,
)
once_differentiable("max_pool_rows_backward")
define(
    "avg_pool_rows_backward(Tensor grad, Tensor x, *, int[] kernel, int[] stride, int[] padding, bool include,"
    " int? divisor, SymInt at, SymInt[] rows) -> Tensor",
    _mean_backward,
    _like_x,
)
once_differentiable("avg_pool_rows_backward")
