"""The graph of all specs of a tensor, with an arc for each one-step redistribution, as flat arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, combinations, product

import numpy as np
from numpy.typing import NDArray

from autopar.mesh import Mesh
from autopar.sharding.redistribution import Step, StepKind, steps_from
from autopar.sharding.spec import Reduction, ShardingSpec, length

Dims = tuple[tuple[int, ...], ...]
Partial = tuple[tuple[int, Reduction], ...]

ALL_ORDERS_UP_TO_AXES = 3
"""With more mesh axes than this, specs with non-increasing axes are nodes only if they are ends, to bound the graph."""


@dataclass(frozen=True, eq=False)
class SpecGraph:
    """The specs of tensors of ``ndim`` dims on ``mesh``, and the steps between them.

    Args:
        nodes: the specs.
        tail, head: arc i leads from ``nodes[tail[i]]`` to ``nodes[head[i]]``; arcs are sorted by head.
        steps: the step of each arc.
        symmetric: whether swapping dims of a node always gives another node.
    """

    ndim: int
    mesh: Mesh
    nodes: tuple[ShardingSpec, ...]
    tail: NDArray[np.int64]
    head: NDArray[np.int64]
    steps: tuple[Step, ...]
    symmetric: bool

    @cached_property
    def index(self) -> dict[ShardingSpec, int]:
        return {spec: i for i, spec in enumerate(self.nodes)}

    @cached_property
    def prices(self) -> tuple[list[tuple[StepKind, tuple[int, ...]]], NDArray[np.int64]]:
        """The distinct pairs (kind, mesh axes along which data moves), and the index of each arc's pair."""
        keys = [(s.kind, s.moved_axes(self.nodes[t])) for s, t in zip(self.steps, self.tail, strict=True)]
        number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        return list(number), np.array([number[k] for k in keys], dtype=np.int64)

    @cached_property
    def gathers(self) -> NDArray[np.bool_]:
        return np.array([s.kind == "all_gather" for s in self.steps], dtype=bool)

    @cached_property
    def cuts(self) -> tuple[list[tuple[int, ...]], NDArray[np.int64]]:
        """The distinct tuples of axes that cut a dim, and the index of that of dim d of node i: (nodes, ndim)."""
        number = {axes: i for i, axes in enumerate(dict.fromkeys(chain.from_iterable(n.dims for n in self.nodes)))}
        table = [[number[axes] for axes in n.dims] for n in self.nodes]
        return list(number), np.array(table, dtype=np.int64).reshape(len(self.nodes), self.ndim)

    def local_bytes(self, shape: Sequence[int], itemsize: int) -> NDArray[np.int64]:
        """Return the bytes of the largest shard at each node."""
        distinct, table = self.cuts
        out = np.full(len(self.nodes), itemsize, dtype=np.int64)
        for d, n in enumerate(shape):
            out *= np.array([length(n, axes, self.mesh) for axes in distinct], dtype=np.int64)[table[:, d]]
        return out

    def overcut(self, shape: Sequence[int]) -> NDArray[np.bool_]:
        """Return whether node i cuts dim d into more parts than it has elements: (nodes, ndim)."""
        distinct, table = self.cuts
        ways = np.array([ShardingSpec((axes,)).ways(self.mesh) for axes in distinct], dtype=np.int64)[table]
        return (ways > np.array(shape, dtype=np.int64)) & (ways > 1)

    def misfits(self, shape: Sequence[int]) -> NDArray[np.int64]:
        """Return the arcs that do not exist for tensors of ``shape``."""
        bad = [i for i in self._permutes if not self.steps[i].fits(self.nodes[self.tail[i]], shape, self.mesh)]
        return np.array(bad, dtype=np.int64)

    def representative(self, node: int, alike: tuple[int, ...]) -> tuple[int, NDArray[np.int64]]:
        """Return the representative of all nodes that equal ``node`` up to a swap of ``alike`` dims.

        The second result maps every node to its image under the swap that leads there.
        """
        order = list(range(self.ndim))
        dims = self.nodes[node].dims
        for kind in set(alike) if self.symmetric else ():
            members = [d for d in order if alike[d] == kind]
            for d, source in zip(members, sorted(members, key=lambda m: dims[m]), strict=True):
                order[d] = source
        traded = self._swapped(tuple(order))
        return int(traded[node]), traded

    def _swapped(self, order: tuple[int, ...]) -> NDArray[np.int64]:
        if order not in self._swaps:
            index = self.index
            moved = (ShardingSpec(tuple(n.dims[d] for d in order), n.partial) for n in self.nodes)
            same = order == tuple(range(self.ndim))
            found = range(len(self.nodes)) if same else [index[spec] for spec in moved]
            self._swaps[order] = np.array(found, dtype=np.int64)
        return self._swaps[order]

    @cached_property
    def _swaps(self) -> dict[tuple[int, ...], NDArray[np.int64]]:
        return {}

    @cached_property
    def _permutes(self) -> list[int]:
        return [i for i, s in enumerate(self.steps) if s.kind == "permute" and s.dim >= 0]


