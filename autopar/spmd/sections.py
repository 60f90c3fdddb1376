"""Profiler ranges named after the modules whose ops a local program runs."""

from __future__ import annotations

import threading

from torch.autograd.profiler import record_function

from autopar import _torch


class _Open(threading.local):
    """The range that this thread is in: autograd runs backwards in threads of its own."""

    range: record_function | None = None


_open = _Open()


def section(module: str) -> None:
    """What runs from here on belongs to ``module``, for a profiler that is running; the last section is ``""``."""
    if _open.range is not None:
        _open.range.__exit__(None, None, None)
        _open.range = None
    if module and _torch.profiler_is_running():
        _open.range = record_function(module)
        _open.range.__enter__()  # type: ignore[no-untyped-call]
