"""Recompose ops that capture decomposed for planning into the ops that a person would write, and into fast kernels.

This works on the local program. If no exchange between ranks is needed, the pieces of a pattern are adjacent: a product
and its bias, the pieces of a batch norm, a sum that keeps its dims and the view that drops them. A collective in
between leaves them as they are. No recomposed op holds more memory than its pieces.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from autopar._torch import LazyGraphModule
from autopar.ir import Graph
from autopar.ops.contract import parse
from autopar.passes.fuse import fuse
from autopar.program import LocalTensor
from autopar.spmd import Lowered

aten = torch.ops.aten
autopar = torch.ops.autopar

FUSED_BATCH_NORM = (aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default)


def compose(lowered: Lowered, graph: Graph) -> Lowered:
    """Return the local program of ``graph`` with composed ops, first those for autopar's kernels."""
    lowered = fuse(lowered, graph)
    before = lowered.accumulate
    return replace(
        lowered,
        forward=_composed(lowered.forward),
        backward=_composed(lowered.backward),
        accumulate=None if before is None else _composed(before),
    )


def _composed(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in list(graph.nodes):
        pattern = _PATTERNS.get(node.target)
        if pattern is not None and not node._erased:
            pattern(node)
    graph.lint()
    return LazyGraphModule(module, graph)


def _replaced(
    node: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None, at: fx.Node | None = None
) -> fx.Node:
    """Replace ``node``, and what only it reads, by a call at its place or at that of ``at``."""
    with node.graph.inserting_before(at or node):
        made = node.graph.call_function(target, args, kwargs or {})
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    _erase(node)
    return made


def _erase(node: fx.Node) -> None:
    """Erase a node without readers, and those of its operands that nobody else reads."""
    if node.users or node.op != "call_function" or node._erased:
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        if source.op == "call_function" and "op" in source.meta and not source.meta["op"].is_collective:
            _erase(source)


def _tensor(node: Any) -> LocalTensor | None:
    found = node.meta.get("tensor") if isinstance(node, fx.Node) else None
    return found if isinstance(found, LocalTensor) else None


def _shape(node: Any) -> tuple[int, ...]:
    tensor = _tensor(node)
    return tensor.meta.shape if tensor is not None else ()


def _has_one_reader(node: Any, target: Any) -> bool:
    """Whether ``node`` is a call of ``target`` with one reader."""
    return isinstance(node, fx.Node) and node.target is target and len(node.users) == 1


# Products.


def _product(node: fx.Node) -> None:
    """Replace a contraction, and the bias added to it, by the call that a person would write."""
    arguments: Any = node.args
    x, w, equation = arguments
    terms = parse(equation)
    reader = next(iter(node.users), None)
    summed, columns = terms.summed, terms.columns
    plain = not terms.batch and terms.out == terms.rows + columns and len(summed) == len(columns) == 1
    if plain and terms.x == terms.rows + summed:
        if reader is not None and _adds_bias(node, reader) and (place := _place_with_bias(node, reader)):
            target = functional.linear if terms.w == columns + summed else linear_of_transposed
            _replaced(reader, target, (x, w, reader.args[1]), at=place)
        elif terms.w == columns + summed:
            _replaced(node, functional.linear, (x, w))
        else:
            _replaced(node, torch.matmul, (x, w))
        return
    weight = _weight_gradient(x, w, equation)
    if weight is not None:
        _replaced(node, gradient_of_weight, weight)


def linear_of_transposed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight + bias``. It is printed as ``F.linear`` of the transposed weight."""
    return functional.linear(x, weight.t(), bias)


def gradient_of_weight(left: torch.Tensor, right: torch.Tensor, last: int) -> torch.Tensor:
    """Return the sum of outer products over all dims but the last. It is printed as one matrix product."""
    return left.flatten(0, last).t() @ right.flatten(0, last)


def _weight_gradient(x: Any, w: Any, equation: str) -> tuple[Any, Any, int] | None:
    terms = parse(equation)
    if terms.batch or len(terms.rows) != 1 or len(terms.columns) != 1 or not terms.summed:
        return None
    if terms.x != terms.summed + terms.rows or terms.w != terms.summed + terms.columns:
        return None
    left, right = (x, w) if terms.out == terms.rows + terms.columns else (w, x)
    return left, right, len(terms.summed) - 1


def _adds_bias(product: fx.Node, reader: fx.Node) -> bool:
    if len(product.users) != 1 or reader.target is not aten.add.Tensor or reader.kwargs:
        return False
    first, bias = reader.args
    same = (_tensor(product), _tensor(bias))
    return (
        first is product
        and len(_shape(bias)) == 1
        and _shape(bias)[0] == _shape(product)[-1]
        and same[0] is not None
        and same[1] is not None
        and same[0].meta.dtype == same[1].meta.dtype
    )


def _place_with_bias(product: fx.Node, reader: fx.Node) -> fx.Node | None:
    """Return where a product can take its bias: at its own place, or where the bias is added.

    The latter only if nothing but the bias is computed in between; anything else would be held together with operands
    that are freed otherwise.
    """
    bias: Any = reader.args[1]
    between, node = set(), product.next
    while node is not reader:
        between.add(node)
        node = node.next
    if bias not in between:
        return product
    return reader if between <= {bias, *bias.all_input_nodes} else None


def _sum(node: fx.Node) -> None:
    """Replace a sum that keeps its dims and the view that drops them by a sum that drops them, where the sum is: before
    the view something may overwrite what it reads."""
    source: Any = node.args[0]
    if not _has_one_reader(source, aten.sum.dim_IntList) or len(source.args) != 3 or not source.args[2]:
        return
    dims, rank = source.args[1], len(_shape(source))
    left = [n for d, n in enumerate(_shape(source.args[0])) if d not in {i % rank for i in dims}] if rank else []
    if list(_shape(node)) == left:
        _replaced(node, aten.sum.dim_IntList, (source.args[0], dims), source.kwargs, at=source)


# Batch norm, if the rank holds the whole batch.


@dataclass(frozen=True)
class _Moments:
    """The statistics of a batch as captured: mean, variance, and the epsilon of the reciprocal root."""

    mean: fx.Node
    variance: fx.Node
    epsilon: float


def _batch_norm(node: fx.Node) -> None:
    arguments: Any = node.args
    x, weight, bias, mean, rstd = arguments
    count: Any = node.kwargs["count"]
    moments = _moments(x, mean, rstd, count)
    if moments is None:
        return
    running = [_running_statistic(moments.mean, 1.0), _running_statistic(moments.variance, count / max(1, count - 1))]
    if None in running:
        return
    (mean_before, mean_after, momentum), (variance_before, variance_after, same) = running  # type: ignore[misc]
    inner = {moments.variance, moments.mean}
    external = [u for n in (mean, rstd, mean_after, variance_after) for u in n.users]
    if not math.isclose(momentum, same) or _is_read_before(inner, node, external):
        return
    args = (x, weight, bias, mean_before, variance_before, True, momentum, moments.epsilon)
    with node.graph.inserting_before(node):
        call = node.graph.call_function(FUSED_BATCH_NORM[0], args)
        call.meta = {k: v for k, v in node.meta.items() if k != "tensor"}
        replaced = (node, mean, rstd, mean_after, variance_after)
        items = [node.graph.call_function(operator.getitem, (call, i)) for i in range(5)]
    for old, item in zip(replaced, items, strict=True):
        item.meta = dict(old.meta)
        old.replace_all_uses_with(item)
    _erase_dead(node.graph)


def _erase_dead(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        ours = node.op == "call_function" and "op" in node.meta and not node.meta["op"].is_collective
        if not node.users and (ours or node.target is operator.getitem):
            graph.erase_node(node)


def _moments(x: Any, mean: Any, rstd: Any, count: Any) -> _Moments | None:
    """Return the statistics that end in ``rstd``, if they are those of a whole batch in one precision."""
    metas = [_tensor(n) for n in (x, mean, rstd)]
    if any(m is None or m.meta.dtype not in ("float32", "float64") for m in metas):
        return None
    if len({m.meta.dtype for m in metas if m is not None}) != 1 or not isinstance(count, int):
        return None
    shifted: Any = rstd.args[0] if rstd.target is aten.rsqrt.default else None
    if not _has_one_reader(shifted, aten.add.Tensor) or not isinstance(shifted.args[1], float):
        return None
    variance = shifted.args[0]
    both = mean.args[0] if mean.target is operator.getitem else None
    if not isinstance(both, fx.Node) or both.target is not autopar.batch_var_mean.default or both.args != (x,):
        return None
    if not isinstance(variance, fx.Node) or variance.args != (both, 0):
        return None
    return _Moments(mean, variance, shifted.args[1]) if _is_whole(x, count) else None


def _is_whole(x: fx.Node, count: Any) -> bool:
    """Whether this rank holds everything that its channels are normalized over, with more than one sample."""
    tensor = _tensor(x)
    assert tensor is not None
    shape, cut = tensor.meta.shape, [d for d, axes in enumerate(tensor.spec.dims) if axes and d != 1]
    return not cut and shape[0] > 1 and math.prod(shape) == count * shape[1]


def _running_statistic(moment: fx.Node, correction: float) -> tuple[fx.Node, fx.Node, float] | None:
    """Return (value before, value after, momentum) of the running statistic that ``moment`` updates."""
    for added in moment.users:
        if added.target is not aten.add.Tensor or added.args[1] is not moment:
            continue
        faded: Any = added.args[0]
        momentum: Any = added.kwargs.get("alpha", 1)
        if not _has_one_reader(faded, aten.mul.Tensor) or not isinstance(faded.args[1], float):
            continue
        if math.isclose(faded.args[1] * correction + momentum, correction):
            return faded.args[0], added, momentum / correction
    return None


def _is_read_before(inner: set[fx.Node], at: fx.Node, external: list[fx.Node]) -> bool:
    """Whether one of ``external`` that is not a piece of the pattern runs before ``at``."""
    order = {n: i for i, n in enumerate(at.graph.nodes)}
    pieces = (aten.add.Tensor, aten.rsqrt.default)
    return any(order[u] < order[at] and u.target not in pieces and u not in inner for u in external)


def _batch_norm_backward(node: fx.Node) -> None:
    """Replace the two sums and the input's gradient by one call, if the sums are not reduced over ranks in between."""
    arguments: Any = node.args
    grad, x, weight, mean, rstd, total, weighted = arguments
    pieces = total.args[0] if isinstance(total, fx.Node) and total.target is operator.getitem else None
    if not isinstance(pieces, fx.Node) or pieces.target is not autopar.batch_norm_backward_reduce.default:
        return
    metas = [_tensor(n) for n in (grad, x, mean, rstd)]
    same = {m.meta.dtype for m in metas if m is not None}
    matches = weighted.args == (pieces, 1) and total.args == (pieces, 0) and pieces.args == (grad, x, mean, rstd)
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    ready = all(not isinstance(a, fx.Node) or order[a] < order[pieces] for a in node.args[:5])
    # torch's kernel confuses memory layouts if a spatial dim has one element.
    whole = _is_whole(x, node.kwargs["count"]) and 1 not in _shape(x)[2:]
    if not (matches and ready and whole) or same not in ({"float32"}, {"float64"}):
        return
    needs = [len(weighted.users) > 1 or weight is not None, len(total.users) > 1]
    args = (grad, x, weight, None, None, mean, rstd, True, 0.0, [True, *needs])
    with node.graph.inserting_before(pieces):
        call = node.graph.call_function(FUSED_BATCH_NORM[1], args)
        call.meta = {k: v for k, v in node.meta.items() if k != "tensor"}
        items = [node.graph.call_function(operator.getitem, (call, i)) for i in range(3)]
    for old, item in zip((node, weighted, total), items, strict=True):
        item.meta = dict(old.meta)
        old.replace_all_uses_with(item)
    for old in (node, total, weighted, pieces):
        if not old._erased and not old.users:
            node.graph.erase_node(old)
    for item in items:
        if not item.users:
            node.graph.erase_node(item)


_PATTERNS: dict[Any, Callable[[fx.Node], None]] = {
    autopar.contract.default: _product,
    aten.reshape.default: _sum,
    autopar.batch_norm.default: _batch_norm,
    autopar.batch_norm_backward_input.default: _batch_norm_backward,
}
