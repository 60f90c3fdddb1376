"""Pool images of which each rank holds a part. Operands include rows of the neighbours and padding.

Spatial dims are the last dims of x, as many as the kernel has. ``whole`` holds their global lengths, ``starts`` where
this rank's rows begin.
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


def _shifted_index(
    index: Tensor, shape: Sequence[int], by: Sequence[int], into: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Convert linear indices in an image of ``shape``, shifted by rows of each dim, to one of shape ``into``.

    Also returns whether they are inside it.
    """
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
    x: Tensor,
    *,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil: bool,
    starts: list[int],
    whole: list[int],
) -> tuple[Tensor, Tensor]:
    """Return maxima, and their indices in the global image."""
    n = len(kernel)
    pool = aten.max_pool2d_with_indices if n == 2 else aten.max_pool3d_with_indices
    out, index = pool(x, kernel, stride, padding, dilation, ceil)
    return out.contiguous(), _shifted_index(index, x.shape[-n:], starts, whole)[0].contiguous()


def _max_fake(
    x: Tensor, *, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool, **_: Any
) -> tuple[Tensor, Tensor]:
    pool = aten.max_pool2d_with_indices if len(kernel) == 2 else aten.max_pool3d_with_indices
    out, index = pool(x, kernel, stride, padding, dilation, ceil)
    return out.new_empty(out.shape), index.new_empty(index.shape)


def _max_backward(grad: Tensor, x: Tensor, index: Tensor, *, starts: list[int], whole: list[int]) -> Tensor:
    """Return the gradient, which goes only to this rank's own rows."""
    n = len(whole)
    own = x.shape[-n:]
    place, inside = _shifted_index(index, whole, [-start for start in starts], own)
    out = x.new_zeros([*x.shape[:-n], math.prod(own)])
    out.scatter_add_(-1, place.where(inside, 0).flatten(-n), grad.where(inside, 0).flatten(-n))
    return out.view(x.shape)


def _like_x(grad: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _recount_(
    result: Tensor,
    kernel: list[int],
    stride: list[int],
    include: bool,
    dims: list[int],
    pads: list[int],
    starts: list[int],
    whole: list[int],
) -> None:
    """Correct averages in place: windows beyond an end of a cut dim counted all their rows.

    Args:
        pads: padding of each of ``dims`` on the global image.
        starts: global row of the first row of the result.
        whole: lengths of the global image.
    """
    for dim, pad, start, n in zip(dims, pads, starts, whole, strict=True):
        i = dim - result.ndim
        shares = []
        for row in range(start, start + result.shape[dim]):
            first = row * stride[i] - pad
            last = min(first + kernel[i], n + pad)
            counted = last - first if include else min(last, n) - max(first, 0)
            shares.append(kernel[i] / max(counted, 1))
        if any(share != 1 for share in shares):
            exact = torch.promote_types(result.dtype, torch.float32)
            result.mul_(torch.tensor(shares, dtype=exact, device=result.device).reshape([-1] + [1] * (-i - 1)))


def _mean(
    x: Tensor,
    *,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil: bool,
    include: bool,
    dims: list[int],
    pads: list[int],
    starts: list[int],
    whole: list[int],
) -> Tensor:
    """Average. Along the cut ``dims`` x includes its padding: ``padding`` is 0 there, and ``pads`` the original one."""
    pool = aten.avg_pool2d if len(kernel) == 2 else aten.avg_pool3d
    out: Tensor = pool(x, kernel, stride, padding, ceil, include)
    _recount_(out, kernel, stride, include, dims, pads, starts, whole)
    return out.contiguous()


def _mean_fake(
    x: Tensor, *, kernel: list[int], stride: list[int], padding: list[int], ceil: bool, include: bool, **_: Any
) -> Tensor:
    pool = aten.avg_pool2d if len(kernel) == 2 else aten.avg_pool3d
    out: Tensor = pool(x, kernel, stride, padding, ceil, include)
    return out.new_empty(out.shape)


def _mean_backward(
    grad: Tensor,
    x: Tensor,
    *,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil: bool,
    include: bool,
    divisor: int | None,
    dims: list[int],
    first: list[int],
    pads: list[int],
    starts: list[int],
    whole: list[int],
) -> Tensor:
    """Return the gradient of this rank's rows of x.

    ``first`` is where these begin, in each of ``dims``, among the rows that the window of the gradient depends on.
    Without ``pads`` every window counts all its rows.
    """
    n = len(kernel)
    if pads:
        grad = grad.clone()
        _recount_(grad, kernel, stride, include, dims, pads, starts, whole)
    pool = aten.avg_pool2d_backward if n == 2 else aten.avg_pool3d_backward
    shape = list(x.shape)
    for dim in dims:
        i = dim - (x.ndim - n)
        shape[dim] = (grad.shape[dim] - 1) * stride[i] + kernel[i]
    wide: Tensor = pool(grad, x.new_empty(shape), kernel, stride, padding, ceil, include, divisor)
    return rows_of(wide, dims, first, [x.shape[dim] for dim in dims])


define(
    "max_pool_part(Tensor x, *, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil,"
    " SymInt[] starts, SymInt[] whole) -> (Tensor, Tensor)",
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
    "avg_pool_part(Tensor x, *, int[] kernel, int[] stride, int[] padding, bool ceil, bool include, int[] dims,"
    " int[] pads, SymInt[] starts, SymInt[] whole) -> Tensor",
    _mean,
    _mean_fake,
)
once_differentiable("avg_pool_part")
define(
    "avg_pool_part_backward(Tensor grad, Tensor x, *, int[] kernel, int[] stride, int[] padding, bool ceil,"
    " bool include, int? divisor, int[] dims, SymInt[] first, int[] pads, SymInt[] starts, SymInt[] whole) -> Tensor",
    _mean_backward,
    _like_x,
)
once_differentiable("avg_pool_part_backward")
