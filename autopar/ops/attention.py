"""Scaled-dot-product attention, forward and backward, with grouped queries and sharding-independent dropout.

q is [b, h, s, d], k [b, g, t, d], v [b, g, t, d_v]; head i of the queries reads head i // (h / g) of k and v. In causal
attention query i may read key j if i >= j, counted in the global tensors. A row that may read nothing gives zeros with
zero gradients and lse 0. Torch's flash kernels for CPU and GPU compute what they support; the rest runs block by block
over the queries with the formulas of Dao et al. 2022 (FlashAttention, appendix B).

Attention and its gradients lie in memory as [b, s, h, d], as those kernels write them if their operands lie so. That is
how models make the operands, which are views of [b, s, h * d], and what they view the result as.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from autopar import _torch
from autopar.errors import AutoparError
from autopar.ops.exponential import exp_
from autopar.ops.random import keep_scale
from autopar.ops.registration import accumulation_dtype, define, differentiate, once_differentiable

# Scores held at a time: on a CPU about the size of its caches, elsewhere enough to keep the device busy.
CPU_SCORES = 1 << 21
SCORES = 1 << 27


@dataclass(frozen=True)
class _Attention:
    """What forward and backward share. ``offset`` is the start of the local [b, h, s, t] in the global one."""

    mask: Tensor | None
    seed: Tensor | None
    is_causal: bool
    scale: float
    dropout_p: float = 0.0
    site: int = -1
    global_shape: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=lambda: [0, 0, 0, 0])

    def flash(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether torch's flash kernel for CPUs supports this. Its first causal query reads the first key alone."""
        full = q.numel() > 0 and k.numel() > 0 and not (self.is_causal and self.offset[2] != self.offset[3])
        return q.device.type == "cpu" and full and not self.dropout_p and q.shape[-1] == v.shape[-1]

    def keys_before(self, q: Tensor, k: Tensor, v: Tensor) -> int:
        """Return how many keys all causal queries read, if torch's flash kernel for CPUs supports those and the others
        apart; else 0."""
        before = self.offset[2] - self.offset[3]
        apart = self.is_causal and self.mask is None and 0 < before < k.shape[2]
        return before if apart and replace(self, is_causal=False).flash(q, k, v) else 0

    def gpu_flash(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether torch's flash kernel for GPUs supports this. Its last causal query reads all keys."""
        plain = self.mask is None and not self.dropout_p and v.shape[-1] == q.shape[-1] and k.numel() * q.numel() > 0
        ends_alike = self.offset[2] + q.shape[2] == self.offset[3] + k.shape[2]
        return plain and (ends_alike or not self.is_causal) and _torch.flash_takes(q)

    def flash_mask(self, q: Tensor) -> Tensor | None:
        """Return the kernel's additive mask."""
        mask = self.mask
        if mask is None:
            return None
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -math.inf)
        if mask.dtype != torch.float32 or q.dtype == torch.float64:
            mask = mask.to(q.dtype)
        return mask[(None,) * (4 - mask.dim())]

    def _causal(self, rows: slice, t: int, device: torch.device) -> Tensor:
        """Return the causal mask, [rows, t] bool."""
        first_query, first_key = self.offset[2:]
        queries = torch.arange(rows.start + first_query, rows.stop + first_query, device=device)
        return queries[:, None] >= torch.arange(first_key, first_key + t, device=device)

    def scores(self, q: Tensor, k: Tensor, rows: slice) -> Tensor:
        """Return the scores, [b, h, rows, t] in the accumulation dtype; -inf where attention is masked."""
        scores = _by_group(q[:, :, rows] * self.scale, k) @ k.transpose(-1, -2)
        scores = scores.view(q.shape[0], q.shape[1], rows.stop - rows.start, k.shape[2])
        if self.mask is not None:
            mask = self.mask[..., rows, :] if self.mask.dim() > 1 and self.mask.shape[-2] > 1 else self.mask
            scores.add_(_additive(mask, scores.dtype) if mask.dtype == torch.bool else mask)
        if self.is_causal:
            scores.add_(_additive(self._causal(rows, k.shape[2], q.device), scores.dtype))
        return scores

    def keep(self, weights: Tensor, rows: slice) -> Tensor | None:
        """Return 1 / (1 - p) where dropout keeps, else 0: [b, h, rows, t] like the weights. None without dropout."""
        if not self.dropout_p:
            return None
        assert self.seed is not None
        b, h, first, t = self.offset
        place = [b, h, first + rows.start, t]
        return keep_scale(self.seed, self.site, self.dropout_p, self.global_shape, place, weights)


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return -inf where attention is masked, else 0. On a CPU adding it is much cheaper than filling by a mask."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -math.inf)


