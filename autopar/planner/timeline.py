"""Step time by simulating a program on two streams: one computes, one communicates.

An op starts when its operands are there and its stream is free; ops keep the program's order on their stream. A
collective that nobody waits for yet runs beside the computation, as the executed program does.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.program import Program


@dataclass(frozen=True)
class Interval:
    """When one op runs, in seconds from the start of the step."""

    op: str
    stream: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Both streams of one training step."""

    intervals: tuple[Interval, ...]
    seconds: float
    compute_s: float
    communication_s: float


def simulate_streams(program: Program) -> Timeline:
    """Run ``program``'s predicted seconds on a compute and a communication stream."""
    free = {"compute": 0.0, "communication": 0.0}
    busy = {"compute": 0.0, "communication": 0.0}
    ready: dict[str, float] = {}
    intervals: list[Interval] = []
    for op in program.ops:
        if op.kind == "input":
            ready.update((t.name, 0.0) for t in op.writes)
            continue
        stream = "communication" if op.is_collective else "compute"
        # A collective is launched by the program, which has to reach it first.
        launched = free["compute"] if op.is_collective else 0.0
        start = max([free[stream], launched, *(ready[r] for r in op.reads)])
        end = start + op.seconds
        free[stream] = end
        busy[stream] += op.seconds
        ready.update((t.name, end) for t in op.writes)
        intervals.append(Interval(op.name, stream, start, end))
    return Timeline(tuple(intervals), max(free.values()), busy["compute"], busy["communication"])
