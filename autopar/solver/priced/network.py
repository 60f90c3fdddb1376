"""A graph in flat arrays: what a choice costs and uses, and usages as costs, in a few numpy operations each."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from autopar.solver.clock import tick
from autopar.solver.problem import Array, IndexArray
from autopar.solver.reduce.graph import Graph

Pair: TypeAlias = tuple[int, int]


class Network:
    """The nodes of a graph are numbered 0 .. n - 1; a choice is an array of their options, and costs and usages of all
    options stand one after the other. Of edges that share a matrix there is one table.

    Args:
        first: where the options of each node begin in ``cost``, and the end.
        ends, edge_at: the nodes u < v of each edge, shape (2, edges), and where its table begins in ``tables``.
        limits, whole: what may be used at each time, and the limit of the problem that a use is a share of.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = graph.nodes()
        self.sizes: IndexArray = np.array([len(graph.costs[node]) for node in self.nodes], dtype=np.int64)
        self.first: IndexArray = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        self.cost = np.concatenate([graph.costs[node] for node in self.nodes]) if self.nodes else np.zeros(0)
        place = {node: at for at, node in enumerate(self.nodes)}
        pairs = graph.pairs()
        self.ends: IndexArray = np.array([(place[u], place[v]) for u, v in pairs], dtype=np.int64).reshape(-1, 2).T
        self._read_tables([graph.neighbours[u][v] for u, v in pairs])
        self._bar()
        self._read_rows()
        tick("compiled element", len(self.cost) + len(self.amounts) + len(self.edge_at))

    def _read_tables(self, matrices: list[Array]) -> None:
        at: dict[int, int] = {}
        unique: list[Array] = []
        end = 0
        for matrix in matrices:
            if id(matrix) not in at:
                at[id(matrix)] = end
                unique.append(matrix.ravel())
                end += matrix.size
        self.tables = np.concatenate(unique) if unique else np.zeros(0)
        self.edge_at: IndexArray = np.array([at[id(matrix)] for matrix in matrices], dtype=np.int64)
        self._width = self.sizes[self.ends[1]]

    def _bar(self) -> None:
        """Sums of infinities are none: what is forbidden is very dear instead."""
        dear = np.where(np.isfinite(self.cost), self.cost, 0.0)
        dearest = float(np.maximum.reduceat(dear, self.first[:-1]).sum()) if len(dear) else 0.0
        finite = np.isfinite(self.tables)
        dearest += float(self.tables.max(where=finite, initial=0.0)) or 1.0
        # More than any choice that is worth comparing, and few enough digits above it.
        self.barred = 100 * dearest
        np.minimum(self.cost, self.barred, out=self.cost)
        np.minimum(self.tables, self.barred, out=self.tables)

    def _read_rows(self) -> None:
        rows = [(at, row) for at, node in enumerate(self.nodes) for row in self.graph.rows[node]]
        self.limits = self.graph.limits
        self.whole = max(self.graph.problem.limit, 1e-300)
        self.row_node: IndexArray = np.array([at for at, _ in rows], dtype=np.int64)
        self.row_start: IndexArray = np.array([row.start for _, row in rows], dtype=np.int64)
        self.row_end: IndexArray = np.array([row.end for _, row in rows], dtype=np.int64)
        self.amounts = np.concatenate([row.amount for _, row in rows]) if rows else np.zeros(0)
        self._row_sizes = self.sizes[self.row_node]
        self.row_first: IndexArray = np.cumsum(self._row_sizes) - self._row_sizes
        self._priced_at = np.arange(len(self.amounts)) + np.repeat(
            self.first[self.row_node] - self.row_first, self._row_sizes
        )
        self.rows_begin: IndexArray = np.searchsorted(self.row_node, np.arange(len(self.nodes) + 1))

    def expand(self, choice: IndexArray) -> tuple[int, ...]:
        """The choice of the whole problem."""
        return self.graph.expand(dict(zip(self.nodes, choice.tolist(), strict=True)))

    def project(self, choice: tuple[int, ...]) -> IndexArray:
        """A choice near one of the whole problem."""
        local = self.graph.project(choice)
        return np.array([local[node] for node in self.nodes], dtype=np.int64)

    def value(self, choice: IndexArray, cost: Array) -> float:
        """What a choice costs where the options of nodes cost ``cost``, without the offset of the graph."""
        tick("flat element", len(self.nodes) + len(self.edge_at))
        u, v = self.ends
        paid = self.tables[self.edge_at + choice[u] * self._width + choice[v]]
        return float(cost[self.first[:-1] + choice].sum() + paid.sum())

    def used(self, choice: IndexArray) -> Array:
        """What a choice uses at each time."""
        tick("flat element", len(self.row_node))
        return self.over_time(self.row_start, self.row_end, self.amounts[self.row_first + choice[self.row_node]])

    def over_time(self, start: IndexArray, end: IndexArray, amount: Array) -> Array:
        """What amounts add up to at each time."""
        most = len(self.limits) + 1
        return np.cumsum(np.bincount(start, amount, most) - np.bincount(end, amount, most))[:-1]

    def excess(self, choice: IndexArray) -> Array:
        """What a choice uses beyond the limit at each time, as a share of all of it."""
        return (self.used(choice) - self.limits) / self.whole

    def least_excess(self) -> Array:
        """The same where each node uses the least that it can, each use apart."""
        if not len(self.row_node):
            return -self.limits / self.whole
        least = np.minimum.reduceat(self.amounts, self.row_first)
        return (self.over_time(self.row_start, self.row_end, least) - self.limits) / self.whole

    def priced(self, prices: Array) -> Array:
        """The costs of all options with what they use, at ``prices`` for all of the limit at each time."""
        tick("flat element", len(self.amounts))
        total = np.concatenate([[0.0], np.cumsum(prices / self.whole)])
        rate = np.repeat(total[self.row_end] - total[self.row_start], self._row_sizes)
        return self.cost + np.bincount(self._priced_at, self.amounts * rate, len(self.cost))
