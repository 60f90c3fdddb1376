"""Which ranks of a mesh differ in what they hold: unevenly cut dims, windows on neighbours' shards, or lent rows have
other lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

from autopar.mesh import Mesh
from autopar.program import Program
from autopar.sharding import Halo
from autopar.sharding.halo import own_rows
from autopar.sharding.spec import chunk, length

Cut = tuple[int, tuple[int, ...]]
"""Length of a dim, and the axes that cut it."""


def unequal_ranks(program: Program, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Return one coordinate of each kind of rank, the first rank's first. All other ranks hold the same as one of
    these.

    Of the ranks that lend rows and of those that work on them, the outermost ones lend most and hold most.
    """
    lending = frozenset(a for op in program.ops if op.loan is not None for a in op.loan.axes)
    return _kinds(frozenset(_cuts(program)), frozenset(h for op in program.ops for h in op.halos), lending, mesh)


def _cuts(program: Program) -> Iterator[Cut]:
    """Yield how the dims of all tensors of the program are cut."""
    seen: set[tuple[tuple[int, ...], int]] = set()
    for op in program.ops:
        for tensor in op.writes:
            key = tensor.meta.shape, id(tensor.spec)
            if key not in seen:
                seen.add(key)
                yield from ((n, axes) for n, axes in zip(tensor.meta.shape, tensor.spec.dims, strict=True) if axes)


@lru_cache(maxsize=256)
def _kinds(
    cuts: frozenset[Cut], halos: frozenset[Halo], lending: frozenset[int], mesh: Mesh
) -> tuple[tuple[int, ...], ...]:
    uneven = sorted(cut for cut in cuts if not _is_even(*cut, mesh))
    windows = [_windows([h for h in halos if h.axis == axis], mesh.shape[axis]) for axis in range(mesh.ndim)]
    for axis in lending:
        windows[axis] = [(*w, at == mesh.shape[axis] - 1) for at, w in enumerate(windows[axis])]
    different = [_different(uneven, axis, mesh, windows[axis]) for axis in range(mesh.ndim)]
    found: dict[object, tuple[int, ...]] = {}
    for coordinate in product(*different):
        lengths = tuple(length(n, axes, mesh, coordinate) for n, axes in uneven)
        found.setdefault((lengths, *(w[at] for w, at in zip(windows, coordinate, strict=True))), coordinate)
    return tuple(found.values())


def _windows(halos: Sequence[Halo], group_size: int) -> list[tuple[object, ...]]:
    """Describe the windows of each rank along an axis: rows, rows before and after the dim's ends, and whether all are
    its own."""
    found: list[list[object]] = [[] for _ in range(group_size)]
    for h in halos:
        for at, ((start, stop), (first, last)) in enumerate(zip(h.windows, own_rows(h.n, group_size), strict=True)):
            inside = first <= start and stop <= last
            found[at].append((stop - start, max(0, -start), max(0, stop - h.n), inside))
    return [*map(tuple, found)]


def _is_even(n: int, axes: tuple[int, ...], mesh: Mesh) -> bool:
    for a in axes:
        if n % mesh.shape[a]:
            return False
        n //= mesh.shape[a]
    return True


def _different(cuts: list[Cut], axis: int, mesh: Mesh, windows: Sequence[object]) -> list[int]:
    """Return coordinates along ``axis`` that differ in how they cut some dim, or in their windows."""
    before = {n for cut in cuts for n in _lengths_before(*cut, axis, mesh)}
    found: dict[object, int] = {}
    for at in range(mesh.shape[axis]):
        lengths = tuple(chunk(n, mesh.shape[axis], at)[1] for n in sorted(before))
        found.setdefault((lengths, windows[at]), at)
    return list(found.values())


def _lengths_before(n: int, axes: tuple[int, ...], axis: int, mesh: Mesh) -> set[int]:
    """Return the lengths that the axes before ``axis`` may leave of a dim for it to cut; empty if it does not cut the
    dim."""
    if axis not in axes:
        return set()
    lengths = {n}
    for a in axes[: axes.index(axis)]:
        lengths = {chunk(m, mesh.shape[a], at)[1] for m in lengths for at in range(mesh.shape[a])}
    return lengths
