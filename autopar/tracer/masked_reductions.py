"""Sums and means of masked selections, in which unselected elements do not count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ops.registration import HALF
from autopar.tracer.masked import Masked, size


def masked_sum(tracer: Any, x: Masked, *, dtype: torch.dtype | None = None) -> Tensor:
    return x.filled(x.whole, 0).sum(dtype=dtype)


def masked_mean(tracer: Any, x: Masked, *, dtype: torch.dtype | None = None) -> Tensor:
    """Average, rounding once as torch does: half precision can hold neither the sum nor the count."""
    kind = dtype or x.whole.dtype
    wide = torch.float32 if kind in HALF else kind
    return (masked_sum(tracer, x, dtype=wide) / x.total()).to(kind)


def sum_along(
    tracer: Any, x: Masked, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | Masked:
    """Sum along dims: along the mask, elements that are not selected are left out; along other dims each selected one
    has its own sum."""
    at = {d % x.ndim for d in dims} if dims else set(range(x.ndim))
    counted, along = x.lead in at, [e for d in sorted(at) for e in x.dims_of(d)]
    made = (x.filled(x.whole, 0) if counted else x.whole).sum(along, keepdim, dtype=dtype)
    if not counted:
        return Masked(made, x.mask, x.lead - (0 if keepdim else sum(d < x.lead for d in at)), x.version)
    kept = [1 if d in at else size(tracer, x, d) for d in range(x.ndim)]
    return made.reshape(kept) if keepdim else made


def mean_along(
    tracer: Any, x: Masked, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Average along dims, rounding once as ``masked_mean`` does."""
    at = {d % x.ndim for d in dims} if dims else set(range(x.ndim))
    kind = dtype or x.whole.dtype
    total = sum_along(tracer, x, dims, keepdim, dtype=torch.float32 if kind in HALF else kind)
    count = math.prod(x.whole.shape[e] for d in at if d != x.lead for e in x.dims_of(d))
    if isinstance(total, Masked):
        return total.with_whole((total.whole / count).to(kind))
    return (total / (x.mask.sum() * count)).to(kind)
