"""The specs in which a tensor can be stored, and the size of the batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

from autopar.mesh import Mesh
from autopar.sharding import ShardingSpec


@lru_cache(maxsize=4096)
def stored_specs(shape: tuple[int, ...], mesh: Mesh) -> tuple[ShardingSpec, ...]:
    """Every spec without partial sums, axes in increasing order on a dim, that leaves no rank without elements."""
    return tuple(_specs(shape, mesh))


def _specs(shape: tuple[int, ...], mesh: Mesh) -> Iterator[ShardingSpec]:
    for places in itertools.product(range(-1, len(shape)), repeat=mesh.ndim):
        dims: list[tuple[int, ...]] = [()] * len(shape)
        for axis, dim in enumerate(places):
            if dim >= 0:
                dims[dim] = (*dims[dim], axis)
        if all(_fills(n, [mesh.shape[a] for a in axes]) for n, axes in zip(shape, dims, strict=True)):
            yield ShardingSpec.of(tuple(dims))


UNEVEN_LEAST = 4
"""A dim is cut unevenly only where each rank gets about so many elements or more: a kernel's 3 rows stay whole."""


def _fills(n: int, ways: list[int]) -> bool:
    """Whether cutting ``n`` elements by each of ``ways`` in turn leaves every rank some."""
    if not ways:
        return True
    if n % ways[0] and n < UNEVEN_LEAST * ways[0]:
        return False
    size = -(-n // ways[0])
    if size == 0 or -(-n // size) != ways[0]:
        return False
    last = n - size * (ways[0] - 1)
    return _fills(size, ways[1:]) and _fills(last, ways[1:])
