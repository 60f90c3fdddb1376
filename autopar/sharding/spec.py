"""The layout of one tensor on a mesh.

A spec names, for each tensor dim, the mesh axes that cut it, outermost first, and the axes over which the tensor is
partial, with the reduction that completes it. An axis of ``k`` ranks cuts a dim of ``n`` elements like ``torch.chunk``:
every rank holds ``ceil(n / k)``, the last ones fewer or none. Further axes cut the resulting shards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, cast

from autopar.errors import SpecError
from autopar.mesh import Mesh

Reduction = Literal["sum", "max", "min", "avg"]
REDUCTIONS: tuple[Reduction, ...] = ("sum", "max", "min", "avg")


@dataclass(frozen=True)
class ShardingSpec:
    """Sharding of one tensor: ``ShardingSpec(((0, 1), (), ()))`` is ``S01RR``.

    Args:
        dims: for each tensor dim the mesh axes that cut it, outermost first.
        partial: pairs (mesh axis, reduction), sorted by axis: the tensor is this reduction of the ranks' values.

    Raises:
        SpecError: if an axis is used twice.
    """

    dims: tuple[tuple[int, ...], ...]
    partial: tuple[tuple[int, Reduction], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "partial", tuple(sorted(self.partial)))
        axes = [a for dim in self.dims for a in dim] + [a for a, _ in self.partial]
        if len(set(axes)) != len(axes):
            twice = next(a for a in axes if axes.count(a) > 1)
            raise SpecError(
                f"Mesh axis {twice} is used twice; an axis can cut or sum a tensor only once.",
                found=_text(self.dims, self.partial),
                hint="use each axis in one place, as in S01R or S0S1.",
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.partial))

    def __reduce__(self) -> tuple[object, ...]:
        return ShardingSpec, (self.dims, self.partial)  # without the cached hash, which differs between processes

    @staticmethod
    @lru_cache(maxsize=64)
    def replicated(ndim: int) -> ShardingSpec:
        return ShardingSpec(((),) * ndim)

    @staticmethod
    @lru_cache(maxsize=65536)
    def of(dims: tuple[tuple[int, ...], ...], partial: tuple[tuple[int, Reduction], ...] = ()) -> ShardingSpec:
        """Return a shared instance: equal specs are then one object, which makes look-ups by spec faster."""
        return ShardingSpec(dims, partial)

    @staticmethod
    def parse(text: str) -> ShardingSpec:
        """Read the text form; ``parse(str(spec)) == spec``.

        Raises:
            SpecError: if the text is not a spec.
        """
        return _parse(text.strip())

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @cached_property
    def axes(self) -> frozenset[int]:
        """Every mesh axis that the spec mentions."""
        return frozenset(a for d in self.dims for a in d) | frozenset(a for a, _ in self.partial)

    @cached_property
    def is_replicated(self) -> bool:
        return not self.axes

    def ways(self, mesh: Mesh) -> int:
        """Return the number of parts into which the mesh cuts the tensor."""
        n = 1
        for dim in self.dims:
            for a in dim:
                n *= mesh.shape[a]
        return n

    def local_shape(self, shape: Sequence[int], mesh: Mesh, coordinate: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return the shape of the shard at ``coordinate``, by default of the largest shard, that of rank 0."""
        if coordinate is None:
            return _largest(tuple(shape), self.dims, mesh)
        return tuple(length(n, axes, mesh, coordinate) for n, axes in zip(shape, self.dims, strict=True))

    def local_slices(self, shape: Sequence[int], mesh: Mesh, coordinate: Sequence[int]) -> tuple[slice, ...]:
        """Return the part of the global tensor that the shard at ``coordinate`` holds."""
        out = []
        for n, axes in zip(shape, self.dims, strict=True):
            start = offset(n, axes, mesh, coordinate)
            out.append(slice(start, start + length(n, axes, mesh, coordinate)))
        return tuple(out)

    def check(self, ndim: int, mesh: Mesh, what: str = "tensor") -> ShardingSpec:
        """Return self if it fits a tensor of ``ndim`` dims on ``mesh``.

        Raises:
            SpecError: if the number of dims differs, or the mesh lacks an axis.
        """
        if self.ndim != ndim:
            raise SpecError(
                f"The spec has {self.ndim} dims, but {what} has {ndim}.",
                found=str(self),
                hint=f"write one letter per dim: {ShardingSpec.replicated(ndim)} replicates it.",
            )
        if self.axes and max(self.axes) >= mesh.ndim:
            raise SpecError(
                f"The spec of {what} names mesh axis {max(self.axes)}, but the mesh has axes 0 to {mesh.ndim - 1}.",
                found=f"{self} on mesh {mesh}",
                hint="write axes by their number, as in S0R.",
            )
        return self

    def __str__(self) -> str:
        return self._written

    @cached_property
    def _written(self) -> str:
        return _text(self.dims, self.partial)


