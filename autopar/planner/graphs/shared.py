"""What all micro-batches of a call compute alike and keep for their backwards: computed once, and held once.

Parameters that are gathered, cast or otherwise redistributed, tables of positions: whatever depends on parameters,
constants and buffers alone. Without this, every micro-batch in flight would have a copy of its own. What the backward
computes again, such as a gather that is repeated, stays with each micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autopar.ir import Arg, Graph, LocalOffset
from autopar.program import Op, Program

FIXED = ("parameter", "constant", "buffer")
"""Kinds of inputs that are the same for all micro-batches of a call, buffers that the forward changes excepted."""


def fixed_nodes(graph: Graph) -> frozenset[str]:
    """Return the inputs and the forward's nodes that every micro-batch of a call has the same values of."""
    changed = {o.name for o in graph.outputs if o.kind == "mutation"}
    found = {i.node for i in graph.inputs if i.kind in FIXED and (i.kind != "buffer" or i.name not in changed)}
    for node in graph.nodes:
        if node.op == "placeholder" or node.phase != "forward":
            continue
        given = (*node.args, *(value for _, value in node.kwargs))
        if all(v.node in found for v in node.inputs) and not any(map(_depends_on_place, given)):
            found.add(node.name)
    return frozenset(found)


WAITED = "|done"
"""What the name of a wait ends in, after that of its collective."""


def wait_for(op: Op) -> Op:
    """Return a wait for a collective."""
    return Op(f"{op.name}{WAITED}", "wait", op.node, (op.writes[0].name,), (), op.phase)


def _depends_on_place(argument: Arg) -> bool:
    if isinstance(argument, (tuple, list)):
        return any(map(_depends_on_place, argument))
    return isinstance(argument, LocalOffset)


def may_be_shared(program: Program, graph: Graph) -> dict[str, Op]:
    """Return the ops of the forward that compute the same for every micro-batch, by name and in order."""
    fixed = fixed_nodes(graph)
    made = {op.writes[0].name for op in program.ops if op.kind == "input" and op.node in fixed}
    found: dict[str, Op] = {}
    for op in program.ops:
        if op.phase != "forward" or op.in_place or not made.issuperset(op.reads):
            continue
        moved = op.kind == "redistribute" or (op.kind == "wait" and op.reads)
        alone = op.kind == "compute" and op.node in fixed and not (op.halos or op.sent or op.loan)
        if moved or alone:
            found[op.name] = op
            made.update(t.name for t in op.writes)
    return found


def shared(program: Program, graph: Graph) -> Program:
    """Return ``program`` with what all micro-batches share computed first, and named in ``Program.once``."""
    if program.once:
        return program
    possible = may_be_shared(program, graph)
    inputs = {op.writes[0].name for op in program.ops if op.kind == "input"}
    own = {t.name for op in possible.values() for t in op.writes if program.root[t.name] not in inputs}
    needed = {name for op in program.ops if op.phase == "backward" for name in op.reads if name in own}
    chosen: set[str] = set()
    for op in reversed(possible.values()):
        if any(t.name in needed for t in op.writes):
            chosen.add(op.name)
            needed.update(op.reads)
    first = [op for op in possible.values() if op.name in chosen]
    read = {name for op in first for name in op.reads}
    first += [wait_for(op) for op in first if op.is_collective and not any(t.name in read for t in op.writes)]
    made = {t.name for op in first for t in op.writes}
    held = {program.root[name] for name in made}
    others = (
        op for op in program.ops if op.name not in chosen and not (op.kind == "wait" and made.issuperset(op.reads))
    )
    rest = [_sparing(op, program, held) for op in others]
    start = next((i for i, op in enumerate(rest) if op.kind != "input"), len(rest))
    ops = (*rest[:start], *first, *rest[start:])
    return replace(program, ops=ops, once=tuple(op.name for op in first)) if first else program


def _sparing(op: Op, program: Program, held: Collection[str]) -> Op:
    """Return an op that does not overwrite what the next micro-batch reads."""
    if op.in_place and program.root[op.reads[max(op.operand, 0)]] in held:
        return replace(op, in_place=False, operand=-1)
    return op
