"""Interpolate images: with torch's kernels if they are whole, else dim by dim, with rows of the neighbours.

A row of the result is a weighted sum of a few rows of x, its *taps*, which depend on its global position. A rank
computes rows ``first`` to ``first + size`` of ``out`` from its rows of x, which start at row ``start`` of ``n``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ops.registration import accumulation_dtype, define, differentiate, once_differentiable

aten = torch.ops.aten

_NAMES = {"nearest": "upsample_nearest", "nearest_exact": "_upsample_nearest_exact", "cubic": "upsample_bicubic"}
_LINEAR = {1: "upsample_linear1d", 2: "upsample_bilinear2d", 3: "upsample_trilinear3d"}


def _kernel(kind: str, dims: int, suffix: str = "") -> Any:
    name = _LINEAR[dims] if kind == "linear" else f"{_NAMES[kind]}{dims}d"
    return getattr(aten, f"{name}{suffix}").default


def _rest(kind: str, align: bool, scales: Sequence[float]) -> list[Any]:
    return [*([] if kind.startswith("nearest") else [align]), *(s or None for s in scales)]


def _whole(x: Tensor, *, kind: str, align: bool, scales: Sequence[float], n: list[int], out: list[int]) -> Tensor:
    made: Tensor = _kernel(kind, len(n))(x.contiguous(), out, *_rest(kind, align, scales))
    return made.contiguous()


def _whole_backward(
    grad: Tensor, *, kind: str, align: bool, scales: Sequence[float], n: list[int], out: list[int]
) -> Tensor:
    kernel = _kernel(kind, len(n), "_backward")
    made: Tensor = kernel(grad.contiguous(), out, [*grad.shape[:2], *n], *_rest(kind, align, scales))
    return made.contiguous()


def _whole_fake(x: Tensor, *, out: list[int], **_: object) -> Tensor:
    return x.new_empty([*x.shape[:2], *out])


def _whole_backward_fake(grad: Tensor, *, n: list[int], **_: object) -> Tensor:
    return grad.new_empty([*grad.shape[:2], *n])


def _context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.options = keyword_only_inputs


def _gradient(ctx: Any, grad: Tensor) -> Tensor:
    dx: Tensor = torch.ops.autopar.interpolate_backward(grad, **ctx.options)
    return dx


_CUBIC = -0.75  # parameter of Keys' kernel, the same as in torch


def _taps(
    x: Tensor, kind: str, align: bool, scale: float, n: int, out: int, first: int, size: int
) -> list[tuple[Tensor, Tensor | None]]:
    """Return, for rows of the result, the rows of x that they depend on with weights. No given ``scale`` is 0."""
    rows = torch.arange(first, first + size, device=x.device)
    if kind.startswith("nearest"):
        op = aten.upsample_nearest1d if kind == "nearest" else aten._upsample_nearest_exact1d
        ramp = torch.arange(n, dtype=torch.float64, device=x.device).view(1, 1, n)
        return [(op(ramp, [out], scale or None).view(-1).index_select(0, rows).long(), None)]
    at = rows.to(accumulation_dtype(x.dtype))
    if align:
        at = at * ((n - 1) / (out - 1) if out > 1 else 0.0)
    else:
        at = (at + 0.5) * (1 / scale if scale else n / out) - 0.5
    if kind == "linear":
        at = at.clamp_(min=0)
    below = at.floor()
    part, place = at - below, below.long()
    if kind == "linear":
        return [(place.clamp(max=n - 1), 1 - part), ((place + 1).clamp(max=n - 1), part)]
    return [((place + k).clamp(0, n - 1), _cubic(part - k)) for k in range(-1, 3)]


def _cubic(distance: Tensor) -> Tensor:
    d, a = distance.abs(), _CUBIC
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return torch.where(d <= 1, near, far)


def _along(weight: Tensor, x: Tensor, dim: int) -> Tensor:
    return weight.view(-1, *[1] * (x.ndim - 1 - dim))


def _forward(
    x: Tensor,
    *,
    kind: str,
    align: bool,
    scales: Sequence[float],
    n: list[int],
    out: list[int],
    start: list[int],
    first: list[int],
    size: list[int],
) -> Tensor:
    y = x if kind.startswith("nearest") else x.to(accumulation_dtype(x.dtype))
    for i, dim in enumerate(range(x.ndim - len(n), x.ndim)):
        total: Tensor | None = None
        for place, weight in _taps(y, kind, align, scales[i], n[i], out[i], first[i], size[i]):
            rows = y.index_select(dim, (place - start[i]).clamp_(0, y.shape[dim] - 1))
            if weight is not None:
                rows.mul_(_along(weight, rows, dim))
            total = rows if total is None else total.add_(rows)
            del rows
        assert total is not None
        y = total
    return y.to(x.dtype).contiguous()


def _backward(
    grad: Tensor,
    *,
    kind: str,
    align: bool,
    scales: Sequence[float],
    n: list[int],
    out: list[int],
    start: list[int],
    first: list[int],
    size: list[int],
) -> Tensor:
    """Return the gradient of this rank's rows of x, ``size`` from ``start`` on. ``grad`` begins at row ``first``."""
    dx = grad.to(accumulation_dtype(grad.dtype))
    for i, dim in enumerate(range(grad.ndim - len(n), grad.ndim)):
        made = dx.new_zeros([size[i] if d == dim else m for d, m in enumerate(dx.shape)])
        for place, weight in _taps(dx, kind, align, scales[i], n[i], out[i], first[i], dx.shape[dim]):
            own = (place >= start[i]) & (place < start[i] + size[i])
            weight = own.to(dx.dtype) if weight is None else weight * own
            made.index_add_(dim, (place - start[i]).where(own, 0), dx * _along(weight, dx, dim))
        dx = made
    return dx.to(grad.dtype).contiguous()


def _fake(x: Tensor, *, n: list[int], size: list[int], **_: object) -> Tensor:
    return x.new_empty([*x.shape[: x.ndim - len(n)], *size])


_OPTIONS = "*, str kind, bool align, float[] scales, int[] n, int[] out"
_PART = f"{_OPTIONS}, SymInt[] start, SymInt[] first, SymInt[] size) -> Tensor"
define(f"interpolate(Tensor x, {_OPTIONS}) -> Tensor", _whole, _whole_fake)
define(f"interpolate_backward(Tensor grad, {_OPTIONS}) -> Tensor", _whole_backward, _whole_backward_fake)
differentiate("interpolate", _gradient, _context)
define(f"interpolate_part(Tensor x, {_PART}", _forward, _fake)
define(f"interpolate_part_backward(Tensor grad, {_PART}", _backward, _fake)
for _name in ("interpolate_backward", "interpolate_part", "interpolate_part_backward"):
    once_differentiable(_name)
