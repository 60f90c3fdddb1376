"""The order in which message passing visits the nodes: one that keeps few nodes half visited, as along a network.

A sweep carries what it learns only from earlier nodes to later ones, so the numbers of the nodes are a poor order where
neighbours have distant ones. Here each next node is the neighbour of the visited whose visit leaves the fewest edges
to unvisited nodes (a greedy for the sum cut, as King 1970 for profiles), the longest waiting one among equals.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence


def narrow_order(nodes: Sequence[int], neighbours: Mapping[int, Iterable[int]] | Sequence[Iterable[int]]) -> list[int]:
    """All of ``nodes``, one connected part after the other."""
    around = {node: list(neighbours[node]) for node in nodes}
    order: list[int] = []
    visited: set[int] = set()
    for node in nodes:
        if node not in visited:
            part = _visit(_far_end(_far_end(node, around), around), around)
            order += part
            visited.update(part)
    return order


def _far_end(start: int, around: Mapping[int, Sequence[int]]) -> int:
    """The node that a breadth-first search from ``start`` finds last."""
    seen = {start}
    waiting = deque([start])
    last = start
    while waiting:
        last = waiting.popleft()
        for other in around[last]:
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return last


def _visit(start: int, around: Mapping[int, Sequence[int]]) -> list[int]:
    open_edges = {start: len(around[start])}
    since = {start: 0}
    heap = [(0, 0, start)]
    order: list[int] = []
    visited: set[int] = set()
    while heap:
        _, _, node = heapq.heappop(heap)
        if node in visited:  # an entry from before a neighbour was visited
            continue
        visited.add(node)
        order.append(node)
        for other in around[node]:
            if other not in visited:
                # An edge to a visited node closes, and another to an unvisited one opens no more.
                open_edges[other] = open_edges.get(other, len(around[other])) - 2
                since.setdefault(other, len(order))
                heapq.heappush(heap, (open_edges[other], since[other], other))
    return order
