"""Norms with statistics over elements that several ranks hold.

Each rank computes the mean and the sum of squared deviations of its part with ``moments``. The op is finished from
those of all ranks (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979). Gradients need two sums, which are gathered likewise. ``gathered`` stacks the summaries of the ranks
in dim 0, and ``counts`` is the number of elements behind each rank's moments.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.ops.registration import accumulation_dtype, define, layer_statistics_dtype, once_differentiable


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def _moments(x: Tensor, dims: list[int]) -> Tensor:
    """Return mean and sum of squared deviations over ``dims``, [2, ...], with these dims kept as one element."""
    variance, mean = torch.var_mean(_wide(x), dims, correction=0, keepdim=True)
    count = math.prod(x.shape[d] for d in dims)
    return torch.stack([mean, variance * count])


def _kept(x: Tensor, dims: list[int]) -> list[int]:
    reduced = {d % x.ndim for d in dims}
    return [1 if i in reduced else n for i, n in enumerate(x.shape)]


def _moments_fake(x: Tensor, dims: list[int]) -> Tensor:
    return x.new_empty([2, *_kept(x, dims)], dtype=accumulation_dtype(x.dtype))


def _combined(gathered: Tensor, counts: list[int]) -> tuple[Tensor, Tensor, int]:
    """Return the mean and the sum of squared deviations over all ranks, and the number of elements."""
    total = sum(counts)
    weights = torch.tensor(counts, dtype=gathered.dtype, device=gathered.device).view(-1, *[1] * (gathered.ndim - 2))
    means = gathered[:, 0]
    mean = (means * weights).sum(0) / total
    return mean, (gathered[:, 1] + (means - mean).square_() * weights).sum(0), total


def _var_mean(
    gathered: Tensor, counts: list[int], correction: float, root: bool, shape: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the variance, or with ``root`` the standard deviation, and the mean."""
    mean, deviations, total = _combined(gathered, counts)
    variance = deviations / max(total - correction, 0)
    return (variance.sqrt_() if root else variance).to(dtype).view(shape), mean.to(dtype).view(shape)


