"""Rewrites the joint graph without changing its values: removes no-ops, and merges equal nodes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_IDENTITIES = {aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}
_COPIES = {aten.clone.default, aten.contiguous.default}
_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default}
_ARITHMETIC = {
    getattr(op, overload): (neutral, op is not aten.add)
    for op, neutral in ((aten.add, 0), (aten.sub, 0), (aten.mul, 1), (aten.div, 1), (aten.pow, 1))
    for overload in (("Tensor_Scalar",) if op is aten.pow else ("Tensor", "Scalar"))
}
"""The operand with which an op does nothing, and whether that holds for floats: adding zero turns -0 into 0."""
_CHECKS = {
    aten._assert_async.msg,
    aten._assert_async.default,
    aten._assert_scalar.default,
    aten._linalg_check_errors.default,
}
"""Ops that check values and only raise; they are assumed to pass."""
_RANDOM = torch.Tag.nondeterministic_seeded


def clean(module: fx.GraphModule) -> None:
    """Mark phases, remove identities and dead nodes, and merge equal nodes of a phase; names become stable."""
    graph = module.graph
    _mark_phases(graph)
    kept = _results(graph)
    for node in list(graph.nodes):
        if node.target in _CHECKS:
            graph.erase_node(node)
        elif node.op == "call_function" and (source := _same_value(node, node in kept)) is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    _merge_equal(graph)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if node.op == "output":
            node.meta["val"] = fx.node.map_arg(node.args[0], lambda n: n.meta["val"])
    graph.lint()
    module.recompile()


def _results(graph: fx.Graph) -> set[fx.Node]:
    output = next(n for n in graph.nodes if n.op == "output")
    return set(output.all_input_nodes)


def _mark_phases(graph: fx.Graph) -> None:
    """Mark a node as backward if a tangent reaches it or autograd created it."""
    for node in graph.nodes:
        late = node.meta.get("partitioner_tag") == "is_backward" and node.op == "call_function"
        tangent = node.op == "placeholder" and "tangents" in node.name
        late = late or tangent or any(n.meta["phase"] == "backward" for n in node.all_input_nodes)
        node.meta["phase"] = "backward" if late else "forward"


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape


def _same_value(node: fx.Node, is_result: bool) -> fx.Node | None:
    """Return the node whose value an op returns unchanged, or None if the op does something."""
    source = node.args[1 if node.target is aten.copy.default else 0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if not is_result and _order(node) is not None and (before := _order(source)) is not None:
        whole = source.args[0]
        undone = [before[d] for d in _order(node) or []] == list(range(len(before)))
        return whole if undone and isinstance(whole, fx.Node) else None
    return source if _does_nothing(node, source, is_result) else None


def _order(node: fx.Node) -> list[int] | None:
    """Return, for each dim of a permuted tensor, the dim of the operand that it is."""
    val: Any = node.meta.get("val")
    if node.target not in (aten.permute.default, aten.transpose.int) or not isinstance(val, torch.Tensor):
        return None
    args: Any = node.args
    if node.target is aten.permute.default:
        return [d % val.ndim for d in args[1]]
    order = list(range(val.ndim))
    a, b = args[1] % max(val.ndim, 1), args[2] % max(val.ndim, 1)
    if order:
        order[a], order[b] = b, a
    return order


def _does_nothing(node: fx.Node, source: fx.Node, is_result: bool) -> bool:
    val: Any = source.meta.get("val")
    same = _same(node.meta.get("val"), val)
    if node.target in _IDENTITIES:
        return True
    if is_result and source.op == "placeholder":
        return False
    if node.target in _COPIES:
        return not is_result
    if node.target in _ARITHMETIC:
        neutral, of_floats = _ARITHMETIC[node.target]
        operand: Any = node.args[1]
        equal = type(operand) in (int, float) and operand == neutral and not node.kwargs
        return same and equal and not is_result and bool(of_floats or not val.dtype.is_floating_point)
    if node.target in _RESHAPES or node.target in (aten._to_copy.default, aten.copy.default):
        return same
    return node.target is aten.dropout.default and node.args[2] is False


def _key(node: fx.Node, phase: str) -> Any:
    def freeze(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return tuple(freeze(i) for i in x)
        if isinstance(x, dict):
            return tuple((k, freeze(v)) for k, v in x.items())
        return (type(x).__name__, x) if isinstance(x, (bool, int, float)) else x

    return (phase, node.target, freeze(node.args), freeze(node.kwargs))


def _merge_equal(graph: fx.Graph) -> None:
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or _is_random(node.target):
            continue
        key = _key(node, "" if node.target is operator.getitem else node.meta["phase"])
        try:
            first = seen.setdefault(key, node)
        except TypeError:
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _is_random(target: Any) -> bool:
    return _RANDOM in getattr(target, "tags", ())
