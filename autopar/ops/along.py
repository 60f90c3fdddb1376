"""Ops along a dim of which each rank holds a part: softmax, scans, and top-k.

Each rank summarizes its part. From the gathered summaries and its own part every rank finishes the op. ``gathered``
stacks the summaries of the ranks in dim 0, in the order of the dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.registration import accumulation_dtype, define, once_differentiable

aten = torch.ops.aten


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def _reduced_shape(x: Tensor, dim: int) -> list[int]:
    return [1 if i == dim % x.ndim else n for i, n in enumerate(x.shape)]


# Softmax. The summary is the logarithm of the sum of exponentials.


def _lse(x: Tensor, dim: int) -> Tensor:
    return _wide(x).logsumexp(dim, keepdim=True)


def _lse_fake(x: Tensor, dim: int) -> Tensor:
    return x.new_empty(_reduced_shape(x, dim), dtype=accumulation_dtype(x.dtype))


def _softmax(x: Tensor, gathered: Tensor, log: bool, safe: bool, dtype: torch.dtype) -> Tensor:
    """Finish a softmax. With ``safe`` the result is zero where all elements are minus infinity."""
    lse = gathered.logsumexp(0)
    y = _wide(x) - lse
    y = y if log else y.exp_()
    return (y.masked_fill_(lse == -torch.inf, 0) if safe else y).to(dtype).contiguous()


def _softmax_fake(x: Tensor, gathered: Tensor, log: bool, safe: bool, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _softmax_sum(grad: Tensor, out: Tensor, dim: int, log: bool) -> Tensor:
    wide = _wide(grad)
    return (wide if log else wide * out).sum(dim, keepdim=True)


def _softmax_sum_fake(grad: Tensor, out: Tensor, dim: int, log: bool) -> Tensor:
    return _lse_fake(grad, dim)


def _softmax_backward(grad: Tensor, out: Tensor, gathered: Tensor, log: bool, dtype: torch.dtype) -> Tensor:
    total, wide = gathered.sum(0), _wide(grad)
    dx = wide - _wide(out).exp().mul_(total) if log else (wide - total).mul_(out)
    return dx.to(dtype).contiguous()


def _softmax_backward_fake(grad: Tensor, out: Tensor, gathered: Tensor, log: bool, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(grad, dtype=dtype, memory_format=torch.contiguous_format)


# Scans. The summary is the total of a part, and the totals of earlier parts are added to a part's own scan.

_SCANS: dict[str, tuple[Any, Any, Any]] = {
    "sum": (lambda x, d: x.sum(d, keepdim=True), lambda x, d: x.cumsum(d), torch.add),
    "prod": (lambda x, d: x.prod(d, keepdim=True), lambda x, d: x.cumprod(d), torch.mul),
    "logsumexp": (lambda x, d: x.logsumexp(d, keepdim=True), torch.logcumsumexp, torch.logaddexp),
}


def _scan_total(x: Tensor, dim: int, kind: str, dtype: torch.dtype) -> Tensor:
    total: Tensor = _SCANS[kind][0](x.to(dtype), dim)
    return total


def _scan_total_fake(x: Tensor, dim: int, kind: str, dtype: torch.dtype) -> Tensor:
    return x.new_empty(_reduced_shape(x, dim), dtype=dtype)


def _scan(x: Tensor, gathered: Tensor, dim: int, kind: str, at: int, dtype: torch.dtype) -> Tensor:
    """Finish a scan. ``at`` is this rank's position along the dim."""
    reduce, scan, join = _SCANS[kind]
    own: Tensor = scan(x.to(gathered.dtype), dim)
    return (join(own, reduce(gathered[:at], 0)[0]) if at else own).to(dtype).contiguous()


