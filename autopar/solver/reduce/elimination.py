"""The optimum of a narrow graph of any length: nodes leave one by one, each by a minimum over its options of the sum of
all tables that it is in, which is a table over its neighbours (Bertele & Brioschi 1972)."""

from __future__ import annotations

import heapq
import math
from functools import reduce

import numpy as np

from autopar import settings
from autopar.solver.clock import tick
from autopar.solver.problem import Array
from autopar.solver.reduce.graph import Graph

Table = tuple[tuple[int, ...], Array]
"""Seconds for the options of some nodes, in ascending order, one axis each."""


def narrow_elimination(graph: Graph) -> list[int] | None:
    """All nodes, always the one next whose table is the smallest; None where the tables have too many elements.

    Usages are left out. Tables grow with the width of the graph, so they are counted before any is made, and one option
    as two, since an array has few axes.
    """
    around = {node: set(graph.neighbours[node]) for node in graph.nodes()}
    weights = {node: math.log(max(len(graph.costs[node]), 2)) for node in around}
    present = {node: weights[node] + math.fsum(weights[other] for other in around[node]) for node in around}
    heap = [(weight, node) for node, weight in present.items()]
    heapq.heapify(heap)
    tick("planned node", len(heap))
    order, elements = [], 0.0
    while heap:
        weight, node = heapq.heappop(heap)
        if present.get(node) != weight:  # an entry from before a neighbour left
            continue
        del present[node]
        order.append(node)
        elements += math.exp(weight)
        if elements > settings.ELIMINATED:
            return None
        others = around.pop(node)
        for other in others:  # a hub has many more neighbours than come and go
            new = others - around[other] - {other}
            around[other] |= new
            around[other].discard(node)
            present[other] += math.fsum(weights[each] for each in new) - weights[node]
            heapq.heappush(heap, (present[other], other))
    return order


def eliminate(graph: Graph, order: list[int]) -> tuple[float, dict[int, int]]:
    """The least seconds of a graph without its usages, infinite where no choice is allowed, and the choice."""
    # The tables that each node is in, by their nodes, or by -1 and the node whose elimination made them.
    tables: dict[int, dict[tuple[int, ...], Table]] = {n: {(n,): ((n,), graph.costs[n])} for n in order}
    for u, v in graph.pairs():
        tables[u][u, v] = tables[v][u, v] = ((u, v), graph.neighbours[u][v])
    least, sums = graph.offset, []
    for node in order:
        mine = tables.pop(node)
        scope = tuple(sorted({other for among, _ in mine.values() for other in among}))
        total = reduce(np.add, (_over(scope, table) for table in mine.values()))
        tick("flat element", total.size * len(mine))
        sums.append((node, scope, total))
        left, made = tuple(other for other in scope if other != node), total.min(axis=scope.index(node))
        for key, (among, _) in mine.items():
            for other in set(among) - {node}:
                del tables[other][key]
        for other in left:
            tables[other][-1, node] = (left, made)
        if not left:
            least += float(made)
    choice: dict[int, int] = {}
    for node, scope, total in reversed(sums):
        choice[node] = int(total[tuple(choice.get(other, slice(None)) for other in scope)].argmin())
    return least, choice


def _over(scope: tuple[int, ...], table: Table) -> Array:
    """The table with an axis for each node of ``scope``, of one element where it does not depend on the node."""
    among, values = table
    shape = iter(values.shape)
    return values.reshape([next(shape) if node in among else 1 for node in scope])