def chunk(n: int, ways: int, index: int) -> tuple[int, int]:
    """Return (offset, length) of chunk ``index`` of ``n`` elements cut into ``ways`` parts like ``torch.chunk``."""
    size = -(-n // ways)
    start = min(index * size, n)
    return start, min(size, n - start)


def length(n: int, axes: Sequence[int], mesh: Mesh, coordinate: Sequence[int] | None = None) -> int:
    """Return how many elements of a dim of ``n`` ``coordinate`` holds (by default rank 0)."""
    for a in axes:
        n = chunk(n, mesh.shape[a], coordinate[a] if coordinate is not None else 0)[1]
    return n


@lru_cache(maxsize=65536)
def _largest(shape: tuple[int, ...], dims: tuple[tuple[int, ...], ...], mesh: Mesh) -> tuple[int, ...]:
    return tuple(length(n, axes, mesh) for n, axes in zip(shape, dims, strict=True))


def offset(n: int, axes: Sequence[int], mesh: Mesh, coordinate: Sequence[int]) -> int:
    """Return the global index of the first element of a dim of ``n`` that ``coordinate`` holds."""
    start = 0
    for a in axes:
        o, n = chunk(n, mesh.shape[a], coordinate[a])
        start += o
    return start


def _axes_text(axes: Sequence[int]) -> str:
    if all(a < 10 for a in axes):
        return "".join(map(str, axes))
    return f"({','.join(map(str, axes))})"


def _text(dims: Sequence[Sequence[int]], partial: Sequence[tuple[int, Reduction]]) -> str:
    cut = "".join(f"S{_axes_text(d)}" if d else "R" for d in dims) or "-"
    groups: dict[str, list[int]] = {}
    for axis, kind in partial:
        groups.setdefault(kind, []).append(axis)
    tail = [f"P{'' if k == 'sum' else k}{_axes_text(a)}" for k, a in groups.items()]
    return " ".join([cut, *tail])


_DIM = re.compile(r"R|S([0-9]+|\([0-9]{1,4}(?:,[0-9]{1,4})*\))")
_PARTIAL = re.compile(r"P(sum|max|min|avg)?([0-9]+|\([0-9]{1,4}(?:,[0-9]{1,4})*\))\Z")


def _axes_of(text: str) -> tuple[int, ...]:
    if text.startswith("("):
        return tuple(int(a) for a in text[1:-1].split(","))
    return tuple(int(a) for a in text)


@lru_cache(maxsize=4096)
def _parse(text: str) -> ShardingSpec:
    head, *tail = text.split() or [""]
    dims: list[tuple[int, ...]] = []
    at = 0
    while head != "-" and at < len(head):
        m = _DIM.match(head, at)
        if not m:
            raise _not_a_spec(text)
        dims.append(_axes_of(m[1]) if m[1] else ())
        at = m.end()
    if not head:
        raise _not_a_spec(text)
    partial: list[tuple[int, Reduction]] = []
    for part in tail:
        m = _PARTIAL.match(part)
        if not m:
            raise _not_a_spec(text)
        partial += [(a, cast(Reduction, m[1] or "sum")) for a in _axes_of(m[2])]
    return ShardingSpec(tuple(dims), tuple(partial))


def _not_a_spec(text: str) -> SpecError:
    return SpecError(
        "This is not a sharding spec.",
        found=f"{text!r:.200}",
        hint="write R or S<axes> per dim, then partial axes: S01RR, S0R P1, S(1,10)R; a scalar is -.",
    )
