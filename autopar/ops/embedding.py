"""Look up rows of a table that may be a shard of the vocabulary. Rows of other ranks become zeros, to be summed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar import kernels
from autopar._torch import FakeTensor
from autopar.ops.registration import accumulation_dtype, define, differentiate, once_differentiable


def _inside(index: Tensor, offset: int, rows: int) -> Tensor | None:
    """Return which indices this shard holds; None if it holds all, which is only checked where it is cheap."""
    inside = (index >= offset) & (index < offset + rows)
    if index.device.type == "cpu" and (isinstance(index, FakeTensor) or bool(inside.all())):
        return None
    return inside


def refuse_outside(index: Tensor, size: int, ignored: int | None = None) -> None:
    """Raise on indices outside the vocabulary, which a shard alone would take for those of another rank.

    Only on CPUs. Elsewhere they give zeros: a check would synchronize the program, and torch's own kernels abort the
    device.

    Args:
        size: size of the global vocabulary; 0 if unknown.

    Raises:
        IndexError: if an index is out of bounds; names the first one.
    """
    # A single class is not checked: what a mask does not select is filled with ones, and counts nowhere.
    if size > 1 and index.device.type == "cpu" and not isinstance(index, FakeTensor):
        wrong = (index < 0) | (index >= size)
        if ignored is not None:
            wrong &= index != ignored
        if bool(wrong.any()):
            raise IndexError(f"Index {index[wrong][0].item()} is out of bounds for size {size}.")


def _lookup(weight: Tensor, index: Tensor, *, offset: int = 0, padding_idx: int = -1, vocabulary: int = 0) -> Tensor:
    if weight.shape[0] == 0:
        return weight.new_zeros([*index.shape, weight.shape[1]])
    if kernels.enabled(weight):
        rows: Tensor = kernels.run("lookup", weight, index, offset=offset)
        return rows
    inside = _inside(index, offset, weight.shape[0])
    local = index - offset if offset else index
    if inside is None:
        return functional.embedding(local, weight).contiguous()
    refuse_outside(index, vocabulary)
    out = functional.embedding(local.where(inside, 0), weight)
    return out.masked_fill_(~inside.unsqueeze(-1), 0).contiguous()


def _lookup_fake(
    weight: Tensor, index: Tensor, *, offset: int = 0, padding_idx: int = -1, vocabulary: int = 0
) -> Tensor:
    return weight.new_empty([*index.shape, weight.shape[1]])


def _lookup_backward(grad: Tensor, index: Tensor, *, rows: int, offset: int = 0, padding_idx: int = -1) -> Tensor:
    if rows == 0:
        return grad.new_zeros([0, grad.shape[-1]])
    if kernels.enabled(grad):
        table: Tensor = kernels.run("lookup_backward", grad, index, rows=rows, offset=offset, padding_idx=padding_idx)
        return table
    inside = _inside(index, offset, rows)
    local = index - offset if offset else index
    if inside is not None:
        grad = grad.masked_fill(~inside.unsqueeze(-1), 0)
        local = local.where(inside, 0)
        # Entries of other ranks add zeros to row 0, or nothing if it is the padding row.
    local_padding = padding_idx - offset if padding_idx >= offset else -1
    dtype = accumulation_dtype(grad.dtype)
    out: Tensor = torch.ops.aten.embedding_dense_backward(grad.to(dtype), local, rows, local_padding, False)
    return out.to(grad.dtype).contiguous()


def _lookup_backward_fake(grad: Tensor, index: Tensor, *, rows: int, offset: int = 0, padding_idx: int = -1) -> Tensor:
    return grad.new_empty([rows, grad.shape[-1]])


def _lookup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    weight, index = inputs
    ctx.save_for_backward(index)
    ctx.options = {k: keyword_only_inputs[k] for k in ("offset", "padding_idx")} | {"rows": weight.shape[0]}


def _lookup_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (index,) = ctx.saved_tensors
    dweight: Tensor = torch.ops.autopar.lookup_backward(grad, index, **ctx.options)
    return dweight, None


define(
    "lookup(Tensor weight, Tensor index, *, SymInt offset=0, SymInt padding_idx=-1, SymInt vocabulary=0) -> Tensor",
    _lookup,
    _lookup_fake,
)
define(
    "lookup_backward(Tensor grad, Tensor index, *, SymInt rows, SymInt offset=0, SymInt padding_idx=-1) -> Tensor",
    _lookup_backward,
    _lookup_backward_fake,
)
once_differentiable("lookup_backward")
differentiate("lookup", _lookup_gradient, _lookup_context)
