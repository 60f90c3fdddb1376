"""Masked selections ``x[mask]``: the number of selected elements depends on values, so no graph can hold them.

Elementwise ops are computed for every element, and those that the mask did not select are dropped where the result is
written back (``h[mask] *= 2``) or reduced (``loss[mask].mean()``). Other operands may have any shape that does not
depend on the number of selected elements. Inputs are filled with ones where they are not selected, so that no gradient
flows back from there, not even the NaN of an op without a gradient there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
    """``whole[..., mask]``. In-place ops change ``whole``, which nothing else holds.

    Args:
        lead: number of dims of ``whole`` before those of the mask.
        version: version of the mask, which must not change before the result is written back.
        shared: whether it is a view of another selection, or another is a view of it: then neither may be changed.
    """

    whole: Tensor
    mask: Tensor
    lead: int
    version: int
    shared: bool = False

    @property
    def rest(self) -> int:
        """Number of dims of ``whole`` after those of the mask."""
        return self.whole.ndim - self.lead - self.mask.ndim

    def with_whole(self, whole: Tensor) -> Masked:
        return Masked(whole, self.mask, self.lead, self.version)

    def with_result(self, whole: Tensor) -> Masked:
        """Return the result of an op that keeps the dims after the mask, and may change those before it."""
        return Masked(whole, self.mask, whole.ndim - self.rest - self.mask.ndim, self.version)

    def _shares_mask(self, other: Masked) -> bool:
        """Whether the same mask selects both, and it has not changed."""
        return self.mask is other.mask and self.version == other.version == self.mask._version

    def is_chosen_with(self, other: Masked) -> bool:
        """Whether the same mask selects both, with equally many dims after it."""
        return self._shares_mask(other) and self.rest == other.rest

    def is_beside(self, other: Masked) -> bool:
        """Whether the same mask selects both, with equally many dims before it."""
        return self._shares_mask(other) and self.lead == other.lead

    def fits(self, other: Masked) -> bool:
        """Whether the same mask selects both, element for element."""
        return self.is_beside(other) and self.rest == other.rest

    @property
    def ndim(self) -> int:
        """Number of dims of the selection, in which those of the mask are one."""
        return self.lead + 1 + self.rest

    def dims_of(self, d: int) -> range:
        """Return the dims of ``whole`` that form dim ``d`` of the selection."""
        first = d + (self.mask.ndim - 1) * (d > self.lead)
        return range(first, first + (self.mask.ndim if d == self.lead else 1))

    def view(self, whole: Tensor) -> Masked:
        """Return a selection by the same mask from ``whole``, which shares its memory with this one's."""
        self.shared = True
        return replace(self, whole=whole)

    def broadcasts(self, x: Tensor) -> bool:
        """Whether ``x`` is the same for all selected elements, however many they are."""
        return x.ndim <= self.rest or x.shape[-self.rest - 1] == 1

    def beside(self, x: Tensor) -> Tensor:
        """Return ``x``, which is the same for all selected elements, with a dim of size 1 for each dim of the mask."""
        if x.ndim <= self.rest:
            return x
        at = x.ndim - self.rest
        return x.reshape(*x.shape[: at - 1], *[1] * self.mask.ndim, *x.shape[at:])

    def filled(self, x: Tensor, value: float) -> Tensor:
        """Return ``x`` with ``value`` where it is not selected."""
        return x.masked_fill(~spread(self.mask, self.rest), value)

    def total(self) -> Tensor:
        """Return the number of selected elements."""
        before, behind = self.whole.shape[: self.lead], self.whole.shape[self.whole.ndim - self.rest :]
        count: Tensor = self.mask.sum() * math.prod((*before, *behind))
        return count

    def materialize(self) -> Tensor:
        """Select for real; if a graph cannot hold that, torch's own error names the line."""
        chosen: Tensor = aten.index.Tensor(self.whole, [*[None] * self.lead, self.mask])
        return chosen


def spread(mask: Tensor, rest: int) -> Tensor:
    return mask.reshape(*mask.shape, *[1] * rest)


def mask_in(indices: Sequence[Any]) -> tuple[Tensor | None, int]:
    """Return the only mask among indices and the number of full dims before it; None if there are other indices."""
    lead = next((i for i, index in enumerate(indices) if index is not None), 0)
    mask, *others = (*indices[lead:], None)
    alone = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim and all(o is None for o in others)
    return (mask if alone else None), lead


