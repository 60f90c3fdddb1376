"""Experts on routed rows: the same graph, in which a mesh axis may send tokens to the ranks of their experts.

Capture gives every token a row for each of its experts, ``[..., b, r, n]``, and products that sort these rows by expert
inside (``ops.experts``). Here the rows are sorted once, and sent to where their experts are: ``[..., c, e, n]``
(``ops.routing``). What lies between two products treats each row alike, and the dims of a row keep their places, so an
op stays the op that it was. Anything else gets the rows back in the order of tokens, and so does what leaves the
experts, summed over the choices of a token.

Where experts are cut, a routed tensor has room for more rows than the mean, and all that is computed row by row has it
too; where none are, it has the rows of its tokens, and sorts them once for all products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Union

from autopar.ir import Arg, Graph, Node, TensorMeta, Value
from autopar.program import Program
from autopar.strategies import find_rule

EVEN, ROUNDED_SHARE = 8, 1 / 16
"""Rows can be cut as evenly as tokens along their last dim into as many parts as a node has devices, where so many
divide the tokens; and into more, to which rows are rounded up by at most that share."""

PRODUCT, WEIGHT_PRODUCT = "autopar.experts_mm", "autopar.experts_mm_weight"

ALONG: Mapping[str, int] = {
    "aten.split": 2,
    "aten.split_with_sizes": 2,
    "aten.slice": 1,
    "aten.slice_backward": 2,
    "aten.cat": 1,
    "aten.sum": 1,
}
"""Ops along the last dim that leave the others as they are, with the position of the argument that names the dim."""


Room = Union[float, Mapping[tuple[int, int, int], int]]
"""Rows for which a rank has room, over the mean; or the columns for numbers of tokens, choices and experts."""


def with_routed_experts(graph: Graph, room: Room) -> Graph:
    """Return ``graph`` with its experts on routed rows; itself if it has none, or no room for them."""
    layers = _layers(graph, room)
    return _Rewriting(graph, layers).done() if layers else graph


def room_of(program: Program) -> Mapping[tuple[int, int, int], int]:
    """Return the room that a program's routed rows have."""
    found: dict[tuple[int, int, int], int] = {}
    for op in program.ops:
        if op.kind == "compute" and len(op.reads) == 1 and op.writes[0].meta.routed:
            ids, keys = program.tensors[op.reads[0]].meta, op.writes[0].meta
            if keys.routed == len(keys.shape) == len(ids.shape):
                found[ids.shape[-2], ids.shape[-1], keys.shape[-1]] = keys.shape[-2]
    return found


@dataclass(frozen=True)
class _Layer:
    """One router and its experts.

    Args:
        ids: the experts of each token, [..., b, r].
        keys: shape and dtype of the keys of its routed rows.
    """

    ids: Value
    shape: tuple[int, ...]
    keys: TensorMeta

    @property
    def span(self) -> int:
        return math.prod(self.shape)

    @property
    def choice_dim(self) -> int:
        return len(self.shape) - 1

    def has_rows(self, meta: TensorMeta) -> bool:
        """Whether a tensor has a row for each choice."""
        return meta.shape[:-1] == self.shape

    def has_tokens(self, meta: TensorMeta) -> bool:
        """Whether a tensor has a row for each token, and one choice."""
        return len(meta.shape) == len(self.shape) + 1 and meta.shape[:-1] == (*self.shape[:-1], 1)

    def routed(self, meta: TensorMeta) -> TensorMeta:
        return self.keys._replace(shape=(*self.keys.shape, meta.shape[-1]), dtype=meta.dtype)


def _layers(graph: Graph, room: Room) -> dict[Value, _Layer]:
    found: dict[Value, _Layer] = {}
    odd = set[Value]()
    for node in graph.nodes:
        if node.packet not in (PRODUCT, WEIGHT_PRODUCT):
            continue
        rows, other, ids = map(graph.meta, node.inputs)
        experts = other.shape[0] if node.packet == PRODUCT else node.kwarg("experts")
        assert isinstance(experts, int)
        layer = _layer(node.inputs[2], ids, experts, room)
        known = found.setdefault(node.inputs[2], layer) if layer is not None else None
        if layer is None or known != layer or rows.shape[:-1] not in (layer.shape, layer.shape[:-1]):
            odd.add(node.inputs[2])
    return {ids: layer for ids, layer in found.items() if ids not in odd}


