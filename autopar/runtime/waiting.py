"""Ranks that wait for others that never come raise, instead of waiting for ever.

How late a rank may be nobody knows: it may write a checkpoint for minutes. So a rank that waits looks at what the
others do. Each process has a thread that tells the job's store when the one that trains has stood still for seconds: at
the same place, without computing, waiting for a disk, a data loader, a thread of its own or another program. Where all others stand
still, they will not come.
"""

from __future__ import annotations

import atexit
import contextlib
import operator
import os
import site
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

import autopar
from autopar import _torch
from autopar.errors import RankError

PATIENCE_S = float(os.environ.get("AUTOPAR_PATIENCE", "30"))
"""Seconds for which a rank waits for others that stand still."""
IN_COLLECTIVE_S = min(PATIENCE_S, 10.0)
"""Likewise where each of them waits in a collective of its own."""
STILL_S = 3
"""After so many seconds at one place a rank says so."""
LATE = " Where ranks may be later, set AUTOPAR_PATIENCE to seconds."
LOOK_S = 1.0
STILL, STANDS = "still", "stands still"
MOVES_S = 0.02
"""Who computes for longer than this in a second does not stand still."""

_COLLECTIVE = (os.path.join("torch", "distributed", ""), os.path.join("autopar", "_torch.py"))
_OURS = (os.path.join("autopar", "runtime", "waiting.py"), os.path.join("autopar", "runtime", "agreement.py"))
_READING = (os.path.join("torch", "utils", "data", ""), f"{os.sep}subprocess.py", f"{os.sep}threading.py")
_LIBRARIES = ("<", *(os.path.dirname(m.__file__ or "<") for m in (autopar, torch, threading)), *site.getsitepackages())


@dataclass
class Board:
    """What the ranks of a process group tell each other by its store.

    Args:
        thread: the one that trains.
        calls: how many roll calls there were.
    """

    store: Any
    rank: int
    size: int
    thread: threading.Thread
    calls: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)

    def told(self, key: str) -> str:
        """What was said under a key, if anything."""
        return str(self.store.get(key).decode()) if self.store.check([key]) else ""

    def of_ranks(self, kind: str) -> dict[int, str]:
        """What each rank said of a kind."""
        said = {rank: self.told(f"{kind}/{rank}") for rank in range(self.size)}
        return {rank: what for rank, what in said.items() if what}

    def roll_call(self, what: str, hint: str) -> None:
        """Return when all ranks have called this for ``what``.

        Raises:
            RankError: some do something else, or do not come.
        """
        self.calls += 1
        call, patience = f"call{self.calls}", Patience(self)
        self.store.set(f"{call}/{self.rank}", what)
        self.store.add(call, 1)
        if self.store.add(f"{call}/{what}", 1) == self.size:
            self.store.set(f"{call}/all", "1")
        while not self._arrive(f"{call}/all"):
            elsewhere = self.told(f"{call}/left")
            if not elsewhere and self.store.add(call, 0) == self.size:
                others = self.of_ranks(call).items()
                elsewhere = "; ".join(f"rank {rank} calls {said}" for rank, said in others if said != what)
            elsewhere = elsewhere or patience.exhausted()
            if elsewhere:
                self.store.set(f"{call}/left", f"rank {self.rank} gave up {what}")
                found = f"rank {self.rank} calls {what}; {elsewhere}"
                raise RankError(f"{what} is for all ranks, and some do not call it.", found=found, hint=hint + LATE)

    def _arrive(self, key: str) -> bool:
        """Look for a second whether something was said."""
        end, pause = time.monotonic() + LOOK_S, 1e-4
        while time.monotonic() < end:
            if self.store.check([key]):
                return True
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return False

    def called_elsewhere(self, doing: str) -> str:
        """Who stands in a roll call while this rank does something else; they are told."""
        call = f"call{self.calls + 1}"
        if not self.store.check([call]):
            return ""
        self.store.set(f"{call}/left", f"rank {self.rank} {doing}")
        return "; ".join(f"rank {rank} calls {what}" for rank, what in self.of_ranks(call).items())

    def watch(self) -> None:
        """Tell the store when the thread that trains stands still, and when it goes on; until the process group ends."""
        group = ref(dist.group.WORLD)  # type: ignore[arg-type]
        still, last, told = 0, None, ""
        while not self.stopped.wait(1.0) and group() is dist.group.WORLD:
            frame = sys._current_frames().get(self.thread.ident or 0)
            now = None if frame is None else (id(frame), frame.f_lasti), _computed(self.thread)
            moves = last is None or now[0] != last[0] or now[1] - last[1] > MOVES_S or _reads(self.thread, frame)
            still, last = 0 if moves else still + 1, now
            said = _place(frame) if still >= STILL_S else ""
            if said != told:
                try:
                    self.store.set(f"{STILL}/{self.rank}", said)
                    self.store.add(STILL, bool(said) - bool(told))
                except Exception:  # noqa: BLE001  the job ends
                    return
                told = said


