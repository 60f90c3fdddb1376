"""Equal layers of a deep graph, and the graph with some of them removed.

Layers are *rows* of nodes: what node c does in one row, node c does in every other. Of the layers that remain, those
after the gap read from the ones before it as they read from their own neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir import Arg, Graph, Node, Value

Rows = Sequence[Sequence[str | None]]
"""The names of the nodes of each layer, in the same order in every layer; None for what is no node."""


@dataclass(frozen=True)
class LayerCut:
    """The removal of rows ``begin`` to ``end`` of each of ``runs``."""

    source: Graph
    runs: Sequence[Rows]
    begin: int
    end: int
    _at: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for r, rows in enumerate(self.runs):
            for row, names in enumerate(rows):
                self._at.update((name, (r, row, column)) for column, name in enumerate(names) if name is not None)

    @classmethod
    def leaving(cls, source: Graph, runs: Sequence[Rows], layers: int) -> LayerCut:
        """Remove rows from the middle until ``layers`` remain."""
        begin = layers // 2
        return cls(source, runs, begin, begin + len(runs[0]) - layers)

    def is_kept(self, name: str) -> bool:
        found = self._at.get(name)
        return found is None or not self.begin <= found[1] < self.end

    def graph(self) -> Graph | None:
        """Return the remaining graph; None if it cannot be closed over the gap."""
        owners = {i.name: i.node for i in reversed(self.source.inputs) if i.kind in ("parameter", "buffer")}
        nodes, outputs = [], []
        for node in self.source.nodes:
            if self.is_kept(node.name):
                read = self._with_neighbours(node)
                if read is None:
                    return None
                nodes.append(read)
        for output in self.source.outputs:
            owner = owners.get(output.name)
            if owner is not None and not self.is_kept(owner):
                continue
            value = self._value_read(output.value, owner)
            if value is None:
                return None
            outputs.append(replace(output, value=value))
        remaining = tuple(i for i in self.source.inputs if self.is_kept(i.node))
        return replace(self.source, nodes=tuple(nodes), inputs=remaining, outputs=tuple(outputs))

    def _with_neighbours(self, node: Node) -> Node | None:
        """Return ``node`` reading from the layers that are now next to its own."""
        read = {}
        for value in node.inputs:
            found = self._value_read(value, node.name)
            if found is None:
                return None
            read[value] = found
        if all(a == b for a, b in read.items()):
            return node
        kwargs = tuple((k, _renamed(a, read)) for k, a in node.kwargs)
        return replace(node, args=tuple(_renamed(a, read) for a in node.args), kwargs=kwargs)

    def _value_read(self, value: Value, reader: str | None) -> Value | None:
        """Return what ``reader`` reads instead of ``value``: the same value, as many layers before or after its own."""
        there, here = self._at.get(value.node), self._at.get(reader or "")
        if there is None or here is None or there[0] != here[0]:
            return value if self.is_kept(value.node) else None
        gone, (run, row, column) = self.end - self.begin, there
        now = row - gone if here[1] >= self.end else row
        name = self.runs[run][now if now < self.begin else now + gone][column]
        return None if name is None else value._replace(node=name)


def _renamed(arg: Arg, names: Mapping[Value, Value]) -> Arg:
    if isinstance(arg, Value):
        return names[arg]
    if isinstance(arg, tuple):
        return tuple(_renamed(item, names) for item in arg)
    return arg


@dataclass(frozen=True)
class Shortened:
    """A graph with fewer layers, each of which stands for several of the deep graph.

    Args:
        like: for each node of a removed layer the one that stands for it.
    """

    graph: Graph
    like: Mapping[str, str]


MIN_LAYERS = 4
"""The least number of layers that remain."""

WORTH = 2
"""How many times as many layers a graph must have for some to be removed."""


def shortened(graph: Graph, block_of: Mapping[str, int], parts: int) -> Shortened | None:
    """Return ``graph`` with about as many equal blocks as one of ``parts`` of it has.

    The blocks that remain stand for the others in turn, so that as many neighbours as remain have one stand for each.
    None if the graph is hardly deeper than that.
    """
    rows = equal_blocks(graph, block_of)
    layers = max(MIN_LAYERS, -(-len(rows) // parts))
    if len(rows) <= WORTH * layers:
        return None
    made = LayerCut.leaving(graph, [rows], layers)
    fewer = made.graph()
    if fewer is None:
        return None
    remaining = [row for row, names in enumerate(rows) if made.is_kept(names[0])]
    like = {
        name: rows[remaining[row % layers]][column]
        for row, names in enumerate(rows)
        for column, name in enumerate(names)
        if row not in remaining
    }
    return Shortened(fewer, like)


def equal_blocks(graph: Graph, block_of: Mapping[str, int]) -> Sequence[Sequence[str]]:
    """Return the nodes of the longest run of equal blocks, by block: its own, and inputs that no other block reads."""
    nodes: dict[int, list[Node]] = {}
    readers: dict[str, set[int | None]] = {}
    for node in graph.nodes:
        block = block_of.get(node.name)
        if block is not None and node.op != "placeholder":
            nodes.setdefault(block, []).append(node)
        for value in node.inputs:
            readers.setdefault(value.node, set()).add(block)
    own = {
        block: [
            *dict.fromkeys(
                v.node for n in made for v in n.inputs if v.node in graph.input_of and len(readers[v.node]) == 1
            )
        ]
        for block, made in nodes.items()
    }
    at = {n.name: (block, i) for block, made in nodes.items() for i, n in enumerate(made)}
    at |= {name: (block, ~i) for block, names in own.items() for i, name in enumerate(names)}
    looks = {block: _look(graph, block, made, own[block], at) for block, made in nodes.items()}
    longest, start = range(0), 0
    for block in range(1, max(nodes, default=0) + 2):
        if block not in looks or looks[block] != looks.get(start):
            longest = max(longest, range(start, block), key=len)
            start = block
    return [(*(n.name for n in nodes[b]), *own[b]) for b in longest if b in nodes]


def _look(
    graph: Graph, block: int, nodes: Sequence[Node], own: Sequence[str], at: Mapping[str, tuple[int, int]]
) -> object:
    """Return what equal blocks have in common: their ops, and where these read, counted from the block itself."""

    def read(value: Value) -> object:
        there = at.get(value.node)
        return value if there is None else (there[0] - block, there[1], value.index)

    ops = [(n.op, n.phase, n.outputs, _without_places(n), tuple(map(read, n.inputs))) for n in nodes]
    inputs = [(graph.input_of[name].kind, graph.input_of[name].trainable, graph.by_name[name].outputs) for name in own]
    return ops, inputs


def _without_places(node: Node) -> object:
    """Return the arguments other than tensors, without the number of a random op, by which its draws differ."""
    kwargs = tuple((name, arg) for name, arg in node.kwargs if name != "site")
    return replace(node, kwargs=kwargs).signature
