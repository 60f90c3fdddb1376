"""What a mask chooses, ``x[mask]``: how many elements that are depends on values, and no graph holds such a tensor.

What is computed with each element by itself is computed with every one, and what the mask did not choose is dropped
where the result is written back (``h[mask] *= 2``) or added up (``loss[mask].mean()``). Whatever enters is filled with
ones where it was not chosen, so that nothing flows back from there: not even the NaN of an op without a gradient there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_map

from autopar._torch import OpOverload, storage_key
from autopar.ops.registration import HALF
from autopar.tracer.flat import Deferred, Flat, materialize
from autopar.tracer.losses import MEAN, SUM, cross_entropy_loss
from autopar.tracer.replacements import Operand, replaces

aten = torch.ops.aten


@dataclass
class Masked(Deferred):
    """``whole[..., mask]``. Ops in place change ``whole``, which nothing else holds.

    Args:
        lead: dims of ``whole`` before those of the mask.
        version: of the mask, which must not change before the result is written back.
    """

    whole: Tensor
    mask: Tensor
    lead: int
    version: int

    @property
    def rest(self) -> int:
        """Dims of ``whole`` behind those of the mask."""
        return self.whole.ndim - self.lead - self.mask.ndim

    def with_whole(self, whole: Tensor) -> Masked:
        return Masked(whole, self.mask, self.lead, self.version)

    def is_beside(self, other: Masked) -> bool:
        """Whether both are chosen by the same mask, which did not change."""
        same = self.mask is other.mask and self.version == other.version == self.mask._version
        return same and self.lead == other.lead

    def fits(self, other: Masked) -> bool:
        """Whether both are chosen alike, element for element."""
        return self.is_beside(other) and self.rest == other.rest

    def filled(self, x: Tensor, value: float) -> Tensor:
        """``x`` with ``value`` where it was not chosen."""
        return x.masked_fill(~spread(self.mask, self.rest), value)

    def total(self) -> Tensor:
        """How many elements are chosen."""
        before, behind = self.whole.shape[: self.lead], self.whole.shape[self.whole.ndim - self.rest :]
        count: Tensor = self.mask.sum() * math.prod((*before, *behind))
        return count

    def materialize(self) -> Tensor:
        """Where there is no way around it torch's own error names the line."""
        chosen: Tensor = aten.index.Tensor(self.whole, [*[None] * self.lead, self.mask])
        return chosen


def spread(mask: Tensor, rest: int) -> Tensor:
    return mask.reshape(*mask.shape, *[1] * rest)


def mask_in(indices: Sequence[Any]) -> tuple[Tensor | None, int]:
    """The one mask among indices, and the whole dims before it; None where there are others."""
    lead = next((i for i, index in enumerate(indices) if index is not None), 0)
    mask, *others = (*indices[lead:], None)
    alone = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim and all(o is None for o in others)
    return (mask if alone else None), lead


def _unflattened(x: Operand, indices: Sequence[Operand | None]) -> tuple[Tensor, list[Tensor | None]]:
    """Where a tensor and its mask have the same dims flattened they stay apart."""
    mask = indices[0] if len(indices) == 1 else None
    if isinstance(x, Flat) and isinstance(mask, Flat) and x.lead_shape == mask.base.shape:
        return x.base, [mask.base]
    plain: tuple[Tensor, list[Tensor | None]] = materialize((x, list(indices)))
    return plain


@replaces(aten.index.Tensor)
def index(tracer: Any, given: Operand, indices: Sequence[Operand | None]) -> Any:
    x, indices = _unflattened(given, indices)
    mask, lead = mask_in(indices)
    return NotImplemented if mask is None else _chosen(x, mask, lead)


@replaces(aten.masked_select.default)
def masked_select(tracer: Any, given: Operand, mask: Operand) -> Any:
    x, chosen = materialize((given, mask))
    return _chosen(x, chosen, 0) if x.shape == chosen.shape and x.ndim else NotImplemented


def _chosen(x: Tensor, mask: Tensor, lead: int) -> Masked:
    whole = Masked(x, mask, lead, mask._version)
    return whole.with_whole(whole.filled(x, 1))


