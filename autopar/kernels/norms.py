"""Fuse what follows the reduce-scatter of a block's output: cast, residual addition and the next norm, in one pass.

Forward: y = residual + x and the layer norm or RMS norm of y, with each row read once and kept in registers. Backward:
the gradient of the norm plus that of the residual path, and those of weight and bias, summed over groups of rows. Layer
norm is from Ba et al. 2016, RMS norm from Zhang and Sennrich 2019. A program handles one row, as in Triton's layer norm
tutorial.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    x,
    residual,
    weight,
    bias,
    total,
    out,
    mean,
    rstd,
    wide,
    hat,
    d,
    stride,
    eps,
    ADD: tl.constexpr,
    SCALED: tl.constexpr,
    SHIFTED: tl.constexpr,
    CENTRED: tl.constexpr,
    WIDE: tl.constexpr,
    HAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < d
    value = tl.load(x + row * stride + column, mask=inside, other=0).to(tl.float32)
    if ADD:
        # Rounded like the stored sum, so that the norm is that of what others read.
        value = value.to(total.dtype.element_ty).to(tl.float32)
        value += tl.load(residual + row * d + column, mask=inside, other=0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * d + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if WIDE:
        tl.store(wide + row * d + column, value, mask=inside)
    if CENTRED:
        centre = tl.sum(value, 0) / d
        value = tl.where(inside, value - centre, 0.0)
        tl.store(mean + row, centre)
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / d + eps)
    tl.store(rstd + row, scale)
    value = value * scale
    if HAT:
        rounded_hat = value.to(hat.dtype.element_ty)
        tl.store(hat + row * d + column, rounded_hat, mask=inside)
        value = rounded_hat.to(tl.float32)
    if SCALED:
        value = value * tl.load(weight + column, mask=inside, other=0).to(tl.float32)
    if SHIFTED:
        value = value + tl.load(bias + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * d + column, value.to(out.dtype.element_ty), mask=inside)


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    eps: float,
    centred: bool,
    results: list[str],
    num_warps: int = 8,
):
    """Return the ``results`` of a norm over the last dim of y = x + residual, in order; y is x without a residual.

    "total" is y, "wide" is y in float32, "out" is the norm times weight plus bias, and "hat" is the norm before both.
    If "hat" is requested, "out" is computed from its rounded values. "mean" and "rstd" are the statistics, [..., 1] in
    float32.

    Args:
        x: [..., d]. Its dtype may differ from that of ``residual``, which the sum has.
        centred: True for layer norm, False for RMS norm, which has no mean.
    """
    d = x.shape[-1]
    flat = x.reshape(x.shape[:-1].numel(), d)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    like = x if residual is None else residual
    row = ("mean", "rstd")
    needed = ["out", "rstd", *(["mean"] if centred else []), *(["total"] if residual is not None else [])]
    made = {
        name: torch.empty(
            (*x.shape[:-1], 1) if name in row else x.shape,
            dtype=torch.float32 if name in (*row, "wide") else like.dtype,
            device=x.device,
        )
        for name in dict.fromkeys([*results, *needed])
    }
    if made["out"].numel():
        out = made["out"]
        add_norm_kernel[(len(flat),)](
            flat,
            like.contiguous(),
            like if weight is None else weight,
            like if bias is None else bias,
            made.get("total", out),
            out,
            made.get("mean", out),
            made["rstd"],
            made.get("wide", out),
            made.get("hat", out),
            d,
            flat.stride(0),
            eps,
            ADD=residual is not None,
            SCALED=weight is not None,
            SHIFTED=bias is not None,
            CENTRED=centred,
            WIDE="wide" in made,
            HAT="hat" in made,
            BLOCK=triton.next_power_of_2(d),
            num_warps=num_warps,
        )
    return [made[name] for name in results]


@triton.jit
def norm_backward_kernel(
    grad,
    y,
    weight,
    mean,
    rstd,
    beside,
    dx,
    dweight,
    dbias,
    n,
    d,
    each,
    ADD: tl.constexpr,
    SCALED: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
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
    grad: torch.Tensor,
    y: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    beside: torch.Tensor | None,
    *,
    results: list[str],
    GROUPS: int = 256,
    num_warps: int = 8,
):
    """Return the ``results`` in order: "input_gradient" of y plus ``beside``, "weight_gradient", "bias_gradient".

    Without ``mean`` it is the gradient of an RMS norm. ``y`` may have a wider dtype than ``grad``, whose dtype the
    result has.
    """
    d = y.shape[-1]
    n = y.numel() // max(d, 1)
    groups = max(1, min(GROUPS, n))
    each = -(-n // groups)
    dtype = grad.dtype if weight is None else weight.dtype
    dx = torch.empty(y.shape, dtype=grad.dtype, device=y.device)
    dweight, dbias = (torch.empty((groups, d), dtype=torch.float32, device=y.device) for _ in range(2))
    if not y.numel():
        dweight.zero_()
        dbias.zero_()
        return _wanted(dx, dweight, dbias, dtype, results)
    norm_backward_kernel[(groups,)](
        grad.contiguous(),
        y.contiguous(),
        y if weight is None else weight,
        rstd if mean is None else mean,
        rstd,
        y if beside is None else beside.contiguous(),
        dx,
        dweight,
        dbias,
        n,
        d,
        each,
        ADD=beside is not None,
        SCALED=weight is not None,
        CENTRED=mean is not None,
        BLOCK=triton.next_power_of_2(d),
        num_warps=num_warps,
    )
    return _wanted(dx, dweight, dbias, dtype, results)


def _wanted(dx, dweight, dbias, dtype, results):
    sums = {"weight_gradient": dweight, "bias_gradient": dbias}
    return [sums[name].sum(0).to(dtype) if name in sums else dx for name in results]
