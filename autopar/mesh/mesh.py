"""The logical mesh: the arrangement of a job's ranks along named axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import MeshError


@dataclass(frozen=True)
class Mesh:
    """An N-dimensional arrangement of ranks, row-major: the last axis varies fastest.

    Args:
        shape: number of ranks along each axis.
        names: one label per axis; ``("0", "1", ...)`` when omitted.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.shape or any(not isinstance(n, int) or n < 1 for n in self.shape):
            raise MeshError(
                "A mesh needs at least one axis, and at least one rank along each.",
                found=f"mesh {self.shape}",
                hint='write mesh=(2, 4) or mesh={"dp": 2, "tp": 4}.',
            )
        if not self.names:
            object.__setattr__(self, "names", tuple(map(str, range(len(self.shape)))))
        if len(set(self.names)) != len(self.shape):
            raise MeshError(
                "A mesh needs one distinct name for each axis.",
                found=f"shape {self.shape}, names {self.names}",
                hint='write mesh={"dp": 2, "tp": 4}.',
            )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the position of ``rank`` along each axis."""
        out = []
        for n in reversed(self.shape):
            rank, c = divmod(rank, n)
            out.append(c)
        return tuple(reversed(out))

    def rank(self, coordinate: tuple[int, ...]) -> int:
        rank = 0
        for c, n in zip(coordinate, self.shape, strict=True):
            rank = rank * n + c
        return rank

    def group(self, rank: int, axis: int) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along ``axis``, ordered by their coordinate there."""
        c = self.coordinate(rank)
        return tuple(self.rank((*c[:axis], i, *c[axis + 1 :])) for i in range(self.shape[axis]))

    def without(self, name: str) -> Mesh:
        """Return the mesh of one coordinate along the axis ``name``; of one rank if there is no other axis."""
        kept = [(n, label) for n, label in zip(self.shape, self.names, strict=True) if label != name]
        return Mesh(*map(tuple, zip(*kept, strict=True))) if kept else Mesh((1,))

    def groups(self, axis: int) -> Iterator[tuple[int, ...]]:
        """Yield all groups along ``axis``."""
        for rank in range(self.size):
            if self.coordinate(rank)[axis] == 0:
                yield self.group(rank, axis)

    def __str__(self) -> str:
        if self.names == tuple(map(str, range(self.ndim))):
            return f"({', '.join(map(str, self.shape))}{',' if self.ndim == 1 else ''})"
        return "(" + ", ".join(f"{k}={n}" for k, n in zip(self.names, self.shape, strict=True)) + ")"
