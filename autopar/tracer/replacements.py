"""Replaces torch's ops in the trace, so that every dim that could be cut can be.

Each function has the signature of the ATen op that it replaces and computes the same values and gradients.
Returning NotImplemented leaves the op as it is.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import torch

import autopar.ops  # noqa: F401  registers torch.ops.autopar
from autopar.tracer.flat import Flat, materialize

aten = torch.ops.aten
ops = torch.ops.autopar
Replacement = Callable[..., Any]
Operand = torch.Tensor | Flat

REPLACEMENTS: dict[Any, Replacement] = {}


def replaces(*targets: Any) -> Callable[[Replacement], Replacement]:
    def register(function: Replacement) -> Replacement:
        for target in targets:
            REPLACEMENTS[target] = function
        return function

    return register


def base_of(x: Operand) -> torch.Tensor:
    return x.base if isinstance(x, Flat) else x


def like(x: Operand, result: torch.Tensor) -> Operand:
    return Flat(result, x.lead) if isinstance(x, Flat) else result


@replaces(aten.linear.default)
def linear(tracer: Any, x: Operand, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    base = base_of(x)
    lead = string.ascii_lowercase[: base.ndim - 1]
    if weight.ndim != 2 or base.ndim > 9 or isinstance(weight, Flat):
        return NotImplemented
    y = ops.contract(base, weight, f"{lead}k,nk->{lead}n")
    return like(x, y if bias is None else y + bias)


@replaces(aten.matmul.default, aten.mm.default, aten.bmm.default)
def matmul(tracer: Any, x: Operand, y: Operand) -> Any:
    if isinstance(y, Flat):
        y = y.materialize()
    if isinstance(x, Flat) and y.ndim != 2:
        x = x.materialize()
    a, b = base_of(x), y
    if not a.is_floating_point() or a.dtype != b.dtype or max(a.ndim, b.ndim) > 8 or min(a.ndim, b.ndim) < 1:
        return NotImplemented
    a_dims = ["k"] if a.ndim == 1 else ["m", "k"]
    b_dims = ["k"] if b.ndim == 1 else ["k", "n"]
    out_dims = [d for d in (*a_dims, *b_dims) if d != "k"]
    if b.ndim <= 2:
        lead = list(string.ascii_lowercase[: max(a.ndim - 2, 0)])
        return like(x, ops.contract(a, b, _equation([*lead, *a_dims], b_dims, [*lead, *out_dims])))
    return _batched(a, b, a_dims, b_dims, out_dims)


def _batched(a: torch.Tensor, b: torch.Tensor, a_dims: list[str], b_dims: list[str], out_dims: list[str]) -> Any:
    n_batch = max(a.ndim, b.ndim) - 2
    names, a_lead, b_lead = string.ascii_lowercase[:n_batch], [], []
    for i, name in enumerate(names):
        at_a, at_b = i - n_batch + a.ndim - len(a_dims), i - n_batch + b.ndim - len(b_dims)
        size_a, size_b = (a.shape[at_a] if at_a >= 0 else 0), (b.shape[at_b] if at_b >= 0 else 0)
        if size_a and not (size_a == 1 and size_b > 1):
            a_lead.append((at_a, name))
        if size_b and not (size_b == 1 and size_a > 1):
            b_lead.append((at_b, name))
    a = _keep(a, [i for i, _ in a_lead], len(a_dims))
    b = _keep(b, [i for i, _ in b_lead], len(b_dims))
    left, right = [n for _, n in a_lead], [n for _, n in b_lead]
    return ops.contract(a, b, _equation([*left, *a_dims], [*right, *b_dims], [*names, *out_dims]))


def _keep(x: torch.Tensor, lead: list[int], tail: int) -> torch.Tensor:
    """Drop broadcast (size 1) batch dims, which an equation leaves out."""
    for dim in reversed([d for d in range(x.ndim - tail) if d not in lead]):
        x = x.squeeze(dim)
    return x


def _equation(a: Sequence[str], b: Sequence[str], out: Sequence[str]) -> str:
    return f"{''.join(a)},{''.join(b)}->{''.join(out)}"


@replaces(aten.addmm.default)
def addmm(tracer: Any, bias: torch.Tensor, x: Operand, y: Operand, *, beta: float = 1, alpha: float = 1) -> Any:
    if isinstance(bias, Flat) or (isinstance(x, Flat) and bias.ndim > 1):
        return NotImplemented
    product = matmul(tracer, x, y)
    if product is NotImplemented:
        return NotImplemented
    scaled = base_of(product) * alpha if alpha != 1 else base_of(product)
    return like(product, scaled + (bias * beta if beta != 1 else bias))


@replaces(aten.baddbmm.default)
def baddbmm(
    tracer: Any, bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    if any(isinstance(t, Flat) for t in (bias, x, y)):
        return NotImplemented
    product = ops.contract(x, y, "bmk,bkn->bmn")
    scaled = product * alpha if alpha != 1 else product
    return scaled + (bias * beta if beta != 1 else bias) if beta != 0 else scaled


@replaces(aten.addbmm.default)
def addbmm(
    tracer: Any, bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    bias, x, y = materialize((bias, x, y))
    product = ops.contract(x, y, "bmk,bkn->mn") * alpha
    return product + bias * beta if beta != 0 else product


@replaces(aten.bilinear.default)
def bilinear(
    tracer: Any, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Any:
    x, y = materialize((x, y))
    lead = string.ascii_lowercase[: x.ndim - 1]
    rows = ops.contract(x, weight, f"{lead}w,xwy->{lead}xy")
    result = ops.contract(rows, y, f"{lead}xy,{lead}y->{lead}x")
    return result if bias is None else result + bias


@replaces(aten.einsum.default)
def einsum(tracer: Any, equation: str, tensors: Sequence[torch.Tensor], *, path: Any = None) -> Any:
    equation = equation.replace(" ", "")
    if len(tensors) != 2 or "->" not in equation or "." in equation or any(isinstance(t, Flat) for t in tensors):
        return NotImplemented
    operands, out = equation.split("->")
    a, b = operands.split(",")
    plain = all(len(set(t)) == len(t) for t in (a, b, out))
    if not plain or not set(a) <= set(b + out) or not set(b) <= set(a + out):
        return NotImplemented
    sizes: dict[str, int] = {}
    for dims, tensor in ((a, tensors[0]), (b, tensors[1])):
        for name, n in zip(dims, tensor.shape, strict=True):
            if sizes.setdefault(name, n) != n:
                return NotImplemented
    return ops.contract(tensors[0], tensors[1], equation)


@replaces(aten.scaled_dot_product_attention.default)
def attention(
    tracer: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    q, k, v, attn_mask = materialize((q, k, v, attn_mask))
    shape = q.shape
    if not 3 <= q.ndim <= 4 or k.ndim != q.ndim or v.ndim != q.ndim:
        return NotImplemented
    learned = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
    if learned and (q.ndim != 4 or k.shape[1] != q.shape[1]):
        return NotImplemented
    if learned:
        scaled_by = q.shape[-1] ** -0.5 if scale is None else scale
        return _attention_by_parts(tracer, q, k, v, attn_mask, dropout_p, scaled_by)
    if q.ndim == 3:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = attn_mask.unsqueeze(1)
    b, h, s = q.shape[:3]
    if k.shape[0] != b or v.shape[0] != b or h % k.shape[1] or v.shape[1] != k.shape[1]:
        return NotImplemented
    while attn_mask is not None and attn_mask.ndim < 4:
        attn_mask = attn_mask.unsqueeze(0)
    place = {"site": tracer.next_site(), "global_shape": [b, h, s, k.shape[2]]} if dropout_p else {}
    out, _ = ops.attention(
        q,
        k,
        v,
        attn_mask,
        tracer.seed if dropout_p else None,
        is_causal=is_causal,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        dropout_p=dropout_p,
        **place,
    )
    return out if len(shape) == 4 else out.squeeze(1)


def _attention_by_parts(tracer: Any, q: Any, k: Any, v: Any, bias: Any, dropout_p: float, scale: float) -> Any:
    """Compute attention with a trained additive bias (T5), which needs the scores' gradient; no kernel returns it."""
    scores = ops.contract(q * scale, k, "bhsd,bhtd->bhst") + bias
    weights = REPLACEMENTS[aten.dropout.default](tracer, scores.softmax(-1), dropout_p, True)
    return ops.contract(weights, v, "bhst,bhtd->bhsd")


