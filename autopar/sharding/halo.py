"""What an op reads of its neighbours' shards, where a window slides along a dim that is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.mesh import Mesh
from autopar.sharding.spec import ShardingSpec, chunk

Window = tuple[int, int]
"""Where a rank's rows begin and end in the global dim; beyond its ends there is padding."""


@dataclass(frozen=True, slots=True)
class Halo:
    """One operand's rows on each rank along ``axis``, of which the neighbours hold some.

    Args:
        operand: its position in ``Node.inputs``.
        dim: that is cut, by ``axis`` alone.
        windows: what each rank along the axis needs.
        before: rows that every rank sends on to the next.
        after: rows that every rank sends back to the one before.
        n: length of the whole dim.
        fill: the padding's value.
    """

    operand: int
    dim: int
    axis: int
    windows: tuple[Window, ...]
    before: int
    after: int
    n: int
    fill: float = 0.0

    @property
    def own(self) -> int:
        """Rows of the longest shard."""
        return -(-self.n // len(self.windows))

    @property
    def copies(self) -> bool:
        """Whether a window is other than the rank's own rows."""
        return self.windows != own_rows(self.n, len(self.windows))

    @property
    def rows(self) -> int:
        """Of the longest window."""
        return max(stop - start for start, stop in self.windows)


def own_rows(n: int, ways: int) -> tuple[Window, ...]:
    """Where each shard of a dim of ``n`` begins and ends."""
    return tuple((start, start + size) for start, size in (chunk(n, ways, i) for i in range(ways)))


def halo(
    operand: int, dim: int, axis: int, n: int, windows: Sequence[Window], mesh: Mesh, fill: float = 0.0
) -> Halo | None:
    """The halo with which every rank has its window; None where a window reaches beyond the neighbours' shards."""
    own = own_rows(n, mesh.shape[axis])
    clipped = [(max(start, 0), min(stop, n)) for start, stop in windows]
    before = max(0, *(mine[0] - start for mine, (start, _) in zip(own, clipped, strict=True)))
    after = max(0, *(stop - mine[1] for mine, (_, stop) in zip(own, clipped, strict=True)))
    shortest = min(stop - start for start, stop in own)
    if max(before, after) > shortest or any(stop <= start for start, stop in windows):
        return None
    return Halo(operand, dim, axis, tuple(windows), before, after, n, fill)


def space_cuts(spec: ShardingSpec, shape: Sequence[int], first: int) -> tuple[tuple[int, int], ...] | None:
    """The dims of space, from ``first`` on, that are cut, each with the axis that cuts it.

    The longest dim is cut first, another only beside it and by a later axis: the other ways send more. None where the
    spec has another of these, or several axes cut one dim.
    """
    longest = sorted(range(first, len(shape)), key=lambda d: -shape[d])
    cut = [d for d in longest if spec.dims[d]]
    axes = [spec.dims[d][0] for d in cut]
    if any(len(spec.dims[d]) > 1 for d in cut) or cut != longest[: len(cut)] or axes != sorted(axes):
        return None
    return tuple(zip(cut, axes, strict=True))


@dataclass(frozen=True)
class Slide:
    """How a kernel moves along a dim; ``reach`` is from its first to its last row."""

    stride: int
    padding: int
    reach: int

    def read_for(self, made: Window) -> Window:
        """Rows of the operand from which rows of the result come."""
        return made[0] * self.stride - self.padding, (made[1] - 1) * self.stride - self.padding + self.reach + 1

    def made_from(self, read: Window) -> Window:
        """Rows of the result into which rows of the operand go."""
        first = -(-(read[0] + self.padding - self.reach) // self.stride)
        return first, (read[1] - 1 + self.padding) // self.stride + 1