def _scan_fake(x: Tensor, gathered: Tensor, dim: int, kind: str, at: int, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _extremum_total(x: Tensor, dim: int, largest: bool, offset: int) -> tuple[Tensor, Tensor]:
    """Return the extremum of a part that begins at ``offset``, with the index of the last one among ties."""
    value, index = x.cummax(dim) if largest else x.cummin(dim)
    last = x.shape[dim] - 1
    return value.narrow(dim, last, 1).contiguous(), (index.narrow(dim, last, 1) + offset).contiguous()


def _extremum_total_fake(x: Tensor, dim: int, largest: bool, offset: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(_reduced_shape(x, dim)), x.new_empty(_reduced_shape(x, dim), dtype=torch.int64)


def _extremum_scan(
    x: Tensor, values: Tensor, indices: Tensor, dim: int, largest: bool, at: int, offset: int
) -> tuple[Tensor, Tensor]:
    own, index = x.cummax(dim) if largest else x.cummin(dim)
    index = index + offset
    if at:
        before, place = values[:at].cummax(0) if largest else values[:at].cummin(0)
        first, where = before[-1], indices[:at].gather(0, place[-1:])[0]
        beaten = own >= first if largest else own <= first
        stays = beaten & ~first.isnan() | own.isnan()
        own, index = torch.where(stays, own, first), torch.where(stays, index, where)
    return own.contiguous(), index.contiguous()


def _extremum_scan_fake(
    x: Tensor, values: Tensor, indices: Tensor, dim: int, largest: bool, at: int, offset: int
) -> tuple[Tensor, Tensor]:
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    return like, torch.empty_like(like, dtype=torch.int64)


# The largest or smallest elements and their indices. The summary is the top k of a part.


def _top_k(x: Tensor, k: int, dim: int, largest: bool, ordered: bool = True) -> tuple[Tensor, Tensor]:
    """Return the top ``k``. For k = 1 it is the first among ties."""
    if k > 1:
        return x.topk(k, dim, largest, ordered)
    return x.max(dim, keepdim=True) if largest else x.min(dim, keepdim=True)


def _top(x: Tensor, k: int, dim: int, largest: bool, offset: int) -> tuple[Tensor, Tensor]:
    """Return the top ``k`` of a part that begins at ``offset``."""
    values, index = _top_k(x, k, dim, largest)
    return values.contiguous(), (index + offset).contiguous()


def _top_fake(x: Tensor, k: int, dim: int, largest: bool, offset: int) -> tuple[Tensor, Tensor]:
    shape = [k if i == dim else n for i, n in enumerate(x.shape)]
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _top_of(
    values: Tensor, indices: Tensor, k: int, dim: int, largest: bool, ordered: bool, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """Return the top ``k`` of the gathered top ``k`` of all ranks."""
    values, indices = (t.movedim(0, dim).flatten(dim, dim + 1) for t in (values, indices))
    best, place = _top_k(values, k, dim, largest, ordered)
    index = indices.gather(dim, place)
    return (best.contiguous(), index) if keepdim else (best.squeeze(dim).contiguous(), index.squeeze(dim))


def _top_of_fake(
    values: Tensor, indices: Tensor, k: int, dim: int, largest: bool, ordered: bool, keepdim: bool
) -> tuple[Tensor, Tensor]:
    shape = [k if i == dim else n for i, n in enumerate(values.shape[1:]) if keepdim or i != dim]
    return values.new_empty(shape), indices.new_empty(shape)


def _place_of_top(values: Tensor, indices: Tensor, dim: int, largest: bool, keepdim: bool) -> Tensor:
    return _top_of(values, indices, 1, dim, largest, True, keepdim)[1]


def _place_of_top_fake(values: Tensor, indices: Tensor, dim: int, largest: bool, keepdim: bool) -> Tensor:
    return _top_of_fake(values, indices, 1, dim, largest, True, keepdim)[1]


define(
    "lse(Tensor x, int dim) -> Tensor",
    _lse,
    _lse_fake,
)
define(
    "softmax_of_lse(Tensor x, Tensor gathered, bool log, bool safe, ScalarType dtype) -> Tensor",
    _softmax,
    _softmax_fake,
)
define(
    "softmax_sum(Tensor grad, Tensor out, int dim, bool log) -> Tensor",
    _softmax_sum,
    _softmax_sum_fake,
)
define(
    "softmax_backward_of_sum(Tensor grad, Tensor out, Tensor gathered, bool log, ScalarType dtype) -> Tensor",
    _softmax_backward,
    _softmax_backward_fake,
)
define(
    "scan_total(Tensor x, int dim, str kind, ScalarType dtype) -> Tensor",
    _scan_total,
    _scan_total_fake,
)
define(
    "scan(Tensor x, Tensor gathered, int dim, str kind, SymInt at, ScalarType dtype) -> Tensor",
    _scan,
    _scan_fake,
)
define(
    "extremum_total(Tensor x, int dim, bool largest, SymInt offset) -> (Tensor, Tensor)",
    _extremum_total,
    _extremum_total_fake,
)
define(
    "extremum_scan(Tensor x, Tensor values, Tensor indices, int dim, bool largest, SymInt at, SymInt"
    " offset) -> (Tensor, Tensor)",
    _extremum_scan,
    _extremum_scan_fake,
)
define(
    "top(Tensor x, SymInt k, int dim, bool largest, SymInt offset) -> (Tensor, Tensor)",
    _top,
    _top_fake,
)
define(
    "top_of(Tensor values, Tensor indices, SymInt k, int dim, bool largest, bool ordered, bool keepdim)"
    " -> (Tensor, Tensor)",
    _top_of,
    _top_of_fake,
)
define(
    "place_of_top(Tensor values, Tensor indices, int dim, bool largest, bool keepdim) -> Tensor",
    _place_of_top,
    _place_of_top_fake,
)
for _name in (
    "lse",
    "softmax_of_lse",
    "softmax_sum",
    "softmax_backward_of_sum",
    "scan_total",
    "scan",
    "extremum_total",
    "extremum_scan",
    "top",
    "top_of",
    "place_of_top",
):
    once_differentiable(_name)
