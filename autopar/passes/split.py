"""Split a stage's backward in two: what leads to the gradients that other stages wait for, and the rest.

Nothing waits for gradients of parameters, so a schedule can run the second part where a rank would be idle.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autopar import spmd
from autopar._torch import LazyGraphModule
from autopar.ir import Input, Output
from autopar.passes.lower import NOT_OVERWRITING
from autopar.planner.graphs.accumulation import is_gradient
from autopar.program import LocalTensor, Op, Program
from autopar.spmd import Lowered, Results

KEPT = "kept"
"""The kind of name that an operand has which the first part takes from the forward."""


def split_backward(lowered: Lowered, program: Program) -> Lowered | None:
    """Return the backward of ``lowered`` as a program of two functions.

    Its ``forward(rank, *saved, *tangents) -> (*gradients of inputs, *kept)`` is the first part, and its
    ``backward(rank, *kept, *accumulators)`` and ``accumulate`` are the second.

    Returns:
        None if there are no gradients of inputs, or if what the second part reads depends on the micro-batch.
    """
    last = _Parts(lowered.backward, lowered.gradients, len(lowered.accumulators), program)
    if not last.ahead:
        return None
    before = None
    if lowered.accumulate is not None:
        before = _Parts(lowered.accumulate, lowered.accumulated, len(lowered.accumulators), program)
        if [n.name for n in before.kept] != [n.name for n in last.kept]:
            return None
    tensors: list[LocalTensor] = [n.meta["tensor"] for n in last.taken[: len(lowered.saved)]]
    saved = [(Input(t.name, "input", f"{KEPT}:{t.name}"), t.spec) for t in tensors]
    return Lowered(
        last.first(),
        last.second(),
        (*saved, *lowered.tangents),
        last.ahead,
        tuple(n.name for n in last.kept),
        (),
        last.rest,
        lowered.accumulators,
        None if before is None else before.second(),
        () if before is None else before.rest,
    )


class _Parts:
    """One backward, taken apart."""

    def __init__(self, module: fx.GraphModule, results: Results, accumulators: int, program: Program) -> None:
        self.module, self.program = module, program
        nodes = list(module.graph.nodes)
        made: Any = module.graph.output_node().args[0]
        goes_back = [_goes_back(o) for o, _ in results]
        self.ahead = tuple(r for r, back in zip(results, goes_back, strict=True) if back)
        self.rest = tuple(r for r, back in zip(results, goes_back, strict=True) if not back)
        self.ahead_nodes = [n for n, back in zip(made, goes_back, strict=True) if back]
        self.rest_nodes = [n for n, back in zip(made, goes_back, strict=True) if not back]
        self.rank, *taken = [n for n in nodes if n.op == "placeholder"]
        self.taken, self.sums = taken[: len(taken) - accumulators], taken[len(taken) - accumulators :]
        self.leads = _leading_to(self.ahead_nodes)
        for node in nodes:  # what the first part launches it waits for, since it leaves its results complete
            if node.target in (spmd.wait, spmd.arrived, operator.getitem) and node.args[0] in self.leads:
                self.leads.add(node)
        body = [n for n in nodes if n.op == "call_function"]
        self.ops = [n for n in body if n in self.leads]
        # Numbers that a rank knows of itself are computed in each part.
        self.others = [n for n in body if n not in self.leads or (n.all_input_nodes == [self.rank] and n.users)]
        read = {source for n in self.others for source in n.all_input_nodes} | set(self.rest_nodes)
        own = {*self.others, *self.sums, self.rank}
        self.kept = [n for n in nodes if n in read and n not in own]

    def first(self) -> fx.GraphModule:
        graph, at = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in (self.rank, *self.taken, *self.ops):
            at[node] = graph.node_copy(node, lambda n: at[n])
        memory = {self.program.root.get(t.name, t.name) for t in map(_tensor, self.kept) if t is not None}
        for node in self.ops:
            _spare(at[node], self.program, memory)
        graph.output(tuple(at[n] for n in (*self.ahead_nodes, *self.kept)))
        return LazyGraphModule(self.module, graph)

    def second(self) -> fx.GraphModule:
        graph, at = fx.Graph(), dict[fx.Node, fx.Node]()
        at[self.rank] = graph.node_copy(self.rank)
        for node in self.kept:
            at[node] = graph.placeholder(node.name)
            at[node].meta = {k: v for k, v in node.meta.items() if k != "op"}
        for node in (*self.sums, *self.others):
            at[node] = graph.node_copy(node, lambda n: at[n])
        graph.output(tuple(at[n] for n in self.rest_nodes))
        return LazyGraphModule(self.module, graph)


def _goes_back(output: Output) -> bool:
    return output.kind == "gradient" and not is_gradient(output)


def _leading_to(results: Sequence[fx.Node]) -> set[fx.Node]:
    found, ahead = set[fx.Node](), list(results)
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead += node.all_input_nodes
    return found


def _tensor(node: fx.Node) -> LocalTensor | None:
    found = node.meta.get("tensor")
    return found if isinstance(found, LocalTensor) else None


def _spare(node: fx.Node, program: Program, memory: Collection[str]) -> None:
    """Let an op not write where the second part still reads."""
    op = node.meta.get("op")
    if not isinstance(op, Op) or not op.in_place:
        return
    overwritten = op.reads[0] if op.kind == "redistribute" else op.reads[op.operand]
    if program.root[overwritten] not in memory:
        return
    node.meta["op"] = replace(op, in_place=False)
    if op.kind == "redistribute":
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "in_place"}
    elif node.target in NOT_OVERWRITING:
        node.target = NOT_OVERWRITING[node.target]
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "grad_input"}