@dataclass
class Patience:
    """How long one rank waits.

    Args:
        still: since when each other rank has stood still at the same place.
    """

    board: Board
    still: dict[int, tuple[str, float]] = field(default_factory=dict)

    def exhausted(self) -> str:
        """What the other ranks do, where each has stood still for long enough; else nothing."""
        others = self.board.size - 1
        if self.board.store.add(STILL, 0) < others:  # one question, where thousands of ranks wait
            return ""
        now, places = time.monotonic(), self.board.of_ranks(STILL)
        places.pop(self.board.rank, None)
        self.still = {r: (p, self.still[r][1] if self.still.get(r, ("",))[0] == p else now) for r, p in places.items()}
        waits = [now - since >= _patience_s(place) for place, since in self.still.values()]
        if len(waits) < others or not all(waits):
            return ""
        told = {place: rank for rank, (place, _) in reversed(self.still.items())}
        return "; ".join(f"rank {rank} {place}" for place, rank in sorted(told.items(), key=operator.itemgetter(1)))


def _patience_s(place: str) -> float:
    return PATIENCE_S if place.startswith(STANDS) else IN_COLLECTIVE_S


def _computed(thread: threading.Thread) -> float:
    """Seconds that a thread has computed; on systems that do not say, it always does."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    if clock is None or not thread.is_alive():
        return time.monotonic()
    return time.clock_gettime(clock(thread.ident))


def _reads(thread: threading.Thread, frame: FrameType | None) -> bool:
    """Whether a thread waits for data, a disk, another thread or another program."""
    with contextlib.suppress(OSError):  # Linux tells
        status = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
        if status.rpartition(") ")[2].startswith("D"):
            return True
    return any(part in f.f_code.co_filename for f in _stack(frame) for part in _READING)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType | None) -> str:
    """Where a thread stands, as an error shows it."""
    frames = list(_stack(frame))
    inner = [f.f_code.co_filename for f in frames[:8]]
    user = next((f for f in frames if not _is_library(f.f_code.co_filename)), None)
    place = "" if user is None else f" at {user.f_code.co_filename}:{user.f_lineno}"
    if any(name.endswith(_OURS) for name in inner):
        return f"waits in a collective of autopar{place}"
    if any(part in name for name in inner for part in _COLLECTIVE):
        return f"waits in a collective{place}"
    return f"{STANDS}{place}"


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES)


_boards: WeakKeyDictionary[Any, Board] = WeakKeyDictionary()


def board() -> Board | None:
    """That of the job's process group, where it has several ranks and a store; they make it at the same time."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1 or dist.get_backend() == "fake":
        return None
    if world not in _boards:
        store = dist.PrefixStore("autopar", _torch.default_store())
        made = Board(store, dist.get_rank(), dist.get_world_size(), threading.current_thread())
        watch = threading.Thread(target=made.watch, name="autopar-waiting", daemon=True)
        watch.start()
        atexit.register(_end, made.stopped, watch)
        _boards[world] = made
    _boards[world].thread = threading.current_thread()
    return _boards[world]


def _end(stopped: threading.Event, watch: threading.Thread) -> None:
    stopped.set()
    watch.join(2.0)


def roll_call(what: str, hint: str) -> None:
    """Every rank calls this, or those that do raise.

    Raises:
        RankError: some do something else, or do not come.
    """
    here = board()
    if here is not None:
        here.roll_call(what, hint)


def wait_for(work: Any, doing: str, hint: str) -> None:
    """Wait for a collective between the hosts that every rank begins for the same reason.

    Raises:
        RankError: the others do something else, or do not come.
    """
    here = board()
    if here is None:
        work.wait()
        return
    patience = Patience(here)
    while not _ends(work):
        elsewhere = here.called_elsewhere(doing) or patience.exhausted()
        if elsewhere:
            found = f"rank {here.rank} {doing}; {elsewhere}"
            raise RankError("Some ranks do not take part in what is for all of them.", found=found, hint=hint + LATE)


def _ends(work: Any) -> bool:
    try:
        work.wait(timedelta(seconds=LOOK_S))
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True
