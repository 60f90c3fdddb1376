"""Ranks that wait for others that never come raise, instead of waiting for ever.

How late a rank may be nobody knows: it may write a checkpoint for minutes. So a rank that waits looks at what the
others do. Each process has a thread that tells the job's store when the one that trains has stood still for seconds: at
the same place, without computing, and without waiting for a disk, a data loader, a thread of its own, another program
or whoever debugs it. Where all others stand still, they will not come.
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
"""Seconds for which a rank waits for others that stand still."""
IN_COLLECTIVE_S = min(PATIENCE_S, 5.0)
"""Likewise where each of them waits in a collective of its own."""
STILL_LOOKS = 3
"""A rank says that it stands still when it was seen so often at one place."""
LATE = " Where ranks may be later, set AUTOPAR_PATIENCE to seconds."
LOOK_S = 1.0
"""How often a rank looks at itself, and at the others where it waits."""
INNER = 8
"""Of so many frames of a stack one is of torch.distributed where a thread waits in a collective."""
STILL, STANDS = "still", "stands still"
MOVES = 0.02
"""Who computes for a larger part of the time does not stand still."""

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVE = (
    str(Path(_TORCH, "distributed", "")),
    str(Path(_OURS, "_torch", "")),
    __file__,
    str(Path(_OURS, "runtime", "agreement.py")),
)
_READING = str(Path(_TORCH, "utils", "data")), str(bdb.__file__)
_OF_ITS_OWN = str(subprocess.__file__), str(threading.__file__)
_LIBRARIES = ("<", _OURS, _TORCH, str(Path(os.__file__).parent), *site.getsitepackages())


@dataclass
class Board:
    """What the ranks of a process group tell each other by its store.

    Args:
        thread: the one that trains.
        calls: how many roll calls there were.
        over: keys that were written for the last one.
    """

    store: Any
    rank: int
    size: int
    thread: threading.Thread
    calls: int = 0
    over: tuple[str, ...] = ()
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
        for key in self.over:  # all are here, and so past the call before
            self.store.delete_key(key)
        shared = (call, f"{call}/{what}", f"{call}/all") if self.rank == 0 else ()
        self.over = (f"{call}/{self.rank}", *shared)

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
        """Tell the store when the thread that trains stands still and when it goes on, until the process group ends."""
        group = ref(dist.group.WORLD)
        last: tuple[Any, float] | None = None
        still, told = 0, ""
        while not self.stopped.wait(LOOK_S) and group() is dist.group.WORLD:
            frame = sys._current_frames().get(self.thread.ident or 0)
            now = [(f.f_code, f.f_lasti) for f in _stack(frame)], _computed(self.thread)
            moves = last is None or now[0] != last[0] or now[1] - last[1] > MOVES * LOOK_S or _reads(self.thread, frame)
            still, last = 0 if moves else still + 1, now
            said = _place(frame) if still >= STILL_LOOKS else ""
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
    """Whether a thread waits for data, a disk, a processor, another thread or another program."""
    with contextlib.suppress(OSError):  # Linux tells
        status = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
        if status.rpartition(") ")[2].startswith(("D", "R")):
            return True
    files = [f.f_code.co_filename for f in _stack(frame)]
    return any(name.startswith(_READING) for name in files) or any(name in _OF_ITS_OWN for name in files[:4])


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType | None) -> str:
    """Where a thread stands, as an error shows it."""
    frames = list(_stack(frame))
    inner = [f.f_code.co_filename for f in frames[:INNER]]
    user = next((f for f in frames if not f.f_code.co_filename.startswith(_LIBRARIES)), None)
    place = "" if user is None else f" at {user.f_code.co_filename}:{user.f_lineno}"
    if any(name.startswith(_COLLECTIVE) for name in inner):
        return f"waits in a collective{place}"
    return f"{STANDS}{place}"


_boards: WeakKeyDictionary[Any, Board] = WeakKeyDictionary()


def board() -> Board | None:
    """That of the job's process group, where it has several ranks and a store; they make it at the same time."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1 or dist.get_backend() == "fake":
        return None
    if world not in _boards:
        store = _torch.store("autopar")
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
