"""Decompose autopar's ops into pointwise ops and reductions, which a fusing compiler merges with their neighbours.

The eager implementations work in cache-sized blocks and branch on values; these are the same functions without either.
Ops with good kernels (attention on GPUs, gradients of lookups, the fused ops that a plan requests) stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar import _torch
from autopar.ops.attention import _checked, _cpu_flash, _cpu_flash_backward
from autopar.ops.contract import _contract, _spread, parse
from autopar.ops.interpolation import _whole, _whole_backward
from autopar.ops.random import GAMMA, MULTIPLIERS, _signed
from autopar.ops.registration import accumulation_dtype

autopar = torch.ops.autopar


def _sumexp(x: Tensor, m: Tensor) -> Tensor:
    dtype = accumulation_dtype(x.dtype)
    return (x.to(dtype) - m.to(dtype).unsqueeze(-1)).exp().sum(-1)


def _local_position(target: Tensor, ignore_index: int, offset: int, v: int) -> tuple[Tensor, Tensor]:
    local = target - offset
    here = (local >= 0) & (local < v) & (target != ignore_index)
    return here, local.where(here, 0)


def _checked_position(
    position: Tensor, index: Tensor, length: int, vocabulary: int, ignored: int | None = None
) -> Tensor:
    """Return the position, or one past the end for an index outside the vocabulary, so that compiled code raises.

    The eager ops raise too. Only on CPUs, and if the size of the global vocabulary is known.
    """
    if vocabulary <= 1 or index.device.type != "cpu":
        return position
    wrong = (index < 0) | (index >= vocabulary)
    if ignored is not None:
        wrong &= index != ignored
    return torch.where(wrong, length, position)


def _nll(
    x: Tensor,
    lse: Tensor,
    target: Tensor,
    share: Tensor | None = None,
    classes: Tensor | None = None,
    *,
    ignore_index: int,
    offset: int = 0,
    own: float = 1.0,
    each: float = 0.0,
    vocabulary: int = 0,
) -> Tensor:
    here, position = _local_position(target, ignore_index, offset, x.shape[-1])
    position = _checked_position(position, target, x.shape[-1], vocabulary, ignore_index)
    chosen = x.gather(-1, position.unsqueeze(-1)).squeeze(-1) if x.shape[-1] else torch.zeros_like(lse)
    loss = (lse - chosen).to(lse.dtype).where(here, 0)
    if share is not None and classes is not None:
        wide = classes.to(lse.dtype)
        others = lse * wide.sum() - (x.to(lse.dtype) * wide).sum(-1)
        return share * loss + ((1 - share) * others).where(target != ignore_index, 0)
    if not each:
        return loss
    others = lse * x.shape[-1] - x.to(lse.dtype).sum(-1)
    return own * loss + (each * others).where(target != ignore_index, 0)


def _nll_backward(
    grad: Tensor,
    x: Tensor,
    lse: Tensor,
    target: Tensor,
    share: Tensor | None = None,
    classes: Tensor | None = None,
    *,
    ignore_index: int,
    offset: int = 0,
    own: float = 1.0,
    each: float = 0.0,
) -> Tensor:
    here, position = _local_position(target, ignore_index, offset, x.shape[-1])
    scale = grad.masked_fill(target == ignore_index, 0).to(lse.dtype).unsqueeze(-1)
    columns = torch.arange(x.shape[-1], device=x.device)
    chosen = (columns == position.unsqueeze(-1)) & here.unsqueeze(-1)
    softmax = (x.to(lse.dtype) - lse.unsqueeze(-1)).exp()
    labels = own * chosen.to(lse.dtype) + each if each else chosen.to(lse.dtype)
    if share is not None and classes is not None:
        part = share.unsqueeze(-1)
        labels = part * chosen.to(lse.dtype) + (1 - part) * classes.to(lse.dtype)
    return ((softmax - labels) * scale).to(x.dtype)


def _lookup(weight: Tensor, index: Tensor, *, offset: int = 0, padding_idx: int = -1, vocabulary: int = 0) -> Tensor:
    if weight.shape[0] == 0:
        return weight.new_zeros([*index.shape, weight.shape[1]])
    local = index - offset if offset else index
    inside = (local >= 0) & (local < weight.shape[0])
    position = _checked_position(local.where(inside, 0), index, weight.shape[0], vocabulary)
    rows = torch.ops.aten.embedding.default(weight, position)
    return torch.where(inside.unsqueeze(-1), rows, 0)


def _global_index(shape: list[int], global_shape: list[int], offset: list[int], device: torch.device) -> Tensor:
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (n, start) in enumerate(zip(shape, offset, strict=True)):
        stride = math.prod(global_shape[dim + 1 :])
        places = (torch.arange(n, device=device) + start) * stride
        index = index + places.view([-1] + [1] * (len(shape) - dim - 1))
    return index.expand(shape)


def _xor_shift(words: Tensor, shift: int) -> Tensor:
    return words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))


def _dropout(x: Tensor, seed: Tensor, *, p: float, site: int, global_shape: list[int], offset: list[int]) -> Tensor:
    if p in (0, 1):
        return x.clone() if p == 0 else torch.zeros_like(x)
    index = _global_index(list(x.shape), global_shape, offset, x.device)
    words = ((index >> 1) + 1) * GAMMA + _mixed_key(seed, site)
    words = _xor_shift(words, 30) * MULTIPLIERS[0]
    words = _xor_shift(words, 27) * MULTIPLIERS[1]
    words = _xor_shift(words, 31)
    # The low half of a word belongs to an even element, the high half to an odd one; both keep their sign.
    bits = torch.where((index & 1).bool(), words >> 32, (words << 32) >> 32)
    keep = bits >= min(round(p * 2**32), 2**32 - 1) - 2**31
    return torch.where(keep, x * (1 / (1 - p)), 0).contiguous()


def _mixed_key(seed: Tensor, site: int) -> Tensor:
    """Compute ``random.key`` out of place."""

    def mixed(words: Tensor) -> Tensor:
        words = _xor_shift(words, 30) * MULTIPLIERS[0]
        return _xor_shift(_xor_shift(words, 27) * MULTIPLIERS[1], 31)

    return mixed(mixed(seed.reshape(()).to(torch.int64) + GAMMA) + _signed((site + 1) * GAMMA))


def _channels(statistic: Tensor, x: Tensor) -> Tensor:
    return statistic.view(1, -1, *[1] * (x.dim() - 2))


def _product(x: Tensor, w: Tensor, equation: str) -> Tensor:
    terms = parse(equation)
    if terms.summed:
        return _contract(x, w, equation)
    return (_spread(x, terms.x, terms.out) * _spread(w, terms.w, terms.out)).contiguous()


def _own_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    wide, dims = x.to(accumulation_dtype(x.dtype)), [d for d in range(x.dim()) if d != 1]
    mean = wide.sum(dims) / (x.numel() // x.shape[1])
    return mean, ((wide - _channels(mean, x)) ** 2).sum(dims)


def _batch_var_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    mean, deviations = _own_moments(x)
    return deviations / (x.numel() // x.shape[1]), mean


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, *, count: int
) -> Tensor:
    dtype = accumulation_dtype(torch.promote_types(x.dtype, mean.dtype))
    scale = rstd.to(dtype) if weight is None else rstd.to(dtype) * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return (x.to(dtype) * _channels(scale, x) + _channels(shift, x)).to(x.dtype)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, seed: Tensor | None = None, **options: Any
) -> Any:
    found = _cpu_flash(_checked(q, k, v, mask, seed, options), q, k, v)
    return NotImplemented if found is None else (_torch.by_rows(found[0]), found[1].contiguous())


def _attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    **options: Any,
) -> Any:
    found = _cpu_flash_backward(_checked(q, k, v, mask, seed, options), grad_out, q, k, v, out, lse)
    return NotImplemented if found is None else tuple(map(_torch.by_rows, found))


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    autopar.attention.default: _attention,
    autopar.attention_backward.default: _attention_backward,
    autopar.contract.default: _product,
    autopar.sumexp.default: _sumexp,
    autopar.rescaled.default: lambda total, own, m: total * (own.to(total.dtype) - m).exp(),
    autopar.nll.default: _nll,
    autopar.nll_backward.default: _nll_backward,
    autopar.lookup.default: _lookup,
    autopar.dropout.default: _dropout,
    autopar.batch_moments.default: lambda x: torch.stack(_own_moments(x)),
    autopar.batch_var_mean.default: _batch_var_mean,
    autopar.batch_norm.default: _batch_norm,
    autopar.interpolate.default: _whole,
    autopar.interpolate_backward.default: _whole_backward,
}
