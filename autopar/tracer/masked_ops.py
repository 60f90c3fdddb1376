"""Runs ops on masked selections, as far as unselected elements cannot affect the result."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from autopar.tracer.flat import Flat
from autopar.tracer.losses import MEAN, SUM, cross_entropy_loss
from autopar.tracer.masked import Count, Masked, has_masked, is_deferred, is_masked, size
from autopar.tracer.masked_reductions import masked_mean, masked_sum, mean_along, sum_along
from autopar.tracer.masked_views import broadcast_tensors, cast, clone, detach, expand_as, flatten, like, reshape
from autopar.tracer.masked_writes import put, put_in_copy

aten = torch.ops.aten


def run(tracer: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on masked selections; NotImplemented if elements that are not selected could affect the result."""
    if target in _OPS:
        return _OPS[target](tracer, *args, **kwargs)
    if target in _ROWWISE:
        return _run_on_rows(tracer, target, args, kwargs)
    if torch.Tag.pointwise not in getattr(target, "tags", ()):
        return NotImplemented
    if not target._schema.is_mutable:
        return _pointwise(target, args, kwargs)
    changed, name = args[0], target._opname
    if not is_masked(changed) or changed.shared or not name.endswith("_"):
        return NotImplemented
    result = _pointwise(getattr(getattr(aten, name[:-1]), target._overloadname), args, kwargs)
    if result is NotImplemented:
        return NotImplemented
    changed.whole = result.whole.to(changed.whole.dtype)
    return changed


