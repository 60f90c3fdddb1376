"""The clock that searches race against. Who wants the best plan so far sets it forward: every deadline has then passed.

Within a limit the clock tells counted work: what is done is counted, and has a price in seconds of the processor. So
the same input is searched alike on every machine, however busy it is. The wall ends a search only where the limit is
up there first. ``settings.WORK_SHARE`` leaves a margin for that: a machine may be twice as slow as the prices say.

``with interruptible(): autopar.plan(...)`` is a plan that the first Ctrl-C ends, and the second one breaks off.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

from autopar import settings

AGES_S = 1e9

A_LOOK = 100
"""Nodes, or moves, between looks at the clock."""

PRICES_S: Mapping[str, float] = {
    "decision": 20e-6,
    "strategy": 20e-6,
    "priced use": 12e-6,
    "kind of use": 100e-6,
    "use": 7e-6,
    "scheduled op": 24e-6,
    "profiled op": 13e-6,
    "simulated event": 7e-6,
    "mixed use": 0.3e-6,
    "changed element": 0.065e-6,
    "held variable": 5e-6,
    "usage": 12e-6,
    "interval": 3e-6,
    "evaluated edge": 3e-6,
    "node of runs": 5e-6,
    "edge of a graph": 13e-6,
    "reduced node": 12e-6,
    "eliminated node": 7e-6,
    "node of dominance": 12e-6,
    "swept node": 18e-6,
    "swept edge": 2.5e-6,
    "conditional cost": 4e-6,
    "element of a message": 1.2e-9,
    "row of a product": 3e-6,
    "element of a product": 2.2e-9,
    "element of dominance": 5.5e-9,
    "flat element": 8e-9,
    "planned node": 10e-6,
    "compiled element": 40e-9,
    "group of steps": 30e-6,
    "element of a step": 1.5e-9,
    "piece": 10e-6,
    "column": 1e-6,
    "matrix of flows": 30e-6,
    "network of an edge": 200e-6,
    "simplex step": 26e-6,
    "iteration of a tree": 400e-6,
}
"""About the seconds of the processor that each takes, fitted to plans of deep and of small models, and a fifth more: so
the limit is rarely one on the wall. ``benchmarks/planning.py`` shows their sum beside the seconds of the processor."""


class _Clock:
    ahead_s = 0.0
    ends_by_wall = True


_clock = _Clock()


@dataclass
class _Race:
    """A limit in seconds, when it began, what the work since then is worth, and what is kept back for the last of it.
    ``least_s``: what the clock says at least, once the search has to end for that."""

    limit_s: float
    began_s: float
    worked_s: float = 0.0
    kept_back_s: float = 0.0
    least_s: float = 0.0

    def gone(self) -> float:
        return time.monotonic() - self.began_s

    def spent(self) -> float:
        """Counted work, until the wall is at the limit: then at least that, so that every deadline has passed."""
        gone = self.gone()
        if _clock.ends_by_wall and self.limit_s - gone <= self.kept_back_s * min(
            gone / max(self.worked_s, 1e-9), settings.SLOWEST
        ):
            self.least_s = max(self.limit_s - self.kept_back_s, gone)
        return max(self.worked_s, self.least_s)


class _Races(threading.local):
    race: _Race | None = None


_here = _Races()


def tick(kind: str, amount: float) -> None:
    """So much work of a kind, of those in ``PRICES_S``, was done."""
    race = _here.race
    if race is not None:
        race.worked_s += PRICES_S[kind] * amount


def tick_up_to(began_s: float, kind: str, amount: float) -> None:
    """So much work was done since ``counted()`` was ``began_s``: as far as that has not been counted yet."""
    tick(kind, max(amount - (counted() - began_s) / PRICES_S[kind], 0.0))


def counted() -> float:
    """Seconds of all work within this limit."""
    return 0.0 if _here.race is None else _here.race.worked_s


def now() -> float:
    """Seconds; only differences mean something."""
    return _now(_here.race)


def _now(race: _Race | None) -> float:
    return (time.monotonic() if race is None else race.spent()) + _clock.ahead_s


def late_after(seconds: float, kind: str, amount: float) -> Callable[[], bool]:
    """Whether so much time has passed, for who asks whenever so much work of a kind is done, in whatever thread."""
    race, until = _here.race, now() + seconds

    def late() -> bool:
        if race is not None:
            race.worked_s += PRICES_S[kind] * amount
        return _now(race) > until

    return late


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Inside, so many seconds on the wall are as many on this clock; a limit in one is part of it."""
    if _here.race is not None:
        yield
        return
    _here.race = _Race(max(seconds, 1e-9), time.monotonic())
    try:
        yield
    finally:
        _here.race = None


@contextlib.contextmanager
def only_counted() -> Iterator[None]:
    """Inside, counted work alone ends a search, however long it takes: for measurements on a busy machine."""
    _clock.ends_by_wall = False
    try:
        yield
    finally:
        _clock.ends_by_wall = True


def keep_back(seconds: float) -> None:
    """So much work is to be done after the search: where all takes longer than its price, the search ends sooner."""
    if _here.race is not None:
        _here.race.kept_back_s = seconds


def on_the_wall(seconds: float) -> float:
    """How long these seconds take at the pace so far, where that is not very slow: for what cannot look at this
    clock."""
    race = _here.race
    if race is None:
        return seconds
    gone, spent = race.gone(), race.spent()
    if spent < settings.STEADY_S or spent >= gone:
        return seconds
    return max(seconds, min(seconds * min(gone / spent, settings.SLOWEST), race.limit_s - gone))


def until_the_limit(seconds: float) -> float:
    """At least these, else what is left on the wall: for what looks at this clock besides."""
    race = _here.race
    if race is None:
        return seconds
    return max(seconds, race.limit_s - race.gone()) if _clock.ends_by_wall else AGES_S


def hurried() -> bool:
    """Whether the search should end with what it has."""
    return _clock.ahead_s > 0


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
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _clock.ahead_s = 0.0
