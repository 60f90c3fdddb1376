"""A lower bound and choices by dual ascent: sequential tree-reweighted message passing (Kolmogorov 2006, 2015).

Costs are shifted between nodes and edges so that the sum of their minima, a bound, rises. An edge's costs are
``matrix + left[a] + right[b]``; the shared matrix is never written. Sweeps go up and down an order of the nodes: a
node collects from each edge to an earlier one its min-marginals, then hands its costs out to the edges to later ones.
Rows of usage are priced by multipliers; any multipliers >= 0 give a valid bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.solver.clock import A_LOOK, tick
from autopar.solver.problem import BARRED, Array, IndexArray, Messages
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.ordering import narrow_order


@dataclass
class SweepResult:
    """``lower_bound`` in seconds; ``choice``: decoded along the sweep, empty where none was asked for; ``marginals``: a
    bound for each option."""

    lower_bound: float
    choice: dict[int, int]
    marginals: dict[int, Array]


class _Side(NamedTuple):
    """Edges of a node on one side.

    Args:
        others: the nodes there.
        handed: what the node has handed to each edge of its costs, shape (edges, options).
        edges: of each edge its matrix, and what the other node has handed to it, as a column.
        elements: of the matrices.
    """

    others: Sequence[int]
    handed: Array
    edges: Sequence[tuple[Array, Array]]
    elements: int


class Dual:
    """The state of the ascent on nodes and edges that stay.

    Args:
        costs: of the options of each node.
        neighbours: for each node and neighbour the matrix of their edge, shape (own options, the neighbour's). Where
            matrices are written to while the ascent goes on, messages are about what they are then.
        constant: is added to every bound.
        options: numbers by which later ascents know those of each node.
        known: messages of these nodes while there were more of them, or under other costs, to go on from: any messages
            give a valid bound.
    """

    def __init__(
        self,
        costs: Mapping[int, Array],
        neighbours: Mapping[int, Mapping[int, Array]] | Sequence[Mapping[int, Array]],
        constant: float = 0.0,
        options: Mapping[int, IndexArray] | None = None,
        known: Messages | None = None,
    ) -> None:
        self.constant = constant
        self.options = options or {node: np.arange(len(cost)) for node, cost in costs.items()}
        self._all = np.concatenate([*costs.values(), np.zeros(0)])
        views = np.split(self._all, np.cumsum([len(cost) for cost in costs.values()])[:-1]) if costs else []
        self.theta = dict(zip(costs, views, strict=True))
        order = narrow_order(list(costs), neighbours)
        rank = {node: place for place, node in enumerate(order)}
        around = {node: sorted(neighbours[node], key=rank.__getitem__) for node in order}
        self._place = {(node, other): i for node, others in around.items() for i, other in enumerate(others)}
        self._handed = {node: np.zeros((len(around[node]), len(costs[node]))) for node in order}
        self._hand_out(known or {})
        self._sides: dict[int, tuple[_Side, _Side]] = {}
        for node in order:
            cut = sum(rank[other] < rank[node] for other in around[node])
            earlier, later = (
                self._side(node, around[node], part, neighbours) for part in (slice(cut), slice(cut, None))
            )
            self._sides[node] = earlier, later
            self._collect(node, earlier)
        up = [(node, earlier, later) for node, (earlier, later) in self._sides.items()]
        self._steps = {True: up, False: [(node, later, earlier) for node, earlier, later in reversed(up)]}
        self._count(up)

    @classmethod
    def of(cls, graph: Graph, prices: Array | None = None, known: Messages | None = None) -> Dual:
        """That of a graph which doesn't change meanwhile, with usages priced, in seconds a byte at each time."""
        nodes, costs = graph.nodes(), dict(enumerate(graph.costs))
        if prices is not None and prices.any():
            total = np.concatenate([[0.0], np.cumsum(prices)])
            for node in nodes:
                for row in graph.rows[node]:
                    costs[node] = costs[node] + (total[row.end] - total[row.start]) * row.amount
        constant = graph.offset - (0.0 if prices is None else float(prices @ graph.limits))
        options = {node: graph.options[node] for node in nodes}
        return cls({node: costs[node] for node in nodes}, graph.neighbours, constant, options, known)

    def messages(self) -> Messages:
        """What a later ascent can go on from."""
        found: dict[int, tuple[IndexArray, dict[int, Array]]] = {n: (self.options[n], {}) for n in self.theta}
        for (node, other), i in self._place.items():
            found[node][1][other] = self._handed[node][i].copy()
        return found

    def _hand_out(self, known: Messages) -> None:
        for (node, other), i in self._place.items():
            options, handed = known.get(node, (self.options[node], {}))
            if other in handed:
                own = self.options[node]
                at = np.minimum(np.searchsorted(options, own), len(options) - 1)
                self._handed[node][i] = np.where(options[at] == own, handed[other][at], 0.0)
                self.theta[node] -= self._handed[node][i]

    def _side(
        self,
        node: int,
        around: Sequence[int],
        part: slice,
        neighbours: Mapping[int, Mapping[int, Array]] | Sequence[Mapping[int, Array]],
    ) -> _Side:
        others = around[part]
        columns = (self._handed[other][self._place[other, node]][:, None] for other in others)
        matrices = [neighbours[other][node] for other in others]
        edges = list(zip(matrices, columns, strict=True))
        return _Side(others, self._handed[node][part], edges, sum(matrix.size for matrix in matrices))

    def _count(self, steps: Sequence[tuple[int, _Side, _Side]]) -> None:
        tick("swept node", len(steps))
        tick("swept edge", sum(len(behind.edges) for _, behind, _ in steps))
        tick("element of a message", sum(behind.elements for _, behind, _ in steps))

    def _collect(self, node: int, side: _Side) -> None:
        """Move the min-marginals of these edges to ``node``."""
        if not side.edges:
            return
        least = np.empty_like(side.handed)
        for i, (matrix, column) in enumerate(side.edges):
            np.minimum.reduce(matrix + column, axis=0, out=least[i])
        self.theta[node] += (side.handed + least).sum(axis=0)
        np.negative(least, out=side.handed)

    def gather(self, node: int) -> Array:
        """Move the min-marginals of all its edges to ``node``; its costs then."""
        for side in self._sides[node]:
            self._collect(node, side)
        return self.theta[node]

    def add(self, change: Array) -> None:
        """To the costs of the options of all nodes, one node after the other."""
        self._all += change

    def sweep(self, forward: bool, *, decode: bool = True, late: Callable[[], bool] | None = None) -> SweepResult:
        """One pass; the bound after it, a choice, and for each option a bound on every choice that takes it.

        Where it gets ``late`` on the way, the bound is that from before, and choice and marginals are empty.
        """
        steps = self._steps[forward]
        bound = bound_before = self._bound()
        choice: dict[int, int] = {}
        marginals: dict[int, Array] = {}
        handed_least: dict[int, float] = {}
        for at, (node, behind, ahead) in enumerate(steps, 1):
            if at % A_LOOK == 0:
                self._count(steps[at - A_LOOK : at])
                if late is not None and late():
                    return SweepResult(bound_before, {}, {})
            theta = self.theta[node]
            if decode:
                choice[node] = _decode(theta, behind, choice)
            before = float(theta.min()) + sum([handed_least[other] for other in behind.others])
            self._collect(node, behind)
            least = float(theta.min())
            bound += least - before
            marginals[node] = theta + (bound - least)
            share = 1.0 / max(len(behind.others), len(ahead.others), 1)
            handed_least[node] = share * least
            if ahead.others:
                part = theta * share
                handed = ahead.handed
                handed += part
                theta -= part * len(ahead.others)
        self._count(steps[len(steps) - len(steps) % A_LOOK :])
        return SweepResult(self._bound(), choice, marginals)

    def _bound(self) -> float:
        return self.constant + math.fsum(float(theta.min()) for theta in self.theta.values())

    def pair_bounds(self, u: int, v: int, matrix: Array, lower_bound: float) -> Array:
        """Right after a sweep: a bound on every choice that takes options a of u and b of v, whose edge has this
        matrix."""
        left = self.theta[u] - self.theta[u].min() + self._handed[u][self._place[u, v]]
        right = self.theta[v] - self.theta[v].min() + self._handed[v][self._place[v, u]]
        return np.asarray(matrix + left[:, None] + right + lower_bound)


def _decode(theta: Array, behind: _Side, choice: Mapping[int, int]) -> int:
    """The cheapest option given what earlier nodes chose."""
    total = theta + behind.handed.sum(axis=0)
    for other, (matrix, _) in zip(behind.others, behind.edges, strict=True):
        total += np.minimum(matrix[choice[other]], BARRED)
    return int(total.argmin())
