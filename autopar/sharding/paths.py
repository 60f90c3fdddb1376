"""The cheapest redistribution between two specs, alone and for all pairs at once.

A path is a walk in the graph of specs; its cost is the sum of its steps'. A path whose every step fits in the
memory that the source and the target need is taken when there is one, else the cheapest of all.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.errors import SpecError
from autopar.mesh import Mesh
from autopar.sharding.redistribution import Step, StepKind
from autopar.sharding.spec import ShardingSpec
from autopar.sharding.spec_graph import SpecGraph, graph_for

NEGLIGIBLE_BYTES = 1 << 20
"""Temporary memory that no path takes an extra collective to avoid."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class CollectivePricing(Protocol):
    """What a step costs. An object that can be hashed must not change its prices: they are cached."""

    def seconds(self, kind: StepKind, nbytes: int, axis: int) -> float:
        """Positive seconds of one step along mesh ``axis``.

        Args:
            kind: the step's kind.
            nbytes: local bytes after an all_gather, before any other step; of the largest shard.
            axis: the mesh axis; a permute along several costs the most that it costs along one of them.
        """
        ...


@dataclass(frozen=True)
class Path:
    """A redistribution.

    Args:
        steps: in order.
        specs: the source, then the spec after each step.
        seconds: the sum over the steps.
        peak_bytes: the most that input and output of one step hold together on the fullest rank.
    """

    steps: tuple[Step, ...]
    specs: tuple[ShardingSpec, ...]
    seconds: float
    peak_bytes: int

    def __str__(self) -> str:
        return " -> ".join(map(str, self.specs))


def cheapest_path(
    src: ShardingSpec, dst: ShardingSpec, shape: Sequence[int], itemsize: int, mesh: Mesh, costs: CollectivePricing
) -> Path:
    """The cheapest way from ``src`` to ``dst`` for a tensor of global ``shape``, by Dijkstra's algorithm.

    No step holds more than source and target together (or ``NEGLIGIBLE_BYTES`` more), unless no path manages
    that. Of equally cheap paths the one with the fewest steps is taken, then the first in the order of steps.

    Args:
        itemsize: bytes of an element.

    Raises:
        SpecError: no path exists: the target is partial where the source is not, or reduces otherwise.
    """
    priced = priced_graph((src, dst), shape, itemsize, mesh, costs)
    start, end = priced.graph.index[src], priced.graph.index[dst]
    arcs = priced.shortest(start, end, priced.bound(start, end))
    if arcs is None:
        arcs = priced.shortest(start, end, np.inf)
    if arcs is None:
        raise unreachable(src, dst)
    return path_of(priced, start, arcs)


def all_pairs(
    specs_src: Sequence[ShardingSpec],
    specs_dst: Sequence[ShardingSpec],
    shape: Sequence[int],
    itemsize: int,
    mesh: Mesh,
    costs: CollectivePricing,
) -> Floats:
    """Seconds of ``cheapest_path`` from each source to each target: (A, B), inf where there is no path."""
    priced = priced_graph((*specs_src, *specs_dst), shape, itemsize, mesh, costs)
    index = priced.graph.index
    return priced.seconds(
        np.array([index[s] for s in specs_src], dtype=np.int64), np.array([index[s] for s in specs_dst], dtype=np.int64)
    )


def unreachable(src: ShardingSpec, dst: ShardingSpec) -> SpecError:
    return SpecError(
        "No redistribution leads from one spec to the other.",
        found=f"{src} -> {dst}",
        hint="a tensor cannot become partial, nor change its reduction; sums and maxima do not mix.",
    )


