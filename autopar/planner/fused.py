"""What fusions by kernels of ours read and write, where a program has them, and what their ops cost elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from autopar.ir import Graph, Value
from autopar.planner.fusion import Border
from autopar.planner.fusions import STATISTICS, Fusion, fusions, run_in
from autopar.planner.variables import Decisions, Handover
from autopar.program import Op, Program

if TYPE_CHECKING:
    from autopar.planner.pricing import Prices


@dataclass(frozen=True)
class Fused:
    """The fusions of a graph.

    Args:
        of_node: by each of their nodes.
        borders: what each of these reads and writes of memory.
    """

    all: tuple[Fusion, ...] = ()
    of_node: Mapping[str, Fusion] = field(default_factory=dict)
    borders: Mapping[str, Border] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, *, across: bool = False) -> Fused:
        """Those of ``graph``; ``across``: only those between whose ops a collective may stand."""
        found = tuple(f for f in fusions(graph) if f.kernel == STATISTICS or not across)
        of_node = {name: f for f in found for name in f.nodes}
        delivered = frozenset(o.value for o in graph.outputs)
        return cls(found, of_node, {name: b for f in found for name, b in _borders(graph, f, delivered)})

    def inside(self, d: Decisions, h: Handover) -> bool:
        """Whether a handover leads from op to op of a kernel, which has to be in one spec throughout."""
        source, target = d.variables[h.source], d.variables[h.target]
        if source.kind not in ("op", "copy") or target.kind not in ("op", "copy"):
            return False
        value = source.value if source.kind == "copy" else Value(source.node.name, h.out) if source.node else None
        fusion = self.of_node.get(value.node) if value is not None else None
        if value is None or fusion is None or fusion.kernel == STATISTICS:
            return False
        if target.kind == "copy":
            readers = (n.name for n, _ in d.graph.consumers.get(value, ()) if n.phase == target.phase)
            return any(name in fusion.nodes for name in readers)
        return target.node is not None and target.node.name in fusion.nodes

    def left_alone(self, d: Decisions, h: Handover) -> int | None:
        """Of a handover from a held value of a kernel to the first of its ops that reads it and may run again: how many
        of them run by themselves then, as the one that makes the value does not; 0 where it is the sum before a norm,
        without which the others are a kernel. None of any other handover."""
        value, node = d.variables[h.source].value, d.variables[h.target].node
        if d.variables[h.target].kind != "rerun" or value is None or node is None or h.source == h.target:
            return None
        fusion = self.of_node.get(value.node)
        if fusion is None or fusion.kernel == STATISTICS or node.name not in fusion.nodes:
            return None
        behind = [value.node]
        for name in fusion.nodes:
            if any(v == value or v.node in behind[1:] for v in d.graph.by_name[name].inputs):
                behind.append(name)
        if behind[1] != node.name:
            return None
        return 0 if value in (v for role, v in fusion.writes if role == "total") else len(behind) - 1


def _borders(graph: Graph, fusion: Fusion, delivered: frozenset[Value]) -> Iterator[tuple[str, Border]]:
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
        yield name, Border(frozenset(reads), writes, first, 0 if fusion.kernel == STATISTICS else fusion.dim)


def _leaves(graph: Graph, fusion: Fusion, value: Value) -> bool:
    """Whether another op reads a result."""
    readers = (n.name for n, _ in graph.consumers.get(value, ()))
    return fusion.kernel == STATISTICS or any(name not in fusion.nodes for name in readers)


def marked(program: Program, graph: Graph, prices: Prices, again: str) -> Program:
    """``program`` with the kernel of each fusion on its ops, where no redistribution stands between these; ops that are
    apart cost what they cost by themselves.

    Args:
        again: marks what runs again in the backward.
    """
    fused, at = prices.fused(graph), {op.name: i for i, op in enumerate(program.ops)}
    if not fused.all:
        return program
    ops, readers = list(program.ops), _readers(program)
    for whole, mark in product(fused.all, ("", again)):
        fusion = run_in(whole, mark, at)
        places = [at[name + mark] for name in fusion.nodes if name + mark in at]
        run = [ops[i] for i in places]
        together = len(places) == len(fusion.nodes) and _together(graph, fusion, run, prices)
        together = together and _is_closed(graph, fusion, run, readers)
        for i in places if together or prices.backend != "inductor" else ():
            node, strategy, own = graph.by_name[ops[i].node], ops[i].strategy, dict[str, Any]()
            assert strategy is not None
            if together:
                own["kernels"] = (fusion.kernel,)
            if not together:
                own["seconds"] = prices.seconds_alone(graph, node, strategy)
            elif fusion is not whole and i == places[0]:
                own["seconds"] = prices.seconds_leading(graph, node, strategy)
            ops[i] = replace(ops[i], **own)
    return replace(program, ops=tuple(ops))


def _readers(program: Program) -> Mapping[str, list[str]]:
    """The ops that read each tensor; a result of the program is read by its name."""
    readers = defaultdict[str, list[str]](list)
    for op in program.ops:
        for name in op.reads:
            readers[name].append(op.name)
    for output, name in program.results:
        readers[name].append(output.name)
    return readers


def _is_closed(graph: Graph, fusion: Fusion, run: Sequence[Op], readers: Mapping[str, list[str]]) -> bool:
    """Whether nothing else in the program reads what the kernel does not write. The captured graph cannot tell: such a
    value may be held, and what follows it run again, or be redistributed."""
    inside, written = {op.name for op in run}, {v for _, v in fusion.writes}
    for name, op in zip(fusion.nodes, run, strict=True):
        for value, tensor in zip(_results(graph, name), op.writes, strict=True):
            if value not in written and not inside.issuperset(readers.get(tensor.name, ())):
                return False
    return True


def _results(graph: Graph, name: str) -> list[Value]:
    return [Value(name, i) for i, meta in enumerate(graph.by_name[name].outputs) if meta is not None]


def _together(graph: Graph, fusion: Fusion, ops: Sequence[Op], prices: Prices) -> bool:
    """Whether the ops hand each other tensors as they make them, and read what others made in one spec each, under
    strategies that the kernel takes."""
    made: dict[Value, str] = {}
    taken: dict[Value, str] = {}
    for op, name in zip(ops, fusion.nodes, strict=True):
        made |= dict(zip(_results(graph, name), (t.name for t in op.writes), strict=True))
    for op, name in zip(ops, fusion.nodes, strict=True):
        node = graph.by_name[name]
        border, metas = prices.fused(graph).borders[name], [graph.meta(v) for v in node.inputs]
        if op.strategy is None or op.kind != "compute" or (border.dim and not border.fits(node, op.strategy, metas)):
            return False
        for value, tensor in zip(node.inputs, op.reads, strict=True):
            if value.node in fusion.nodes and fusion.kernel != STATISTICS and made[value] != tensor:
                return False
            if value.node not in fusion.nodes and taken.setdefault(value, tensor) != tensor:
                return False
    if fusion.kernel != STATISTICS:
        return True
    strategy, last = ops[0].strategy, tuple(n - 1 for n in prices.mesh.shape)
    assert strategy is not None
    shard = strategy.inputs[0].local_shape(graph.meta(fusion.reads[0][1]).shape, prices.mesh, last)
    return ops[0].reads[0] == ops[1].reads[0] and shard[-1] > 0
