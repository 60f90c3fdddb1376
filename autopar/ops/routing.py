"""Rows of tokens in the order of the experts that they go to.

Each of ``ids`` [..., b, r] sends the row of a token to an expert, one *place* of ``span`` in all. A routed tensor
[..., c, e, n] stands for these rows: it is a buffer of rows, those of expert 0 first and places in order within an
expert, and then rows that stand for none. Its leading dims say how many rows it has room for, and how they are cut says
which rows a rank has: those of its tokens and of its experts. ``keys``, [..., c, e], has ``expert * span + place`` for
each row, in increasing order, and a key of the expert after the last for rows that stand for none.

``send`` and ``collect`` are each other's gradients. ``spmd.routing`` runs them on the ranks of a mesh.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ops.experts import _bounds, _has_kernel
from autopar.ops.registration import accumulation_dtype, define, once_differentiable

aten = torch.ops.aten


def _route(ids: Tensor, *, experts: int, columns: int) -> Tensor:
    """[..., b, r] -> [..., columns, experts]"""
    span = ids.numel()
    made = ids.new_full([*ids.shape[:-2], columns, experts], experts * span)
    made.view(-1)[:span] = (ids.reshape(-1) * span + torch.arange(span, device=ids.device)).sort().values
    return made


def _route_fake(ids: Tensor, *, experts: int, columns: int) -> Tensor:
    return ids.new_empty([*ids.shape[:-2], columns, experts])


def _places(keys: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """Return the place of each row, and which rows stand for none."""
    flat = keys.reshape(-1)
    return flat % span, flat >= keys.shape[-1] * span


def _send(x: Tensor, ids: Tensor, keys: Tensor, *, each: bool = False) -> Tensor:
    """[..., b, n] or, a row for each choice, [..., b, r, n] -> [..., c, e, n]"""
    place, none = _places(keys, ids.numel())
    rows = x.reshape(-1, x.shape[-1]).index_select(0, place if each else place // ids.shape[-1])
    return rows.masked_fill_(none.unsqueeze(1), 0).view(*keys.shape, x.shape[-1])


def _send_fake(x: Tensor, ids: Tensor, keys: Tensor, *, each: bool = False) -> Tensor:
    return x.new_empty([*keys.shape, x.shape[-1]])


def _collect(y: Tensor, ids: Tensor, keys: Tensor, *, each: bool = False) -> Tensor:
    """[..., c, e, n] -> [..., b, n], the sum over a token's choices in their order, or of each [..., b, r, n]"""
    span, n = ids.numel(), y.shape[-1]
    place, none = _places(keys, span)
    slots = y.new_zeros(span + 1, n)  # the last takes the rows that stand for none
    slots.index_copy_(0, place.masked_fill_(none, span), y.reshape(-1, n))
    own = slots[:span].view(*ids.shape, n)
    return own.clone() if each else own.sum(-2)


def _collect_fake(y: Tensor, ids: Tensor, keys: Tensor, *, each: bool = False) -> Tensor:
    return y.new_empty([*(ids.shape if each else ids.shape[:-1]), y.shape[-1]])


def _ends(keys: Tensor, span: int, first: int, experts: int) -> Tensor:
    """Return where the rows of each expert end."""
    after = torch.arange(first + 1, first + experts + 1, device=keys.device) * span
    return torch.searchsorted(keys.reshape(-1), after, out_int32=True)


def _routed_mm(
    rows: Tensor, weight: Tensor, keys: Tensor, *, span: int, transposed: bool = False, first: int = 0
) -> Tensor:
    """[..., c, e, k], [e, k, n] or [e, n, k] -> [..., c, e, n]; rows that stand for none may be anything."""
    matrices = weight.transpose(1, 2) if transposed else weight
    flat, ends = rows.reshape(-1, rows.shape[-1]), _ends(keys, span, first, weight.shape[0])
    if _has_kernel(flat, matrices):
        made: Tensor = aten._grouped_mm(flat, matrices, ends)
        return made.view(*keys.shape, matrices.shape[2])
    out = flat.new_zeros(flat.shape[0], matrices.shape[2])
    for expert, (low, high) in enumerate(_bounds(ends)):
        torch.mm(flat[low:high], matrices[expert], out=out[low:high])
    return out.view(*keys.shape, matrices.shape[2])


