"""Batch normalization in training, with statistics and sums over the batch as separate ops that ranks can exchange.

A caller takes variance and mean from ``batch_var_mean``, rstd = (variance + eps)^-1/2, then ``batch_norm``. If the
batch is cut, the ranks gather their ``batch_moments`` instead, and ``var_mean_of_moments`` combines them
(``statistics``). The gradient of ``batch_norm`` is ``batch_norm_backward_reduce``, reduced over the ranks, followed by
``batch_norm_backward_input`` (Ioffe and Szegedy 2015, section 3). x is [n, c, ...]; statistics are [c], in float32 or
float64.

GPUs have kernels for these parts, which torch made for its ``SyncBatchNorm``. The ones for sums give each channel to a
single block of threads, and if x is in half precision round products and parts of the sums of a gradient to it. If
channels lie innermost they do neither. So they are handed every place of every channel as a channel of its own, [n, c
times places], and their results are summed up once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.registration import accumulation_dtype, define, differentiate, once_differentiable, without_gradient

KERNELS_ON = "cuda"
"""The type of devices on which torch has kernels for the parts of a batch norm."""

SAMPLES = 4
"""Samples from which sums for every place are worth their memory, which is that of three samples in float32."""

INT32 = 2**31 - 1


def _channels(statistic: Tensor, x: Tensor) -> Tensor:
    """[c] -> [1, c, 1, ...], to broadcast with x."""
    return statistic.view(1, -1, *[1] * (x.dim() - 2))


def _sum(x: Tensor) -> Tensor:
    """[n, c, ...] -> [c]"""
    return x.sum([dim for dim in range(x.dim()) if dim != 1], dtype=accumulation_dtype(x.dtype))


def _kernels_take(x: Tensor, *statistics: Tensor) -> bool:
    """Whether torch's kernels for the parts of a batch norm support this. They number elements in 32 bits."""
    fits = x.device.type == KERNELS_ON and 0 < x.numel() < INT32
    return fits and all(s.dtype == accumulation_dtype(x.dtype) for s in statistics)


def _sums_pay(x: Tensor) -> bool:
    return x.shape[0] >= SAMPLES or x.shape[0] * x.shape[1] == x.numel()


def _planes(x: Tensor) -> Tensor:
    """[n, c, ...] -> [n, c, places], contiguous, so that all results are."""
    return x.contiguous().view(x.shape[0], x.shape[1], -1)


def _in_dtype(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)


def _var_mean_by_kernel(x: Tensor) -> tuple[Tensor, Tensor]:
    x = _planes(x)
    mean, variance = torch.ops.aten.batch_norm_update_stats(x.flatten(1), None, None, 0.0)
    between, mean = torch.var_mean(mean.view(x.shape[1:]), 1, correction=0)
    return variance.view(x.shape[1:]).mean(1).add_(between), mean