def _pointwise(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map(
        lambda x: x.materialize() if isinstance(x, Flat) else x, (args, kwargs), is_leaf=is_deferred
    )
    leaves, _ = tree_flatten((args, kwargs), is_leaf=is_masked)
    first = next(filter(is_masked, leaves), None)
    if first is None or not all(_is_compatible(x, first) for x in leaves) or _may_raise(target, args):
        return NotImplemented

    # Filling would give a scalar tensor dims, and its dtype would then count in the result's.
    scalars = any(isinstance(x, Tensor) and x.requires_grad and _has_own_dtype(x, first) for x in leaves)

    def enter(x: Any) -> Any:
        if is_masked(x):
            return x.filled(x.whole, 1) if scalars else x.whole
        if not isinstance(x, Tensor):
            return x
        beside = first.with_mask_dims(x)
        return first.filled(beside, 1) if x.requires_grad and not _has_own_dtype(x, first) else beside

    return first.with_result(target(*tree_map(enter, args, is_leaf=is_masked), **tree_map(enter, kwargs)))


def _has_own_dtype(x: Tensor, first: Masked) -> bool:
    return not x.ndim and x.dtype != first.whole.dtype


_ROWWISE = {
    aten.linear.default,
    aten.matmul.default,
    aten.layer_norm.default,
    aten.embedding.default,
    aten.softmax.int,
    aten.log_softmax.int,
    aten.chunk.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.slice.Tensor,
    aten.unsqueeze.default,
}


_VIEWS = {
    aten.chunk.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.slice.Tensor,
    aten.unsqueeze.default,
}


_DIM_ARGUMENT = {
    aten.softmax.int: 1,
    aten.log_softmax.int: 1,
    aten.chunk.default: 2,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.slice.Tensor: 1,
    aten.unsqueeze.default: 1,
}
"""Position of the argument that names the dim, for ops that do not always work on the last one."""


def _run_on_rows(tracer: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that treats all rows alike on every row, as it can run on flattened leading dims."""
    at, along = 1 if target is aten.embedding.default else 0, _DIM_ARGUMENT.get(target, len(args))
    x, others = args[at], (*args[:at], *args[at + 1 :])
    if not is_masked(x) or has_masked((others, kwargs)):
        return NotImplemented
    if along < len(args) and args[along] >= 0:  # dims before the mask are flattened together with its own
        if args[along] <= x.lead:
            return NotImplemented
        args = (*args[:along], args[along] - x.lead, *args[along + 1 :])
    rows = Flat(x.filled(x.whole, 1 if x.whole.is_floating_point() else 0), x.lead + x.mask.ndim)
    made = tracer.call_function(target, (*args[:at], rows, *args[at + 1 :]), kwargs)
    several = made if isinstance(made, (list, tuple)) else [made]
    if not all(isinstance(m, Flat) and m.lead_shape == rows.lead_shape for m in several):
        return NotImplemented
    select = x.view if target in _VIEWS else x.with_whole
    return tree_map(lambda m: select(m.base), made, is_leaf=lambda m: isinstance(m, Flat))


def _may_raise(target: Any, args: Any) -> bool:
    """Whether an op divides integers, where a zero is an error on CPUs even at elements that are not selected."""
    divides = target._opname in ("floor_divide", "remainder", "fmod") or target._overloadname.endswith("_mode")
    return divides and is_masked(args[1]) and not args[1].whole.is_floating_point()


def _is_compatible(x: Any, first: Masked) -> bool:
    """Whether ``x`` is a number, selected by the same mask, or the same for all selected elements."""
    if is_masked(x):
        return first.matches_after_mask(x)
    return first.broadcasts(x) if isinstance(x, Tensor) else not isinstance(x, Count)


def _assume_true(tracer: Any, *compared: Any) -> bool:
    """Assume that a count is within its bounds."""
    return True


def item(tracer: Any, items: Any, at: int) -> Any:
    return items[at] if isinstance(items, list) else NotImplemented


def _cross_entropy(
    tracer: Any,
    x: Any,
    target: Any,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Compute cross-entropy with unselected elements ignored by their labels."""
    if not (is_masked(x) and is_masked(target) and x.matches_before_mask(target)) or reduction not in (MEAN, SUM):
        return NotImplemented
    if x.lead or x.rest != 1 or target.rest or target.whole.is_floating_point():
        return NotImplemented
    lead = x.mask.ndim
    scores, labels = Flat(x.filled(x.whole, 1), lead), Flat(target.filled(target.whole, ignore_index), lead)
    return cross_entropy_loss(tracer, scores, labels, weight, reduction, ignore_index, label_smoothing)


def _loss_of_elements(loss: Any) -> Callable[..., Any]:
    names = [a.name for a in loss._schema.arguments]
    defaults = {a.name: a.default_value for a in loss._schema.arguments if a.has_default_value()}

    def reduced(tracer: Any, *args: Any, **kwargs: Any) -> Any:
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        # Some losses reject probabilities above 1, which unselected elements may have become.
        values = [v.with_whole(v.filled(v.whole, 1)) if isinstance(v, Masked) else v for v in map(given.get, names)]
        values[names.index("reduction")] = 0
        each = _pointwise(loss, tuple(values), {})
        if each is NotImplemented or given["reduction"] not in (MEAN, SUM):
            return each
        return masked_mean(tracer, each) if given["reduction"] == MEAN else masked_sum(tracer, each)

    return reduced


_LOSSES = (
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
)


_OPS: dict[Any, Callable[..., Any]] = {
    aten.index_put_.default: put,
    aten.index_put.default: put_in_copy,
    aten.sum.default: masked_sum,
    aten.mean.default: masked_mean,
    aten.sum.dim_IntList: sum_along,
    aten.mean.dim: mean_along,
    aten.detach.default: detach,
    aten.zeros_like.default: like(aten.zeros_like.default),
    aten.ones_like.default: like(aten.ones_like.default),
    aten.full_like.default: like(aten.full_like.default),
    aten.expand_as.default: expand_as,
    aten.sym_size.int: size,
    operator.ge: _assume_true,
    operator.le: _assume_true,
    aten.view.default: reshape,
    aten.reshape.default: reshape,
    aten.flatten.using_ints: flatten,
    aten.to.dtype: cast,
    aten.clone.default: clone,
    aten.broadcast_tensors.default: broadcast_tensors,
    operator.getitem: item,
    aten.cross_entropy_loss.default: _cross_entropy,
    **{loss: _loss_of_elements(loss) for loss in _LOSSES},
}
