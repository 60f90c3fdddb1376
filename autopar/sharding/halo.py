"""Halos: rows of the neighbours' shards that an op reads when its window slides along a cut dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.mesh import Mesh
from autopar.sharding.spec import ShardingSpec, chunk

Window = tuple[int, int]
"""Start and stop of a rank's rows in the global dim. Rows beyond its ends are padding."""


@dataclass(frozen=True, slots=True)
class Halo:
    """The rows of one operand that each rank along ``axis`` needs; neighbours hold some of them.

    Args:
        operand: position of the operand in ``Node.inputs``.
        dim: the cut dim; only ``axis`` cuts it.
        windows: rows that each rank along the axis needs.
        before: number of rows that each rank sends to the next rank.
        after: number of rows that each rank sends to the previous rank.
        n: global length of the dim.
        fill: value of the padding.
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
        """Whether any window differs from the rank's own rows, so that rows have to be copied."""
        return self.windows != own_rows(self.n, len(self.windows))

    @property
    def rows(self) -> int:
        """Rows of the longest window."""
        return max(stop - start for start, stop in self.windows)


def own_rows(n: int, ways: int) -> tuple[Window, ...]:
    """Return start and stop of each of ``ways`` shards of a dim of ``n``."""
    return tuple((start, start + size) for start, size in (chunk(n, ways, i) for i in range(ways)))


def halo(
    operand: int, dim: int, axis: int, n: int, windows: Sequence[Window], mesh: Mesh, fill: float = 0.0
) -> Halo | None:
    """Return the halo that completes the window of each rank, or None if one reaches beyond the neighbours' shards."""
    own = own_rows(n, mesh.shape[axis])
    clipped = [(max(start, 0), min(stop, n)) for start, stop in windows]
    before = max(0, *(mine[0] - start for mine, (start, _) in zip(own, clipped, strict=True)))
    after = max(0, *(stop - mine[1] for mine, (_, stop) in zip(own, clipped, strict=True)))
    shortest = min(stop - start for start, stop in own)
    if max(before, after) > shortest or any(stop <= start for start, stop in windows):
        return None
    return Halo(operand, dim, axis, tuple(windows), before, after, n, fill)


def space_cuts(spec: ShardingSpec, shape: Sequence[int], first: int) -> tuple[tuple[int, int], ...] | None:
    """Return the cut spatial dims, those from ``first`` on, each with its axis; None if the spec is not allowed.

    The longest dim has to be cut first, and further ones by later axes, since other choices send more. No dim may be
    cut by several axes.
    """
    longest = sorted(range(first, len(shape)), key=lambda d: -shape[d])
    cut = [d for d in longest if spec.dims[d]]
    axes = [spec.dims[d][0] for d in cut]
    if any(len(spec.dims[d]) > 1 for d in cut) or cut != longest[: len(cut)] or axes != sorted(axes):
        return None
    return tuple(zip(cut, axes, strict=True))


@dataclass(frozen=True)
class Slide:
    """How a kernel moves along a dim. ``reach`` is the distance from its first to its last row."""

    stride: int
    padding: int
    reach: int

    def read_for(self, made: Window) -> Window:
        """Return the rows of the operand that these rows of the result are computed from."""
        return made[0] * self.stride - self.padding, (made[1] - 1) * self.stride - self.padding + self.reach + 1

    def made_from(self, read: Window) -> Window:
        """Return the rows of the result that these rows of the operand contribute to."""
        first = -(-(read[0] + self.padding - self.reach) // self.stride)
        return first, (read[1] - 1 + self.padding) // self.stride + 1
