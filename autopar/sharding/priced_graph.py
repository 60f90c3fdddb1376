"""The graph of specs with bytes and seconds for one tensor, and shortest paths in it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from autopar.mesh import Mesh
from autopar.sharding.redistribution import StepKind
from autopar.sharding.spec import ShardingSpec
from autopar.sharding.spec_graph import SpecGraph, graph_for

NEGLIGIBLE_BYTES = 1 << 20
"""Temporary memory, in bytes, that is too small to be worth an extra collective."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class CollectivePricing(Protocol):
    """Prices of steps. Those of hashable objects are cached, so they must not change."""

    def seconds(self, kind: StepKind, nbytes: int, axis: int) -> float:
        """Return the seconds of one step along mesh ``axis``, a positive number.

        Args:
            kind: the step's kind.
            nbytes: bytes of the largest shard, after an all_gather and before any other step.
            axis: the mesh axis; a permute along several axes costs the maximum over them.
        """
        ...


@dataclass(eq=False)
class PricedGraph:
    """A graph of specs with bytes and seconds for one tensor. Distances are computed on first use.

    Args:
        local_bytes: bytes at each node.
        arcs: indices of the arcs of ``graph`` that exist, sorted by head.
        cost: seconds of each of ``arcs``.
        peak: bytes of input plus output of each of ``arcs``.
        alike: a number for each dim; dims with the same number can be swapped without changing any price.
    """

    graph: SpecGraph
    local_bytes: Ints
    arcs: Ints
    cost: Floats
    peak: Ints
    alike: tuple[int, ...]
    _rows: dict[int, Floats] = field(init=False, default_factory=dict)

    def bound(self, start: int, end: int) -> float:
        """Return how many bytes a step on a path between the two nodes may hold."""
        return float(self.local_bytes[start] + self.local_bytes[end]) + NEGLIGIBLE_BYTES

    def seconds(self, starts: Ints, ends: Ints) -> Floats:
        """Return the seconds of the best path from each of ``starts`` to each of ``ends``, shape (A, B)."""
        self._fill([int(s) for s in starts if int(s) not in self._rows])
        if not len(starts):
            return np.zeros((0, len(ends)))
        return np.stack([self._rows[int(s)][ends] for s in starts])

    def _fill(self, starts: Sequence[int]) -> None:
        """Compute the rows of ``starts``: once for nodes that differ only by a swap of equal dims, then copied."""
        pairs = [self.graph.representative(s, self.alike) for s in starts]
        missing = sorted({r for r, _ in pairs} - self._rows.keys())
        if missing:
            self._rows |= zip(missing, self._distances(np.array(missing)).T.copy(), strict=True)
        for start, (representative, traded) in zip(starts, pairs, strict=True):
            self._rows[start] = self._rows[representative][traded]

    def _distances(self, starts: Ints) -> Floats:
        """Return the seconds of the best paths from ``starts`` to all nodes, shape (nodes, starts).

        Bellman-Ford relaxation over increasing memory bounds: first along the arcs that fit in the tightest bound, then
        also along those that the next bound admits, and so on. Each pair takes its value at its own bound.
        """
        levels = np.unique(self.peak)
        allowed = self.local_bytes[:, None] + self.local_bytes[starts][None, :] + NEGLIGIBLE_BYTES
        level = np.searchsorted(levels, allowed, side="right")
        level_of_arc = np.searchsorted(levels, self.peak)
        distance = np.full((len(self.graph.nodes), len(starts)), np.inf)
        distance[starts, np.arange(len(starts))] = 0.0
        out = np.full_like(distance, np.inf)
        before = 0
        for here in np.unique(level[np.isinf(out)]):
            self._relax(distance, level_of_arc < here, (level_of_arc >= before) & (level_of_arc < here))
            out = np.where(level == here, distance, out)
            before = here
        self._relax(distance, np.ones(len(self.arcs), dtype=bool), level_of_arc >= before)
        return np.where(np.isinf(out), distance, out)

    def _relax(self, distance: Floats, usable: Bools, first: Bools) -> None:
        """Relax the arcs ``first``, then ``usable`` arcs from improved nodes, until nothing changes."""
        head, tail = self.graph.head[self.arcs], self.graph.tail[self.arcs]
        chosen = np.flatnonzero(first)
        while len(chosen):
            candidate = distance[tail[chosen]]
            candidate += self.cost[chosen][:, None]
            heads, begin = np.unique(head[chosen], return_index=True)
            best = np.minimum.reduceat(candidate, begin, axis=0)
            old = distance[heads]
            nearer = (best < old).any(axis=1)
            distance[heads] = np.minimum(best, old)
            moved = np.zeros(len(distance), dtype=bool)
            moved[heads[nearer]] = True
            chosen = np.flatnonzero(usable & moved[tail])

    @cached_property
    def leaving(self) -> list[list[int]]:
        """For each node, the positions in ``arcs`` of those that leave it."""
        out: list[list[int]] = [[] for _ in self.graph.nodes]
        for i, t in enumerate(self.graph.tail[self.arcs]):
            out[t].append(i)
        return out

    def shortest(self, start: int, end: int, bound: float) -> list[int] | None:
        """Return the arcs of the cheapest path whose steps hold at most ``bound`` bytes, or None."""
        heads = self.graph.head[self.arcs]
        queue: list[tuple[float, int, list[int], int]] = [(0.0, 0, [], start)]
        done: set[int] = set()
        while queue:
            seconds, steps, taken, node = heapq.heappop(queue)
            if node == end:
                return taken
            if node in done:
                continue
            done.add(node)
            for i in self.leaving[node]:
                head = int(heads[i])
                if head not in done and self.peak[i] <= bound:
                    heapq.heappush(queue, (seconds + float(self.cost[i]), steps + 1, [*taken, i], head))
        return None