def _var_mean_fake(
    gathered: Tensor, counts: list[int], correction: float, root: bool, shape: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return gathered.new_empty(shape, dtype=dtype), gathered.new_empty(shape, dtype=dtype)


def _variance(
    gathered: Tensor, counts: list[int], correction: float, root: bool, shape: list[int], dtype: torch.dtype
) -> Tensor:
    return _var_mean(gathered, counts, correction, root, shape, dtype)[0]


def _variance_fake(
    gathered: Tensor, counts: list[int], correction: float, root: bool, shape: list[int], dtype: torch.dtype
) -> Tensor:
    return gathered.new_empty(shape, dtype=dtype)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        y = y.mul_(weight) if torch.result_type(y, weight) == y.dtype else y * weight
    return y if bias is None else y + bias


def _normed(
    x: Tensor, gathered: Tensor, weight: Tensor | None, bias: Tensor | None, counts: list[int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, deviations, total = _combined(gathered, counts)
    rstd = (deviations / total + eps).rsqrt_()
    y = (_wide(x) - mean).mul_(rstd)
    return _affine(y, weight, bias).to(x.dtype).contiguous(), mean, rstd


def _layer_norm(
    x: Tensor, gathered: Tensor, weight: Tensor | None, bias: Tensor | None, *, counts: list[int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = _normed(x, gathered, weight, bias, counts, eps)
    dtype = layer_statistics_dtype(x, x.dtype, weight)
    return y, mean.to(dtype), rstd.to(dtype)


def _layer_norm_fake(
    x: Tensor, gathered: Tensor, weight: Tensor | None, bias: Tensor | None, *, counts: list[int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    like, dtype = torch.empty_like(x, memory_format=torch.contiguous_format), layer_statistics_dtype(x, x.dtype, weight)
    return (
        like,
        gathered.new_empty(gathered.shape[2:], dtype=dtype),
        gathered.new_empty(gathered.shape[2:], dtype=dtype),
    )


def _rms_norm(
    x: Tensor, gathered: Tensor, weight: Tensor | None, *, counts: list[int], eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    mean, deviations, total = _combined(gathered, counts)
    rstd = (deviations / total + mean.square() + eps).rsqrt_()
    return _affine(_wide(x) * rstd, weight, None).to(x.dtype).contiguous(), rstd.to(dtype)


def _rms_norm_fake(
    x: Tensor, gathered: Tensor, weight: Tensor | None, *, counts: list[int], eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), gathered.new_empty(
        gathered.shape[2:], dtype=dtype
    )


def _scaled(grad: Tensor, weight: Tensor | None) -> Tensor:
    """Return the gradient of the normalized elements."""
    return _wide(grad) if weight is None else _wide(grad) * weight


def _normalized(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    return _wide(x) * rstd if mean is None else (_wide(x) - mean).mul_(rstd)


def _norm_sums(
    grad: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, dims: list[int]
) -> Tensor:
    """Return the sums over ``dims`` of the normalized elements' gradient, and of its product with them: [2, ...]."""
    scaled = _scaled(grad, weight)
    first = scaled.sum(dims, keepdim=True)
    return torch.stack([first, scaled.mul(_normalized(x, mean, rstd)).sum(dims, keepdim=True)])


def _norm_sums_fake(
    grad: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, dims: list[int]
) -> Tensor:
    return x.new_empty([2, *_kept(x, dims)], dtype=accumulation_dtype(x.dtype))


def _norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    gathered: Tensor,
    *,
    count: int,
    own: list[int],
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias; the latter two are summed over ``own``, the dims they lack."""
    first, second = gathered.sum(0).unbind()
    normal = _normalized(x, mean, rstd)
    wide, dtype = _wide(grad), grad.dtype if weight is None else weight.dtype
    dw = (wide * normal).sum(own, keepdim=False).to(dtype) if mask[1] else wide.new_empty(0)
    db = wide.sum(own, keepdim=False).to(dtype) if len(mask) > 2 and mask[2] else wide.new_empty(0)
    if not mask[0]:
        return x.new_empty(0), dw, db
    # dx = rstd (g - sum(g) / count - xhat sum(g xhat) / count); RMS norm subtracts no mean
    dx = _scaled(grad, weight) - normal.mul_(second / count)
    if mean is not None:
        dx -= first / count
    return dx.mul_(rstd).to(x.dtype).contiguous(), dw.contiguous(), db.contiguous()


def _norm_backward_fake(
    grad: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    gathered: Tensor,
    *,
    count: int,
    own: list[int],
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    shape, dtype = [n for i, n in enumerate(x.shape) if i not in own], grad.dtype if weight is None else weight.dtype
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if mask[0] else x.new_empty(0)
    wide = accumulation_dtype(x.dtype)
    dw = x.new_empty(shape, dtype=dtype) if mask[1] else x.new_empty(0, dtype=wide)
    return dx, dw, x.new_empty(shape, dtype=dtype) if len(mask) > 2 and mask[2] else x.new_empty(0, dtype=wide)


def _rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    gathered: Tensor,
    *,
    count: int,
    own: list[int],
    mask: list[bool],
) -> tuple[Tensor, Tensor]:
    return _norm_backward(grad, x, mean, rstd, weight, gathered, count=count, own=own, mask=mask)[:2]


def _rms_norm_backward_fake(
    grad: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    gathered: Tensor,
    *,
    count: int,
    own: list[int],
    mask: list[bool],
) -> tuple[Tensor, Tensor]:
    return _norm_backward_fake(grad, x, mean, rstd, weight, gathered, count=count, own=own, mask=mask)[:2]


# Group norm: the same on views [samples, groups, channels of a group, space].


def _grouped(x: Tensor, groups: int) -> Tensor:
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, -1)


def _by_channel(vector: Tensor | None, groups: int) -> Tensor | None:
    return None if vector is None else vector.view(1, groups, -1, 1)


def _group_moments(x: Tensor, groups: int) -> Tensor:
    return _moments(_grouped(x, groups), [2, 3])


def _group_moments_fake(x: Tensor, groups: int) -> Tensor:
    return x.new_empty([2, x.shape[0], groups, 1, 1], dtype=accumulation_dtype(x.dtype))


def _group_norm(
    x: Tensor,
    gathered: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    groups: int,
    counts: list[int],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a group norm. Its statistics have the weight's dtype, as in torch on every device."""
    affine = _by_channel(weight, groups), _by_channel(bias, groups)
    y, mean, rstd = _normed(_grouped(x, groups), gathered, *affine, counts, eps)
    dtype = x.dtype if weight is None else weight.dtype
    return y.view(x.shape), mean.to(dtype).view(x.shape[0], groups), rstd.to(dtype).view(x.shape[0], groups)


def _group_norm_fake(
    x: Tensor,
    gathered: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    groups: int,
    counts: list[int],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = x.dtype if weight is None else weight.dtype
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    return (
        like,
        gathered.new_empty([x.shape[0], groups], dtype=dtype),
        gathered.new_empty([x.shape[0], groups], dtype=dtype),
    )


def _group_norm_sums(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, groups: int) -> Tensor:
    of_group = mean[..., None, None], rstd[..., None, None]
    return _norm_sums(_grouped(grad, groups), _grouped(x, groups), *of_group, _by_channel(weight, groups), [2, 3])


def _group_norm_sums_fake(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, groups: int
) -> Tensor:
    return _group_moments_fake(x, groups)


def _group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    gathered: Tensor,
    *,
    groups: int,
    count: int,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    of_group = mean[..., None, None], rstd[..., None, None]
    views = _grouped(grad, groups), _grouped(x, groups)
    weight = _by_channel(weight, groups)
    dx, dw, db = _norm_backward(*views, *of_group, weight, gathered, count=count, own=[0, 3], mask=mask)
    return (dx.view(x.shape) if mask[0] else dx), dw.flatten(), db.flatten()


def _group_norm_backward_fake(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    gathered: Tensor,
    *,
    groups: int,
    count: int,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dims = [0, *range(2, x.ndim)]
    return _norm_backward_fake(grad, x, mean, rstd, weight, gathered, count=count, own=dims, mask=mask)


define(
    "moments(Tensor x, int[] dims) -> Tensor",
    _moments,
    _moments_fake,
)
define(
    "variance_of_moments(Tensor gathered, SymInt[] counts, float correction, bool root, SymInt[] shape,"
    " ScalarType dtype) -> Tensor",
    _variance,
    _variance_fake,
)
define(
    "var_mean_of_moments(Tensor gathered, SymInt[] counts, float correction, bool root, SymInt[] shape,"
    " ScalarType dtype) -> (Tensor, Tensor)",
    _var_mean,
    _var_mean_fake,
)
define(
    "layer_norm_of_moments(Tensor x, Tensor gathered, Tensor? weight, Tensor? bias, *, SymInt[] counts,"
    " float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm,
    _layer_norm_fake,
)
define(
    "rms_norm_of_moments(Tensor x, Tensor gathered, Tensor? weight, *, SymInt[] counts, float eps,"
    " ScalarType dtype) -> (Tensor, Tensor)",
    _rms_norm,
    _rms_norm_fake,
)
define(
    "norm_sums(Tensor grad, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, int[] dims) -> Tensor",
    _norm_sums,
    _norm_sums_fake,
)
define(
    "rms_norm_backward_of_sums(Tensor grad, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor"
    " gathered, *, SymInt count, int[] own, bool[] mask) -> (Tensor, Tensor)",
    _rms_norm_backward,
    _rms_norm_backward_fake,
)
define(
    "layer_norm_backward_of_sums(Tensor grad, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight,"
    " Tensor gathered, *, SymInt count, int[] own, bool[] mask) -> (Tensor, Tensor, Tensor)",
    _norm_backward,
    _norm_backward_fake,
)
define(
    "group_moments(Tensor x, SymInt groups) -> Tensor",
    _group_moments,
    _group_moments_fake,
)
define(
    "group_norm_of_moments(Tensor x, Tensor gathered, Tensor? weight, Tensor? bias, *, SymInt groups,"
    " SymInt[] counts, float eps) -> (Tensor, Tensor, Tensor)",
    _group_norm,
    _group_norm_fake,
)
define(
    "group_norm_sums(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, SymInt groups) -> Tensor",
    _group_norm_sums,
    _group_norm_sums_fake,
)
define(
    "group_norm_backward_of_sums(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor"
    " gathered, *, SymInt groups, SymInt count, bool[] mask) -> (Tensor, Tensor, Tensor)",
    _group_norm_backward,
    _group_norm_backward_fake,
)
for _name in (
    "moments",
    "variance_of_moments",
    "var_mean_of_moments",
    "layer_norm_of_moments",
    "rms_norm_of_moments",
    "norm_sums",
    "rms_norm_backward_of_sums",
    "layer_norm_backward_of_sums",
    "group_moments",
    "group_norm_of_moments",
    "group_norm_sums",
    "group_norm_backward_of_sums",
):
    once_differentiable(_name)
