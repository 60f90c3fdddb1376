"""The cheapest redistribution between two specs, or between all pairs of two lists of specs.

A path is a walk in the graph of specs, and its cost is the sum over its steps. Paths whose steps all fit in the memory
of source plus target are preferred; only if there is none is the cheapest of all paths taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import SpecError
from autopar.mesh import Mesh
from autopar.sharding.pareto import pareto_set
from autopar.sharding.priced_graph import CollectivePricing, Floats, PricedGraph, priced, priced_graph
from autopar.sharding.redistribution import Step
from autopar.sharding.spec import ShardingSpec
from autopar.sharding.spec_graph import graph_for, unusual


@dataclass(frozen=True)
class Path:
    """A redistribution.

    Args:
        steps: the steps in order.
        specs: the source, then the spec after each step.
        seconds: sum over the steps.
        peak_bytes: largest sum of a step's input and output on the fullest rank.
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
    """Return the cheapest redistribution from ``src`` to ``dst`` of a tensor of global ``shape``.

    With affine costs (``LinearPricing``) one search serves all sizes (``pareto_set``); otherwise Dijkstra's algorithm
    runs for this size.

    No step holds more than source and target together plus ``NEGLIGIBLE_BYTES``, unless every path does. Ties go to the
    path with the fewest steps, then to the first in the order of steps.

    Args:
        itemsize: bytes of an element.

    Raises:
        SpecError: if no path exists: the target is partial where the source is not, or has another reduction.
    """
    found = pareto_set(src, dst, shape, itemsize, mesh, costs)
    if found is not None:
        alternatives, scale = found
        line = alternatives.best(scale)
        if line is None:
            raise unreachable(src, dst)
        return Path(line.steps, line.specs, line.seconds(scale), line.peak_units * scale)
    tensor = priced_graph((src, dst), shape, itemsize, mesh, costs)
    start, end = tensor.graph.index[src], tensor.graph.index[dst]
    arcs = tensor.shortest(start, end, tensor.bound(start, end))
    if arcs is None:
        arcs = tensor.shortest(start, end, np.inf)
    if arcs is None:
        raise unreachable(src, dst)
    return path_of(tensor, start, arcs)


def all_pairs(
    specs_src: Sequence[ShardingSpec],
    specs_dst: Sequence[ShardingSpec],
    shape: Sequence[int],
    itemsize: int,
    mesh: Mesh,
    costs: CollectivePricing,
) -> Floats:
    """Return the seconds of ``cheapest_path`` from each source to each target, shape (A, B); inf without a path."""
    rows = [i for i, s in enumerate(specs_src) if not unusual(s, mesh)]
    columns = [j for j, d in enumerate(specs_dst) if not unusual(d, mesh)]
    if len(rows) == len(specs_src) and len(columns) == len(specs_dst):
        return _seconds(specs_src, specs_dst, shape, itemsize, mesh, costs)
    common = np.zeros((len(specs_src), len(specs_dst)), dtype=bool)
    common[np.ix_(rows, columns)] = True
    out = np.full(common.shape, np.inf)
    sources, targets = [specs_src[i] for i in rows], [specs_dst[j] for j in columns]
    out[np.ix_(rows, columns)] = _seconds(sources, targets, shape, itemsize, mesh, costs)
    for i, j in zip(*np.nonzero(~common), strict=True):
        # The extra nodes around an unusual spec must not be open to other pairs.
        out[i, j] = _seconds([specs_src[i]], [specs_dst[j]], shape, itemsize, mesh, costs)[0, 0]
    return out


def _seconds(
    sources: Sequence[ShardingSpec],
    targets: Sequence[ShardingSpec],
    shape: Sequence[int],
    itemsize: int,
    mesh: Mesh,
    costs: CollectivePricing,
) -> Floats:
    graph = graph_for(len(shape), mesh, (*sources, *targets))
    rows, columns = (np.array([graph.index[s] for s in specs], dtype=np.int64) for specs in (sources, targets))
    overcut = graph.overcut(shape) @ (1 << np.arange(len(shape)))
    pairs = overcut[rows][:, None] | overcut[columns][None, :]
    out = np.full(pairs.shape, np.inf)
    for code in np.unique(pairs):
        tensor = priced(graph, shape, itemsize, costs, tuple(d for d in range(len(shape)) if code >> d & 1))
        here = pairs == code
        i, j = np.flatnonzero(here.any(axis=1)), np.flatnonzero(here.any(axis=0))
        out[here] = tensor.seconds(rows[i], columns[j])[here[np.ix_(i, j)]]
    return out


def unreachable(src: ShardingSpec, dst: ShardingSpec) -> SpecError:
    return SpecError(
        "No redistribution leads from one spec to the other.",
        found=f"{src} -> {dst}",
        hint="a tensor cannot become partial or change its reduction, and sums and maxima do not mix.",
    )


def path_of(tensor: PricedGraph, start: int, arcs: Sequence[int]) -> Path:
    """Return the path that follows ``arcs`` of ``tensor`` from node ``start``."""
    graph = tensor.graph
    steps = tuple(graph.steps[tensor.arcs[i]] for i in arcs)
    specs = (graph.nodes[start], *(graph.nodes[graph.head[tensor.arcs[i]]] for i in arcs))
    seconds = 0.0
    for i in arcs:
        seconds += float(tensor.cost[i])
    peak = max((int(tensor.peak[i]) for i in arcs), default=int(tensor.local_bytes[start]))
    return Path(steps, specs, seconds, peak)
