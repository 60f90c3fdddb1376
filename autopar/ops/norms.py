"""A residual addition fused with the norm that follows it, and their gradient. They follow a block's reduction.

Programs call these if a plan fused the pieces (``planner/graphs/kernel_patterns.py``). A captured graph never holds
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar import kernels
from autopar.ops.registration import accumulation_dtype, define, layer_statistics_dtype, once_differentiable

ROWS = ("mean", "rstd")


def _row_dtype(x: Tensor, like: torch.dtype, weight: Tensor | None, centred: bool) -> torch.dtype:
    return layer_statistics_dtype(x, like, weight) if centred else accumulation_dtype(like)


def _add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    centred: bool,
    results: list[str],
) -> list[Tensor]:
    given = [t for t in (x, residual, weight, bias) if t is not None]
    rows = _row_dtype(x, x.dtype if residual is None else residual.dtype, weight, centred)
    if kernels.enabled(*given):
        made: list[Tensor] = kernels.run(
            "add_norm", x, residual, weight, bias, eps=eps, centred=centred, results=results
        )
        return [t.to(rows) if name in ROWS else t for name, t in zip(results, made, strict=True)]
    total = x.clone() if residual is None else x.to(residual.dtype) + residual
    wide = total.to(accumulation_dtype(total.dtype))
    mean = wide.mean(-1, keepdim=True)
    moved = wide - mean if centred else wide
    rstd = torch.rsqrt(moved.square().mean(-1, keepdim=True) + eps)
    hat = moved * rstd
    out = hat
    if "hat" in results:
        hat = hat.to(total.dtype)
        out = hat.to(wide.dtype)
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    found = {
        "total": total,
        "out": out.to(total.dtype),
        "mean": mean.to(rows),
        "rstd": rstd.to(rows),
        "wide": wide,
        "hat": hat,
    }
    return [found[name].contiguous() for name in results]


def _add_norm_fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    centred: bool,
    results: list[str],
) -> list[Tensor]:
    dtype = x.dtype if residual is None else residual.dtype
    own = {"wide": accumulation_dtype(dtype)} | dict.fromkeys(ROWS, _row_dtype(x, dtype, weight, centred))
    return [
        x.new_empty([*x.shape[:-1], 1] if name in ROWS else x.shape, dtype=own.get(name, dtype)) for name in results
    ]


def _norm_backward(
    grad: Tensor,
    y: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    beside: Tensor | None,
    *,
    results: list[str],
) -> list[Tensor]:
    given = [t for t in (grad, y, rstd, mean, weight, beside) if t is not None]
    if kernels.enabled(*given):
        made: list[Tensor] = kernels.run("norm_backward", grad, y, mean, rstd, weight, beside, results=results)
        return made
    dtype = accumulation_dtype(grad.dtype)
    wide, moved = grad.to(dtype), y.to(dtype)
    hat = (moved if mean is None else moved - mean) * rstd
    scaled = wide if weight is None else wide * weight
    dx = scaled - hat * (scaled * hat).mean(-1, keepdim=True)
    dx = (dx if mean is None else dx - scaled.mean(-1, keepdim=True)) * rstd
    dx = (dx if beside is None else dx + beside).to(grad.dtype)
    lead = list(range(grad.dim() - 1))
    as_weight = grad.dtype if weight is None else weight.dtype
    found = {
        "input_gradient": dx,
        "weight_gradient": (wide * hat).sum(lead).to(as_weight),
        "bias_gradient": wide.sum(lead).to(as_weight),
    }
    return [found[name].contiguous() for name in results]


def _norm_backward_fake(
    grad: Tensor,
    y: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    beside: Tensor | None,
    *,
    results: list[str],
) -> list[Tensor]:
    as_weight = grad.dtype if weight is None else weight.dtype
    return [
        grad.new_empty(grad.shape) if name == "input_gradient" else grad.new_empty(grad.shape[-1:], dtype=as_weight)
        for name in results
    ]


define(
    "add_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, *, float eps, bool centred, str[] results)"
    " -> Tensor[]",
    _add_norm,
    _add_norm_fake,
)
define(
    "norm_backward(Tensor grad, Tensor y, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? beside, *,"
    " str[] results) -> Tensor[]",
    _norm_backward,
    _norm_backward_fake,
)
once_differentiable("norm_backward")
