"""Step time by simulating a program on two streams: one computes, one communicates.

As the executed program does: a collective is launched at its place in the program and runs beside what is computed
next, collectives one after the other; it is waited for before its first reader, also where that reader is another
collective; and what is still under way when the forward ends is waited for there, since the forward returns it.

While both streams are busy they may slow each other down, as on a CPU whose cores also carry the messages. With
``overlap`` o, each then runs at the rate 1 / (2 - o): o = 1 is free overlap, o = 0 is taking turns. So a step takes
at least as long as either stream's work, and at most as long as both together.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from autopar.program import Op, Program


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


def simulate_streams(program: Program, overlap: float = 1.0) -> Timeline:
    """Run ``program``'s predicted seconds on a compute and a communication stream.

    Args:
        overlap: share of a collective's time that computation beside it is spared; see `mesh.Measured`.
    """
    streams = _Streams(1 / (2 - overlap))
    phase = ""
    for op in program.ops:
        if op.kind == "input":
            continue
        if op.phase != phase:
            streams.wait_for_all()
            phase = op.phase
        for name in op.reads:
            streams.wait_for(name)
        if op.is_collective:
            streams.launch(op)
        else:
            streams.compute(op)
    streams.wait_for_all()
    collectives = sum(op.seconds for op in program.collectives)
    computed = sum(op.seconds for op in program.ops if op.kind != "input" and not op.is_collective)
    return Timeline(tuple(streams.intervals), streams.now_s, computed, collectives)


@dataclass
class _Streams:
    """The compute stream's clock, and the collectives that are under way, with the work that the first has left.

    Args:
        rate: of both streams while both are busy.
    """

    rate: float
    now_s: float = 0.0
    intervals: list[Interval] = field(default_factory=list)
    queue: deque[Op] = field(default_factory=deque)
    pending: set[str] = field(default_factory=set)
    left_s: float = 0.0
    begun_s: float = 0.0

    def launch(self, op: Op) -> None:
        if not self.queue:
            self.left_s, self.begun_s = op.seconds, self.now_s
        self.queue.append(op)
        self.pending.update(t.name for t in op.writes)

    def compute(self, op: Op) -> None:
        start_s, work_s = self.now_s, op.seconds
        while work_s > 0 and self.queue:
            done_s = min(work_s, self.left_s)
            self.now_s += done_s / self.rate
            self.left_s -= done_s
            work_s -= done_s
            self._finish_what_is_done()
        self.now_s += work_s
        self.intervals.append(Interval(op.name, "compute", start_s, self.now_s))

    def wait_for(self, name: str) -> None:
        """The compute stream stands still until the tensor is there."""
        while name in self.pending:
            self._run_first()

    def wait_for_all(self) -> None:
        while self.queue:
            self._run_first()

    def _run_first(self) -> None:
        self.now_s += self.left_s
        self.left_s = 0.0
        self._finish_what_is_done()

    def _finish_what_is_done(self) -> None:
        while self.queue and self.left_s <= 0:
            op = self.queue.popleft()
            self.pending.difference_update(t.name for t in op.writes)
            self.intervals.append(Interval(op.name, "communication", self.begun_s, self.now_s))
            if self.queue:
                self.left_s, self.begun_s = self.queue[0].seconds, self.now_s