def _routed_mm_fake(
    rows: Tensor, weight: Tensor, keys: Tensor, *, span: int, transposed: bool = False, first: int = 0
) -> Tensor:
    return rows.new_empty([*keys.shape, weight.shape[1 if transposed else 2]])


def _routed_mm_weight(
    rows: Tensor, grad: Tensor, keys: Tensor, *, span: int, experts: int, transposed: bool = False, first: int = 0
) -> Tensor:
    """Sum outer products over each expert's rows: [e, k, n], or [e, n, k]."""
    left, right = rows.reshape(-1, rows.shape[-1]), grad.reshape(-1, grad.shape[-1])
    left, right = (right, left) if transposed else (left, right)
    ends = _ends(keys, span, first, experts)
    if _has_kernel(left, right):
        made: Tensor = aten._grouped_mm(left.t(), right, ends)
        return made.contiguous()
    out = left.new_zeros(experts, left.shape[1], right.shape[1])
    for expert, (low, high) in enumerate(_bounds(ends)):
        torch.mm(left[low:high].t(), right[low:high], out=out[expert])
    return out


def _routed_mm_weight_fake(
    rows: Tensor, grad: Tensor, keys: Tensor, *, span: int, experts: int, transposed: bool = False, first: int = 0
) -> Tensor:
    k, n = rows.shape[-1], grad.shape[-1]
    return rows.new_empty([experts, n, k] if transposed else [experts, k, n])


def _of_expert(x: Tensor, keys: Tensor, *, span: int, first: int = 0) -> Tensor:
    """[e, n] -> [..., c, e, n]: the row of each row's expert, zeros for rows that stand for none."""
    expert = keys.reshape(-1) // span - first
    none = (expert < 0) | (expert >= x.shape[0])
    made = x.index_select(0, expert.masked_fill_(none, 0))
    return made.masked_fill_(none.unsqueeze(1), 0).view(*keys.shape, x.shape[1])


def _of_expert_fake(x: Tensor, keys: Tensor, *, span: int, first: int = 0) -> Tensor:
    return x.new_empty([*keys.shape, x.shape[1]])


def _sum_of_expert(y: Tensor, keys: Tensor, *, span: int, experts: int, first: int = 0) -> Tensor:
    """[..., c, e, n] -> [e, n]: the sum of each expert's rows."""
    expert = keys.reshape(-1) // span - first
    none = (expert < 0) | (expert >= experts)
    made = y.new_zeros(experts + 1, y.shape[-1], dtype=accumulation_dtype(y.dtype))
    made.index_add_(0, expert.masked_fill_(none, experts), y.reshape(-1, y.shape[-1]).to(made.dtype))
    return made[:experts].to(y.dtype, copy=True)


def _sum_of_expert_fake(y: Tensor, keys: Tensor, *, span: int, experts: int, first: int = 0) -> Tensor:
    return y.new_empty([experts, y.shape[-1]])


define("route(Tensor ids, *, SymInt experts, SymInt columns) -> Tensor", _route, _route_fake)
define("send(Tensor x, Tensor ids, Tensor keys, *, bool each=False) -> Tensor", _send, _send_fake)
define("collect(Tensor y, Tensor ids, Tensor keys, *, bool each=False) -> Tensor", _collect, _collect_fake)
define(
    "routed_mm(Tensor rows, Tensor weight, Tensor keys, *, SymInt span, bool transposed=False, SymInt first=0)"
    " -> Tensor",
    _routed_mm,
    _routed_mm_fake,
)
define(
    "routed_mm_weight(Tensor rows, Tensor grad, Tensor keys, *, SymInt span, SymInt experts, bool transposed=False, "
    "SymInt first=0) -> Tensor",
    _routed_mm_weight,
    _routed_mm_weight_fake,
)
define("of_expert(Tensor x, Tensor keys, *, SymInt span, SymInt first=0) -> Tensor", _of_expert, _of_expert_fake)
define(
    "sum_of_expert(Tensor y, Tensor keys, *, SymInt span, SymInt experts, SymInt first=0) -> Tensor",
    _sum_of_expert,
    _sum_of_expert_fake,
)
for _name in ("route", "send", "collect", "routed_mm", "routed_mm_weight", "of_expert", "sum_of_expert"):
    once_differentiable(_name)
