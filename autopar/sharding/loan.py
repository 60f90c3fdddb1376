"""Loans: rows that a rank works on for another, so that causal attention costs all ranks alike.

Row ``i`` of causal attention reads ``i + 1`` keys, so of n contiguous shards the last has almost twice the mean work.
Rank n - 1 - i is the *mirror* of rank i. A rank of the second half lends its last rows to its mirror, as many as make
the work of both equal, and gets their results back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.mesh import Mesh
from autopar.sharding.spec import length, offset


@dataclass(frozen=True, slots=True)
class Loan:
    """The rows of a cut dim that each rank lends to its mirror.

    Args:
        n: global length of the dim.
        axes: the mesh axes that cut it, in order. Ranks along them are numbered in row-major order.
        lent: the number of rows that each rank lends.
    """

    n: int
    axes: tuple[int, ...]
    lent: tuple[int, ...]

    @property
    def most(self) -> int:
        """The most rows that any rank lends."""
        return max(self.lent)


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank does: of its own rows, from ``start`` to ``stop``, it works on all but the last ``lent``.

    Args:
        guests: rows of the mirror that it works on.
        first: global index of the first of these; 0 if there are none.
    """

    start: int
    stop: int
    lent: int
    guests: int
    first: int

    @property
    def kept(self) -> int:
        return self.stop - self.start - self.lent


def loan(n: int, axes: Sequence[int], mesh: Mesh) -> Loan | None:
    """Return the loan that balances causal attention over ``n`` rows that ``axes`` cut; None if nothing is cut."""
    shards = own_rows(n, axes, mesh)
    if len(shards) == 1:
        return None
    lent = [0] * len(shards)
    for i in range(len(shards) // 2):
        lent[-1 - i] = _rows_lent(shards[i], shards[-1 - i])
    return Loan(n, tuple(axes), tuple(lent))


def own_rows(n: int, axes: Sequence[int], mesh: Mesh) -> list[tuple[int, int]]:
    """Return start and stop of the rows of each rank along ``axes``, in row-major order."""
    found = []
    for place in itertools.product(*(range(mesh.shape[a]) for a in axes)):
        at = [0] * mesh.ndim
        for a, i in zip(axes, place, strict=True):
            at[a] = i
        start = offset(n, axes, mesh, at)
        found.append((start, start + length(n, axes, mesh, at)))
    return found


def work(start: int, stop: int) -> int:
    """Return the pairs of queries and keys in rows ``start`` to ``stop``."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


def _rows_lent(light: tuple[int, int], heavy: tuple[int, int]) -> int:
    """Return how many of the last rows of ``heavy`` to lend for the work of both to be as equal as rows allow."""
    excess, stop = work(*heavy) - work(*light), heavy[1]
    # Lent rows start at u, where twice their work is the excess: u (u + 1) = stop (stop + 1) - excess.
    u = (math.isqrt(max(0, 1 + 4 * (stop * (stop + 1) - excess))) - 1) // 2
    first = min((u, u + 1), key=lambda start: abs(excess - 2 * work(start, stop)))
    return stop - min(max(first, heavy[0]), stop)


def share(n: int, axes: Sequence[int], lent: Sequence[int], mesh: Mesh, coordinate: Sequence[int]) -> Share:
    """Return what the rank at ``coordinate`` does, given how many rows each rank along ``axes`` lends."""
    other = mirrored(axes, mesh, coordinate)
    start, size = offset(n, axes, mesh, coordinate), length(n, axes, mesh, coordinate)
    guests = lent[number(axes, mesh, other)]
    end = offset(n, axes, mesh, other) + length(n, axes, mesh, other)
    return Share(start, start + size, lent[number(axes, mesh, coordinate)], guests, end - guests if guests else 0)


def mirrored(axes: Sequence[int], mesh: Mesh, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinate of the mirror: counted from the other end along ``axes``."""
    return tuple(mesh.shape[a] - 1 - i if a in axes else i for a, i in enumerate(coordinate))


def number(axes: Sequence[int], mesh: Mesh, coordinate: Sequence[int]) -> int:
    """Return the number of a rank along ``axes``, in row-major order."""
    found = 0
    for a in axes:
        found = found * mesh.shape[a] + coordinate[a]
    return found
