"""Read and write at indices of a dim of which a rank holds a part, from ``offset`` on.

Elements of other ranks are read as zero, to be summed over the ranks, and are not written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.registration import define, once_differentiable

aten = torch.ops.aten
Number = int | float | bool


def _is_local(local: Tensor, n: int) -> Tensor:
    return (local >= 0) & (local < n)


def _gather(x: Tensor, dim: int, index: Tensor, offset: int) -> Tensor:
    local = index - offset
    here = _is_local(local, x.shape[dim])
    return x.gather(dim, local.where(here, 0)).masked_fill_(~here, 0).contiguous()


def _gather_fake(x: Tensor, dim: int, index: Tensor, offset: int) -> Tensor:
    return x.new_empty(index.shape)


def _local(indices: list[Tensor | None], at: int, offset: int, whole: int) -> Tensor:
    """Return the local index of dim ``at``, of ``whole`` global elements. Negative indices count from its end."""
    index = indices[at]
    assert index is not None
    return index.where(index >= 0, index + whole) - offset


def _index(x: Tensor, indices: list[Tensor | None], at: int, offset: int, whole: int) -> Tensor:
    local = _local(indices, at, offset, whole)
    here = _is_local(local, x.shape[at])
    found: Tensor = aten.index(x, [local.where(here, 0) if i == at else index for i, index in enumerate(indices)])
    # Read in the same way whether an element is missing, so that flags line up with elements.
    flags = torch.tensor([True, False], device=x.device).view(-1, *[1] * (x.ndim - 1 - at))
    shape = [2 if i == at else n for i, n in enumerate(x.shape)]
    missing = aten.index(flags.expand(shape), [here.long() if i == at else index for i, index in enumerate(indices)])
    return found.masked_fill_(missing, 0).contiguous()


def _index_fake(x: Tensor, indices: list[Tensor | None], at: int, offset: int, whole: int) -> Tensor:
    return x.new_empty(aten.index(x, indices).shape)


def _with_spill(x: Tensor, dim: int) -> Tensor:
    """Return a copy with an extra element at the end of ``dim``, where writes to other ranks' elements go."""
    return torch.cat([x, x.narrow(dim, 0, 1)], dim)


def _spill_index(local: Tensor, n: int) -> Tensor:
    return local.where(_is_local(local, n), n)


def _without_spill(x: Tensor, dim: int) -> Tensor:
    return x.narrow(dim, 0, x.shape[dim] - 1).contiguous()


def _scatter(
    x: Tensor, dim: int, index: Tensor, source: Tensor | None, value: Number, kind: str, include_self: bool, offset: int
) -> Tensor:
    """Scatter. ``kind`` is "set", "sum", or a reduction of ``scatter_reduce``."""
    big, local = _with_spill(x, dim), _spill_index(index - offset, x.shape[dim])
    if source is None:
        return _without_spill(big.scatter_(dim, local, value), dim)
    if kind == "set":
        return _without_spill(big.scatter_(dim, local, source), dim)
    return _without_spill(big.scatter_reduce_(dim, local, source, kind, include_self=include_self), dim)


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _index_write(
    x: Tensor, dim: int, index: Tensor, source: Tensor, kind: str, alpha: Number, include_self: bool, offset: int
) -> Tensor:
    """Write at indices. ``kind`` is "add", "copy", or a reduction of ``index_reduce``."""
    big, local = _with_spill(x, dim), _spill_index(index - offset, x.shape[dim])
    if kind == "add":
        return _without_spill(big.index_add_(dim, local, source, alpha=alpha), dim)
    if kind == "copy":
        return _without_spill(big.index_copy_(dim, local, source), dim)
    return _without_spill(big.index_reduce_(dim, local, source, kind, include_self=include_self), dim)


def _index_put(
    x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool, at: int, offset: int, whole: int
) -> Tensor:
    local = _spill_index(_local(indices, at, offset, whole), x.shape[at])
    put = [local if i == at else index for i, index in enumerate(indices)]
    big: Tensor = aten.index_put_(_with_spill(x, at), put, values, accumulate)
    return _without_spill(big, at)


define("gather_part(Tensor x, int dim, Tensor index, SymInt offset) -> Tensor", _gather, _gather_fake)
define(
    "index_part(Tensor x, Tensor?[] indices, int at, SymInt offset, SymInt whole) -> Tensor",
    _index,
    _index_fake,
)
define(
    "scatter_part(Tensor x, int dim, Tensor index, Tensor? source, Scalar value, str kind, bool include_self,"
    " SymInt offset) -> Tensor",
    _scatter,
    _like,
)
define(
    "index_write_part(Tensor x, int dim, Tensor index, Tensor source, str kind, Scalar alpha, bool include_self,"
    " SymInt offset) -> Tensor",
    _index_write,
    _like,
)
define(
    "index_put_part(Tensor x, Tensor?[] indices, Tensor values, bool accumulate, int at, SymInt offset,"
    " SymInt whole) -> Tensor",
    _index_put,
    _like,
)
for _name in ("gather_part", "index_part", "scatter_part", "index_write_part", "index_put_part"):
    once_differentiable(_name)
