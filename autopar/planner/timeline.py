"""Step time by simulating a program on three streams: one computes, one communicates, one copies to and from the host.

As the executed program does: a collective is launched at its place in the program and runs beside what is computed
next, collectives one after the other; it is waited for before its first reader, also where that reader is another
collective; and what is still under way when the forward ends is waited for there, since the forward returns it.

While both of these are busy they may slow each other down, as on a CPU whose cores also carry the messages. With
``overlap`` o, each then runs at the rate 1 / (2 - o): o = 1 is free overlap, o = 0 is taking turns. Copies to and from
the host run one after the other beside both, done by engines of their own. So a step takes at least as long as each
stream's work, and at most as long as all together.
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
    """The streams of one training step, and the work of each."""

    intervals: tuple[Interval, ...]
    seconds: float
    compute_s: float
    communication_s: float
    transfer_s: float = 0.0


def simulate_streams(program: Program, overlap: float = 1.0) -> Timeline:
    """Run ``program``'s predicted seconds on the streams.

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
        elif op.is_transfer:
            streams.copy(op)
        else:
            streams.compute(op)
    streams.wait_for_all()
    streams.step(program)
    collectives = sum(op.seconds for op in program.collectives)
    copied = sum(op.seconds for op in program.ops if op.is_transfer) + program.state_transfer_s
    computed = sum(op.seconds for op in program.ops if not (op.kind == "input" or op.is_collective or op.is_transfer))
    return Timeline(tuple(streams.intervals), streams.now_s, computed, collectives, copied)


@dataclass
class _Streams:
    """The compute stream's clock, and the collectives that are under way, with the work that the first has left.

    Args:
        rate: of computing and communicating while both are busy.
        copied: when each tensor whose copy was started is there.
        host_free_s: when the last of these copies ends.
    """

    rate: float
    now_s: float = 0.0
    intervals: list[Interval] = field(default_factory=list)
    queue: deque[Op] = field(default_factory=deque)
    pending: set[str] = field(default_factory=set)
    left_s: float = 0.0
    begun_s: float = 0.0
    copied: dict[str, float] = field(default_factory=dict)
    host_free_s: float = 0.0

    def launch(self, op: Op) -> None:
        """The calling program pays for the launch; what is under way goes on meanwhile."""
        begun_s = self.now_s
        self._advance(op.launch_s)
        if not self.queue:
            self.left_s, self.begun_s = op.seconds - op.launch_s, begun_s
        self.queue.append(op)
        self.pending.update(t.name for t in op.writes)

    def copy(self, op: Op) -> None:
        start_s = max(self.now_s, self.host_free_s)
        self.host_free_s = start_s + op.seconds
        self.copied.update((t.name, self.host_free_s) for t in op.writes)
        self.intervals.append(Interval(op.name, "host", start_s, self.host_free_s))

    def compute(self, op: Op) -> None:
        start_s = self.now_s
        self._advance(op.seconds)
        self.intervals.append(Interval(op.name, "compute", start_s, self.now_s))

    def _advance(self, work_s: float) -> None:
        """The compute stream works so long, alone or beside what is under way."""
        while work_s > 0 and self.queue:
            done_s = min(work_s, self.left_s)
            self.now_s += done_s / self.rate
            self.left_s -= done_s
            work_s -= done_s
            self._finish_what_is_done()
        self.now_s += work_s

    def wait_for(self, name: str) -> None:
        """The compute stream stands still until the tensor is there."""
        while name in self.pending:
            self._run_first()
        self._stand_until(self.copied.pop(name, 0.0))

    def wait_for_all(self) -> None:
        while self.queue:
            self._run_first()
        self._stand_until(self.host_free_s)
        self.copied.clear()

    def step(self, program: Program) -> None:
        """The optimizer's state that the host keeps comes and goes when all else is done."""
        if program.state_transfer_s:
            start_s, self.now_s = self.now_s, self.now_s + program.state_transfer_s
            self.intervals.append(Interval("optimizer state", "host", start_s, self.now_s))

    def _stand_until(self, end_s: float) -> None:
        """Nothing is computed till then, while collectives go on."""
        while self.queue and self.now_s + self.left_s <= end_s:
            self._run_first()
        if self.queue:
            self.left_s -= max(end_s - self.now_s, 0.0)
        self.now_s = max(self.now_s, end_s)

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
                self.left_s, self.begun_s = self.queue[0].seconds - self.queue[0].launch_s, self.now_s
