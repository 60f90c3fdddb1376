"""Waits for collectives that nobody reads soon, such as a gradient's: as soon as they should be done.

Until it is waited for, a collective keeps what it sends alive. If waits were left to the readers, for gradients the end
of the step, these buffers would pile up. A wait where the collective is predicted to be done frees its buffer at no
cost in time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autopar.planner.graphs.shared import wait_for
from autopar.planner.schedule.timeline import simulate_streams
from autopar.program import Op, Program


def place_waits(program: Program, overlap: float, later: float = 0.0) -> Program:
    """Add a wait for each collective before the first op that should start after its end, if its first reader comes
    later.

    Args:
        overlap: as in ``simulate_streams``.
        later: how long after its predicted end a collective is waited for, as a share of its time.
    """
    intervals = simulate_streams(program, overlap).intervals
    ends = {i.op: i.end_s + later * (i.end_s - i.start_s) for i in intervals if i.stream == "communication"}
    starts = {i.op: i.start_s for i in intervals if i.stream == "compute"}
    positions = [at for at, op in enumerate(program.ops) if op.name in starts]
    times = [starts[program.ops[at].name] for at in positions]
    read = program.first_read
    turn = program.turn
    waits: dict[int, list[Op]] = {}
    for at, op in enumerate(program.ops):
        if not op.is_collective or op.step is None or op.step.kind == "all_reduce":
            continue
        first = max(bisect_left(times, ends[op.name]), bisect_left(positions, at + 1))
        position = positions[first] if first < len(positions) else len(program.ops)
        first_read = min(read.get(t.name, len(program.ops)) for t in op.writes)
        needed = min(first_read, turn if at < turn else len(program.ops))
        if position < needed:
            waits.setdefault(position, []).append(wait_for(op))
    return _with(program, waits) if waits else program


def wait_sooner(program: Program, timeline: Sequence[int], budget: float) -> Program | None:
    """Add waits for collectives before ops beside which ``timeline`` is over ``budget``; None if no buffer could go
    there.

    The program stops there until the collective is done, and its buffer is freed.

    Args:
        timeline: the bytes that are held while each op runs.
    """
    over = [at for at in range(len(program.ops)) if timeline[at] > budget]
    waited = {op.reads[0]: at for at, op in enumerate(program.ops) if op.kind == "wait" and len(op.reads) == 1}
    waits: dict[int, list[Op]] = {}
    gone: set[int] = set()
    for at, op in enumerate(program.ops):
        if not op.is_collective or op.step is None or op.step.kind == "all_reduce":
            continue
        name = op.writes[0].name
        until = min([program.first_read.get(t.name, len(program.ops)) for t in op.writes])
        there = between(over, at, until)
        if there and all(program.last_read[source] == at for source in op.reads):
            gone |= {waited[name]} if name in waited else set()
            waits.setdefault(over[there[0]], []).append(wait_for(op))
    return _with(program, waits, gone) if waits else None


def between(positions: Sequence[int], after: int, before: int) -> range:
    """Return the indices of those ascending ``positions`` that are after one and before another."""
    return range(bisect_right(positions, after), bisect_left(positions, before))


def _with(program: Program, waits: Mapping[int, Sequence[Op]], gone: Collection[int] = ()) -> Program:
    """Return ``program`` with waits before ops, and without the ops at ``gone``."""
    kept = [() if at in gone else (op,) for at, op in enumerate(program.ops)]
    return replace(program, ops=tuple(each for at, own in enumerate(kept) for each in (*waits.get(at, ()), *own)))