@dataclass(eq=False)
class PricedGraph:
    """A graph of specs with the bytes and seconds of one tensor; distances are computed when first asked for.

    Args:
        local_bytes: at each node.
        arcs: numbers of the arcs of ``graph`` that exist, sorted by head.
        cost: seconds of each of ``arcs``.
        peak: bytes of input and output of each of ``arcs``.
    """

    graph: SpecGraph
    local_bytes: Ints
    arcs: Ints
    cost: Floats
    peak: Ints
    _distance: Floats = field(init=False)
    _known: NDArray[np.bool_] = field(init=False)
    _bounded: dict[tuple[int, int], float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.graph.nodes)
        self._distance = np.full((n, n), np.inf)
        self._known = np.zeros(n, dtype=bool)

    def bound(self, start: int, end: int) -> float:
        """Bytes that a step between the two may hold."""
        return float(self.local_bytes[start] + self.local_bytes[end]) + NEGLIGIBLE_BYTES

    def seconds(self, starts: Ints, ends: Ints) -> Floats:
        """Of the best path from each of ``starts`` to each of ``ends``: (A, B)."""
        missing = np.unique(starts[~self._known[starts]])
        if len(missing):
            self._distance[missing] = self._distances(missing, np.arange(len(self.arcs))).T
            self._known[missing] = True
        out = self._distance[np.ix_(starts, ends)]
        return out if self._always_fits else self._within_bounds(starts, ends, out)

    @cached_property
    def _always_fits(self) -> bool:
        return not len(self.peak) or int(self.peak.max()) <= NEGLIGIBLE_BYTES

    def _within_bounds(self, starts: Ints, ends: Ints, out: Floats) -> Floats:
        """Replace the seconds of pairs whose cheapest paths hold too much by those of the cheapest that does not."""
        allowed = (self.local_bytes[starts][:, None] + self.local_bytes[ends][None, :]).astype(float) + NEGLIGIBLE_BYTES
        for level in np.unique(allowed):
            rows = np.flatnonzero((allowed == level).any(axis=1))
            arcs = np.flatnonzero(self.peak <= level)
            if len(arcs) == len(self.arcs):
                continue
            nodes, inverse = np.unique(starts[rows], return_inverse=True)
            distance = self._distances(nodes, arcs)[ends][:, inverse].T
            better = (allowed[rows] == level) & np.isfinite(distance)
            out[rows] = np.where(better, distance, out[rows])
        return out

    def _distances(self, starts: Ints, arcs: Ints) -> Floats:
        """Bellman and Ford's relaxation along ``arcs`` from all of ``starts`` at once: (nodes, starts)."""
        distance = np.full((len(self.graph.nodes), len(starts)), np.inf)
        distance[starts, np.arange(len(starts))] = 0.0
        head, tail = self.graph.head[self.arcs[arcs]], self.graph.tail[self.arcs[arcs]]
        if not len(head):
            return distance
        cost = self.cost[arcs][:, None]
        heads, first = np.unique(head, return_index=True)
        while True:
            candidate = distance[tail]
            candidate += cost
            best = np.minimum.reduceat(candidate, first, axis=0)
            before = distance[heads]
            if not (best < before).any():
                return distance
            distance[heads] = np.minimum(best, before)

    @cached_property
    def _leaving(self) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in self.graph.nodes]
        for i, t in enumerate(self.graph.tail[self.arcs]):
            out[t].append(i)
        return out

    def shortest(self, start: int, end: int, bound: float) -> list[int] | None:
        """Arcs of the cheapest path whose steps hold at most ``bound`` bytes; None when there is none."""
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
            for i in self._leaving[node]:
                head = int(heads[i])
                if head not in done and self.peak[i] <= bound:
                    heapq.heappush(queue, (seconds + float(self.cost[i]), steps + 1, [*taken, i], head))
        return None


def path_of(priced: PricedGraph, start: int, arcs: Sequence[int]) -> Path:
    """The path that takes ``arcs`` of ``priced`` from node ``start``."""
    graph = priced.graph
    steps = tuple(graph.steps[priced.arcs[i]] for i in arcs)
    specs = (graph.nodes[start], *(graph.nodes[graph.head[priced.arcs[i]]] for i in arcs))
    seconds = 0.0
    for i in arcs:
        seconds += float(priced.cost[i])
    peak = max((int(priced.peak[i]) for i in arcs), default=int(priced.local_bytes[start]))
    return Path(steps, specs, seconds, peak)


def priced_graph(
    ends: Sequence[ShardingSpec], shape: Sequence[int], itemsize: int, mesh: Mesh, costs: CollectivePricing
) -> PricedGraph:
    """The graph between ``ends``. A dim is cut into more parts than it has elements only if one of them does that."""
    graph = graph_for(len(shape), mesh, ends)
    over = graph.overcut(shape)[[graph.index[s] for s in ends]].any(axis=0)
    overcut_dims = tuple(int(d) for d in np.flatnonzero(over))
    try:
        return _priced_cached(graph, tuple(shape), itemsize, costs, overcut_dims)
    except TypeError:  # costs that cannot be hashed
        return _priced(graph, tuple(shape), itemsize, costs, overcut_dims)


def _priced(
    graph: SpecGraph, shape: tuple[int, ...], itemsize: int, costs: CollectivePricing, overcut_dims: tuple[int, ...]
) -> PricedGraph:
    local_bytes = graph.local_bytes(shape, itemsize)
    over = graph.overcut(shape)
    over[:, list(overcut_dims)] = False
    usable = ~over.any(axis=1)
    exists = usable[graph.tail] & usable[graph.head]
    exists[graph.misfits(shape)] = False
    arcs = np.flatnonzero(exists)
    before, after = local_bytes[graph.tail[arcs]], local_bytes[graph.head[arcs]]
    nbytes = np.where(graph.gathers[arcs], after, before)
    return PricedGraph(graph, local_bytes, arcs, _costs(graph, arcs, nbytes, costs), before + after)


def _costs(graph: SpecGraph, arcs: Ints, nbytes: Ints, costs: CollectivePricing) -> Floats:
    """Seconds of each arc; each distinct (kind, axes, bytes) is priced once."""
    keys, key_of_arc = graph.prices
    sizes, size_of_arc = np.unique(nbytes, return_inverse=True)
    codes, inverse = np.unique(key_of_arc[arcs] * len(sizes) + size_of_arc, return_inverse=True)
    prices = []
    for code in codes:
        (kind, axes), size = keys[code // len(sizes)], int(sizes[code % len(sizes)])
        prices.append(max(costs.seconds(kind, size, axis) for axis in axes))
    return np.array(prices, dtype=np.float64)[inverse]


_priced_cached = lru_cache(maxsize=1024)(_priced)
