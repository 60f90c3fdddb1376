"""The clock that searches race against. Who wants the best plan so far sets it forward: every deadline has then passed.

``with interruptible(): autopar.plan(...)`` is a plan that the first Ctrl-C ends, and the second one breaks off.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

AGES_S = 1e9


class _Clock:
    ahead_s = 0.0
    watched = False


_clock = _Clock()


def now() -> float:
    """Seconds; only differences mean something."""
    return time.monotonic() + _clock.ahead_s


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