def merge_equal_masks(graph: fx.Graph) -> None:
    """``y[x > 0] = h[x > 0]`` and ``loss(h[x > 0], y[x > 0])`` compute a mask twice: they become one, where nothing
    that they read is ever changed."""
    if not any(node.target in (aten.index.Tensor, aten.index_put_.default) for node in graph.nodes):
        return
    written = {storage_key(value) for node in graph.nodes for value in _written(node)}
    first: dict[Any, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        value, target = node.meta.get("val"), node.target
        if not isinstance(value, Tensor) or not isinstance(target, OpOverload) or target.namespace != "aten":
            continue
        read = [n.meta.get("val") for n in node.all_input_nodes]
        changes = any(isinstance(v, Tensor) and storage_key(v) in written for v in (value, *read))
        if changes or target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
            continue
        computed = fx.map_arg((node.args, node.kwargs), lambda n: same.get(n, n))
        earlier = first.setdefault((target, str(computed)), node)
        if target._opname == "to" and storage_key(value) == storage_key(read[0]):  # as it was already
            earlier = computed[0][0]
        same[node] = earlier
        if earlier is not node and value.dtype == torch.bool:
            node.replace_all_uses_with(earlier)


_WRITE_UNSAID = {aten.batch_norm.default, aten.instance_norm.default}


def _written(node: fx.Node) -> Iterator[Tensor]:
    """Tensors that a node changes, or may."""
    if node.op != "call_function":
        return
    target, written = node.target, node.all_input_nodes
    if isinstance(target, OpOverload) and target.namespace == "aten" and target not in _WRITE_UNSAID:
        changed = {a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        given = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False)) | node.kwargs
        named = [v for name, v in given.items() if name in changed]
        written = [n for v in named for n in (v if isinstance(v, (list, tuple)) else [v]) if isinstance(n, fx.Node)]
    yield from (v for n in written if isinstance(v := n.meta.get("val"), Tensor))


def is_masked(x: Any) -> bool:
    return isinstance(x, Masked)


def has_masked(tree: Any) -> bool:
    return any(map(is_masked, tree_flatten(tree, is_leaf=is_masked)[0]))