def _with_contiguous_rows(x: Tensor) -> Tensor:
    """Return ``x`` with contiguous rows, as torch's kernels require. The one for CPUs does not check."""
    return x if x.stride(-1) == 1 else _torch.by_rows(x)


def _by_group(x: Tensor, k: Tensor) -> Tensor:
    """[b, h, rows, n] -> [b, g, h / g rows, n]: queries that share a head of k become rows of one matrix."""
    b, h, rows, n = x.shape
    return x.reshape(b, k.shape[1], h // max(1, k.shape[1]) * rows, n)


def _row_blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
    b, h, s, _ = q.shape
    limit = CPU_SCORES if q.device.type == "cpu" else SCORES
    step = max(1, limit // max(1, b * h * k.shape[2]))
    return (slice(start, min(s, start + step)) for start in range(0, s, step))


def _checked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, options: Any) -> _Attention:
    attention = _Attention(mask, seed, **options)
    b, h, _, d = q.shape
    fits = k.shape[0] == b and v.shape[:3] == k.shape[:3] and k.shape[3] == d and h % max(1, k.shape[1]) == 0
    if not fits or not q.dtype == k.dtype == v.dtype:
        raise AutoparError(
            "Attention needs q [b, h, s, d], k [b, g, t, d] and v [b, g, t, d_v], with h a multiple of g.",
            found=", ".join(f"{x.dtype} {list(x.shape)}" for x in (q, k, v)),
        )
    if attention.dropout_p and seed is None:
        raise AutoparError("Attention with dropout needs a seed.", found=f"dropout_p={attention.dropout_p}")
    return attention


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, seed: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    attention = _checked(q, k, v, mask, seed, options)
    found = _cpu_flash(attention, q, k, v)
    if found is None and attention.gpu_flash(q, k, v):
        q, k, v = map(_with_contiguous_rows, (q, k, v))
        found = _torch.flash_attention(q, k, v, causal=attention.is_causal, scale=attention.scale)
    out, lse = _forward(attention, q, k, v) if found is None else found
    return _torch.by_rows(out), lse.contiguous()


def _cpu_flash(attention: _Attention, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the results in the layout of torch's CPU kernel, or None if it does not support this."""
    if before := attention.keys_before(q, k, v):
        return _joined(*(_cpu_flash(*part) for part in _parts(attention, before, q, k, v)))  # type: ignore[arg-type]
    if not attention.flash(q, k, v):
        return None
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *map(_with_contiguous_rows, (q, k, v)),
        0.0,
        attention.is_causal,
        attn_mask=attention.flash_mask(q),
        scale=attention.scale,
    )
    return out, lse


def _parts(
    attention: _Attention, before: int, q: Tensor, k: Tensor, v: Tensor
) -> Iterator[tuple[_Attention, Tensor, Tensor, Tensor]]:
    """Return causal attention to the keys that all queries read, and that to the others."""
    yield replace(attention, is_causal=False), q, k[:, :, :before], v[:, :, :before]
    yield replace(attention, offset=[0, 0, 0, 0]), q, k[:, :, before:], v[:, :, before:]


def _joined(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention to two sets of keys from the results for each."""
    (out, lse), (more, of_more) = one, other
    total = torch.logaddexp(lse, of_more)
    shares = (lse.sub(total).exp_().unsqueeze(-1), of_more.sub(total).exp_().unsqueeze(-1))
    joined = out.to(lse.dtype).mul_(shares[0]).add_(more.to(lse.dtype).mul_(shares[1]))
    return joined.to(out.dtype), total


def _forward(attention: _Attention, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype)
    out = _torch.zeros_by_rows(q, [*q.shape[:3], v.shape[3]])
    lse = q.new_zeros(q.shape[:3], dtype=dtype)
    if out.numel() == 0 or k.numel() == 0:
        return out, lse
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    for rows in _row_blocks(q, k):
        scores = attention.scores(q, k, rows)
        highest = scores.amax(-1, keepdim=True)
        highest.masked_fill_(highest == -math.inf, 0)
        weights = exp_(scores.sub_(highest))
        total = weights.sum(-1, keepdim=True)
        empty = total == 0
        lse[:, :, rows] = (total.log() + highest).masked_fill_(empty, 0).squeeze(-1)
        keep = attention.keep(weights, rows)
        if keep is not None:
            weights.mul_(keep)
        product = (_by_group(weights, v) @ v).view(*weights.shape[:3], v.shape[3])
        out[:, :, rows] = product.div_(total.masked_fill_(empty, 1)).to(out.dtype)
    return out, lse


def _fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, seed: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    _checked(q, k, v, mask, seed, options)
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    return _empty_by_rows(q, v.shape[3]), lse


def _empty_by_rows(x: Tensor, width: int) -> Tensor:
    b, h, s, _ = x.shape
    return x.new_empty([b, s, h, width]).transpose(1, 2)


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
) -> tuple[Tensor, Tensor, Tensor]:
    attention = _checked(q, k, v, mask, seed, options)
    found = _cpu_flash_backward(attention, grad_out, q, k, v, out, lse)
    if found is None and attention.gpu_flash(q, k, v):
        q, k, v, grad_out = map(_with_contiguous_rows, (q, k, v, grad_out))
        options = {"causal": attention.is_causal, "scale": attention.scale}
        found = _torch.flash_attention_backward(grad_out, q, k, v, out, lse, **options)
    dq, dk, dv = _backward(attention, grad_out, q, k, v, out, lse) if found is None else found
    return _torch.by_rows(dq), _torch.by_rows(dk), _torch.by_rows(dv)


def _cpu_flash_backward(
    attention: _Attention, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    if before := attention.keys_before(q, k, v):
        parts = _parts(attention, before, q, k, v)
        first, second = (_cpu_flash_backward(part[0], grad_out, *part[1:], out, lse) for part in parts)
        assert first is not None and second is not None
        dk, dv = (_torch.joined_by_rows(parts) for parts in zip(first[1:], second[1:], strict=True))
        return first[0].add(second[0]), dk, dv
    if not attention.flash(q, k, v):
        return None
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *map(_with_contiguous_rows, (grad_out, q, k, v, out)),
        lse,
        0.0,
        attention.is_causal,
        attn_mask=attention.flash_mask(q),
        scale=attention.scale,
    )
    return dq, dk, dv


def _backward(
    attention: _Attention, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    original, dtype = q.dtype, accumulation_dtype(q.dtype)
    q, k, v, grad_out, out = (x.to(dtype) for x in (q, k, v, grad_out, out))
    dq, dk, dv = (_torch.zeros_by_rows(x, x.shape) for x in (q, k, v))
    if min(q.numel(), k.numel()) > 0:
        for rows in _row_blocks(q, k):
            weights = exp_(attention.scores(q, k, rows).sub_(lse[:, :, rows, None]))
            grad = grad_out[:, :, rows]
            dweights = (_by_group(grad, v) @ v.transpose(-1, -2)).view(weights.shape)
            keep = attention.keep(weights, rows)
            kept = weights
            if keep is not None:
                dweights.mul_(keep)
                kept = keep.mul_(weights)
            dv += _by_group(kept, v).transpose(-1, -2) @ _by_group(grad, v)
            dweights.sub_((grad * out[:, :, rows]).sum(-1, keepdim=True)).mul_(weights)
            dq[:, :, rows] = (_by_group(dweights, k) @ k).view(*weights.shape[:3], k.shape[3]).mul_(attention.scale)
            dk += _by_group(dweights, k).transpose(-1, -2) @ _by_group(q[:, :, rows] * attention.scale, k)
    return dq.to(original), dk.to(original), dv.to(original)


def _backward_fake(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return tuple(_empty_by_rows(x, x.shape[3]) for x in (q, k, v))


def _context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> None:
    q, k, v, mask, seed = (*inputs, None, None)[:5]
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, mask, seed, out, lse)
    ctx.options = keyword_only_inputs


def _gradient(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return None, None, None, None, None
    q, k, v, mask, seed, out, lse = ctx.saved_tensors
    dq, dk, dv = torch.ops.autopar.attention_backward(grad_out, q, k, v, mask, out, lse, seed, **ctx.options)
    return dq, dk, dv, None, None


_OPTIONS = (
    "*, bool is_causal, float scale, float dropout_p=0.0, int site=-1, SymInt[] global_shape=[],"
    " SymInt[] offset=[0, 0, 0, 0]"
)
define(
    f"attention(Tensor q, Tensor k, Tensor v, Tensor? mask=None, Tensor? seed=None, {_OPTIONS})"
    " -> (Tensor out, Tensor lse)",
    _attention,
    _fake,
)
define(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse,"
    f" Tensor? seed, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    _attention_backward,
    _backward_fake,
)
once_differentiable("attention_backward")
differentiate("attention", _gradient, _context)
