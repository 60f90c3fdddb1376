"""Replace ops that a plan assigns to one of autopar's kernels by one call.

``Op.kernels`` of the program says what is fused. ``planner/pricing/fused.py`` made sure that nothing else reads the
kernel's intermediate values.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import fx

from autopar._torch import LazyGraphModule
from autopar.ir import Graph, Value
from autopar.planner.graphs.kernel_patterns import STATISTICS, Fusion, fusions, part_that_runs
from autopar.program import AGAIN
from autopar.spmd import Lowered

autopar = torch.ops.autopar


def fuse(lowered: Lowered, graph: Graph) -> Lowered:
    """Return ``lowered``, a program for ``graph``, with its fused kernels."""
    if not any(_kernels(n) for m in (lowered.forward, lowered.backward) for n in m.graph.nodes):
        return lowered
    found, before = fusions(graph), lowered.accumulate
    made = replace(
        lowered,
        backward=_fused(lowered.backward, graph, found),
        accumulate=None if before is None else _fused(before, graph, found),
    )
    forward = _without_unread(made)
    return replace(forward, forward=_fused(forward.forward, graph, found))


def _without_unread(lowered: Lowered) -> Lowered:
    """Do not save what no backward reads any more, such as normalized rows that a kernel recomputes."""
    backs = [m for m in (lowered.backward, lowered.accumulate) if m is not None]
    fed = [[n for n in m.graph.nodes if n.op == "placeholder" and n.target != "rank"] for m in backs]
    unread = {i for i in range(len(lowered.saved)) if not any(f[i].users for f in fed)}
    for inputs in fed:
        for i in unread:
            inputs[i].graph.erase_node(inputs[i])
    forward = fx.Graph()
    results: Any = forward.graph_copy(lowered.forward.graph, {})
    first = len(lowered.results)
    forward.output(tuple(r for i, r in enumerate(results) if i - first not in unread))
    return replace(
        lowered,
        forward=LazyGraphModule(lowered.forward, forward),
        saved=tuple(name for i, name in enumerate(lowered.saved) if i not in unread),
    )


def _fused(module: fx.GraphModule, captured: Graph, found: Sequence[Fusion]) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    called = {n.meta["op"].name: n for n in graph.nodes if n.op == "call_function" and "op" in n.meta}
    for whole, mark in product(found, ("", AGAIN)):
        fusion = part_that_runs(whole, mark, called)
        nodes = [called.get(name + mark) for name in fusion.nodes]
        present = [n for n in nodes if n is not None and fusion.kernel in _kernels(n)]
        if len(present) == len(nodes) and fusion.kernel == STATISTICS:
            _statistics(graph, present)
        elif len(present) == len(nodes):
            _fuse_nodes(graph, fusion, *_tensors(captured, fusion, present))
    graph.lint()
    return LazyGraphModule(module, graph)


def _kernels(node: fx.Node) -> tuple[str, ...]:
    op = node.meta.get("op")
    return op.kernels if op is not None else ()


def _statistics(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Compute the maximum and the sum of exponentials in one pass. If ranks reduce the maximum, rescale the sum."""
    amax, sumexp = nodes
    x, m = amax.args[0], sumexp.args[1]
    with graph.inserting_before(amax):
        call = graph.call_function(autopar.softmax_statistics.default, (x,))
        most, total = (graph.call_function(operator.getitem, (call, i)) for i in range(2))
    call.meta = {k: v for k, v in amax.meta.items() if k != "tensor"} | {"results": 2}
    most.meta, total.meta = dict(amax.meta), dict(sumexp.meta)
    if m is amax:
        sumexp.replace_all_uses_with(total)
    else:
        with graph.inserting_before(sumexp):
            scaled = graph.call_function(autopar.rescaled.default, (total, most, m))
        scaled.meta = dict(sumexp.meta)
        sumexp.replace_all_uses_with(scaled)
    graph.erase_node(sumexp)
    amax.replace_all_uses_with(most)
    graph.erase_node(amax)


def _fuse_nodes(
    graph: fx.Graph, fusion: Fusion, nodes: Mapping[Value, fx.Node], given: Mapping[Value, fx.Node]
) -> None:
    """Replace ``nodes`` by one call, at the place of the first of them or after the last operand.

    They stay as they are if a result is read before that, or an operand is overwritten.
    """
    order = {n: i for i, n in enumerate(graph.nodes)}
    several = [n.all_input_nodes[0] for n in nodes.values() if n.target is operator.getitem]
    members = {*nodes.values(), *several}
    outside = {role: nodes[v] for role, v in fusion.writes if v in nodes and set(nodes[v].users) - members}
    last = max((given[v] for _, v in fusion.reads), key=order.__getitem__)
    readers = (order[u] for n in outside.values() for u in n.users if u not in members)
    if min(readers, default=len(order)) <= order[last]:
        return
    first = min(members, key=order.__getitem__)
    between = (n for n in graph.nodes if order[first] < order[n] <= order[last] and n not in members)
    if any(n.meta["op"].in_place and {*n.all_input_nodes} & {*given.values()} for n in between if "op" in n.meta):
        return
    anchor = next(n for n in nodes.values() if "op" in n.meta)
    role = {name: given[v] for name, v in fusion.reads}
    if fusion.kernel == "add_norm":
        target = autopar.add_norm.default
        args = tuple(role.get(name) for name in ("x", "residual", "weight", "bias"))
        options: dict[str, Any] = {"eps": fusion.eps, "centred": fusion.centred}
    else:
        target, options = autopar.norm_backward.default, {}
        args = tuple(role.get(name) for name in ("grad", "y", "mean", "rstd", "weight", "beside"))
    with graph.inserting_before(first) if order[last] < order[first] else graph.inserting_after(last):
        call = graph.call_function(target, args, {**options, "results": list(outside)})
    call.meta = {k: v for k, v in anchor.meta.items() if k != "tensor"} | {"results": len(outside)}
    after = call
    for i, old in enumerate(outside.values()):
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (call, i))
        after.meta = dict(old.meta)
        old.replace_all_uses_with(after, lambda reader: reader not in members)
    for node in sorted(members, key=order.__getitem__, reverse=True):
        if not node.users:  # keep what somebody else reads
            graph.erase_node(node)


def _tensors(
    graph: Graph, fusion: Fusion, calls: Sequence[fx.Node]
) -> tuple[dict[Value, fx.Node], dict[Value, fx.Node]]:
    """Return the fx nodes of all values that the ops write, and of all that they read."""
    made: dict[Value, fx.Node] = {}
    given: dict[Value, fx.Node] = {}
    for name, call in zip(fusion.nodes, calls, strict=True):
        node, op = graph.by_name[name], call.meta["op"]
        named = {n.meta["tensor"].name: n for n in call.all_input_nodes if "tensor" in n.meta}
        for value, tensor in zip(node.inputs, op.reads, strict=True):
            given.setdefault(value, named[tensor])
        if len(node.outputs) == 1:
            made[Value(name)] = call
        else:
            items = [n for n in call.users if n.target is operator.getitem]
            made |= {Value(name, n.args[1]): n for n in items}  # type: ignore[arg-type]
    return made, given
