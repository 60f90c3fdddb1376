"""Decomposes losses where ranks have to exchange something: over classes, and over samples.

Each function has the signature of the ATen op that it replaces, as in ``replacements``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.registration import HALF
from autopar.tracer.flat import Flat, materialize
from autopar.tracer.replacements import REPLACEMENTS, Operand, Replacement, base_of, replaces

aten = torch.ops.aten
ops = torch.ops.autopar

MEAN, SUM = 1, 2


@replaces(aten.cross_entropy_loss.default)
def cross_entropy_loss(
    tracer: Any,
    x: Operand,
    target: Operand,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Compute cross-entropy over classes that may be cut; targets that are probabilities are left to torch."""
    if base_of(target).is_floating_point():
        return NotImplemented
    if isinstance(x, Flat) and isinstance(target, Flat) and x.lead_shape == target.base.shape and len(x.rest) == 1:
        scores, index = x.base, target.base
        flat = True
    else:
        scores, index = materialize((x, target))
        flat = False
        if scores.ndim > 2:
            scores = scores.movedim(1, -1)
    # The ops compute in float32 whatever they read, so a float32 copy of the logits would only take memory.
    scores = tracer.before_widening(scores)
    losses, counted = _losses(scores, index, materialize(weight), ignore_index, label_smoothing)
    dtype = _loss_dtype(base_of(x))
    if reduction not in (MEAN, SUM):
        result = losses.to(dtype)
        return Flat(result, x.lead) if flat and isinstance(x, Flat) else result
    total = losses.sum()
    return (total / counted.sum() if reduction == MEAN else total).to(dtype)


def _losses(
    scores: Tensor, index: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each sample, zero if it is ignored, and its weight in an average."""
    detached = scores.detach()
    largest = detached.amax(-1)
    lse = ops.sumexp(detached, largest).log() + largest
    counted, wide = torch.ne(index, ignore_index), lse.dtype
    if weight is None:
        smoothed = {"own": 1 - smoothing, "each": smoothing / scores.shape[-1]} if smoothing else {}
        return ops.nll(scores, lse, index, ignore_index=ignore_index, offset=0, **smoothed), counted
    own = weight[index.where(counted, 0)].where(counted, 0).to(wide)
    if not smoothing:
        return ops.nll(scores, lse, index, ignore_index=ignore_index, offset=0) * own, own
    # The weight of a row's loss, the share of it that its target has, and how the rest is distributed over classes.
    total = weight.to(wide).sum()
    each = (total * (smoothing / scores.shape[-1])).expand_as(own).where(counted, 0)
    row = own * (1 - smoothing) + each
    share = own * (1 - smoothing) / row.where(row != 0, 1)
    classes = weight.to(wide) / total.where(total != 0, 1)
    return ops.nll(scores, lse, index, share, classes, ignore_index=ignore_index, offset=0) * row, own


def _loss_dtype(scores: Tensor) -> torch.dtype:
    """Return the dtype of a loss: autocast computes losses in float32."""
    lower = torch.is_autocast_enabled("cpu") and scores.dtype in HALF
    return torch.float32 if lower else scores.dtype


def _average(each: Tensor) -> Tensor:
    """Average in float32 if the dtype is half precision, which cannot hold the sum."""
    wide = torch.float32 if each.dtype in HALF else None
    return (each.sum(dtype=wide) / each.numel()).to(each.dtype)


def _averaged(loss: Any) -> Replacement:
    """Turn an averaging loss into a sum of elementwise losses and a division: shards cannot average on their own."""
    at = [a.name for a in loss._schema.arguments].index("reduction")
    defaults = [a.default_value for a in loss._schema.arguments]

    def summed(tracer: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, Flat) for a in args):
            x, y = args[:2]
            same = isinstance(x, Flat) and isinstance(y, Flat) and x.lead_shape == y.lead_shape
            args = (x.base, y.base, *args[2:]) if same else materialize(args)
        values = [*args, *defaults[len(args) :]]
        names = [a.name for a in loss._schema.arguments]
        values = [kwargs.get(n, v) for n, v in zip(names, values, strict=True)]
        reduction, values[at] = values[at], 0
        if reduction == 0:
            return NotImplemented
        each = loss(*values)
        return each.sum() if reduction == SUM else _average(each)

    return summed


for _loss in (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
):
    REPLACEMENTS[_loss] = _averaged(_loss)


@replaces(aten.multilabel_margin_loss.default)
def multilabel_margin_loss(tracer: Any, x: Operand, target: Operand, reduction: int = MEAN) -> Any:
    """Compute the loss with labels ending at the first -1; torch's decomposition counts the rest as class 0."""
    scores, index = materialize((x, target))
    classes = scores.shape[-1]
    named = torch.ne(index, -1).long().cumprod(-1).bool()
    picked = index.where(named, 0)
    counts = torch.zeros_like(index).scatter_add(-1, picked, named.long())
    margins = (1 - scores.gather(-1, picked).unsqueeze(-1) + scores.unsqueeze(-2)).clamp_min(0)
    losses = margins.where(named.unsqueeze(-1) & torch.eq(counts, 0).unsqueeze(-2), 0).sum((-2, -1)) / classes
    if reduction not in (MEAN, SUM):
        return losses
    return _average(losses) if reduction == MEAN else losses.sum()