def _layer(ids: Value, meta: TensorMeta, experts: int, room: Room) -> _Layer | None:
    """Return the layer with these ids; None where each row names one expert by itself."""
    if len(meta.shape) < 2 or meta.dtype != "int64" or not meta.numel or meta.shape[-1] > experts < 2:
        return None
    *outer, tokens, choices = meta.shape
    if isinstance(room, Mapping):
        columns = room.get((tokens, choices, experts), 0)
    else:
        wanted = math.ceil(min(room * tokens * choices / experts, tokens))
        even = math.gcd(tokens, max(EVEN, 1 << int(math.log2(max(wanted * ROUNDED_SHARE, 1)))))
        columns = min(-(-wanted // even) * even, tokens)
    if not columns:
        return None
    shape = (*outer, columns, experts)
    return _Layer(ids, meta.shape, TensorMeta(shape, "int64", len(shape), (tokens, choices)))


@dataclass
class _Rewriting:
    """The nodes made so far.

    Args:
        rows: the routed form of a value, by layer.
        taken_over: values that there are in routed form alone.
    """

    graph: Graph
    layers: Mapping[Value, _Layer]
    nodes: list[Node] = field(default_factory=list)
    rows: dict[tuple[Value, Value], Value] = field(default_factory=dict)
    taken_over: dict[Value, _Layer] = field(default_factory=dict)
    in_tokens: dict[Value, Value] = field(default_factory=dict)
    keys: dict[Value, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = {n.name for n in self.graph.nodes}

    def done(self) -> Graph:
        for node in self.graph.nodes:
            self._node(node)
        last = self.graph.nodes[-1]
        outputs = tuple(replace(o, value=self._tokens(o.value, last)) for o in self.graph.outputs)
        read = {o.value.node for o in outputs}
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if node.op == "placeholder" or node.name in read:
                kept.append(node)
                read.update(v.node for v in node.inputs)
        return replace(self.graph, nodes=tuple(reversed(kept)), outputs=outputs)

    def _node(self, node: Node) -> None:
        if node.packet == PRODUCT and node.inputs[2] in self.layers:
            self._product(node, self.layers[node.inputs[2]])
        elif node.packet == WEIGHT_PRODUCT and node.inputs[2] in self.layers:
            self._weight_product(node, self.layers[node.inputs[2]])
        elif not any(v in self.taken_over for v in node.inputs) or not self._taken_over(node):
            self.nodes.append(_with_operands(node, {v: self._tokens(v, node) for v in node.inputs}))

    def _product(self, node: Node, layer: _Layer) -> None:
        rows, weight = self._rows(layer, node.inputs[0], node), self._tokens(node.inputs[1], node)
        options = (("span", layer.span), *_only(node, "transposed"))
        self._take_over(node, layer, "autopar.routed_mm.default", (rows, weight, self._keys(layer, node)), options)

    def _weight_product(self, node: Node, layer: _Layer) -> None:
        rows, grad = (self._rows(layer, v, node) for v in node.inputs[:2])
        options = (("span", layer.span), *_only(node, "experts", "transposed"))
        args: tuple[Arg, ...] = (rows, grad, self._keys(layer, node))
        self.nodes.append(replace(node, op="autopar.routed_mm_weight.default", args=args, kwargs=options))

    def _taken_over(self, node: Node) -> bool:
        """Run an op on routed rows, or sum them up; False where it needs them in the order of tokens."""
        layer = next(self.taken_over[v] for v in node.inputs if v in self.taken_over)
        if self._is_sum_of_choices(node, layer):
            args: tuple[Arg, ...] = (self._rows(layer, node.inputs[0], node), layer.ids, self._keys(layer, node))
            self.nodes.append(replace(node, op="autopar.collect.default", args=args, kwargs=()))
            return True
        if self._is_gradient_of_lookup(node, layer):
            args = (self._rows(layer, node.inputs[0], node), self._keys(layer, node))
            options = (("span", layer.span), ("experts", layer.keys.shape[-1]))
            self.nodes.append(replace(node, op="autopar.sum_of_expert.default", args=args, kwargs=options))
            return True
        if not self._is_row_wise(node, layer):
            return False
        given = {v: self._operand(layer, v, node) for v in node.inputs}
        self._take_over(node, layer, node.op, _with_operands(node, given).args, _with_operands(node, given).kwargs)
        return True

    def _take_over(self, node: Node, layer: _Layer, op: str, args: tuple[Arg, ...], kwargs: object) -> None:
        outputs = tuple(m and layer.routed(m) for m in node.outputs)
        made = replace(node, op=op, args=args, kwargs=kwargs, outputs=outputs)  # type: ignore[arg-type]
        self.nodes.append(_with_shape(made))
        for i in range(len(outputs)):
            value = Value(node.name, i)
            self.rows[layer.ids, value], self.taken_over[value] = value, layer

    def _is_sum_of_choices(self, node: Node, layer: _Layer) -> bool:
        if node.packet != "aten.sum" or len(node.args) != 2 or node.kwargs:
            return False
        return node.args[1] in ((layer.choice_dim,), (-2,))

    def _is_gradient_of_lookup(self, node: Node, layer: _Layer) -> bool:
        made = node.outputs[0]
        if made is None or node.packet != "autopar.lookup_backward" or node.inputs[1:] != (layer.ids,):
            return False
        return made.shape[0] == layer.keys.shape[-1] and node.kwarg("padding_idx", -1) == -1

    def _is_row_wise(self, node: Node, layer: _Layer) -> bool:
        """Whether each row of the results depends on the same row of the operands alone."""
        rule = find_rule(node)
        made = [m for m in node.outputs if m is not None]
        if not all(map(layer.has_rows, made)) or any(self.taken_over.get(v, layer) != layer for v in node.inputs):
            return False
        if node.packet in ALONG:
            return all(layer.has_rows(self.graph.meta(v)) for v in node.inputs) and _is_last(node, layer.choice_dim + 1)
        alike = rule is not None and rule.elementwise and node.packet != "autopar.dropout"
        return alike and all(self._fits(layer, self.graph.meta(v)) for v in node.inputs)

    @staticmethod
    def _fits(layer: _Layer, meta: TensorMeta) -> bool:
        return len(meta.shape) < 2 or layer.has_rows(meta) or layer.has_tokens(meta)

    def _operand(self, layer: _Layer, value: Value, reader: Node) -> Value:
        if len(self.graph.meta(value).shape) < 2:
            return value
        return self._rows(layer, value, reader)

    def _rows(self, layer: _Layer, value: Value, reader: Node) -> Value:
        """Return the routed form of rows, or of tokens."""
        key = layer.ids, value
        if key not in self.rows:
            self.rows[key] = self._made_rows(layer, value, reader)
        return self.rows[key]

    def _made_rows(self, layer: _Layer, value: Value, reader: Node) -> Value:
        node, meta = self.graph.by_name[value.node], self.graph.meta(value)
        if meta.shape[:-1] == layer.shape[:-1]:
            return self._sent(layer, value, meta, reader, each=False)
        if layer.has_tokens(meta):
            return self._sent_tokens(layer, value, meta, reader)
        if self._is_lookup(node, layer):
            options = (("span", layer.span),)
            args = (self._tokens(node.inputs[0], reader), self._keys(layer, reader))
            return self._added("of_expert", "autopar.of_expert.default", args, options, layer.routed(meta), reader)
        if node.packet == "aten.expand" and layer.has_tokens(self.graph.meta(node.inputs[0])):
            source = self.graph.meta(node.inputs[0])
            if source.shape[-1] == meta.shape[-1]:
                return self._rows(layer, node.inputs[0], reader)
        if self._comes_from_tokens(layer, value):
            made = _with_operands(node, {v: self._operand(layer, v, reader) for v in node.inputs})
            made = replace(made, name=self._name(node.name), outputs=(layer.routed(meta),), phase=reader.phase)
            self.nodes.append(_with_shape(made))
            return Value(made.name)
        return self._sent(layer, self._tokens(value, reader), meta, reader, each=True)

    def _comes_from_tokens(self, layer: _Layer, value: Value) -> bool:
        """Whether rows are made of one row for each token and numbers for each choice, which are less to send."""
        node = self.graph.by_name[value.node]
        if (layer.ids, value) in self.rows or node.packet == "aten.expand":
            return self._is_narrow(layer, value)
        if len(node.outputs) != 1 or not node.inputs or not self._is_row_wise(node, layer) or node.packet in ALONG:
            return False
        return all(self._is_narrow(layer, v) or self._comes_from_tokens(layer, v) for v in node.inputs)

    def _is_narrow(self, layer: _Layer, value: Value) -> bool:
        node, meta = self.graph.by_name[value.node], self.graph.meta(value)
        if len(meta.shape) < 2 or layer.has_tokens(meta) or (layer.ids, value) in self.rows:
            return True
        expanded = node.packet == "aten.expand" and layer.has_tokens(self.graph.meta(node.inputs[0]))
        return expanded or (layer.has_rows(meta) and meta.shape[-1] == 1)

    def _is_lookup(self, node: Node, layer: _Layer) -> bool:
        if node.packet != "autopar.lookup" or node.inputs[1:] != (layer.ids,) or node.kwarg("padding_idx", -1) != -1:
            return False
        return self.graph.meta(node.inputs[0]).shape[0] == layer.keys.shape[-1]

    def _sent_tokens(self, layer: _Layer, value: Value, meta: TensorMeta, reader: Node) -> Value:
        """Return the routed form of [..., b, 1, n]: of what was unsqueezed, or of a view."""
        node, tokens = self.graph.by_name[value.node], TensorMeta((*layer.shape[:-1], meta.shape[-1]), meta.dtype)
        if node.packet == "aten.unsqueeze" and self.graph.meta(node.inputs[0]) == tokens:
            return self._rows(layer, node.inputs[0], reader)
        args = (self._tokens(value, reader), layer.choice_dim)
        seen = self._added("squeeze", "aten.squeeze.dim", args, (), tokens, reader)
        return self._sent(layer, seen, tokens, reader, each=False)

    def _sent(self, layer: _Layer, value: Value, meta: TensorMeta, reader: Node, *, each: bool) -> Value:
        args = (self._tokens(value, reader), layer.ids, self._keys(layer, reader))
        options = (("each", True),) if each else ()
        return self._added("send", "autopar.send.default", args, options, layer.routed(meta), reader)

    def _keys(self, layer: _Layer, reader: Node) -> Value:
        if layer.ids not in self.keys:
            options = (("experts", layer.keys.shape[-1]), ("columns", layer.keys.shape[-2]))
            self.keys[layer.ids] = self._added(
                "route", "autopar.route.default", (layer.ids,), options, layer.keys, reader
            )
        return self.keys[layer.ids]

    def _tokens(self, value: Value, reader: Node) -> Value:
        """Return a value in the order of tokens."""
        layer = self.taken_over.get(value)
        if layer is None:
            return value
        if value not in self.in_tokens:
            args, meta = (value, layer.ids, self._keys(layer, reader)), self.graph.meta(value)
            made = self._added("collect", "autopar.collect.default", args, (("each", True),), meta, reader)
            self.in_tokens[value] = made
        return self.in_tokens[value]

    def _added(
        self,
        name: str,
        op: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        meta: TensorMeta,
        reader: Node,
    ) -> Value:
        made = Node(self._name(name), op, args, kwargs, (meta,), reader.phase, reader.module, reader.source)
        self.nodes.append(made)
        return Value(made.name)

    def _name(self, name: str) -> str:
        found, i = name, 0
        while found in self.names:
            i += 1
            found = f"{name}_{i}"
        self.names.add(found)
        return found


def _only(node: Node, *names: str) -> tuple[tuple[str, Arg], ...]:
    return tuple((k, v) for k, v in node.kwargs if k in names)


def _is_last(node: Node, dim: int) -> bool:
    """Whether an op is along the last dim, ``dim``, alone."""
    at = ALONG[node.packet]
    given = node.args[at] if at < len(node.args) else dict(node.kwargs).get("dim", 0)
    dims: Sequence[Arg] = given if isinstance(given, tuple) else (given,)
    if any(d not in (dim, -1) for d in dims) or not dims:
        return False
    return node.packet != "aten.sum" or node.args[2:3] == (True,)


def _with_operands(node: Node, given: Mapping[Value, Value]) -> Node:
    if all(v == g for v, g in given.items()):
        return node

    def of(arg: Arg) -> Arg:
        if isinstance(arg, Value):
            return given[arg]
        return tuple(map(of, arg)) if isinstance(arg, tuple) else arg

    args, kwargs = tuple(map(of, node.args)), tuple((k, of(a)) for k, a in node.kwargs)
    return replace(node, args=args, kwargs=kwargs)


def _with_shape(node: Node) -> Node:
    """Return the node with the shapes of its results in the arguments that state them."""
    rule = find_rule(node)
    args, kwargs = list(node.args), dict(node.kwargs)
    for place, index in (rule.shape_args if rule is not None else {}).items():
        meta = node.outputs[index]
        if meta is not None and isinstance(place, int) and place < len(args):
            args[place] = meta.shape
        elif meta is not None and isinstance(place, str) and place in kwargs:
            kwargs[place] = meta.shape
    return replace(node, args=tuple(args), kwargs=tuple(kwargs.items()))
