"""The greedy redistribution of Colossal-Auto, kept for comparison: it follows a similarity of specs, not costs."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.mesh import Mesh
from autopar.sharding.paths import Path, path_of, unreachable
from autopar.sharding.priced_graph import CollectivePricing, PricedGraph, priced_graph
from autopar.sharding.spec import ShardingSpec

DROP, APPEND, FURTHER, REDUCE = 20, 5, 6, 100
"""Weights of a dim's distance: an axis to gather, an axis to cut, and each step after the first, as in Colossal-Auto.
REDUCE, for a partial axis to reduce, is our addition and outweighs the others."""


def distance(spec: ShardingSpec, target: ShardingSpec) -> int:
    """Return the distance of two specs, zero if they are equal. It is 5 + 20 = 25 for S0R and RS0, 16 for R and S01."""
    cuts = sum(_dim_distance(a, b) for a, b in zip(spec.dims, target.dims, strict=True))
    return cuts + REDUCE * len(set(spec.partial) ^ set(target.partial))


def _dim_distance(axes: tuple[int, ...], target: tuple[int, ...]) -> int:
    common = 0
    while axes[common : common + 1] and axes[common : common + 1] == target[common : common + 1]:
        common += 1
    drops, appends = len(axes) - common, len(target) - common
    return DROP * drops + APPEND * appends + FURTHER * max(drops + appends - 1, 0)


def greedy_path(
    src: ShardingSpec, dst: ShardingSpec, shape: Sequence[int], itemsize: int, mesh: Mesh, costs: CollectivePricing
) -> Path:
    """Return the path that steps to the neighbour closest to ``dst`` each time; ties go to the first.

    It uses the steps of Colossal-Auto (all-gather, slice and all-to-all) and reductions of partial sums. ``costs`` only
    price the result.

    Raises:
        SpecError: if it gets stuck or no path exists.
    """
    priced = priced_graph((src, dst), shape, itemsize, mesh, costs)
    index = priced.graph.index
    node, end = index[src], index[dst]
    arcs: list[int] = []
    visited = {node}
    while node != end:
        choices = _choices(priced, node, visited)
        if not choices:
            raise unreachable(src, dst)
        arc = min(choices, key=lambda i: (distance(priced.graph.nodes[_head(priced, i)], dst), i))
        arcs.append(arc)
        node = _head(priced, arc)
        visited.add(node)
    return path_of(priced, index[src], arcs)


def _choices(priced: PricedGraph, node: int, visited: set[int]) -> list[int]:
    return [
        i
        for i in priced.leaving[node]
        if priced.graph.steps[priced.arcs[i]].kind != "permute" and _head(priced, i) not in visited
    ]


def _head(priced: PricedGraph, arc: int) -> int:
    return int(priced.graph.head[priced.arcs[arc]])
