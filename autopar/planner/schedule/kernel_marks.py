"""Marks in the scheduled program of the ops that one of our kernels runs together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from autopar.ir import Graph, Value
from autopar.planner.graphs.kernel_patterns import STATISTICS, Fusion, part_that_runs
from autopar.planner.pricing.prices import Prices
from autopar.program import Op, Program


def mark_kernels(program: Program, graph: Graph, prices: Prices, again: str) -> Program:
    """Mark the ops of each fusion with its kernel if no redistribution separates them.

    Ops that are separated cost what they cost by themselves.

    Args:
        again: the suffix of ops that run again in the backward.
    """
    fused, at = prices.fused(graph), {op.name: i for i, op in enumerate(program.ops)}
    if not fused.all:
        return program
    ops, readers = list(program.ops), _readers(program)
    for whole, mark in product(fused.all, ("", again)):
        fusion = part_that_runs(whole, mark, at)
        positions = [at[name + mark] for name in fusion.nodes if name + mark in at]
        run = [ops[i] for i in positions]
        together = len(positions) == len(fusion.nodes) and _together(graph, fusion, run, prices)
        together = together and _is_closed(graph, fusion, run, readers)
        for i in positions if together or prices.backend != "inductor" else ():
            node, strategy, own = graph.by_name[ops[i].node], ops[i].strategy, dict[str, Any]()
            assert strategy is not None
            if together:
                own["kernels"] = (fusion.kernel,)
            if not together:
                own["seconds"] = prices.seconds_alone(graph, node, strategy)
            elif fusion is not whole and i == positions[0]:
                own["seconds"] = prices.seconds_leading(graph, node, strategy)
            ops[i] = replace(ops[i], **own)
    return replace(program, ops=tuple(ops))


def _readers(program: Program) -> Mapping[str, list[str]]:
    """Return the names of the ops that read each tensor. The name of a program's result counts as a reader."""
    readers = defaultdict[str, list[str]](list)
    for op in program.ops:
        for name in op.reads:
            readers[name].append(op.name)
    for output, name in program.results:
        readers[name].append(output.name)
    return readers


def _is_closed(graph: Graph, fusion: Fusion, run: Sequence[Op], readers: Mapping[str, list[str]]) -> bool:
    """Whether nothing else in the program reads what the kernel does not write.

    The captured graph cannot tell: such a value may be held and what follows it run again, or be redistributed.
    """
    inside, written = {op.name for op in run}, {v for _, v in fusion.writes}
    for name, op in zip(fusion.nodes, run, strict=True):
        for value, tensor in zip(_results(graph, name), op.writes, strict=True):
            if value not in written and not inside.issuperset(readers.get(tensor.name, ())):
                return False
    return True


def _results(graph: Graph, name: str) -> list[Value]:
    return [Value(name, i) for i, meta in enumerate(graph.by_name[name].outputs) if meta is not None]


def _together(graph: Graph, fusion: Fusion, ops: Sequence[Op], prices: Prices) -> bool:
    """Whether the ops can be one kernel.

    They must hand each other tensors as they make them, read each of the others' tensors in one spec, and have
    strategies that the kernel supports.
    """
    made: dict[Value, str] = {}
    taken: dict[Value, str] = {}
    for op, name in zip(ops, fusion.nodes, strict=True):
        made |= dict(zip(_results(graph, name), (t.name for t in op.writes), strict=True))
    for op, name in zip(ops, fusion.nodes, strict=True):
        node = graph.by_name[name]
        traffic, metas = prices.fused(graph).fused_traffic[name], [graph.meta(v) for v in node.inputs]
        if op.strategy is None or op.kind != "compute" or (traffic.dim and not traffic.fits(node, op.strategy, metas)):
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
    shard = graph.meta(fusion.reads[0][1]).local_shape(strategy.inputs[0], prices.mesh, last)
    return ops[0].reads[0] == ops[1].reads[0] and shard[-1] > 0
