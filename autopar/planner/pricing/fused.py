"""What our fused kernels read and write where a program has them, and what their ops cost elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.ir import Graph, Value
from autopar.planner.graphs.fused_chains import FusedTraffic
from autopar.planner.graphs.kernel_patterns import STATISTICS, Fusion, fusions
from autopar.planner.problem.variables import Decisions, Use


@dataclass(frozen=True)
class Fused:
    """The fusions of a graph.

    Args:
        of_node: the fusion of each node in one.
        fused_traffic: what each of these nodes moves to and from memory.
    """

    all: tuple[Fusion, ...] = ()
    of_node: Mapping[str, Fusion] = field(default_factory=dict)
    fused_traffic: Mapping[str, FusedTraffic] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, *, across: bool = False) -> Fused:
        """Find the fusions of ``graph``.

        Args:
            across: find only those whose ops a collective may separate.
        """
        found = tuple(f for f in fusions(graph) if f.kernel == STATISTICS or not across)
        of_node = {name: f for f in found for name in f.nodes}
        delivered = frozenset(o.value for o in graph.outputs)
        return cls(found, of_node, {name: b for f in found for name, b in _traffic_of(graph, f, delivered)})

    def inside(self, d: Decisions, use: Use) -> bool:
        """Whether a use leads from op to op of one kernel, which must be in one spec throughout."""
        source, target = d.variables[use.source], d.variables[use.target]
        if source.kind not in ("op", "copy") or target.kind not in ("op", "copy"):
            return False
        value = source.value if source.kind == "copy" else Value(source.node.name, use.out) if source.node else None
        fusion = self.of_node.get(value.node) if value is not None else None
        if value is None or fusion is None or fusion.kernel == STATISTICS:
            return False
        if target.kind == "copy":
            readers = (n.name for n, _ in d.graph.consumers.get(value, ()) if n.phase == target.phase)
            return any(name in fusion.nodes for name in readers)
        return target.node is not None and target.node.name in fusion.nodes

    def rerun_alone(self, d: Decisions, use: Use) -> int | None:
        """Return how many ops of a kernel run by themselves if they run again but the op that makes their input does
        not.

        This concerns a use from a held value of a kernel to the first of its ops that reads the value and may run
        again. The count is 0 where the value is the sum before a norm, without which the other ops are a kernel. None
        for any other use.
        """
        value, node = d.variables[use.source].value, d.variables[use.target].node
        if d.variables[use.target].kind != "rerun" or value is None or node is None or use.source == use.target:
            return None
        fusion = self.of_node.get(value.node)
        if fusion is None or fusion.kernel == STATISTICS or node.name not in fusion.nodes:
            return None
        reached = [value.node]
        for name in fusion.nodes:
            if any(v == value or v.node in reached[1:] for v in d.graph.by_name[name].inputs):
                reached.append(name)
        if reached[1] != node.name:
            return None
        return 0 if value in (v for role, v in fusion.writes if role == "total") else len(reached) - 1


def _traffic_of(graph: Graph, fusion: Fusion, delivered: frozenset[Value]) -> Iterator[tuple[str, FusedTraffic]]:
    read, taken = set[Value](), {v for _, v in fusion.reads}
    for name in fusion.nodes:
        node, reads = graph.by_name[name], set[int]()
        for position, value in enumerate(node.inputs):
            if value in taken and value not in read:
                read.add(value)
                reads.add(position)
        results = (Value(name, i) for i in range(len(node.outputs)))
        writes = frozenset(v.index for v in results if v in delivered or _leaves(graph, fusion, v))
        first = name == fusion.nodes[0] or fusion.kernel == STATISTICS
        yield name, FusedTraffic(frozenset(reads), writes, first, 0 if fusion.kernel == STATISTICS else fusion.dim)


def _leaves(graph: Graph, fusion: Fusion, value: Value) -> bool:
    """Whether an op outside the kernel reads a result."""
    readers = (n.name for n, _ in graph.consumers.get(value, ()))
    return fusion.kernel == STATISTICS or any(name not in fusion.nodes for name in readers)
