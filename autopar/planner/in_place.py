"""Which all-reduces may overwrite their operand, instead of a copy: those of a tensor that nobody else has.

Half of what an all-reduce holds is then gone, and a copy is saved. The operand must be memory of its own, made by an op
that surely returns no view, and be read by nothing else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from autopar.ir import Graph
from autopar.planner.movable import FLOATS, SUMMED
from autopar.program import Op, Program

MAKES_NEW = frozenset({
    "autopar.contract", "aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.sum", "aten.convolution",
    "aten.convolution_backward", "aten.native_layer_norm_backward", "aten.embedding_dense_backward",
})  # fmt: skip
"""Ops whose results are never views."""


def reduced_in_place(program: Program, graph: Graph) -> Program:
    """``program`` in which these all-reduces say so."""
    readers = Counter(name for op in program.ops for name in op.reads)
    readers.update(name for _, name in program.results)

    def may(op: Op) -> bool:
        if op.step is None or op.step.kind != "all_reduce" or op.bucket or op.step.reduction not in SUMMED:
            return False
        name = op.reads[0]
        writer = program.ops[program.writer[name]]
        made = writer.kind == "compute" and graph.by_name[writer.node].packet in MAKES_NEW
        return made and readers[name] == 1 and op.writes[0].meta.dtype in FLOATS

    return replace(program, ops=tuple(replace(op, in_place=True) if may(op) else op for op in program.ops))