def _unflattened(x: Operand, indices: Sequence[Operand | None]) -> tuple[Tensor, list[Tensor | None]]:
    """Unflatten a tensor and its mask if both have the same dims flattened."""
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
    if x.shape != chosen.shape:
        x, chosen = aten.broadcast_tensors.default([x, chosen])
    return _chosen(x, chosen, 0) if x.ndim else NotImplemented


def _chosen(x: Tensor, mask: Tensor, lead: int) -> Masked:
    whole = Masked(x, mask, lead, mask._version)
    return whole.with_whole(whole.filled(x, 1))


def merge_equal_masks(graph: fx.Graph) -> None:
    """Merge masks that are computed twice, if nothing that they read is ever changed.

    ``y[x > 0] = h[x > 0]`` and ``loss(h[x > 0], y[x > 0])`` compute a mask twice.
    """
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
        if target._opname == "to" and storage_key(value) == storage_key(read[0]):  # a conversion that changes nothing
            earlier = computed[0][0]
        same[node] = earlier
        if earlier is not node and value.dtype == torch.bool:
            node.replace_all_uses_with(earlier)


_WRITE_UNSAID = {aten.batch_norm.default, aten.instance_norm.default}


def _written(node: fx.Node) -> Iterator[Tensor]:
    """Yield the tensors that a node changes, or may change."""
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


def _is_chosen(x: Any) -> bool:
    return isinstance(x, (Masked, Count))


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Deferred)


def has_masked(tree: Any) -> bool:
    return any(map(_is_chosen, tree_flatten(tree, is_leaf=_is_chosen)[0]))


