"""How many parameters an optimizer with state on the host steps at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_BYTES = 2**25
"""Most bytes of parameters in a chunk, on one rank."""

LEAST_CHUNKS = 8
"""Fewest chunks in which all such parameters step."""


def optimizer_chunk_bytes(total: int) -> int:
    """Return the bytes of parameters on one rank that step together, of ``total`` with state on the host.

    Chunks are large enough that transfers take longer than their launches, and a small part of small models. A
    parameter larger than a chunk steps alone.
    """
    return min(MOST_BYTES, total // LEAST_CHUNKS)


def largest_chunk_bytes(parameters: Sequence[tuple[int, int]]) -> int:
    """Return an upper bound on the bytes that a chunk brings to the device, whatever the order of parameters.

    Args:
        parameters: for each its bytes on one rank, and the bytes of its state and of the step's temporaries.
    """
    largest = max((own for _, own in parameters), default=0)
    dearest = max((own / size for size, own in parameters if size), default=0.0)
    full = math.ceil(optimizer_chunk_bytes(sum(size for size, _ in parameters)) * dearest)
    return min(sum(own for _, own in parameters), max(full, largest))
