"""Blocks of a sequence that ranks pass round a ring, and the zigzag order in which causal attention costs all alike.

The shard of each of n ranks is split into two halves, and all halves are numbered from 0. In zigzag order rank i has
halves i and 2n - 1 - i. Of any other rank's halves it reads two products of halves at most, so all ranks work alike on
each block that reaches them (Brandon et al., "Striped Attention", 2023, describe the imbalance; the order by halves is
that of Llama 3, Grattafiori et al., 2024, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from autopar.mesh import Mesh
from autopar.sharding.loan import own_rows


@dataclass(frozen=True, slots=True)
class Part:
    """Adjacent rows of a sequence.

    Args:
        start: global index of the first.
    """

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of a rank: one part, or in zigzag order two, the second far behind the first."""

    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        return sum(part.length for part in self.parts)


@lru_cache(maxsize=1024)
def shards(n: int, axes: tuple[int, ...], mesh: Mesh) -> tuple[Block, ...]:
    """Return the rows of each rank along ``axes``, in row-major order of their coordinates."""
    return tuple(Block((Part(start, stop - start),)) for start, stop in own_rows(n, axes, mesh))


@lru_cache(maxsize=1024)
def halves(n: int, axes: tuple[int, ...], mesh: Mesh) -> tuple[Part, ...]:
    """Return the halves of all shards in order; the first of a shard has the odd row."""
    found = []
    for start, stop in own_rows(n, axes, mesh):
        middle = (start + stop + 1) // 2
        found += [Part(start, middle - start), Part(middle, stop - middle)]
    return tuple(found)


@lru_cache(maxsize=1024)
def zigzag(n: int, axes: tuple[int, ...], mesh: Mesh) -> tuple[Block, ...]:
    """Return the rows of each rank along ``axes`` in zigzag order."""
    parts = halves(n, axes, mesh)
    return tuple(Block((parts[i], parts[-1 - i])) for i in range(len(parts) // 2))


def holder(half: int, ways: int) -> int:
    """Return the number of the rank that has a half in zigzag order."""
    return min(half, 2 * ways - 1 - half)
