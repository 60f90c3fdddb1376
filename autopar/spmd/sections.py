"""Profiler ranges named after the modules whose ops a local program runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from torch.autograd.profiler import record_function

from autopar import _torch


class _Open(threading.local):
    """The open range of this thread. Autograd runs backwards in threads of its own."""

    range: record_function | None = None
    begun: list[tuple[str, float]] | None = None


_open = _Open()


def section(module: str) -> None:
    """Begin the range of ``module`` if a profiler is running. ``""`` ends the last one."""
    if _open.begun is not None:
        _open.begun.append((module, time.perf_counter()))
    if _open.range is not None:
        _open.range.__exit__(None, None, None)
        _open.range = None
    if module and _torch.profiler_is_running():
        _open.range = record_function(module)
        _open.range.__enter__()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def timed(begun: list[tuple[str, float]]) -> Iterator[None]:
    """Record when each section of this thread begins. The end is recorded as a section ``""``."""
    _open.begun = begun
    try:
        yield
    finally:
        _open.begun = None
        begun.append(("", time.perf_counter()))