@replaces(aten.embedding.default)
def embedding(
    tracer: Any,
    weight: torch.Tensor,
    indices: Operand,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if scale_grad_by_freq:
        return aten.embedding.default(weight, materialize(indices), padding_idx, scale_grad_by_freq)
    return like(indices, ops.lookup(weight, base_of(indices), offset=0, padding_idx=padding_idx))


INTERPOLATIONS = {
    "nearest": ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    "nearest_exact": ("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    "linear": ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"),
    "cubic": ("upsample_bicubic2d",),
}


def _interpolation(kind: str) -> Replacement:
    """Return one op for an interpolation, which torch would decompose into reads at indices."""

    def interpolate(tracer: Any, x: Operand, output_size: Any, *rest: Any) -> Any:
        *align, scales = rest
        image: torch.Tensor = materialize(x)
        if not image.is_floating_point():
            return NotImplemented
        n, out = list(image.shape[2:]), output_size
        if out is None:
            out = [int(size * scale) for size, scale in zip(n, scales, strict=True)]
        aligned, factors = bool(align and align[0]), list(scales or [0.0] * len(n))
        return ops.interpolate(image, kind=kind, align=aligned, scales=factors, n=n, out=list(out))

    return interpolate


for _kind, _names in INTERPOLATIONS.items():
    replaces(*(getattr(aten, name).vec for name in _names))(_interpolation(_kind))


def _adaptive(pool: Any) -> Replacement:
    """Turn adaptive pooling with adjacent windows of equal length into ordinary pooling, which can be cut spatially."""

    def pooled(tracer: Any, x: Operand, output_size: Sequence[int]) -> Any:
        image: torch.Tensor = materialize(x)
        n = image.shape[image.ndim - len(output_size) :]
        # torch turns a single window into a mean by itself, and a maximum over one is the same in parts.
        if not image.is_floating_point() or all(o == 1 for o in output_size):
            return NotImplemented
        if any(not o or size % o for size, o in zip(n, output_size, strict=True)):
            return NotImplemented
        return pool(image, [size // o for size, o in zip(n, output_size, strict=True)])

    return pooled


for _name in ("avg_pool1d", "avg_pool2d", "avg_pool3d"):
    replaces(getattr(aten, f"adaptive_{_name}").default)(_adaptive(getattr(aten, _name)))
for _n in (1, 2, 3):
    replaces(getattr(aten, f"adaptive_max_pool{_n}d").default)(_adaptive(getattr(aten, f"max_pool{_n}d_with_indices")))


@replaces(aten.embedding_bag.padding_idx)
def embedding_bag(
    tracer: Any,
    weight: torch.Tensor,
    indices: Operand,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Look up rows and sum them by bag; divide averages by the bag's length, and leave maxima to torch."""
    flat, starts = materialize((indices, offsets))
    if mode == 2 or scale_grad_by_freq:
        rest = (materialize(per_sample_weights), include_last_offset, padding_idx)
        return aten.embedding_bag.padding_idx(weight, flat, starts, scale_grad_by_freq, mode, False, *rest)
    n, bags = flat.shape[0], offsets.shape[0] - include_last_offset
    bag = torch.searchsorted(starts[:bags], torch.arange(n, dtype=starts.dtype), right=True) - 1
    counted = torch.ones_like(flat) if padding_idx is None else torch.ne(flat, padding_idx).long()
    rows = ops.lookup(weight, flat, offset=0, padding_idx=-1) * counted.to(weight.dtype).unsqueeze(1)
    if per_sample_weights is not None:
        rows = rows * materialize(per_sample_weights).unsqueeze(1)
    total = rows.new_zeros([bags, weight.shape[1]]).index_add(0, bag, rows)
    if mode == 1:
        length = torch.zeros_like(starts[:bags]).index_add(0, bag, counted.to(starts.dtype))
        total = total / length.clamp(min=1).unsqueeze(1)
    return total, bag, bag, bag


@replaces(aten.batch_norm.default)
def batch_norm(
    tracer: Any,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    x, weight, bias = materialize((x, weight, bias))
    if not training:
        return _affine(x, weight, bias, running_mean, running_var, eps)
    count = x.numel() // x.shape[1]
    variance, mean = ops.batch_var_mean(x.detach())
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
    if running_var is not None:
        unbiased = count / max(count - 1, 1)
        running_var.mul_(1 - momentum).add_(variance.to(running_var.dtype), alpha=momentum * unbiased)
    return ops.batch_norm(x, weight, bias, mean, (variance + eps).rsqrt(), count=count)


@replaces(aten.instance_norm.default)
def instance_norm(
    tracer: Any,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """Normalize each channel of a sample by itself, as a group norm whose groups are the channels."""
    if running_mean is not None or running_var is not None or not use_input_stats:
        return NotImplemented
    x, weight, bias = materialize((x, weight, bias))
    return torch.group_norm(x, x.shape[1], weight, bias, eps)


def _affine(x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, eps: float) -> Any:
    """Compute batch norm in evaluation: one multiplication and one addition per channel."""
    scale = (var + eps).rsqrt() * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - mean * scale
    shape = [1, -1] + [1] * (x.ndim - 2)
    return (x * scale.reshape(shape) + shift.reshape(shape)).to(x.dtype)
