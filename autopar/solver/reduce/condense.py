"""Fewer times and fewer rows of usage, by looking at all the options of all nodes at once.

Merged nodes have many overlapping rows. At each time what a node's least option uses goes to the limit; then a time is
dropped when even the largest options fit, or when a kept neighbour in time asks at least as much of every option.
"""

from __future__ import annotations

import numpy as np

from autopar import settings
from autopar.solver.problem import Array
from autopar.solver.reduce.graph import Graph, Row


def condense_usages(graph: Graph) -> bool:
    """Whether it was done: the table must not be too large."""
    nodes = [node for node in graph.nodes() if graph.rows[node]]
    options = sum(len(graph.costs[node]) for node in nodes)
    times = len(graph.limits)
    if not times or not nodes or times * options > settings.TABLE:
        return False
    tables = [_dense(graph, node) for node in nodes]
    limits = graph.limits.copy()
    for table in tables:
        least = table.min(axis=1)
        limits -= least
        table -= least[:, None]
    largest = np.sum([table.max(axis=1) for table in tables], axis=0)
    asked = np.concatenate(tables, axis=1)
    kept = _undominated(asked, limits, np.flatnonzero(largest > limits))
    graph.limits = limits[kept]
    graph.times = graph.times[kept]
    for node, table in zip(nodes, tables, strict=True):
        graph.rows[node] = _runs(table[kept])
    return True


def _dense(graph: Graph, node: int) -> Array:
    """What each option uses at each time, shape (times, options)."""
    change = np.zeros((len(graph.limits) + 1, len(graph.costs[node])))
    for row in graph.rows[node]:
        change[row.start] += row.amount
        change[row.end] -= row.amount
    return np.asarray(np.cumsum(change, axis=0)[:-1])


def _undominated(asked: Array, limits: Array, tight: np.ndarray) -> list[int]:
    kept: list[int] = []
    for time in tight:
        while kept and _implies(asked, limits, int(time), kept[-1]):
            kept.pop()
        if not kept or not _implies(asked, limits, kept[-1], int(time)):
            kept.append(int(time))
    return kept


def _implies(asked: Array, limits: Array, one: int, other: int) -> bool:
    """Whether keeping within the limit at ``one`` does so at ``other``."""
    return bool(limits[one] <= limits[other] and (asked[one] >= asked[other]).all())


def _runs(table: Array) -> list[Row]:
    """Rows over stretches of times at which each option uses the same."""
    if not len(table):
        return []
    starts = np.flatnonzero(np.concatenate([[True], (table[1:] != table[:-1]).any(axis=1)]))
    ends = np.append(starts[1:], len(table))
    return [Row(int(s), int(e), table[s].copy()) for s, e in zip(starts, ends, strict=True) if table[s].max() > 0]