def _batch_moments(x: Tensor) -> Tensor:
    """Return mean and sum of squared deviations of each channel, [2, c].

    Two passes, which on CPUs are vectorized, unlike torch's ``var_mean``.
    """
    count = max(1, x.numel() // max(1, x.shape[1]))
    if _kernels_take(x) and _sums_pay(x):
        variance, mean = _var_mean_by_kernel(x)
        return torch.stack([mean, variance.mul_(count)])
    mean = _sum(x).div_(count)
    return torch.stack([mean, _sum((x - _channels(mean, x)).square_())])


def _batch_moments_fake(x: Tensor) -> Tensor:
    return x.new_empty([2, x.shape[1]], dtype=accumulation_dtype(x.dtype))


def _batch_var_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    if _kernels_take(x) and _sums_pay(x):
        return _var_mean_by_kernel(x)
    mean, deviations = _batch_moments(x).unbind()
    return deviations / max(1, x.numel() // max(1, x.shape[1])), mean.clone()


def _batch_var_mean_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    variance = x.new_empty([x.shape[1]], dtype=accumulation_dtype(x.dtype))
    return variance, torch.empty_like(variance)


def _statistics_dtype(x: Tensor, mean: Tensor) -> torch.dtype:
    return accumulation_dtype(torch.promote_types(x.dtype, mean.dtype))


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, *, count: int
) -> Tensor:
    if _kernels_take(x, mean, rstd):
        weight, bias = _in_dtype(weight, mean.dtype), _in_dtype(bias, mean.dtype)
        return torch.batch_norm_elemt(_planes(x), weight, bias, mean, rstd, 0.0).view(x.shape)
    dtype = _statistics_dtype(x, mean)
    scale = rstd.to(dtype) if weight is None else rstd.to(dtype) * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    if x.device.type == "cpu":  # its three-operand kernels are not vectorized if two operands broadcast
        out = torch.mul(x.to(dtype), _channels(scale, x)).add_(_channels(shift, x))
    else:
        out = torch.addcmul(_channels(shift, x), x.to(dtype), _channels(scale, x))
    return out.to(x.dtype).contiguous()


def _batch_norm_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, *, count: int
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward_reduce(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    if _kernels_take(x, mean, rstd) and grad.dtype == x.dtype and _sums_pay(x):
        return _sums_by_kernel(grad, x, mean, rstd)
    dtype = _statistics_dtype(x, mean)
    if x.device.type == "cpu" and x.numel() and grad.dtype == x.dtype == mean.dtype == rstd.dtype:
        # torch's kernel for the whole gradient takes a single pass if only these two sums are requested. In four dims
        # it is wrong if x is channels-last and grad's strides fit both layouts, as with one sample or one column.
        if x.dim() > 3:
            x, grad = x.flatten(2), grad.flatten(2)
        _, sum_grad_xhat, sum_grad = torch.ops.aten.native_batch_norm_backward(
            grad, x, torch.ones_like(mean), None, None, mean, rstd, True, 0.0, [False, True, True]
        )
        return sum_grad, sum_grad_xhat
    sum_grad_xhat = _sum((x - _channels(mean, x)).mul_(grad)) * rstd
    return grad.sum([dim for dim in range(x.dim()) if dim != 1], dtype=dtype), sum_grad_xhat.to(dtype)


def _sums_by_kernel(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    x = _planes(x)
    means = mean.unsqueeze(1).expand(x.shape[1:]).flatten()
    sums = torch.batch_norm_backward_reduce(
        _planes(grad).flatten(1), x.flatten(1), means, means, None, True, False, False
    )
    sum_grad, sum_grad_deviation = (s.view(x.shape[1:]).sum(1) for s in sums[:2])
    return sum_grad, sum_grad_deviation.mul_(rstd)


def _backward_reduce_fake(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dtype = _statistics_dtype(x, mean)
    return x.new_empty([x.shape[1]], dtype=dtype), x.new_empty([x.shape[1]], dtype=dtype)


def _backward_input(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    sum_grad: Tensor,
    sum_grad_xhat: Tensor,
    *,
    count: int,
) -> Tensor:
    statistics = (mean, rstd, sum_grad, sum_grad_xhat)
    if _kernels_take(x, *statistics) and grad.dtype == x.dtype and count < INT32:
        return _input_by_kernel(grad, x, _in_dtype(weight, mean.dtype), statistics, count)
    # dx = rstd w (g - sum(g) / count - xhat sum(g xhat) / count), with xhat = (x - mean) rstd
    scale = rstd if weight is None else rstd * weight
    slope, shift = rstd * sum_grad_xhat / -count, sum_grad / -count
    out = x - _channels(mean, x)
    if x.device.type == "cpu":
        out.mul_(_channels(slope, x)).add_(_channels(shift, x)).add_(grad).mul_(_channels(scale, x))
    else:
        torch.addcmul(_channels(shift * scale, x), out, _channels(slope * scale, x), out=out)
        out.addcmul_(grad.to(out.dtype), _channels(scale, x))
    return out.to(x.dtype).contiguous()


def _input_by_kernel(
    grad: Tensor, x: Tensor, weight: Tensor | None, statistics: tuple[Tensor, ...], count: int
) -> Tensor:
    # Without a check this kernel takes statistics to be contiguous.
    mean, rstd, sum_grad, sum_grad_xhat = (s.contiguous() for s in statistics)
    sums = (sum_grad, sum_grad_xhat / rstd)
    counted = torch.full([1], count, dtype=torch.int32, device=x.device)
    dx: Tensor = torch.batch_norm_backward_elemt(_planes(grad), _planes(x), mean, rstd, weight, *sums, counted)
    return dx.view(x.shape)


def _backward_input_fake(grad: Tensor, x: Tensor, *_: Any, count: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    x, weight, bias, mean, rstd = inputs
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.count = keyword_only_inputs["count"]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    sum_grad, sum_grad_xhat = torch.ops.autopar.batch_norm_backward_reduce(grad, x, mean, rstd)
    dx = dweight = dbias = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.autopar.batch_norm_backward_input(
            grad, x, weight, mean, rstd, sum_grad, sum_grad_xhat, count=ctx.count
        )
    if ctx.needs_input_grad[1]:
        dweight = sum_grad_xhat.to(weight.dtype)
    if ctx.needs_input_grad[2]:
        dbias = sum_grad.to(ctx.bias_dtype)
    return dx, dweight, dbias, None, None


define("batch_moments(Tensor x) -> Tensor", _batch_moments, _batch_moments_fake)
define("batch_var_mean(Tensor x) -> (Tensor variance, Tensor mean)", _batch_var_mean, _batch_var_mean_fake)
without_gradient("batch_moments")
without_gradient("batch_var_mean")
define(
    "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, *, SymInt count) -> Tensor",
    _batch_norm,
    _batch_norm_fake,
)
define(
    "batch_norm_backward_reduce(Tensor grad, Tensor x, Tensor mean, Tensor rstd)"
    " -> (Tensor sum_grad, Tensor sum_grad_xhat)",
    _backward_reduce,
    _backward_reduce_fake,
)
define(
    "batch_norm_backward_input(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, Tensor sum_grad,"
    " Tensor sum_grad_xhat, *, SymInt count) -> Tensor",
    _backward_input,
    _backward_input_fake,
)
once_differentiable("batch_norm_backward_reduce")
once_differentiable("batch_norm_backward_input")
differentiate("batch_norm", _gradient, _context)
