"""Ranks that wait for others which never come raise an error instead of waiting for ever.

No fixed timeout is right, since a rank may write a checkpoint for minutes. So a waiting rank looks at what the others
do. Each process has a thread that reports to the job's store when the training thread has stood still for seconds: at
the same place, without computing, and without waiting for a disk, a data loader, a thread of its own, another program
or a debugger. If all other ranks stand still, they will not come.
"""

from __future__ import annotations

import atexit
import bdb
import contextlib
import operator
import os
import site
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from autopar import _torch
from autopar.errors import RankError

PATIENCE_S = float(os.environ.get("AUTOPAR_PATIENCE", "20"))
"""Seconds for which a rank waits for others that stand still, unless all of them wait in collectives."""
IN_COLLECTIVE_S = min(PATIENCE_S, 5.0)
"""Seconds for which a rank waits if each of the others waits in a different collective."""
STILL_LOOKS = 3
"""How many times in a row a rank must be seen at one place before it reports that it stands still."""
LATE_HINT = " If ranks may be later than this, set AUTOPAR_PATIENCE to a number of seconds."
LOOK_S = 1.0
"""Seconds between a rank's looks at itself, and at the others while it waits."""
INNER = 8
"""Number of innermost stack frames to search for torch.distributed, to tell whether a thread waits in a collective."""
STILL, STANDS = "still", "stands still"
MOVING_FRACTION = 0.02
"""A thread that computes for more than this fraction of the time does not stand still."""

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVE = (
    str(Path(_TORCH, "distributed", "")),
    str(Path(_OURS, "_torch", "")),
    __file__,
    str(Path(_OURS, "runtime", "agreement.py")),
)
_READING = str(Path(_TORCH, "utils", "data")), str(bdb.__file__)
_OTHER_WAITS = str(subprocess.__file__), str(threading.__file__)
_LIBRARIES = ("<", _OURS, _TORCH, str(Path(os.__file__).parent), *site.getsitepackages())


@dataclass
class Board:
    """What the ranks of a process group tell each other through its store.

    Args:
        thread: the training thread.
        calls: number of roll calls so far.
        finished_keys: keys that this rank wrote for the last one.
    """

    store: Any
    rank: int
    size: int
    thread: threading.Thread
    calls: int = 0
    finished_keys: tuple[str, ...] = ()
    stopped: threading.Event = field(default_factory=threading.Event)

    def read(self, key: str) -> str:
        """Return what is stored under a key, or an empty text."""
        return str(self.store.get(key).decode()) if self.store.check([key]) else ""

    def of_ranks(self, kind: str) -> dict[int, str]:
        """Return what each rank has reported under ``kind``, for those that have."""
        values = {rank: self.read(f"{kind}/{rank}") for rank in range(self.size)}
        return {rank: what for rank, what in values.items() if what}

    def roll_call(self, what: str, hint: str) -> None:
        """Return when all ranks have called this with the same ``what``.

        Raises:
            RankError: some ranks do something else, or do not come.
        """
        self.calls += 1
        call, patience = f"call{self.calls}", Patience(self)
        self.store.set(f"{call}/{self.rank}", what)
        self.store.add(call, 1)
        if self.store.add(f"{call}/{what}", 1) == self.size:
            self.store.set(f"{call}/all", "1")
        while not self._arrive(f"{call}/all"):
            elsewhere = self.read(f"{call}/left")
            if not elsewhere and self.store.add(call, 0) == self.size:
                others = self.of_ranks(call).items()
                elsewhere = "; ".join(f"rank {rank} calls {other}" for rank, other in others if other != what)
            elsewhere = elsewhere or patience.exhausted()
            if elsewhere:
                self.store.set(f"{call}/left", f"rank {self.rank} gave up {what}")
                found = f"rank {self.rank} calls {what}; {elsewhere}"
                raise RankError(f"All ranks must call {what}, but some do not.", found=found, hint=hint + LATE_HINT)
        for key in self.finished_keys:  # all ranks are here, so all have left the previous call
            self.store.delete_key(key)
        shared = (call, f"{call}/{what}", f"{call}/all") if self.rank == 0 else ()
        self.finished_keys = (f"{call}/{self.rank}", *shared)

    def _arrive(self, key: str) -> bool:
        """Wait up to ``LOOK_S`` seconds for a key to be set."""
        end, pause = time.monotonic() + LOOK_S, 1e-4
        while time.monotonic() < end:
            if self.store.check([key]):
                return True
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return False

    def called_elsewhere(self, doing: str) -> str:
        """Return who waits in a roll call while this rank does something else, and let them know."""
        call = f"call{self.calls + 1}"
        if not self.store.check([call]):
            return ""
        self.store.set(f"{call}/left", f"rank {self.rank} {doing}")
        return "; ".join(f"rank {rank} calls {what}" for rank, what in self.of_ranks(call).items())

    def watch(self) -> None:
        """Report to the store when the training thread stands still and when it goes on, until the group ends."""
        group = ref(dist.group.WORLD)
        last: tuple[Any, float] | None = None
        still, reported = 0, ""
        while not self.stopped.wait(LOOK_S) and group() is dist.group.WORLD:
            frame = sys._current_frames().get(self.thread.ident or 0)
            now = [(f.f_code, f.f_lasti) for f in _stack(frame)], _cpu_seconds(self.thread)
            moves = (
                last is None
                or now[0] != last[0]
                or now[1] - last[1] > MOVING_FRACTION * LOOK_S
                or _waits_outside(self.thread, frame)
            )
            still, last = 0 if moves else still + 1, now
            report = _location(frame) if still >= STILL_LOOKS else ""
            del frame  # it would keep the locals of a function alive that the training thread has left
            if report != reported:
                try:
                    self.store.set(f"{STILL}/{self.rank}", report)
                    self.store.add(STILL, bool(report) - bool(reported))
                except Exception:  # noqa: BLE001  the job is ending
                    return
                reported = report


