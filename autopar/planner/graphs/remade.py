"""What a kernel of the backward makes again by itself: the same graph, in which the backward does not read it.

The kernel of an RMS norm's gradient makes the normalized rows from what the norm read. The captured backward reads
those that the forward made, which would be held for it in vain.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.ir import Graph, Node, Value
from autopar.planner.graphs.chunked import unused_name, with_operands
from autopar.planner.graphs.kernel_patterns import Fusion, fusions

DEPTH = 2
"""Ops between what a norm reads and its normalized rows: a product and a cast."""


def with_remade_values(graph: Graph) -> Graph:
    """Return ``graph`` with copies in the backward of the ops whose values its kernels make again; itself if there are
    none."""
    made = _Remade(graph, {n.name for n in graph.nodes})
    for fusion in fusions(graph):
        made.add(fusion)
    if not made.before:
        return graph
    nodes = [n for each in graph.nodes for n in (*made.before.get(each.name, ()), made.changed.get(each.name, each))]
    return replace(graph, nodes=tuple(nodes))


@dataclass
class _Remade:
    """The copies that come before each node, and the nodes that read copies."""

    graph: Graph
    names: set[str]
    before: dict[str, list[Node]] = field(default_factory=dict)
    changed: dict[str, Node] = field(default_factory=dict)

    def add(self, fusion: Fusion) -> None:
        inside, reads = set(fusion.nodes), {v for _, v in fusion.reads}
        for node in map(self.graph.by_name.__getitem__, fusion.nodes):
            for value in dict.fromkeys(node.inputs) if node.phase == "backward" else ():
                made = None if value.node in inside or value in reads else self._copies(node, value, reads, DEPTH)
                if made:
                    self.before.setdefault(node.name, []).extend(made)
                    read = self.changed.get(node.name, node)
                    self.changed[node.name] = with_operands(read, {value: Value(made[-1].name)})

    def _copies(self, reader: Node, value: Value, reads: set[Value], depth: int) -> list[Node]:
        """Return ops that make ``value`` of ``reads`` before ``reader``; none if it takes more than ``depth``."""
        node, found = self.graph.by_name[value.node], list[Node]()
        if depth == 0 or node.phase != "forward" or len(node.outputs) != 1 or not node.inputs:
            return []
        copies: dict[Value, Value] = {}
        for operand in dict.fromkeys(node.inputs):
            if operand not in reads:
                before = self._copies(reader, operand, reads, depth - 1)
                if not before:
                    return []
                found += before
                copies[operand] = Value(before[-1].name)
        name = unused_name(f"{node.name}_again", self.names)
        self.names.add(name)
        again = replace(with_operands(node, copies), name=name, phase=reader.phase)
        return [*found, replace(again, module=reader.module, source=reader.source)]
