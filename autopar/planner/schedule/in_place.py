"""Which ops overwrite an operand instead of allocating: all-reduces, sums and activations of what nobody else needs
then.

This halves what they hold, and saves a copy or an allocation. The operand must have memory of its own, made by an op
that never returns a view. An all-reduce runs alongside other ops, so it must be the operand's only reader. Any other op
must come after the other readers, none of which may be a view of the operand or still under way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from autopar.ir import FLOATS, Graph
from autopar.planner.footprint.collective_buffers import SUMMED
from autopar.planner.footprint.overwriting import MAKES_NEW, OVERWRITABLE, OVERWRITING, may_overwrite, only_reads
from autopar.program import Op, Program


def in_place(program: Program, graph: Graph) -> Program:
    """Mark the ops of ``program`` that overwrite an operand.

    All-reduces overwrite theirs. Ops whose operands have one shape overwrite one that nobody reads afterwards.
    """
    readers: dict[str, list[Op]] = defaultdict(list)
    for op in program.ops:
        for name in op.reads:
            readers[name].append(op)
    results = {name for _, name in program.results}
    accumulates = any(i.kind == "accumulator" for i in graph.inputs)

    def may_reduce(op: Op) -> bool:
        assert op.step is not None
        if op.step.kind != "all_reduce" or op.bucket or op.step.reduction not in SUMMED:
            return False
        name = op.reads[0]
        writer = program.ops[program.writer[name]]
        made = writer.kind == "compute" and graph.by_name[writer.node].packet in MAKES_NEW
        return made and len(readers[name]) == 1 and name not in results and op.writes[0].meta.dtype in FLOATS

    def ends(name: str, at: Op) -> bool:
        writer = program.ops[program.writer[name]]
        if name in results or writer.phase != at.phase or readers[name][-1] is not at:
            return False
        if writer.kind == "compute":
            new = graph.by_name[writer.node].packet in OVERWRITABLE
        else:
            new = writer.is_collective and not writer.bucket
        return new and all(only_reads(r, graph) for r in readers[name])

    def made(op: Op) -> Op:
        if op.step is not None:
            return replace(op, in_place=True) if may_reduce(op) else op
        if accumulates:  # the program of the other micro-batches has other results
            return op
        operand = next((i for i, name in enumerate(_overwritable(op, program, graph)) if ends(name, op)), None)
        return op if operand is None else replace(op, in_place=True, operand=operand)

    return replace(program, ops=tuple(map(made, program.ops)))


def _overwritable(op: Op, program: Program, graph: Graph) -> Sequence[str]:
    """Return the operands that an op could overwrite.

    All are tensors of the shape and dtype of its result, with more than one dim: statistics are small and belong to
    patterns.
    """
    if op.kind != "compute" or op.kernels:
        return ()
    node = graph.by_name[op.node]
    if node.op not in OVERWRITING or len(set(op.reads)) < len(op.reads):
        return ()
    if not may_overwrite(node, graph):
        return ()
    alike = all(program.tensors[name].bytes == op.writes[0].bytes for name in op.reads)
    return op.reads[: OVERWRITING[node.op]] if alike else ()