@dataclass
class Patience:
    """Decides how long one rank waits.

    Args:
        still: for each rank that stands still, its place and since when it has been there.
    """

    board: Board
    still: dict[int, tuple[str, float]] = field(default_factory=dict)

    def exhausted(self) -> str:
        """Return what the other ranks do if each has stood still for long enough, else an empty text."""
        others = self.board.size - 1
        if self.board.store.add(STILL, 0) < others:  # a single request, since thousands of ranks may wait
            return ""
        now, places = time.monotonic(), self.board.of_ranks(STILL)
        places.pop(self.board.rank, None)
        self.still = {r: (p, self.still[r][1] if self.still.get(r, ("",))[0] == p else now) for r, p in places.items()}
        waits = [now - since >= _patience_s(place) for place, since in self.still.values()]
        if len(waits) < others or not all(waits):
            return ""
        ranks = {place: rank for rank, (place, _) in reversed(self.still.items())}
        return "; ".join(f"rank {rank} {place}" for place, rank in sorted(ranks.items(), key=operator.itemgetter(1)))


def _patience_s(place: str) -> float:
    return PATIENCE_S if place.startswith(STANDS) else IN_COLLECTIVE_S


def _cpu_seconds(thread: threading.Thread) -> float:
    """Return the seconds that a thread has computed; where the system does not report it, time counts as computing."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    if clock is None or not thread.is_alive():
        return time.monotonic()
    return time.clock_gettime(clock(thread.ident))


def _waits_outside(thread: threading.Thread, frame: FrameType | None) -> bool:
    """Whether a thread waits for data, a disk, a processor, another thread or another program."""
    with contextlib.suppress(OSError):  # available on Linux only
        status = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
        if status.rpartition(") ")[2].startswith(("D", "R")):
            return True
    files = [f.f_code.co_filename for f in _stack(frame)]
    return any(name.startswith(_READING) for name in files) or any(name in _OTHER_WAITS for name in files[:4])


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _location(frame: FrameType | None) -> str:
    """Describe where a thread is, for an error message."""
    frames = list(_stack(frame))
    inner = [f.f_code.co_filename for f in frames[:INNER]]
    user = next((f for f in frames if not f.f_code.co_filename.startswith(_LIBRARIES)), None)
    place = "" if user is None else f" at {user.f_code.co_filename}:{user.f_lineno}"
    if any(name.startswith(_COLLECTIVE) for name in inner):
        return f"waits in a collective{place}"
    return f"{STANDS}{place}"


_boards: WeakKeyDictionary[Any, Board] = WeakKeyDictionary()


def board() -> Board | None:
    """Return the job's board if it has several ranks and a store; the ranks create it at the same time."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1 or dist.get_backend() == "fake":
        return None
    if world not in _boards:
        store = _torch.store("autopar")
        made = Board(store, dist.get_rank(), dist.get_world_size(), threading.current_thread())
        watch = threading.Thread(target=made.watch, name="autopar-waiting", daemon=True)
        watch.start()
        atexit.register(_stop, made.stopped, watch)
        _boards[world] = made
    _boards[world].thread = threading.current_thread()
    return _boards[world]


def _stop(stopped: threading.Event, watch: threading.Thread) -> None:
    stopped.set()
    watch.join(2.0)


def roll_call(what: str, hint: str) -> None:
    """Wait until every rank calls this; raise if some do not.

    Raises:
        RankError: some ranks do something else, or do not come.
    """
    here = board()
    if here is not None:
        here.roll_call(what, hint)


def wait_for(work: Any, doing: str, hint: str) -> None:
    """Wait for a collective between the hosts that every rank starts for the same reason.

    Raises:
        RankError: the other ranks do something else, or do not come.
    """
    here = board()
    if here is None:
        work.wait()
        return
    patience = Patience(here)
    while not _is_finished(work):
        elsewhere = here.called_elsewhere(doing) or patience.exhausted()
        if elsewhere:
            found = f"rank {here.rank} {doing}; {elsewhere}"
            raise RankError(
                "All ranks must take part in this call, but some do not.", found=found, hint=hint + LATE_HINT
            )


def _is_finished(work: Any) -> bool:
    try:
        work.wait(timedelta(seconds=LOOK_S))
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True
