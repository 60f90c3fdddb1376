"""Simulated step time: one stream computes, one for each mesh axis communicates, and one copies to and from the host.

As in the executed program, a collective is launched at its place and runs alongside what is computed next. Collectives
that occupy the links of one mesh axis run one after the other; those of different axes run concurrently. A collective
is waited for before its first reader, even if that is another collective. What is still under way when the forward ends
is waited for there, since the forward returns it.

While the program computes and communicates, each may slow the other down, as on a CPU whose cores also carry the
messages. With ``overlap`` o, both then run at the rate 1 / (2 - o): o = 1 is free overlap, o = 0 is taking turns.
Copies to and from the host run one after the other beside both, on engines of their own. So a step takes at least as
long as each stream's work, and at most as long as all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from autopar.program import Op, Program
from autopar.solver.clock import tick

EventKind: TypeAlias = Literal["compute", "launch", "both", "copy"]
"""What an event occupies: the compute stream, the queue of an axis, both, or the host's copy engine."""


@dataclass(frozen=True)
class Interval:
    """When one op runs, in seconds from the start of the step."""

    op: str
    stream: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The streams of one training step, and the seconds of work on each."""

    intervals: tuple[Interval, ...]
    seconds: float
    compute_s: float
    communication_s: float
    transfer_s: float = 0.0


class Event(NamedTuple):
    """What the streams see of an op.

    Args:
        reads, writes: names of tensors.
        queue: the mesh axis whose links a collective occupies.
    """

    kind: EventKind
    name: str
    phase: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    seconds: float = 0.0
    launch_s: float = 0.0
    queue: int = 0

    @staticmethod
    def of(op: Op) -> Event:
        if op.is_collective or op.kind == "decomposed":
            assert op.step is not None
            kind: EventKind = "launch" if op.is_collective else "both"
            writes = tuple([t.name for t in op.writes])
            return Event(kind, op.name, op.phase, op.reads, writes, op.seconds, op.launch_s, op.step.link)
        if op.is_transfer:
            return Event("copy", op.name, op.phase, op.reads, tuple([t.name for t in op.writes]), op.seconds)
        return Event("compute", op.name, op.phase, op.reads, (), op.seconds)


def simulate_streams(program: Program, overlap: float = 1.0) -> Timeline:
    """Run ``program``'s predicted seconds on the streams.

    Args:
        overlap: the share of a collective's time that overlapping computation does not pay for; see ``mesh.Measured``.
    """
    events = [Event.of(op) for op in program.ops if op.kind != "input"]
    streams = _Streams(1 / (2 - overlap), [])
    streams.run(events)
    streams.wait_for_all()
    streams.step(program)
    work: dict[EventKind, list[float]] = {"launch": [], "copy": [], "compute": [], "both": []}
    for event in events:
        work[event.kind].append(event.seconds)
    return Timeline(
        tuple(streams.intervals or ()),
        streams.now_s,
        sum(work["compute"] + work["both"]),
        sum(work["launch"]),
        sum(work["copy"]) + program.state_transfer_s,
    )


def simulated_seconds(events: Iterable[Event], overlap: float, begins: list[float] | None = None) -> float:
    """Return when the streams are done with ``events``.

    Args:
        begins: takes when the program comes to each event, after what it waits for there.
    """
    streams = _Streams(1 / (2 - overlap), begins=begins)
    streams.run(events)
    streams.wait_for_all()
    return streams.now_s


@dataclass(slots=True)
class _Queue:
    """The collectives on the links of one axis that are under way, and the work that remains of the first."""

    events: deque[Event] = field(default_factory=deque)
    left_s: float = 0.0
    begun_s: float = 0.0

    def begin(self, at_s: float) -> None:
        """Start the first collective; the seconds of its launch have passed."""
        first = self.events[0]
        self.left_s, self.begun_s = first.seconds - first.launch_s, at_s


@dataclass(slots=True)
class _Streams:
    """The compute stream's clock, and what runs alongside it.

    Args:
        rate: of computing and communicating while both are busy.
        intervals: collects when each op ran; None if nobody asks.
        begins: collects when the program comes to each event.
        queues: by the mesh axis whose links the collectives occupy.
        busy: the queues that have something under way.
        pending: the queue of each tensor that is on its way.
        copied: when each tensor whose copy was started arrives.
        host_free_s: when the last of these copies ends.
    """

    rate: float
    intervals: list[Interval] | None = None
    begins: list[float] | None = None
    now_s: float = 0.0
    queues: dict[int, _Queue] = field(default_factory=dict)
    busy: list[_Queue] = field(default_factory=list)
    pending: dict[str, _Queue] = field(default_factory=dict)
    copied: dict[str, float] = field(default_factory=dict)
    host_free_s: float = 0.0

    def run(self, events: Iterable[Event]) -> None:
        """Run all events in turn."""
        phase, events = "", list(events)
        tick("simulated event", len(events))
        pending = self.pending
        for event in events:
            if event.phase != phase:
                self.wait_for_all()
                phase = event.phase
            for name in event.reads:
                if name in pending or name in self.copied:
                    self.wait_for(name)
            if self.begins is not None:
                self.begins.append(self.now_s)
            if event.kind == "compute":
                self.compute(event)
            elif event.kind == "launch":
                self.launch(event)
            elif event.kind == "both":
                self.decomposed(event)
            else:
                self.copy(event)

    def _record(self, name: str, stream: str, start_s: float, end_s: float) -> None:
        if self.intervals is not None:
            self.intervals.append(Interval(name, stream, start_s, end_s))

    def launch(self, event: Event) -> None:
        """Launch a collective. The compute stream pays for the launch, while what is under way continues."""
        begun_s = self.now_s
        self._advance(event.launch_s)
        queue = self.queues.get(event.queue)
        if queue is None:
            queue = self.queues[event.queue] = _Queue()
        queue.events.append(event)
        if len(queue.events) == 1:
            self.busy.append(queue)
            queue.begin(begun_s)
        for name in event.writes:
            self.pending[name] = queue

    def copy(self, event: Event) -> None:
        start_s = max(self.now_s, self.host_free_s)
        self.host_free_s = start_s + event.seconds
        self.copied.update((name, self.host_free_s) for name in event.writes)
        self._record(event.name, "host", start_s, self.host_free_s)

    def compute(self, event: Event) -> None:
        start_s = self.now_s
        if self.busy:
            self._advance(event.seconds)
        else:
            self.now_s += event.seconds
        if self.intervals is not None:
            self.intervals.append(Interval(event.name, "compute", start_s, self.now_s))

    def decomposed(self, event: Event) -> None:
        """Run a product beside its own messages, after the collectives of its axis that are under way."""
        queue = self.queues.get(event.queue)
        while queue is not None and queue.events:
            self._idle(queue.left_s)
        start_s = self.now_s
        self._advance(event.seconds)
        for stream in ("compute", "communication"):
            self._record(event.name, stream, start_s, self.now_s)

    def _advance(self, work_s: float) -> None:
        """Let the compute stream work for ``work_s``, alone or beside what is under way."""
        while work_s > 0 and self.busy:
            done_s = min(work_s, self._first_s())
            self._communicate(done_s, done_s / self.rate)
            work_s -= done_s
        self.now_s += work_s

    def wait_for(self, name: str) -> None:
        """Stop the compute stream until the tensor is there."""
        while name in self.pending:
            self._idle(self.pending[name].left_s)
        if name in self.copied:
            self._idle_until(self.copied.pop(name))

    def wait_for_all(self) -> None:
        while self.busy:
            self._idle(self._first_s())
        self._idle_until(self.host_free_s)
        self.copied.clear()

    def step(self, program: Program) -> None:
        """Transfer the optimizer state that the host keeps, after everything else."""
        if program.state_transfer_s:
            start_s, self.now_s = self.now_s, self.now_s + program.state_transfer_s
            self._record("optimizer state", "host", start_s, self.now_s)

    def _idle_until(self, end_s: float) -> None:
        self._idle(end_s - self.now_s)

    def _idle(self, seconds: float) -> None:
        """Compute nothing for so long, while collectives continue."""
        while self.busy and (first_s := self._first_s()) <= seconds:
            self._communicate(first_s, first_s)
            seconds -= first_s
        if seconds > 0:
            self._communicate(seconds, seconds)

    def _first_s(self) -> float:
        """Return the work until the first of the collectives under way is done."""
        busy = self.busy
        return busy[0].left_s if len(busy) == 1 else min([queue.left_s for queue in busy])

    def _communicate(self, work_s: float, seconds: float) -> None:
        """Let ``seconds`` pass, in which every queue does ``work_s`` of its first collective, and none does more."""
        self.now_s += seconds
        idle = False
        for queue in self.busy:
            queue.left_s -= work_s
            while queue.left_s <= 0 and queue.events:
                event = queue.events.popleft()
                for name in event.writes:
                    self.pending.pop(name, None)
                self._record(event.name, "communication", queue.begun_s, self.now_s)
                if queue.events:
                    queue.begin(self.now_s)
                else:
                    idle = True
        if idle:
            self.busy = [queue for queue in self.busy if queue.events]
