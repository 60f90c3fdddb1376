"""Scalar outputs for which the forward need not wait: what it computes of a collective of which nothing else is made.

Such is a loss that the ranks add up, unless the backward reads the sum. A program may wait for it when someone reads
the output, and at the latest with the backward's first wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.program import Program


@dataclass(frozen=True)
class Late:
    """Names of ops that a program may put off.

    Args:
        collectives: those that it may wait for late; they are launched in their place all the same.
        computed: what is computed of them.
    """

    collectives: frozenset[str]
    computed: frozenset[str]


def late(program: Program) -> Late:
    """What of the forward only scalar outputs are made of, from the last collectives on, which no other follows."""
    scalars = {n for output, n in program.results if output.kind == "output" and not program.tensors[n].meta.shape}
    wanted = {name for output, name in program.results if output.kind != "output" or name not in scalars}
    ends, used, found = set[str](), set[str](), set[str]()
    for op in reversed(program.ops):
        if op.kind == "wait":
            continue
        free = op.phase == "forward" and len(op.writes) == 1 and not op.bucket
        if free and op.writes[0].name not in wanted and (op.writes[0].name in used | scalars):
            if op.kind == "redistribute" and op.is_collective:
                found.add(op.name)
            elif op.kind == "compute" and not (op.in_place or op.halos or op.sent or op.kernels):
                ends.add(op.name)
                used.update(op.reads)
                continue
        wanted.update(op.reads)
    return _reached(program, found, ends)


def _reached(program: Program, collectives: set[str], ends: set[str]) -> Late:
    """Of ``ends`` what follows from ``collectives``."""
    made, computed = set[str](), set[str]()
    for op in program.ops:
        if op.name in collectives or (op.name in ends and any(name in made for name in op.reads)):
            made.add(op.writes[0].name)
            computed |= {op.name} - collectives
    return Late(frozenset(collectives), frozenset(computed))