def graph_for(ndim: int, mesh: Mesh, ends: Sequence[ShardingSpec]) -> SpecGraph:
    """Return the graph in which to search redistributions between any two of ``ends``.

    Its nodes are all specs over the mesh's axes that are at most as partial as an end. On meshes of many axes only
    increasing orders are included, and the specs that lead to ``unusual`` ends. What a pair of ends can reach does not
    depend on the other ends, so a pair costs the same alone and among others.
    """
    for spec in ends:
        spec.check(ndim, mesh)
    mesh = Mesh(mesh.shape)
    partials = {q for p in {s.partial for s in ends} for q in _less_partial(p, mesh)} | {()}
    odd = {dims for s in ends if unusual(s, mesh) for dims in _prefixes(s.dims)}
    return _graph(ndim, mesh, tuple(sorted(partials)), tuple(sorted(odd)))


def unusual(spec: ShardingSpec, mesh: Mesh) -> bool:
    """Whether the spec is a node only in graphs that have it as an end."""
    return mesh.ndim > ALL_ORDERS_UP_TO_AXES and any(list(d) != sorted(d) for d in spec.dims)


@lru_cache(maxsize=256)
def _graph(ndim: int, mesh: Mesh, partials: tuple[Partial, ...], odd: tuple[Dims, ...]) -> SpecGraph:
    nodes = tuple(dict.fromkeys(_nodes(ndim, mesh, partials, odd)))
    index = {spec: i for i, spec in enumerate(nodes)}
    arcs = [
        (index[after], i, position, step)
        for i, spec in enumerate(nodes)
        for position, (step, after) in enumerate(steps_from(spec, ndim, mesh))
        if after in index
    ]
    arcs.sort(key=lambda a: a[:3])
    head = np.array([a[0] for a in arcs], dtype=np.int64)
    tail = np.array([a[1] for a in arcs], dtype=np.int64)
    return SpecGraph(ndim, mesh, nodes, tail, head, tuple(a[3] for a in arcs), symmetric=not odd)


def _nodes(ndim: int, mesh: Mesh, partials: tuple[Partial, ...], odd: tuple[Dims, ...]) -> Iterator[ShardingSpec]:
    increasing_only = mesh.ndim > ALL_ORDERS_UP_TO_AXES
    for partial in partials:
        taken = {a for a, _ in partial}
        for dims in _cuts(((),) * ndim, [a for a in range(mesh.ndim) if a not in taken], increasing_only):
            yield ShardingSpec(dims, partial)
        for dims in odd:
            if taken.isdisjoint(chain.from_iterable(dims)):
                yield ShardingSpec(dims, partial)


def _cuts(dims: Dims, axes: list[int], increasing_only: bool) -> Iterator[Dims]:
    """Yield every way to give each of ``axes`` a place in some dim, or none."""
    if not axes:
        yield dims
        return
    yield from _cuts(dims, axes[1:], increasing_only)
    for d, cut in enumerate(dims):
        for at in range(len(cut) if increasing_only else 0, len(cut) + 1):
            yield from _cuts((*dims[:d], (*cut[:at], axes[0], *cut[at:]), *dims[d + 1 :]), axes[1:], increasing_only)


@lru_cache(maxsize=1024)
def _less_partial(partial: Partial, mesh: Mesh) -> frozenset[Partial]:
    """Return everything that reductions and permutes between axes of equal size can make of ``partial``."""
    found: set[Partial] = set()
    for subset in chain.from_iterable(combinations(partial, size) for size in range(len(partial) + 1)):
        places = [[a for a in range(mesh.ndim) if mesh.shape[a] == mesh.shape[axis]] for axis, _ in subset]
        for axes in product(*places):
            if len(set(axes)) == len(axes):
                found.add(tuple(sorted(zip(axes, (kind for _, kind in subset), strict=True))))
    return frozenset(found)


def _prefixes(dims: Dims) -> Iterator[Dims]:
    """Yield every spec on the way to ``dims`` when its cuts are made one by one."""
    return product(*([axes[:n] for n in range(len(axes) + 1)] for axes in dims))
