"""Tells where a forward is whose capture takes long.

A loop over positions, such as a scan of a state-space model that is written in Python, becomes ops for each position:
tens of thousands a layer. That is captured in the end, but it looks like a program that hangs.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterator

from autopar.tracer.blame import innermost, is_ours, line_at

SLOW_S = 60.0
"""Seconds after which an export says where it is."""


@contextlib.contextmanager
def telling_where(after_s: float = SLOW_S) -> Iterator[None]:
    """Warn once where the calling thread is if what runs inside takes longer than ``after_s`` seconds."""
    caller = threading.get_ident()

    def tell() -> None:
        where = _running(sys._current_frames().get(caller))
        if where:
            warnings.warn(
                f"The capture of the forward has taken {after_s:g} s so far and is at {where}. It goes on. A loop over "
                "positions is captured op by op for each of them: write it for chunks of positions, as products or "
                "scans along a dim, or capture a shorter sequence.",
                stacklevel=1,
            )

    timer = threading.Timer(after_s, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _running(frame: types.FrameType | None) -> str:
    """Return the innermost line of the user's code, or of a library that they use, that runs in ``frame``."""
    stack = traceback.walk_stack(frame) if frame is not None else ()
    lines = [line_at(f.f_code.co_filename, number, f.f_code.co_name) for f, number in stack]
    # Not the program that asks for the capture.
    inside = itertools.takewhile(lambda line: line.file.name != "export.py" or not is_ours(line.file), lines)
    return innermost([line for line in reversed(list(inside)) if not line.file.name.startswith("<")])
