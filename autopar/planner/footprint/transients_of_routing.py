"""What ops on routed rows hold besides their results while they run: rows on their way, and positions of rows."""

from __future__ import annotations

from autopar.planner.footprint.local_op import Formulas, LocalOp, wide
from autopar.planner.footprint.transients_of_products import POSITION_BYTES
from autopar.sharding.strategy import moved_axes

POSITIONS = 12
"""Tensors of positions, flags and keys at a time, of rows or of choices: a bound, as they are small beside rows."""


def _route(op: LocalOp) -> int:
    (ids, _), (keys, _) = op.operands[0], op.results[0]
    return POSITIONS * POSITION_BYTES * (ids.numel + keys.numel) + 2 * POSITION_BYTES * op.mesh.size**2


def _positions(op: LocalOp) -> int:
    (ids, _), (keys, _) = op.operands[1:3]
    counts = 4 * (op.mesh.size + 1)
    return (
        POSITIONS * POSITION_BYTES * (ids.numel + keys.numel + counts)
        if moved_axes(op.strategy)
        else (POSITIONS * POSITION_BYTES * keys.numel)
    )


def _send(op: LocalOp) -> int:
    """Rows that are sent and that arrive; where none are, rows are taken as they are needed."""
    if not moved_axes(op.strategy):
        return _positions(op)
    (x, size), (ids, _), (keys, _) = op.operands
    return (ids.numel + keys.numel) * x.shape[-1] * size + _positions(op)


def _collect(op: LocalOp) -> int:
    """Rows that are sent, those that come back, and those of each choice; with ``each`` these are the result."""
    (y, size), (ids, _), (keys, _) = op.operands
    row = y.shape[-1] * size
    choices = (ids.numel + 1) * row
    if not moved_axes(op.strategy):
        return choices + _positions(op)
    return max(keys.numel * row, choices) + choices - (op.written if op.node.kwarg("each") else 0) + _positions(op)


def _ends(op: LocalOp) -> int:
    stacks = op.operands[1], op.results[0]
    experts = next(t.shape[0] for t, _ in reversed(stacks) if len(t.shape) == 3)
    return experts * (2 * POSITION_BYTES + 4) + 64


def _of_expert(op: LocalOp) -> int:
    return POSITIONS * POSITION_BYTES * op.operands[-1][0].numel


def _sum_of_expert(op: LocalOp) -> int:
    y, size = op.operands[0]
    converted = y.numel * wide(size) if size < wide(size) else 0
    experts = op.results[0][0].shape[0]
    return converted + (experts + 1) * y.shape[-1] * wide(size) + _of_expert(op)


FORMULAS: Formulas = {
    "autopar.route": _route,
    "autopar.send": _send,
    "autopar.collect": _collect,
    **dict.fromkeys(("autopar.routed_mm", "autopar.routed_mm_weight"), _ends),
    "autopar.of_expert": _of_expert,
    "autopar.sum_of_expert": _sum_of_expert,
}
