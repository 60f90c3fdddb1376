"""Multiply each row by the matrix of the expert that it names.

No row depends on another, so rows can be cut anywhere. Inside, the rank's own rows are sorted by expert for the kernel,
and put back. A rank may hold some of the experts, from ``first`` on: rows of the others become zeros, to be summed over
the ranks. If ids have one more dim, a row names several experts, and gives a row for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.embedding import _lookup
from autopar.ops.registration import define, differentiate, once_differentiable

aten = torch.ops.aten

ALIGNMENT_BYTES = 16
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _by_expert(ids: Tensor, first: int, experts: int) -> tuple[Tensor, Tensor]:
    """Return the positions of ids sorted by expert, with other ranks' experts last, and where each expert's end."""
    expert = ids.reshape(-1) - first
    expert.masked_fill_((expert < 0) | (expert >= experts), experts)
    ordered, order = expert.sort(stable=True)
    numbers = torch.arange(experts, device=ids.device, dtype=ordered.dtype)
    return order, torch.searchsorted(ordered, numbers, right=True, out_int32=True)


def _gathered_rows(rows: Tensor, order: Tensor) -> Tensor:
    """[..., k] -> [s, k]: gather the row of each position; a row may have several."""
    flat = rows.reshape(-1, rows.shape[-1])
    each = order.shape[0] // flat.shape[0]
    return flat.index_select(0, order if each == 1 else order // each)


def _has_kernel(*operands: Tensor) -> bool:
    """Whether torch's grouped product supports these operands."""
    if any(not x.is_cuda or x.dtype not in KERNEL_DTYPES or 1 not in x.stride()[-2:] for x in operands):
        return False
    if any(n * x.itemsize % ALIGNMENT_BYTES for x in operands for n in x.stride() if n != 1):
        return False
    return torch.cuda.get_device_capability(operands[0].device) >= (8, 0)


def _bounds(ends: Tensor) -> list[tuple[int, int]]:
    bounds: list[int] = [0, *ends.tolist()]
    return list(zip(bounds, bounds[1:], strict=False))


def _products(rows: Tensor, weight: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """[..., k], [e, k, n] -> [s, n]: a row for each position, zeros for those after the last end."""
    taken = _gathered_rows(rows, order)
    if _has_kernel(taken, weight):
        made: Tensor = aten._grouped_mm(taken, weight, ends)
        del taken
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        place.masked_fill_(place >= ends[-1], -1)  # rows that the kernel does not write
        return _lookup(made, place, offset=0)
    out = taken.new_zeros(taken.shape[0], weight.shape[2])
    for expert, (low, high) in enumerate(_bounds(ends)):
        torch.mm(taken[low:high], weight[expert], out=out[low:high])
    del taken
    return torch.empty_like(out).index_copy_(0, order, out)


def _experts_mm(rows: Tensor, weight: Tensor, ids: Tensor, *, transposed: bool = False, first: int = 0) -> Tensor:
    """[..., k], [e, k, n] or [e, n, k], [...] or [..., r] -> [..., n] or [..., r, n]"""
    matrices = weight.transpose(1, 2) if transposed else weight
    shape = [*ids.shape, matrices.shape[2]]
    if 0 in (ids.numel(), weight.numel()):
        return rows.new_zeros(shape)
    return _products(rows, matrices, *_by_expert(ids, first, weight.shape[0])).view(shape)


def _experts_mm_fake(rows: Tensor, weight: Tensor, ids: Tensor, *, transposed: bool = False, first: int = 0) -> Tensor:
    return rows.new_empty([*ids.shape, weight.shape[1 if transposed else 2]])


def _experts_mm_weight(
    rows: Tensor, grad: Tensor, ids: Tensor, *, experts: int, transposed: bool = False, first: int = 0
) -> Tensor:
    """Sum outer products over each expert's rows: [e, k, n], or [e, n, k]."""
    k, n = rows.shape[-1], grad.shape[-1]
    if 0 in (ids.numel(), k, n, experts):
        return rows.new_zeros([experts, n, k] if transposed else [experts, k, n])
    order, ends = _by_expert(ids, first, experts)
    left, right = _gathered_rows(rows, order), _gathered_rows(grad, order)
    left, right = (right, left) if transposed else (left, right)
    if _has_kernel(left, right):
        made: Tensor = aten._grouped_mm(left.t(), right, ends)
        return made.contiguous()
    out = rows.new_zeros(experts, left.shape[1], right.shape[1])
    for expert, (low, high) in enumerate(_bounds(ends)):
        torch.mm(left[low:high].t(), right[low:high], out=out[expert])
    return out


def _experts_mm_weight_fake(
    rows: Tensor, grad: Tensor, ids: Tensor, *, experts: int, transposed: bool = False, first: int = 0
) -> Tensor:
    k, n = rows.shape[-1], grad.shape[-1]
    return rows.new_empty([experts, n, k] if transposed else [experts, k, n])


def _context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    rows, weight, ids = inputs
    ctx.save_for_backward(rows, weight, ids)
    ctx.several = ids.dim() == rows.dim()
    ctx.transposed, ctx.first = (keyword_only_inputs[k] for k in ("transposed", "first"))


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ids = ctx.saved_tensors
    of_rows = of_weight = None
    if ctx.needs_input_grad[0]:
        by_id: Tensor = torch.ops.autopar.experts_mm(grad, weight, ids, transposed=not ctx.transposed, first=ctx.first)
        of_rows = by_id.sum(-2) if ctx.several else by_id
    if ctx.needs_input_grad[1]:
        of_weight = torch.ops.autopar.experts_mm_weight(
            rows, grad, ids, experts=weight.shape[0], transposed=ctx.transposed, first=ctx.first
        )
    return of_rows, of_weight, None


define(
    "experts_mm(Tensor rows, Tensor weight, Tensor ids, *, bool transposed=False, SymInt first=0) -> Tensor",
    _experts_mm,
    _experts_mm_fake,
)
define(
    "experts_mm_weight(Tensor rows, Tensor grad, Tensor ids, *, SymInt experts, bool transposed=False, "
    "SymInt first=0) -> Tensor",
    _experts_mm_weight,
    _experts_mm_weight_fake,
)
differentiate("experts_mm", _gradient, _context)
once_differentiable("experts_mm_weight")
