"""Equal layers of a deep graph, and the graph with some of them removed.

Layers are *rows* of nodes: what node c does in one row, node c does in every other. Of the layers that remain, those
after the gap read from the ones before it as they read from their own neighbours.
"""

from __future__ import annotations

import itertools
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


MIN_ROWS, MIN_BLOCKS = 2, 4
"""The least number of equal rows, and of blocks in them, that remain."""

WORTH = 2
"""How many times as many rows a graph must have for some to be removed."""


def shortened(graph: Graph, block_of: Mapping[str, int], parts: int) -> Shortened | None:
    """Return ``graph`` with about as many equal blocks as one of ``parts`` of it has.

    The blocks that remain stand for the others in turn, so that as many neighbours as remain have one stand for each.
    None if the graph is hardly deeper than that.
    """
    rows = equal_blocks(graph, block_of)
    blocks = len({block_of[name] for row in rows[:1] for name in row if name in block_of})
    layers = max(MIN_ROWS, -(-MIN_BLOCKS // max(blocks, 1)), -(-len(rows) // parts))
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
    """Return the nodes of the longest run of equal blocks, by block: its own, and inputs that no other block reads.

    Where blocks of several kinds take turns, so many of them count as one.
    """
    at = {n.name: block_of[n.name] for n in graph.nodes if n.name in block_of and n.op != "placeholder"}
    for name in graph.input_of:
        readers = {at.get(reader.name, -1) for reader, _ in graph.consumers.get(Value(name), ())}
        if len(readers) == 1 and readers != {-1}:
            at[name] = readers.pop()
    members: dict[int, set[str]] = {}
    for name, block in at.items():
        members.setdefault(block, set()).add(name)
    turns = {block: _turn(graph.likes, at, members, block) for block in members}
    longest: Sequence[Sequence[str]] = ()
    for turn, stretch in itertools.groupby(range(max(members, default=-1) + 1), lambda block: turns.get(block, 0)):
        blocks = list(stretch)
        if turn and len(blocks) >= turn:
            rows = [[name for name in at if at[name] in blocks[:turn]]]
            for _ in range(len(blocks) // turn):
                rows.append([graph.likes[name] for name in rows[-1]])
            longest = max(longest, rows, key=lambda rows: sum(map(len, rows)))
    return longest


def _turn(likes: Mapping[str, str], at: Mapping[str, int], members: Mapping[int, set[str]], block: int) -> int:
    """Return how many blocks further on the likes of a block are; 0 where they are not all of one block."""
    names = {likes.get(name, "") for name in members[block]}
    there = at.get(next(iter(names)), block)
    return there - block if there > block and names == members[there] else 0
