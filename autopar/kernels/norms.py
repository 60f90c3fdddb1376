"""What follows a reduce-scatter of a block's output: its cast, the residual's addition and the next norm, in one pass.

Forward: y = residual + x and the layer norm or RMS norm of y, each row read once and kept in registers. Backward: the
gradient of the norm plus that which the residual path brings, and those of weight and bias, summed by groups of rows.
Layer norm is Ba et al. 2016, RMS norm Zhang and Sennrich 2019; one row a program as in Triton's tutorial on layer norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST = 65536
"""Elements of a row, which has to fit into one program's registers."""


@triton.jit
def add_norm_kernel(
    x, residual, weight, bias, total, out, mean, rstd, d, stride, eps, ADD: tl.constexpr, SCALED: tl.constexpr,
    SHIFTED: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < d
    value = tl.load(x + row * stride + column, mask=inside, other=0).to(tl.float32)
    if ADD:
        # Rounded as the sum that others read, so that the norm is that of what is stored.
        value = value.to(total.dtype.element_ty).to(tl.float32)
        value += tl.load(residual + row * d + column, mask=inside, other=0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * d + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if CENTRED:
        centre = tl.sum(value, 0) / d
        value = tl.where(inside, value - centre, 0.0)
        tl.store(mean + row, centre)
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / d + eps)
    tl.store(rstd + row, scale)
    value = value * scale
    if SCALED:
        value = value * tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    if SHIFTED:
        value = value + tl.load(bias + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * d + column, value.to(out.dtype.element_ty), mask=inside)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
    eps: float, *, centred: bool, num_warps: int = 8,
):
    """(y = x + residual, norm(y) * weight + bias, mean, 1 / deviation): of the last dim; y is x without a residual.

    Args:
        x: [..., d], also in another dtype than ``residual``, whose the sum is.
        centred: layer norm; else RMS norm, whose mean comes empty.
    """
    d = x.shape[-1]
    flat = x.reshape(-1, d)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    like = x if residual is None else residual
    total = x if residual is None else torch.empty(x.shape, dtype=like.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=like.dtype, device=x.device)
    mean, rstd = (torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device) for _ in range(2))
    if out.numel():
        add_norm_kernel[(len(flat),)](
            flat, like.contiguous(), like if weight is None else weight, like if bias is None else bias, total, out,
            mean, rstd, d, flat.stride(0), eps, ADD=residual is not None, SCALED=weight is not None,
            SHIFTED=bias is not None, CENTRED=centred, BLOCK=triton.next_power_of_2(d), num_warps=num_warps,
        )
    return total, out, mean, rstd


@triton.jit
def norm_backward_kernel(
    grad, y, weight, mean, rstd, beside, dx, dweight, dbias, n, d, each, ADD: tl.constexpr, SCALED: tl.constexpr,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < d
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    if SCALED:
        w = tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    for row in range(group * each, tl.minimum(group * each + each, n)):
        g = tl.load(grad + row * d + column, mask=inside, other=0).to(tl.float32)
        value = tl.load(y + row * d + column, mask=inside, other=0).to(tl.float32)
        scale = tl.load(rstd + row)
        if CENTRED:
            value = tl.where(inside, value - tl.load(mean + row), 0.0)
        hat = value * scale
        dw += g * hat
        db += g
        if SCALED:
            g = g * w
        result = g - hat * (tl.sum(g * hat, 0) / d)
        if CENTRED:
            result -= tl.sum(g, 0) / d
        result *= scale
        if ADD:
            result += tl.load(beside + row * d + column, mask=inside, other=0).to(tl.float32)
        tl.store(dx + row * d + column, result.to(dx.dtype.element_ty), mask=inside)
    tl.store(dweight + group * d + column, dw, mask=inside)
    tl.store(dbias + group * d + column, db, mask=inside)


def norm_backward(
    grad: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor | None, rstd: torch.Tensor,
    beside: torch.Tensor | None, *, GROUPS: int = 256, num_warps: int = 8,
):
    """(gradient of y, plus ``beside``; of the weight; of the bias). Without ``mean`` it is that of an RMS norm."""
    d = y.shape[-1]
    n = y.numel() // max(d, 1)
    groups = max(1, min(GROUPS, n))
    each = -(-n // groups)
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    dweight, dbias = (torch.empty((groups, d), dtype=torch.float32, device=y.device) for _ in range(2))
    if not y.numel():
        return dx, dweight.new_zeros(d).to(y.dtype), dbias.new_zeros(d).to(y.dtype)
    norm_backward_kernel[(groups,)](
        grad.contiguous(), y.contiguous(), y if weight is None else weight, rstd if mean is None else mean, rstd,
        y if beside is None else beside.contiguous(), dx, dweight, dbias, n, d, each, ADD=beside is not None,
        SCALED=weight is not None, CENTRED=mean is not None, BLOCK=triton.next_power_of_2(d), num_warps=num_warps,
    )
    dtype = y.dtype if weight is None else weight.dtype
    return dx, dweight.sum(0).to(dtype), dbias.sum(0).to(dtype)