def priced_graph(
    ends: Sequence[ShardingSpec], shape: Sequence[int], itemsize: int, mesh: Mesh, costs: CollectivePricing
) -> PricedGraph:
    """Return the graph between ``ends``. A dim may have more parts than elements only if one of them cuts it so."""
    graph = graph_for(len(shape), mesh, ends)
    return priced(graph, shape, itemsize, costs, overcut_by(graph, [graph.index[s] for s in ends], shape))


def overcut_by(graph: SpecGraph, ends: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the dims that one of the nodes ``ends`` cuts into more parts than they have elements."""
    return tuple(int(d) for d in np.flatnonzero(graph.overcut(shape)[list(ends)].any(axis=0)))


def proportion(shape: Sequence[int], itemsize: int, mesh: Mesh) -> tuple[tuple[int, ...], int]:
    """Reduce ``shape`` to a smaller one and a factor in bytes: local bytes of any spec are local elements times it.

    A dim that the size of the mesh divides shrinks to that size, since only its bytes matter.
    """
    size = mesh.size
    even = [n > 0 and n % size == 0 for n in shape]
    reduced = tuple(size if e else n for n, e in zip(shape, even, strict=True))
    return reduced, itemsize * math.prod(n // size for n, e in zip(shape, even, strict=True) if e)


def existing_arcs(graph: SpecGraph, shape: tuple[int, ...], overcut_dims: tuple[int, ...]) -> Ints:
    """Return the arcs of ``graph`` that exist for a tensor of ``shape`` if only ``overcut_dims`` may be overcut."""
    over = graph.overcut(shape)
    over[:, list(overcut_dims)] = False
    usable = ~np.asarray(over.any(axis=1))
    exists = usable[graph.tail] & usable[graph.head]
    exists[graph.misfits(shape)] = False
    return np.flatnonzero(exists)


def priced(
    graph: SpecGraph, shape: Sequence[int], itemsize: int, costs: CollectivePricing, overcut_dims: tuple[int, ...]
) -> PricedGraph:
    """Price ``graph`` for one tensor. Only ``overcut_dims`` may be cut into more parts than they have elements."""
    reduced, scale = proportion(shape, itemsize, graph.mesh)
    try:
        return _priced_cached(graph, reduced, scale, cast(Hashable, costs), overcut_dims)
    except TypeError:  # unhashable costs
        return _priced(graph, reduced, scale, costs, overcut_dims)


def _priced(
    graph: SpecGraph, shape: tuple[int, ...], itemsize: int, costs: CollectivePricing, overcut_dims: tuple[int, ...]
) -> PricedGraph:
    local_bytes = graph.local_bytes(shape, itemsize)
    arcs = existing_arcs(graph, shape, overcut_dims)
    before, after = local_bytes[graph.tail[arcs]], local_bytes[graph.head[arcs]]
    nbytes = np.where(graph.gathers[arcs], after, before)
    kinds = [(n, d in overcut_dims) for d, n in enumerate(shape)]
    alike = tuple(kinds.index(k) for k in kinds)
    return PricedGraph(graph, local_bytes, arcs, _costs(graph, arcs, nbytes, costs), before + after, alike)


def _costs(graph: SpecGraph, arcs: Ints, nbytes: Ints, costs: CollectivePricing) -> Floats:
    """Return the seconds of each arc. Each distinct (kind, axes, bytes) is priced once."""
    keys, key_of_arc = graph.prices
    sizes, size_of_arc = np.unique(nbytes, return_inverse=True)
    codes, inverse = np.unique(key_of_arc[arcs] * len(sizes) + size_of_arc, return_inverse=True)
    prices = []
    for code in codes:
        (kind, axes), size = keys[code // len(sizes)], int(sizes[code % len(sizes)])
        prices.append(max(costs.seconds(kind, size, axis) for axis in axes))
    return np.array(prices, dtype=np.float64)[inverse]


_priced_cached = lru_cache(maxsize=512)(_priced)
