"""How dims and parameters flow: which factor of each op a tensor's dim becomes, and which weights an op reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir import Graph, Node, Value
from autopar.strategies import bound
from autopar.strategies.notation import Bound

Dims = Mapping[Value, frozenset[int]]


@dataclass
class Dataflow:
    """A graph with the fitted rule of each op, and the values that are computed from parameters alone."""

    graph: Graph
    rules: dict[str, Bound | None] = field(init=False)
    state: frozenset[Value] = field(init=False)

    def __post_init__(self) -> None:
        fitted: dict[int, Bound | None] = {}
        for node in self.graph.nodes:
            if self.graph.kinds[node.name] not in fitted:
                fitted[self.graph.kinds[node.name]] = _rule(self.graph, node)
        self.rules = {n.name: fitted[self.graph.kinds[n.name]] for n in self.graph.nodes if n.op != "placeholder"}
        self.state = frozenset(_state(self.graph))

    def factor(self, node: Node, position: int, dim: int) -> str | None:
        """Return the leading factor of a dim of operand ``position``: the one that a cut of that dim cuts."""
        rule = self.rules[node.name]
        factors = rule.inputs[position][dim] if rule else ()
        return factors[0] if factors else None

    def result_dim(self, node: Node, index: int, factor: str) -> int | None:
        """Return the dim of result ``index`` that a cut of ``factor`` cuts."""
        rule = self.rules[node.name]
        dims = rule.outputs[index] if rule else None
        return next((d for d, f in enumerate(dims or ()) if f[:1] == (factor,)), None)

    def trace(self, starts: Dims) -> dict[str, frozenset[str]]:
        """Return the factors of each op that stand for the dims in ``starts``, or for dims that derive from them."""
        found: dict[str, frozenset[str]] = {}
        dims = dict(starts)
        none = frozenset[int]()
        known: dict[object, tuple[frozenset[str], list[tuple[int, frozenset[int]]]]] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                continue
            taken = tuple([dims.get(v, none) for v in node.inputs])
            key = self.graph.kinds[node.name], taken
            if key not in known:
                known[key] = self._follow(node, taken)
            found[node.name], made = known[key]
            for i, cut in made:
                value = Value(node.name, i)
                dims[value] = dims[value] | cut if value in dims else cut
        return found

    def _follow(
        self, node: Node, taken: Sequence[frozenset[int]]
    ) -> tuple[frozenset[str], list[tuple[int, frozenset[int]]]]:
        """Return the factors of the dims ``taken`` of each operand, and the dims of each result that these become."""
        at = [(p, d) for p, dims in enumerate(taken) for d in sorted(dims)]
        factors = frozenset(f for p, d in at if (f := self.factor(node, p, d)) is not None)
        made = (
            (i, frozenset(d for f in factors if (d := self.result_dim(node, i, f)) is not None))
            for i in range(len(node.outputs))
        )
        return factors, [(i, dims) for i, dims in made if dims]

    def batch(self) -> dict[Value, frozenset[int]]:
        """Return dim 0 of every input that has the batch there, activations of other pipeline stages included."""
        size = batch_size(self.graph)
        found = {}
        for i in self.graph.inputs:
            meta = self.graph.by_name[i.node].outputs[0]
            if i.kind in ("input", "received", "tangent") and meta is not None and meta.shape and meta.shape[0] == size:
                found[Value(i.node)] = frozenset((0,))
        return found

    def sequence(self) -> dict[Value, frozenset[int]]:
        """Return dim 1 of every input that has the batch in dim 0 and the sequence of the first such input in dim 1."""
        shapes = {v: m.shape for v in self.batch() if (m := self.graph.by_name[v.node].outputs[0]) and len(m.shape) > 1}
        size = next((shape[1] for shape in shapes.values()), -1)
        return {v: frozenset((1,)) for v, shape in shapes.items() if shape[1] == size}

    def weights(self, node: Node) -> Iterable[int]:
        """Return the positions of operands that are computed from parameters alone."""
        return (p for p, v in enumerate(node.inputs) if v in self.state)


def _rule(graph: Graph, node: Node) -> Bound | None:
    return bound(node, tuple(graph.meta(v) for v in node.inputs))


def _state(graph: Graph) -> Iterable[Value]:
    """Return the parameters and what is computed from them alone."""
    found = {Value(i.node) for i in graph.inputs if i.kind == "parameter"}
    for node in graph.nodes:
        if node.inputs and all(v in found for v in node.inputs):
            found.update(Value(node.name, i) for i in range(len(node.outputs)))
    return found


def batch_size(graph: Graph) -> int:
    """Return the size of dim 0 of the first input that has dims; -1 if there is none."""
    if graph.part is not None:
        return graph.part.batch
    for i in graph.inputs:
        meta = graph.by_name[i.node].outputs[0]
        if i.kind == "input" and meta is not None and meta.shape:
            return meta.shape[0]
    return -1
