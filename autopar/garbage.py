"""Pauses the garbage collector: planning creates hundreds of thousands of objects, and few of them in cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """Disable the cyclic garbage collector in the body.

    Afterwards the objects created meanwhile count as old, so that no collection scans all of them at once, unless the
    caller has frozen objects, which this would unfreeze.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
