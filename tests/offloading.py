"""Offload chosen values of a program to the host, whatever the planner would choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.program import LocalTensor, Op, Program


def saved(program: Program) -> list[LocalTensor]:
    """Return the tensors that the forward makes and the backward reads."""
    read = {name for op in program.ops if op.phase == "backward" for name in op.reads}
    return [
        t
        for op in program.ops
        if op.phase == "forward" and op.kind != "input"
        for t in op.writes
        if t.name in read and not t.host
    ]


def offloaded(program: Program, chosen: Callable[[LocalTensor], bool] = lambda t: True, later: int = 3) -> Program:
    """Return ``program`` with the ``chosen`` saved tensors offloaded.

    Each copy to the host starts when its tensor is made, and the program waits for it ``later`` ops later. The copy
    back starts ``later`` ops before the first reader in the backward.
    """
    results = {name for _, name in program.results}
    away = {t.name: t for t in saved(program) if chosen(t) and t.name not in results}
    back = {name: replace(t, name=f"{name}|back") for name, t in away.items()}
    ops: list[Op] = []
    for op in program.ops:
        if op.phase == "backward":
            op = replace(op, reads=tuple(back[r].name if r in back else r for r in op.reads))
        ops.append(op)
        ops += [_offload(op, t) for t in op.writes if t.name in away]
    for name, tensor in back.items():
        first = next(i for i, op in enumerate(ops) if tensor.name in op.reads)
        turn = next(i for i, op in enumerate(ops) if op.phase == "backward" and op.kind != "input")
        ops.insert(max(first - later, turn), _fetch(ops[first], tensor))
        sent = next(i for i, op in enumerate(ops) if op.name == f"{name}|offload")
        wait = Op(f"{name}|offload|done", "wait", ops[sent].node, (name, f"{name}|host"), (), "forward")
        ends = next(i for i, op in enumerate(ops) if op.phase == "backward" and op.kind != "input")
        ops.insert(min(sent + 1 + later, ends), wait)
    return Program(tuple(ops), program.results)


def _offload(op: Op, t: LocalTensor) -> Op:
    return Op(f"{t.name}|offload", "offload", op.node, (t.name,), (_host(t),), "forward", seconds=1e-6, form="offload")


def _fetch(reader: Op, t: LocalTensor) -> Op:
    name = t.name.removesuffix("|back")
    return Op(f"{name}|fetch", "fetch", reader.node, (f"{name}|host",), (t,), "backward", seconds=1e-6, form="offload")


def _host(t: LocalTensor) -> LocalTensor:
    return replace(t, name=f"{t.name}|host", host=True)
