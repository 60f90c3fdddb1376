"""Planning makes objects by the hundred thousand, and drops few in cycles: the collector would look at them in vain."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """Without the collector of cycles until the end. What was made meanwhile then counts as old, so that nothing looks
    at all of it at once; unless the caller froze something, which would thaw."""
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
