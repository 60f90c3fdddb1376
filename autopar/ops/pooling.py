"""Pooling of images of which each rank has a part. Rows of the neighbours come with it, padding included.

Dims are those of space, of which there are as many as a kernel has: the last ones of x. ``whole`` is their lengths on
all ranks together, ``starts`` where this rank's rows begin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ops.convolution import rows_of
from autopar.ops.registration import define, once_differentiable, without_gradient

aten = torch.ops.aten


def _moved(index: Tensor, shape: Sequence[int], by: Sequence[int], into: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Places in an image of ``shape``, moved by so many rows of each dim, as places in one of shape ``into``; and
    whether they are in it."""
    place, inside, stride = torch.zeros_like(index), torch.ones_like(index, dtype=torch.bool), 1
    dims = list(zip(shape, by, into, strict=True))
    while dims:
        n, step, size = dims.pop()
        row = index.remainder(n).add_(step)
        inside &= row >= 0
        inside &= row < size
        place += row.mul_(stride)
        del row
        index = index // n if dims else index
        stride *= size
    return place, inside


def _max(
    x: Tensor, *, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], starts: list[int],
    whole: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Indices are those of the whole image."""
    n = len(kernel)
    pool = aten.max_pool2d_with_indices if n == 2 else aten.max_pool3d_with_indices
    out, index = pool(x, kernel, stride, padding, dilation)
    return out.contiguous(), _moved(index, x.shape[-n:], starts, whole)[0].contiguous()


def _pooled_shape(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> list[int]:
    n = len(kernel)
    padded = [size + 2 * p for size, p in zip(x.shape[-n:], padding, strict=True)]
    sizes = [(size - d * (k - 1) - 1) // s + 1 for size, d, k, s in zip(padded, dilation, kernel, stride, strict=True)]
    return [*x.shape[:-n], *sizes]


def _max_fake(
    x: Tensor, *, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], **_: Any
) -> tuple[Tensor, Tensor]:
    shape = _pooled_shape(x, kernel, stride, padding, dilation)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _max_backward(grad: Tensor, x: Tensor, index: Tensor, *, starts: list[int], whole: list[int]) -> Tensor:
    """The gradient goes to this rank's own rows alone."""
    n = len(whole)
    own = x.shape[-n:]
    place, inside = _moved(index, whole, [-start for start in starts], own)
    out = x.new_zeros([*x.shape[:-n], math.prod(own)])
    out.scatter_add_(-1, place.where(inside, 0).flatten(-n), grad.where(inside, 0).flatten(-n))
    return out.view(x.shape)


def _like_x(grad: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _mean_backward(
    grad: Tensor, x: Tensor, *, kernel: list[int], stride: list[int], padding: list[int], include: bool,
    divisor: int | None, dims: list[int], first: list[int],
) -> Tensor:  # fmt: skip
    """``first``: where the rank's own rows of each of ``dims`` are among those from which its window comes."""
    n = len(kernel)
    pool = aten.avg_pool2d_backward if n == 2 else aten.avg_pool3d_backward
    shape = list(x.shape)
    for dim in dims:
        i = dim - (x.ndim - n)
        shape[dim] = (grad.shape[dim] - 1) * stride[i] + kernel[i]
    wide: Tensor = pool(grad, x.new_empty(shape), kernel, stride, padding, False, include, divisor)
    return rows_of(wide, dims, first, [x.shape[dim] for dim in dims])


define(
    "max_pool_part(Tensor x, *, int[] kernel, int[] stride, int[] padding, int[] dilation, SymInt[] starts,"
    " SymInt[] whole) -> (Tensor, Tensor)",
    _max,
    _max_fake,
)
without_gradient("max_pool_part")
define(
    "max_pool_part_backward(Tensor grad, Tensor x, Tensor index, *, SymInt[] starts, SymInt[] whole) -> Tensor",
    _max_backward,
    _like_x,
)
once_differentiable("max_pool_part_backward")
define(
    "avg_pool_part_backward(Tensor grad, Tensor x, *, int[] kernel, int[] stride, int[] padding, bool include,"
    " int? divisor, int[] dims, SymInt[] first) -> Tensor",
    _mean_backward,
    _like_x,
)
once_differentiable("avg_pool_part_backward")
