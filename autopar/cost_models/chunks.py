"""How much of its parameters an optimizer steps at a time whose state the host keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence

OPTIMIZER_CHUNK_BYTES = 2**25
"""Of parameters on one rank that step together: their state is on the device at once."""


def largest_chunk_bytes(parameters: Sequence[tuple[int, int]]) -> int:
    """The most that the parameters which step together bring to the device, in whatever order they step.

    Args:
        parameters: of each its bytes on one rank, and the bytes of its state and of what its step makes.
    """
    largest = max((own for _, own in parameters), default=0)
    dearest = max((own / size for size, own in parameters if size), default=0.0)
    full = math.ceil(OPTIMIZER_CHUNK_BYTES * dearest)
    return min(sum(own for _, own in parameters), max(full, largest))
