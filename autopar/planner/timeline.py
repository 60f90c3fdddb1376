"""Step time by simulating a program on streams: one computes, one for each mesh axis communicates, one copies to and
from the host.

As the executed program does: a collective is launched at its place in the program and runs beside what is computed
next. Those of one mesh axis, which is one process group, run one after the other, those of different axes beside each
other. A collective is waited for before its first reader, also where that reader is another collective; and what is
still under way when the forward ends is waited for there, since the forward returns it.

While the program computes and communicates both may slow each other down, as on a CPU whose cores also carry the
messages. With ``overlap`` o, each then runs at the rate 1 / (2 - o): o = 1 is free overlap, o = 0 is taking turns.
Copies to and from the host run one after the other beside both, done by engines of their own. So a step takes at least
as long as each stream's work, and at most as long as all together.
"""

from __future__ import annotations

import math
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
        elif op.kind == "decomposed":
            streams.together(op)
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
class _Queue:
    """The collectives of one process group that are under way, and the work that the first has left."""

    ops: deque[Op] = field(default_factory=deque)
    left_s: float = 0.0
    begun_s: float = 0.0

    def begin(self, at_s: float) -> None:
        """The first runs from now on; the seconds of its launch have passed."""
        self.left_s, self.begun_s = self.ops[0].seconds - self.ops[0].launch_s, at_s


@dataclass
class _Streams:
    """The compute stream's clock, and what runs beside it.

    Args:
        rate: of computing and communicating while both are busy.
        queues: by the mesh axes that the collectives run over.
        pending: the queue of each tensor that is on its way.
        copied: when each tensor whose copy was started is there.
        host_free_s: when the last of these copies ends.
    """

    rate: float
    now_s: float = 0.0
    intervals: list[Interval] = field(default_factory=list)
    queues: dict[tuple[int, ...], _Queue] = field(default_factory=dict)
    pending: dict[str, _Queue] = field(default_factory=dict)
    copied: dict[str, float] = field(default_factory=dict)
    host_free_s: float = 0.0

    def launch(self, op: Op) -> None:
        """The calling program pays for the launch; what is under way goes on meanwhile."""
        assert op.step is not None
        begun_s = self.now_s
        self._advance(op.launch_s)
        queue = self.queues.setdefault((op.step.axis, *op.step.axes), _Queue())
        queue.ops.append(op)
        if len(queue.ops) == 1:
            queue.begin(begun_s)
        self.pending.update((t.name, queue) for t in op.writes)

    def copy(self, op: Op) -> None:
        start_s = max(self.now_s, self.host_free_s)
        self.host_free_s = start_s + op.seconds
        self.copied.update((t.name, self.host_free_s) for t in op.writes)
        self.intervals.append(Interval(op.name, "host", start_s, self.host_free_s))

    def compute(self, op: Op) -> None:
        start_s = self.now_s
        self._advance(op.seconds)
        self.intervals.append(Interval(op.name, "compute", start_s, self.now_s))

    def together(self, op: Op) -> None:
        """A product beside its own messages, behind the collectives of its axis that are under way."""
        assert op.step is not None
        queue = self.queues.get((op.step.axis,))
        while queue is not None and queue.ops:
            self._stand(queue.left_s)
        start_s = self.now_s
        self._advance(op.seconds)
        self.intervals += [Interval(op.name, s, start_s, self.now_s) for s in ("compute", "communication")]

    def _advance(self, work_s: float) -> None:
        """The compute stream works so long, alone or beside what is under way."""
        while work_s > 0 and (first_s := self._first_s()) < math.inf:
            done_s = min(work_s, first_s)
            self._communicate(done_s, done_s / self.rate)
            work_s -= done_s
        self.now_s += work_s

    def wait_for(self, name: str) -> None:
        """The compute stream stands still until the tensor is there."""
        while name in self.pending:
            self._stand(self.pending[name].left_s)
        if name in self.copied:
            self._stand_until(self.copied.pop(name))

    def wait_for_all(self) -> None:
        while (first_s := self._first_s()) < math.inf:
            self._stand(first_s)
        self._stand_until(self.host_free_s)
        self.copied.clear()

    def step(self, program: Program) -> None:
        """The optimizer's state that the host keeps comes and goes when all else is done."""
        if program.state_transfer_s:
            start_s, self.now_s = self.now_s, self.now_s + program.state_transfer_s
            self.intervals.append(Interval("optimizer state", "host", start_s, self.now_s))

    def _stand_until(self, end_s: float) -> None:
        self._stand(end_s - self.now_s)

    def _stand(self, seconds: float) -> None:
        """Nothing is computed for so long, while collectives go on."""
        while (first_s := self._first_s()) <= seconds:
            self._communicate(first_s, first_s)
            seconds -= first_s
        if seconds > 0:
            self._communicate(seconds, seconds)

    def _first_s(self) -> float:
        """Work until the first of the collectives under way is done; inf where none is."""
        first_s = math.inf
        for queue in self.queues.values():
            if queue.ops and queue.left_s < first_s:
                first_s = queue.left_s
        return first_s

    def _communicate(self, work_s: float, seconds: float) -> None:
        """``seconds`` pass, in which every queue does ``work_s`` of its first collective, and none does more."""
        self.now_s += seconds
        for queue in self.queues.values():
            queue.left_s -= work_s
            while queue.ops and queue.left_s <= 0:
                op = queue.ops.popleft()
                for tensor in op.writes:
                    self.pending.pop(tensor.name, None)
                self.intervals.append(Interval(op.name, "communication", queue.begun_s, self.now_s))
                if queue.ops:
                    queue.begin(self.now_s)
