"""How much of its parameters an optimizer steps at a time whose state the host keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_BYTES = 2**25
LEAST_CHUNKS = 8


def optimizer_chunk_bytes(total: int) -> int:
    """Bytes of parameters on one rank that step together, of ``total`` whose state the host keeps: large enough that
    transfers take longer than their launches, and of small models a small part. A larger parameter steps alone."""
    return min(MOST_BYTES, total // LEAST_CHUNKS)


def largest_chunk_bytes(parameters: Sequence[tuple[int, int]]) -> int:
    """The most that the parameters which step together bring to the device, in whatever order they step.

    Args:
        parameters: of each its bytes on one rank, and the bytes of its state and of what its step makes.
    """
    largest = max((own for _, own in parameters), default=0)
    dearest = max((own / size for size, own in parameters if size), default=0.0)
    full = math.ceil(optimizer_chunk_bytes(sum(size for size, _ in parameters)) * dearest)
    return min(sum(own for _, own in parameters), max(full, largest))
