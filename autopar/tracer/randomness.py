"""Refuses random numbers of Python and NumPy: captured once, they would be the same in every step."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from autopar.errors import CaptureError
from autopar.tracer.blame import Line, line_at

_TORCH = str(Path(torch.__file__).parent)


@contextlib.contextmanager
def refuse_python_random(rerun: Callable[[], Any]) -> Iterator[None]:
    """Refuse a program that draws from ``random`` or ``numpy.random``, and restore their states.

    Args:
        rerun: runs the program once more, to find the line that draws.

    Raises:
        CaptureError: the program drew.
    """
    before = _states()
    try:
        yield
        changed = _changed(before)
        if changed:
            line = _line_that_draws(rerun)
            raise CaptureError(
                f"The model draws from {changed}{f' in {line}' if line else ''}.",
                found="a number that the captured program would repeat in every step",
                hint="draw with torch (torch.rand, nn.Dropout), or outside of forward and pass the result as an input.",
            )
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002  the state that the legacy functions share


def _states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()  # noqa: NPY002


def _changed(before: tuple[Any, Any]) -> str:
    now = _states()
    if now[0] != before[0]:
        return "Python's random"
    if any(not np.array_equal(a, b) for a, b in zip(now[1], before[1], strict=True)):
        return "numpy.random"
    return ""


def _line_that_draws(run: Callable[[], Any]) -> Line | None:
    """Run line by line until a random state changes, and return the line."""
    before = _states()
    reached: dict[FrameType, int] = {}
    found: Line | None = None

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal found
        file = frame.f_code.co_filename
        if found is not None or file.startswith(_TORCH) or file in (random.__file__, __file__):
            return None
        if _changed(before):
            found = _line_in(frame, reached)
            return None
        reached[frame] = frame.f_lineno
        return trace

    with torch.no_grad(), contextlib.suppress(Exception):
        sys.settrace(trace)
        try:
            run()
        finally:
            sys.settrace(None)
    return found


def _line_in(frame: FrameType | None, reached: Mapping[FrameType, int]) -> Line | None:
    """Return the line last reached in ``frame`` or in its nearest traced caller."""
    while frame is not None and frame not in reached:
        frame = frame.f_back
    return line_at(frame.f_code.co_filename, reached[frame], frame.f_code.co_name) if frame is not None else None