def run(tracer: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on masked selections; NotImplemented if elements that are not selected could affect the result."""
    if target in _OPS:
        return _OPS[target](tracer, *args, **kwargs)
    if target in _ROW_BY_ROW:
        return _by_rows(tracer, target, args, kwargs)
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
    args, kwargs = tree_map(lambda x: x.materialize() if isinstance(x, Flat) else x, (args, kwargs), is_leaf=_is_leaf)
    leaves, _ = tree_flatten((args, kwargs), is_leaf=is_masked)
    first = next(filter(is_masked, leaves), None)
    if first is None or not all(_may_enter(x, first) for x in leaves) or _may_stop(target, args):
        return NotImplemented

    # Filling would give a scalar tensor dims, and its dtype would then count in the result's.
    scalars = any(isinstance(x, Tensor) and x.requires_grad and _has_own_dtype(x, first) for x in leaves)

    def enter(x: Any) -> Any:
        if is_masked(x):
            return x.filled(x.whole, 1) if scalars else x.whole
        if not isinstance(x, Tensor):
            return x
        beside = first.beside(x)
        return first.filled(beside, 1) if x.requires_grad and not _has_own_dtype(x, first) else beside

    return first.with_result(target(*tree_map(enter, args, is_leaf=is_masked), **tree_map(enter, kwargs)))


def _has_own_dtype(x: Tensor, first: Masked) -> bool:
    return not x.ndim and x.dtype != first.whole.dtype


_ROW_BY_ROW = {
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
_ALONG = {
    aten.softmax.int: 1,
    aten.log_softmax.int: 1,
    aten.chunk.default: 2,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.slice.Tensor: 1,
    aten.unsqueeze.default: 1,
}
"""Position of the argument that names the dim, for ops that do not always work on the last one."""


def _by_rows(tracer: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that treats all rows alike on every row, as it can run on flattened leading dims."""
    at, along = 1 if target is aten.embedding.default else 0, _ALONG.get(target, len(args))
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
    like = x.view if target in _VIEWS else x.with_whole
    return tree_map(lambda m: like(m.base), made, is_leaf=lambda m: isinstance(m, Flat))


def _may_stop(target: Any, args: Any) -> bool:
    """Whether an op divides integers, where a zero is an error on CPUs even at elements that are not selected."""
    divides = target._opname in ("floor_divide", "remainder", "fmod") or target._overloadname.endswith("_mode")
    return divides and is_masked(args[1]) and not args[1].whole.is_floating_point()


def _may_enter(x: Any, first: Masked) -> bool:
    """Whether ``x`` is a number, selected by the same mask, or the same for all selected elements."""
    if is_masked(x):
        return first.is_chosen_with(x)
    return first.broadcasts(x) if isinstance(x, Tensor) else not isinstance(x, Count)


def _turn(mask: Tensor) -> Tensor:
    """Return each selected element's position among the selected ones; for the others, that of the one before."""
    return (mask.reshape(-1).cumsum(0) - 1).reshape(mask.shape)


@replaces(aten.index_put_.default)
def put(tracer: Any, given: Operand, indices: Sequence[Operand | None], values: Any, accumulate: bool = False) -> Any:
    """Write ``x[mask] = token``, ``x[mask] = rows``, or results of ``x[mask]`` by the same mask.

    There must be as many rows as the mask selects, which is a check of values and assumed to pass.
    """
    x, indices = _unflattened(given, indices)
    mask, lead = mask_in(indices)
    if mask is None:
        return NotImplemented
    place = Masked(x, mask, lead, mask._version)
    new = _for_all(values, place)
    if new is None:
        return NotImplemented
    new = new.to(x.dtype)
    written = x.copy_(torch.where(spread(mask, place.rest), x + new if accumulate else new, x))
    return given if isinstance(given, Flat) and x is given.base else written


@replaces(aten.index_put.default)
def put_in_copy(
    tracer: Any, given: Operand, indices: Sequence[Operand | None], values: Any, accumulate: bool = False
) -> Any:
    """Write as in ``x.clone()[mask] = values``."""
    if mask_in(materialize(list(indices)))[0] is None:
        return NotImplemented
    return put(tracer, materialize(given).clone(), indices, values, accumulate)


def _for_all(values: Any, place: Masked) -> Tensor | None:
    """Extend ``values``, which are written where ``place`` selects, to all elements of ``place``.

    Return None if the result could depend on the number of selected elements.
    """
    if is_masked(values):
        whole = values.whole
        while whole.ndim > place.whole.ndim and whole.shape[0] == 1:
            whole = whole.squeeze(0)
        return whole if values.is_chosen_with(place) and whole.ndim <= place.whole.ndim else None
    found: Tensor = materialize(values)
    while found.ndim > place.rest and found.shape[0] == 1:
        found = found.squeeze(0)
    if place.broadcasts(found):
        return place.beside(found)
    at = found.ndim - place.rest - 1  # the dim of the rows
    rows = found.shape[at]
    return found[(slice(None),) * at + (_turn(place.mask).clamp(0, rows - 1),)] if rows else None


def _sum(tracer: Any, x: Masked, *, dtype: torch.dtype | None = None) -> Tensor:
    return x.filled(x.whole, 0).sum(dtype=dtype)


def _mean(tracer: Any, x: Masked, *, dtype: torch.dtype | None = None) -> Tensor:
    """Average, rounding once as torch does: half precision can hold neither the sum nor the count."""
    kind = dtype or x.whole.dtype
    wide = torch.float32 if kind in HALF else kind
    return (_sum(tracer, x, dtype=wide) / x.total()).to(kind)


def _sum_along(
    tracer: Any, x: Masked, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | Masked:
    """Sum along dims: along the mask, elements that are not selected are left out; along other dims each selected one
    has its own sum."""
    at = {d % x.ndim for d in dims} if dims else set(range(x.ndim))
    counted, along = x.lead in at, [e for d in sorted(at) for e in x.dims_of(d)]
    made = (x.filled(x.whole, 0) if counted else x.whole).sum(along, keepdim, dtype=dtype)
    if not counted:
        return Masked(made, x.mask, x.lead - (0 if keepdim else sum(d < x.lead for d in at)), x.version)
    kept = [1 if d in at else _size(tracer, x, d) for d in range(x.ndim)]
    return made.reshape(kept) if keepdim else made


def _mean_along(
    tracer: Any, x: Masked, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Average along dims, rounding once as ``_mean`` does."""
    at = {d % x.ndim for d in dims} if dims else set(range(x.ndim))
    kind = dtype or x.whole.dtype
    total = _sum_along(tracer, x, dims, keepdim, dtype=torch.float32 if kind in HALF else kind)
    count = math.prod(x.whole.shape[e] for d in at if d != x.lead for e in x.dims_of(d))
    if isinstance(total, Masked):
        return total.with_whole((total.whole / count).to(kind))
    return (total / (x.mask.sum() * count)).to(kind)


def _detach(tracer: Any, x: Masked) -> Masked:
    return x.view(x.whole.detach())


def _like(target: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tracer, x, *args, **kwargs: x.with_whole(target(x.whole, *args, **kwargs))


def _expand_as(tracer: Any, x: Any, other: Any) -> Any:
    if not isinstance(x, Tensor) or not is_masked(other) or not other.broadcasts(x):
        return NotImplemented
    beside = other.beside(x).expand(other.whole.shape)
    return other.with_whole(other.filled(beside, 1) if x.requires_grad else beside)


@dataclass
class Count(Deferred):
    """The number of elements that a mask selects, which only shapes may use."""

    chosen: Masked

    def materialize(self) -> Tensor:
        """Select for real; if a graph cannot hold that, torch's own error names the line."""
        return self.chosen.materialize()


def _size(tracer: Any, x: Masked, dim: int) -> Any:
    d = dim % x.ndim
    return Count(x) if d == x.lead else x.whole.shape[x.dims_of(d)[0]]


def _holds(tracer: Any, *compared: Any) -> bool:
    """Assume that a count is within its bounds."""
    return True


def reshape(tracer: Any, x: Any, shape: Sequence[Any]) -> Any:
    """View a selection so that the selected elements, or these and all dims before them, remain one dim."""
    if not is_masked(x) or x.whole.numel() == 0:
        return NotImplemented
    at = [i for i, n in enumerate(shape) if isinstance(n, Count) or n == -1]
    lead, own = x.whole.shape[: x.lead], x.whole.shape[x.whole.ndim - x.rest :]
    if len(at) != 1 or math.prod(shape[at[0] + 1 :]) != math.prod(own):
        return NotImplemented
    before, behind = shape[: at[0]], shape[at[0] + 1 :]
    if math.prod(before) == math.prod(lead):
        return replace(x.view(x.whole.reshape(*before, *x.mask.shape, *behind)), lead=len(before))
    if before or isinstance(shape[0], Count):
        return NotImplemented
    key = id(x.mask), x.version, tuple(lead)
    mask, _ = tracer.wider_masks.setdefault(key, (x.mask.expand(*lead, *x.mask.shape), x.mask))
    return replace(x.view(x.whole.reshape(*mask.shape, *behind)), mask=mask, lead=0)


def _flatten(tracer: Any, x: Masked, start_dim: int = 0, end_dim: int = -1) -> Any:
    sizes = [_size(tracer, x, d) for d in range(x.ndim)]
    start, end = start_dim % x.ndim, end_dim % x.ndim
    inside = sizes[start : end + 1]
    merged = -1 if any(isinstance(n, Count) for n in inside) else math.prod(inside)
    return reshape(tracer, x, [*sizes[:start], merged, *sizes[end + 1 :]])


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
    tracer: Any,
    x: Any,
    target: Any,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Compute cross-entropy with unselected elements ignored by their labels."""
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
        # Some losses reject probabilities above 1, which unselected elements may have become.
        values = [v.with_whole(v.filled(v.whole, 1)) if isinstance(v, Masked) else v for v in map(given.get, names)]
        values[names.index("reduction")] = 0
        each = _pointwise(loss, tuple(values), {})
        if each is NotImplemented or given["reduction"] not in (MEAN, SUM):
            return each
        return _mean(tracer, each) if given["reduction"] == MEAN else _sum(tracer, each)

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
    aten.sum.default: _sum,
    aten.mean.default: _mean,
    aten.sum.dim_IntList: _sum_along,
    aten.mean.dim: _mean_along,
    aten.detach.default: _detach,
    aten.zeros_like.default: _like(aten.zeros_like.default),
    aten.ones_like.default: _like(aten.ones_like.default),
    aten.full_like.default: _like(aten.full_like.default),
    aten.expand_as.default: _expand_as,
    aten.sym_size.int: _size,
    operator.ge: _holds,
    operator.le: _holds,
    aten.view.default: reshape,
    aten.reshape.default: reshape,
    aten.flatten.using_ints: _flatten,
    aten.to.dtype: _cast,
    aten.clone.default: _clone,
    aten.broadcast_tensors.default: _broadcast_tensors,
    operator.getitem: _item,
    aten.cross_entropy_loss.default: _cross_entropy,
    **{loss: _loss_of_elements(loss) for loss in _LOSSES},
}