def run(tracer: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on what masks chose; NotImplemented where what was not chosen could show."""
    if target in _OPS:
        return _OPS[target](tracer, *args, **kwargs)
    if target in _ROW_BY_ROW:
        return _by_rows(tracer, target, args, kwargs)
    if torch.Tag.pointwise not in getattr(target, "tags", ()):
        return NotImplemented
    if not target._schema.is_mutable:
        return _pointwise(target, args, kwargs)
    changed, name = args[0], target._opname
    if not is_masked(changed) or not name.endswith("_"):
        return NotImplemented
    result = _pointwise(getattr(getattr(aten, name[:-1]), target._overloadname), args, kwargs)
    if result is NotImplemented:
        return NotImplemented
    changed.whole = result.whole.to(changed.whole.dtype)
    return changed


def _pointwise(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    leaves, _ = tree_flatten((args, kwargs), is_leaf=lambda x: isinstance(x, (Masked, Flat)))
    first = next(x for x in leaves if is_masked(x))
    if not all(_may_enter(x, first) for x in leaves) or _may_stop(target, args):
        return NotImplemented

    def enter(x: Any) -> Any:
        if is_masked(x):
            return x.whole
        return first.filled(x, 1) if isinstance(x, Tensor) and x.requires_grad else x

    return first.with_whole(target(*tree_map(enter, args, is_leaf=is_masked), **tree_map(enter, kwargs)))


_ROW_BY_ROW = {
    aten.linear.default, aten.matmul.default, aten.layer_norm.default, aten.embedding.default, aten.softmax.int,
    aten.log_softmax.int, aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor,
    aten.unsqueeze.default, aten.sum.dim_IntList,
}  # fmt: skip


def _by_rows(tracer: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on every row, where it treats rows alike: then it can be done while leading dims are flattened, too."""
    at = 1 if target is aten.embedding.default else 0
    x, others = args[at], (*args[:at], *args[at + 1 :])
    if not is_masked(x) or x.lead or has_masked((others, kwargs)):
        return NotImplemented
    rows = Flat(x.filled(x.whole, 1 if x.whole.is_floating_point() else 0), x.mask.ndim)
    made = tracer.call_function(target, (*args[:at], rows, *args[at + 1 :]), kwargs)
    several = made if isinstance(made, (list, tuple)) else [made]
    if not all(isinstance(m, Flat) and m.lead_shape == x.mask.shape for m in several):
        return NotImplemented
    return tree_map(lambda m: x.with_whole(m.base), made, is_leaf=lambda m: isinstance(m, Flat))


def _may_stop(target: Any, args: Any) -> bool:
    """A division of integers by zero is an error on CPUs, also where nobody asked for it."""
    divides = target._opname in ("floor_divide", "remainder", "fmod") or target._overloadname.endswith("_mode")
    return divides and is_masked(args[1]) and not args[1].whole.is_floating_point()


def _may_enter(x: Any, first: Masked) -> bool:
    """Numbers, what is chosen alike, and tensors that are the same for all that is chosen.

    Filling gives dims to a scalar tensor that has none, and with them its dtype would count in the result's.
    """
    if is_masked(x):
        return first.fits(x)
    if isinstance(x, Tensor):
        return x.ndim <= first.rest and (x.ndim > 0 or x.dtype == first.whole.dtype)
    return not isinstance(x, Flat)


def _turn(mask: Tensor) -> Tensor:
    """Which one of those that are chosen an element is, in order; for the others that before them."""
    return (mask.reshape(-1).cumsum(0) - 1).reshape(mask.shape)


@replaces(aten.index_put_.default)
def put(tracer: Any, given: Operand, indices: Sequence[Operand | None], values: Any, accumulate: bool = False) -> Any:
    """``x[mask] = token``, ``x[mask] = rows``, and what was computed with ``x[mask]`` written by the same mask.

    That there are as many rows as the mask chooses is a check of values, which is taken as passed.
    """
    x, indices = _unflattened(given, indices)
    mask, lead = mask_in(indices)
    if mask is None or accumulate:
        return NotImplemented
    rest = x.ndim - lead - mask.ndim
    if is_masked(values):
        if not values.fits(Masked(x, mask, lead, mask._version)):
            return NotImplemented
        values = values.whole
    else:
        values = materialize(values)
        while values.ndim > rest and values.shape[0] == 1:
            values = values.squeeze(0)
        if values.ndim == rest + 1 and not lead and values.shape[0]:
            values = values[_turn(mask).clamp(0, values.shape[0] - 1)]
        elif values.ndim > rest:
            return NotImplemented
    written = x.copy_(torch.where(spread(mask, rest), values.to(x.dtype), x))
    return given if isinstance(given, Flat) and x is given.base else written


def _sum(tracer: Any, x: Masked, *, dtype: torch.dtype | None = None) -> Tensor:
    return x.filled(x.whole, 0).sum(dtype=dtype)


def _mean(tracer: Any, x: Masked, *, dtype: torch.dtype | None = None) -> Tensor:
    """Rounded once, as torch's own: neither the sum nor the count is what half precision can hold."""
    kind = dtype or x.whole.dtype
    wide = torch.float32 if kind in HALF else kind
    return (_sum(tracer, x, dtype=wide) / x.total()).to(kind)


def _cast(
    tracer: Any, x: Masked, dtype: torch.dtype, non_blocking: bool = False, copy: bool = False, **_: Any
) -> Masked:
    return x if x.whole.dtype == dtype and not copy else x.with_whole(x.whole.to(dtype))


def _clone(tracer: Any, x: Masked, **_: Any) -> Masked:
    return x.with_whole(x.whole)


def _broadcast_tensors(tracer: Any, tensors: Sequence[Any]) -> Any:
    first, *others = tensors
    alike = is_masked(first) and all(is_masked(t) and first.fits(t) for t in others)
    return list(tensors) if alike and all(t.whole.shape == first.whole.shape for t in others) else NotImplemented


def _item(tracer: Any, items: Any, at: int) -> Any:
    return items[at] if isinstance(items, list) else NotImplemented


def _cross_entropy(
    tracer: Any, x: Any, target: Any, weight: Tensor | None = None,
    reduction: int = MEAN, ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """What was not chosen is ignored, as labels can say."""
    if not (is_masked(x) and is_masked(target) and x.is_beside(target)) or reduction not in (MEAN, SUM):
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
        # Some of them refuse probabilities beyond 1, which what was not chosen may have become.
        values = [v.with_whole(v.filled(v.whole, 1)) if isinstance(v, Masked) else v for v in map(given.get, names)]
        values[names.index("reduction")] = 0
        each = _pointwise(loss, tuple(values), {})
        if each is NotImplemented or given["reduction"] not in (MEAN, SUM):
            return each
        return _mean(tracer, each) if given["reduction"] == MEAN else _sum(tracer, each)

    return reduced


_LOSSES = (
    aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
)  # fmt: skip

_OPS: dict[Any, Callable[..., Any]] = {
    aten.index_put_.default: put,
    aten.sum.default: _sum,
    aten.mean.default: _mean,
    aten.to.dtype: _cast,
    aten.clone.default: _clone,
    aten.broadcast_tensors.default: _broadcast_tensors,
    operator.getitem: _item,
    aten.cross_entropy_loss.default: _cross_entropy,
    **{loss: _loss_of_elements(loss) for loss in _LOSSES},
}
