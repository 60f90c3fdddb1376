"""The clock that searches race against. Who wants the best plan so far sets it forward: every deadline has then passed.

Within a limit it tells the processor time of this thread, so that what is found does not hang on what else the machine
does; the time on the wall counts the more of it has gone, and all of it at the end of the limit, which is kept.

``with interruptible(): autopar.plan(...)`` is a plan that the first Ctrl-C ends, and the second one breaks off.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

AGES_S = 1e9

STEADY_S = 0.2
"""Before so much has gone nothing is said of the pace."""

SLOWEST = 2.0
"""Seconds on the wall for one of others' work: what takes longer than that may as well be left for what comes next."""


class _Clock:
    ahead_s = 0.0
    watched = False


_clock = _Clock()


@dataclass
class _Race:
    """A limit in seconds, and what the clocks said as it began. ``elsewhere_s``: processor time of other programs that
    worked for this thread."""

    limit_s: float
    began_s: float
    worked_s: float
    elsewhere_s: float = 0.0

    def gone(self) -> float:
        return time.monotonic() - self.began_s

    def spent(self) -> float:
        gone = self.gone()
        return max(time.thread_time() - self.worked_s + self.elsewhere_s, gone * min(1.0, gone / self.limit_s))


class _Races(threading.local):
    race: _Race | None = None


_here = _Races()


def now() -> float:
    """Seconds; only differences mean something."""
    race = _here.race
    return (time.monotonic() if race is None else race.began_s + race.spent()) + _clock.ahead_s


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Inside, so many seconds on the wall are as many on this clock; a limit in one is part of it."""
    if _here.race is not None:
        yield
        return
    _here.race = _Race(max(seconds, 1e-9), time.monotonic(), time.thread_time())
    try:
        yield
    finally:
        _here.race = None


def on_the_wall(seconds: float) -> float:
    """How long these seconds take at the pace so far, where that is not very slow."""
    race = _here.race
    if race is None:
        return seconds
    gone, spent = race.gone(), race.spent()
    if spent < STEADY_S or spent >= gone:
        return seconds
    return max(seconds, min(seconds * min(gone / spent, SLOWEST), race.limit_s - gone))


def until_the_limit(seconds: float) -> float:
    """At least these, else what is left on the wall: for what looks at this clock besides."""
    race = _here.race
    return seconds if race is None else max(seconds, race.limit_s - race.gone())


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Inside, processes that were waited for worked for this thread."""
    before = _of_processes()
    try:
        yield
    finally:
        if _here.race is not None:
            _here.race.elsewhere_s += _of_processes() - before


def _of_processes() -> float:
    times = os.times()
    return times.children_user + times.children_system


def hurried() -> bool:
    """Whether the search should end with what it has."""
    return _clock.ahead_s > 0


def watched() -> bool:
    """Whether anyone may hurry, so that back ends should look."""
    return _clock.watched


def hurry() -> None:
    """Let every deadline pass, also those that begin from now on, but for the least time that a solve is given."""
    _clock.ahead_s = AGES_S


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, the first Ctrl-C hurries the search; a second one is a KeyboardInterrupt as ever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if hurried():
            raise KeyboardInterrupt
        hurry()

    before = signal.signal(signal.SIGINT, on_interrupt)
    _clock.watched = True
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _clock.ahead_s, _clock.watched = 0.0, False
