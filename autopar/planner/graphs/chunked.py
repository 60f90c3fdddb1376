"""Losses whose logits are computed in chunks of classes: the same graph, in which no tensor holds all logits.

Such losses are found by what they compute: the product of activations with a table, perhaps a bias, slices of its rows,
and the cross-entropy of these that ``tracer.losses`` writes, with the gradient of all that. The logits must have no
other reader, including the model's caller. The backward computes one more product (``ops.linear_nll``), so such a graph
is for budgets that bind: the search then plans both.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.ir import Arg, Graph, Node, TensorMeta, Value


@dataclass(frozen=True)
class _Loss:
    """One loss and its gradient, as they were captured.

    Args:
        product: the op that makes the logits; ``bias`` is added to it.
        slices: of its rows, in order; ``unsliced`` are their gradients, in order.
        nodes: all nodes that are replaced.
        gradients: the nodes that make the gradients of x, the table and the bias.
    """

    product: Node
    bias: Value | None
    slices: tuple[Node, ...]
    unsliced: tuple[Node, ...]
    lse: Value
    nll: Node
    backward: Node
    nodes: frozenset[str]
    gradients: tuple[Node | None, Node | None, Node | None]


def with_chunked_losses(graph: Graph, least: int) -> Graph:
    """Return ``graph`` with its losses of more than ``least`` logits in chunks of classes; itself if it has none."""
    for name in [n.name for n in graph.nodes if n.packet == "autopar.nll"]:
        node = graph.by_name[name]
        found = _Finder(graph).loss(node) if graph.meta(node.inputs[0]).numel > least else None
        graph = graph if found is None else _rewritten(graph, found)
    return graph


class _Finder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.outputs = {o.value for o in graph.outputs}

    def maker(self, value: Value, packet: str) -> Node | None:
        node = self.graph.by_name[value.node]
        return node if node.packet == packet else None

    def readers(self, value: Value) -> list[Node]:
        return [n for n, _ in self.graph.consumers.get(value, ())]

    def only_reader(self, value: Value, packet: str) -> Node | None:
        """Return the only reader of a value, if it is of this packet."""
        readers = self.readers(value)
        alone = len(readers) == 1 and value not in self.outputs and readers[0].packet == packet
        return readers[0] if alone else None

    def is_read_only_by(self, value: Value, *nodes: Node) -> bool:
        """Whether nobody but ``nodes`` reads a value."""
        return value not in self.outputs and {n.name for n in self.readers(value)} == {n.name for n in nodes}

    def loss(self, nll: Node) -> _Loss | None:
        scores, lse = nll.inputs[:2]
        add = self.maker(lse, "aten.add")
        log = self.maker(add.inputs[0], "aten.log") if add and len(add.inputs) == 2 else None
        total = self.maker(log.inputs[0], "autopar.sumexp") if log else None
        largest = self.maker(total.inputs[1], "aten.amax") if total else None
        backward = next((n for n in self.readers(scores) if n.packet == "autopar.nll_backward"), None)
        if add is None or log is None or total is None or largest is None or backward is None:
            return None
        same = add.inputs[1] == Value(largest.name) and largest.inputs[0] == total.inputs[0] == scores
        same = same and backward.inputs[1:] == nll.inputs and backward.kwargs == nll.kwargs
        inside = (
            self.is_read_only_by(scores, largest, total, nll, backward)
            and self.is_read_only_by(Value(largest.name), total, add)
            and self.is_read_only_by(Value(total.name), log)
            and self.is_read_only_by(Value(log.name), add)
            and self.is_read_only_by(lse, nll, backward)
        )
        if not same or not inside:
            return None
        slices, made = self._slices(scores)
        unsliced, given = self._unsliced(backward, slices)
        product, bias = self._product(made)
        if product is None or len(unsliced) != len(slices):
            return None
        gradients = self._gradients(product, bias, given)
        if gradients is None:
            return None
        passed = [product, largest, total, log, add, nll, backward, *slices, *unsliced, *filter(None, gradients)]
        if bias is not None:
            passed += [self.graph.by_name[made.node]]
            passed += [self.graph.by_name[g.inputs[0].node] for g in gradients[2:] if g is not None]
        nodes = frozenset(n.name for n in passed)
        return _Loss(product, bias, slices, unsliced, lse, nll, backward, nodes, gradients)

    def _slices(self, scores: Value) -> tuple[tuple[Node, ...], Value]:
        """Return slices of rows, in order, and the value that they are taken of."""
        found: list[Node] = []
        while (node := self.maker(scores, "aten.slice")) is not None:
            ndim, dim = len(node.outputs[0].shape) if node.outputs[0] else 0, node.args[1] if len(node.args) > 1 else 0
            if not isinstance(dim, int) or dim % max(ndim, 1) == ndim - 1:
                break
            scores = node.inputs[0]
            if found and not self.is_read_only_by(Value(node.name), found[0]):
                break
            found.insert(0, node)
        if found and not self.is_read_only_by(scores, found[0]):
            return (), scores
        return tuple(found), scores

    def _unsliced(self, backward: Node, slices: tuple[Node, ...]) -> tuple[tuple[Node, ...], Value]:
        """Return the gradients of those slices, in order, and the gradient of what they are taken of."""
        found, given = list[Node](), Value(backward.name)
        for _ in slices:
            node = self.only_reader(given, "aten.slice_backward")
            if node is None:
                break
            found.append(node)
            given = Value(node.name)
        return tuple(found), given

    def _product(self, logits: Value) -> tuple[Node | None, Value | None]:
        """Return the product with a table [classes, width] that makes the logits, and the bias that is added to it."""
        added, bias = self.maker(logits, "aten.add"), None
        if added is not None and len(added.inputs) == 2 and len(added.args) == 2 and not added.kwargs:
            logits, bias = added.inputs
            if self.graph.meta(bias).shape != self.graph.meta(logits).shape[-1:] or not self.is_read_only_by(
                logits, added
            ):
                return None, None
        product = self.maker(logits, "autopar.contract")
        if product is None or product.args[2] != _equations(self.graph.meta(product.inputs[0]))[0]:
            return None, None
        metas = [self.graph.meta(v) for v in (*product.inputs, *([bias] if bias else []))]
        one_dtype = len({m.dtype for m in metas}) == 1 and metas[0].dtype.startswith(("float", "bfloat"))
        return (product, bias) if one_dtype else (None, None)

    def _gradients(
        self, product: Node, bias: Value | None, given: Value
    ) -> tuple[Node | None, Node | None, Node | None] | None:
        """Return the ops that make the gradients of x, the table and the bias; None if others read the gradient of the
        logits."""
        (x, table), (_, of_x, of_table) = product.inputs, _equations(self.graph.meta(product.inputs[0]))
        lead = tuple(range(len(self.graph.meta(x).shape) - 1))
        found: list[Node | None] = [None, None, None]
        for node in self.readers(given):
            if node.packet == "autopar.contract" and node.args == (given, table, of_x):
                at, made = 0, node
            elif node.packet == "autopar.contract" and node.args == (given, x, of_table):
                at, made = 1, node
            elif node.packet == "aten.sum" and bias is not None and node.args[1:] == (lead, True):
                seen = self.only_reader(Value(node.name), "aten.view")
                if seen is None:
                    return None
                at, made = 2, seen
            else:
                return None
            if found[at] is not None or made.outputs[0] is None or given in self.outputs:
                return None
            found[at] = made
        if found[:2] == [None, None]:
            return None
        metas = [self.graph.meta(v) for v in (x, table, *([bias] if bias is not None else []))]
        same = all(g is None or g.outputs[0] == m for g, m in zip(found, metas, strict=False))
        return (found[0], found[1], found[2]) if same else None


def _equations(x: TensorMeta) -> tuple[str, str, str]:
    """Return the equations of the product and of its gradients, as ``tracer`` writes them."""
    lead = string.ascii_lowercase[: len(x.shape) - 1]
    return f"{lead}k,nk->{lead}n", f"{lead}n,nk->{lead}k", f"{lead}n,{lead}k->nk"


def _rewritten(graph: Graph, loss: _Loss) -> Graph:
    x, table = loss.product.inputs
    width = graph.meta(table).shape[1]
    names = {n.name for n in graph.nodes} - loss.nodes
    moved: dict[str, Node] = {}
    for node in loss.slices:
        moved[node.name] = _reshaped(node, x, width)
        x = Value(node.name)
    rows, x_meta = graph.meta(Value(loss.nll.name)), (moved[x.node].outputs[0] if moved else graph.meta(x))
    target, *weights = loss.nll.inputs[2:]
    forward = Node(
        unused_name("linear_nll", names),
        "autopar.linear_nll.default",
        (x, table, loss.bias, target, *weights),
        tuple(k for k in loss.nll.kwargs if k[0] != "offset"),
        (rows, rows),
        loss.nll.phase,
        loss.product.module,
        loss.product.source,
    )
    lse = Value(forward.name, 1)
    of_x, of_table, of_bias = loss.gradients
    made = (
        x_meta if of_x is not None else None,
        None if of_table is None else of_table.outputs[0],
        None if of_bias is None else of_bias.outputs[0],
    )
    backward = Node(
        unused_name("linear_nll_backward", names | {forward.name}),
        "autopar.linear_nll_backward.default",
        (loss.backward.inputs[0], x, table, loss.bias, lse, target, *weights),
        (*loss.backward.kwargs, ("mask", tuple(m is not None for m in made))),
        made,
        loss.backward.phase,
        loss.product.module,
        loss.product.source,
    )
    given = Value(backward.name)
    for node in loss.unsliced if of_x is not None else ():
        moved[node.name] = _reshaped(node, given, width)
        given = Value(node.name)
    replacements = {Value(loss.nll.name): Value(forward.name)}
    results = (given, Value(backward.name, 1), Value(backward.name, 2))
    replacements |= {Value(g.name): v for g, v in zip(loss.gradients, results, strict=True) if g is not None}
    placed = moved | {loss.nll.name: forward, loss.backward.name: backward}
    nodes = tuple(
        placed[n.name] if n.name in placed else with_operands(n, replacements)
        for n in graph.nodes
        if n.name in placed or n.name not in loss.nodes
    )
    outputs = tuple(replace(o, value=replacements.get(o.value, o.value)) for o in graph.outputs)
    return replace(graph, nodes=nodes, outputs=outputs)


def _reshaped(node: Node, operand: Value, width: int) -> Node:
    """Return a slice, or its gradient, of rows of another width."""
    meta, args = node.outputs[0], node.args[1:]
    assert meta is not None
    if node.packet == "aten.slice_backward" and isinstance(args[0], tuple):
        args = ((*args[0][:-1], width), *args[1:])
    return replace(node, args=(operand, *args), outputs=(TensorMeta((*meta.shape[:-1], width), meta.dtype),))


def with_operands(node: Node, replacements: Mapping[Value, Value]) -> Node:
    if not any(v in replacements for v in node.inputs):
        return node

    def moved(arg: Arg) -> Arg:
        if isinstance(arg, Value):
            return replacements.get(arg, arg)
        return tuple(map(moved, arg)) if isinstance(arg, tuple) else arg

    return replace(node, args=tuple(map(moved, node.args)), kwargs=tuple((k, moved(v)) for k, v in node.kwargs))


def unused_name(name: str, taken: set[str]) -> str:
    found, count = name, 0
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    return found
