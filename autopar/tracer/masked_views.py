"""Views, copies and conversions of masked selections, which select by the same mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.tracer.masked import Count, Masked, is_masked, size


def detach(tracer: Any, x: Masked) -> Masked:
    return x.view(x.whole.detach())


def like(target: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tracer, x, *args, **kwargs: x.with_whole(target(x.whole, *args, **kwargs))


def expand_as(tracer: Any, x: Any, other: Any) -> Any:
    if not isinstance(x, Tensor) or not is_masked(other) or not other.broadcasts(x):
        return NotImplemented
    beside = other.with_mask_dims(x).expand(other.whole.shape)
    return other.with_whole(other.filled(beside, 1) if x.requires_grad else beside)


def reshape(tracer: Any, x: Any, shape: Sequence[Any]) -> Any:
    """View a selection so that the selected elements, or these and all dims before them, remain one dim."""
    if not is_masked(x) or x.whole.numel() == 0:
        return NotImplemented
    at = [i for i, n in enumerate(shape) if isinstance(n, Count) or n == -1]
    lead, own = x.whole.shape[: x.lead], x.whole.shape[x.whole.ndim - x.rest :]
    if len(at) != 1 or math.prod(shape[at[0] + 1 :]) != math.prod(own):
        return NotImplemented
    before, behind = shape[: at[0]], shape[at[0] + 1 :]
    if math.prod(before) == math.prod(lead):
        return replace(x.view(x.whole.reshape(*before, *x.mask.shape, *behind)), lead=len(before))
    if before or isinstance(shape[0], Count):
        return NotImplemented
    key = id(x.mask), x.version, tuple(lead)
    mask, _ = tracer.wider_masks.setdefault(key, (x.mask.expand(*lead, *x.mask.shape), x.mask))
    return replace(x.view(x.whole.reshape(*mask.shape, *behind)), mask=mask, lead=0)


def flatten(tracer: Any, x: Masked, start_dim: int = 0, end_dim: int = -1) -> Any:
    sizes = [size(tracer, x, d) for d in range(x.ndim)]
    start, end = start_dim % x.ndim, end_dim % x.ndim
    inside = sizes[start : end + 1]
    merged = -1 if any(isinstance(n, Count) for n in inside) else math.prod(inside)
    return reshape(tracer, x, [*sizes[:start], merged, *sizes[end + 1 :]])


def cast(
    tracer: Any, x: Masked, dtype: torch.dtype, non_blocking: bool = False, copy: bool = False, **_: Any
) -> Masked:
    return x if x.whole.dtype == dtype and not copy else x.with_whole(x.whole.to(dtype))


def clone(tracer: Any, x: Masked, **_: Any) -> Masked:
    return x.with_whole(x.whole)


def broadcast_tensors(tracer: Any, tensors: Sequence[Any]) -> Any:
    first, *others = tensors
    alike = is_masked(first) and all(is_masked(t) and first.matches(t) for t in others)
    return list(tensors) if alike and all(t.whole.shape == first.whole.shape for t in others) else NotImplemented
