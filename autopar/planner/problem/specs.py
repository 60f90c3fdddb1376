"""The specs in which a tensor can be stored, and which strategies of an op are worth listing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

from autopar.ir import TensorMeta
from autopar.mesh import Mesh
from autopar.sharding import ShardingSpec, Strategy
from autopar.sharding.spec import length
from autopar.sharding.strategy import ring_axes


@lru_cache(maxsize=4096)
def stored_specs(shape: tuple[int, ...], mesh: Mesh) -> tuple[ShardingSpec, ...]:
    """Return every spec without partial sums, with axes in increasing order on a dim, that leaves no rank without
    elements."""
    return tuple(_specs(shape, mesh))


def _specs(shape: tuple[int, ...], mesh: Mesh) -> Iterator[ShardingSpec]:
    for chosen_dims in itertools.product(range(-1, len(shape)), repeat=mesh.ndim):
        dims: list[tuple[int, ...]] = [()] * len(shape)
        for axis, dim in enumerate(chosen_dims):
            if dim >= 0:
                dims[dim] = (*dims[dim], axis)
        if all(_leaves_no_rank_empty(n, [mesh.shape[a] for a in axes]) for n, axes in zip(shape, dims, strict=True)):
            yield ShardingSpec.of(tuple(dims))


MIN_UNEVEN_LENGTH = 4
"""The number of elements per rank from which on a dim may be cut unevenly. A kernel's 3 rows stay whole."""


def _leaves_no_rank_empty(n: int, group_sizes: list[int]) -> bool:
    """Whether cutting ``n`` elements by each of ``group_sizes`` in turn leaves every rank some."""
    if not group_sizes:
        return True
    if n % group_sizes[0] and n < MIN_UNEVEN_LENGTH * group_sizes[0]:
        return False
    size = -(-n // group_sizes[0])
    if size == 0 or -(-n // size) != group_sizes[0]:
        return False
    last = n - size * (group_sizes[0] - 1)
    return _leaves_no_rank_empty(size, group_sizes[1:]) and _leaves_no_rank_empty(last, group_sizes[1:])


MIN_RING_ROWS = 256
"""Rows of each rank from which on its blocks may go round a ring: a tile of 128 rows of flash attention for each of the
halves that causal attention makes. With fewer, rings cost more than they hide, and make the search longer."""


def without_short_rings(options: Sequence[Strategy], metas: Sequence[TensorMeta], mesh: Mesh) -> tuple[Strategy, ...]:
    """Return the strategies of an op but those in which blocks of too few rows go round."""
    return tuple(o for o in options if not (ring := ring_axes(o)) or _rows(o, metas, ring, mesh) >= MIN_RING_ROWS)


def _rows(option: Strategy, metas: Sequence[TensorMeta], ring: Sequence[int], mesh: Mesh) -> int:
    """Return the fewest rows that the first rank has of a dim that is cut by a ring."""
    cut = (
        length(n, axes, mesh)
        for meta, spec in zip(metas, option.inputs, strict=True)
        for n, axes in zip(meta.shape, spec.dims, strict=True)
        if set(axes).intersection(ring)
    )
    return min(cut)
