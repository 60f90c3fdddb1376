"""How much of its parameters an optimizer steps at a time whose state the host keeps."""

from __future__ import annotations

from collections.abc import Sequence

OPTIMIZER_CHUNK_BYTES = 2**25
"""Of parameters on one rank that step together: their state is on the device at once."""


def largest_chunk_bytes(parameters: Sequence[int]) -> int:
    """At most so many bytes of ``parameters``, given by their bytes on one rank, step together, in whatever order."""
    return min(sum(parameters), max(OPTIMIZER_CHUNK_BYTES, max(parameters, default=0)))
