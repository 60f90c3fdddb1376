"""A lower bound and choices by dual ascent: sequential tree-reweighted message passing (Kolmogorov 2006, 2015).

Costs are shifted between nodes and edges so that the sum of their minima, a bound, rises. An edge's costs are
``matrix + left[a] + right[b]``; the shared matrix is never written. Sweeps go up and down an order of the nodes: a
node collects from each edge to an earlier one its min-marginals, then hands its costs out to the edges to later ones.
Rows of usage are priced by multipliers; any multipliers >= 0 give a valid bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.solver.clock import A_LOOK, tick
from autopar.solver.problem import BARRED, Array, Messages
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.ordering import narrow_order


@dataclass
class SweepResult:
    """``lower_bound`` in seconds; ``choice``: decoded along the sweep, empty where none was asked for; ``marginals``: a
    bound for each option."""

    lower_bound: float
    choice: dict[int, int]
    marginals: dict[int, Array]


class Dual:
    """The state of the ascent for a graph that doesn't change meanwhile. It goes on from the ``known`` messages of the
    graph while there was more of it, or of one with other costs: any messages give a valid bound."""

    def __init__(self, graph: Graph, prices: Array | None = None, known: Messages | None = None) -> None:
        self.graph = graph
        self.nodes = graph.nodes()
        self.order = narrow_order(self.nodes, graph.neighbours)
        self.prices = np.zeros(len(graph.limits)) if prices is None else prices.copy()
        self.theta = {node: graph.costs[node].copy() for node in self.nodes}
        self.push: dict[int, dict[int, Array]] = {
            node: {other: np.zeros(len(graph.costs[node])) for other in sorted(graph.neighbours[node])}
            for node in self.nodes
        }
        rank = {node: place for place, node in enumerate(self.order)}
        self.earlier = {node: [o for o in self.push[node] if rank[o] < rank[node]] for node in self.nodes}
        self.later = {node: [o for o in self.push[node] if rank[o] > rank[node]] for node in self.nodes}
        self._price_usages(self.prices)
        self._hand_out(known or {})
        self._elements = 0
        for node in self.order:
            for other in self.earlier[node]:
                self._collect(node, other)
        self._count(len(self.nodes))

    def messages(self) -> Messages:
        """What a later ascent can go on from."""
        return {node: (self.graph.options[node], pushed) for node, pushed in self.push.items()}

    def _hand_out(self, known: Messages) -> None:
        for node in self.nodes:
            options, handed = known.get(node, (self.graph.options[node], {}))
            for other in self.push[node].keys() & handed.keys():
                own = self.graph.options[node]
                at = np.minimum(np.searchsorted(options, own), len(options) - 1)
                part = np.where(options[at] == own, handed[other][at], 0.0)
                self.push[node][other] = part
                self.theta[node] = self.theta[node] - part

    def _count(self, nodes: int) -> None:
        tick("swept node", nodes)
        tick("element of a message", self._elements)
        self._elements = 0

    def keep(self, masks: dict[int, np.ndarray]) -> None:
        """Take the options out of the graph for which a mask is false; what was passed about the others stays.

        Raises:
            InfeasibleError: a node has none left.
        """
        touched: set[int] = set()
        for node, mask in masks.items():
            if not mask.all():
                self.graph.keep(node, mask)
                self.theta[node] = self.theta[node][mask]
                self.push[node] = {other: pushed[mask] for other, pushed in self.push[node].items()}
                touched.update(self.graph.neighbours[node])
        if touched:
            self.keep({node: self._supported(node) for node in sorted(touched)})

    def _supported(self, node: int) -> np.ndarray:
        """Which options have a partner at every neighbour."""
        mask = np.ones(len(self.theta[node]), dtype=bool)
        for matrix in self.graph.neighbours[node].values():
            mask &= np.isfinite(matrix).any(axis=1)
        return mask

    def _collect(self, node: int, other: int) -> None:
        """Move the min-marginals of the edge to ``node``."""
        matrix, handed = self.graph.neighbours[other][node], self.push[other][node]
        self._elements += matrix.size
        least = (matrix + handed[:, None]).min(axis=0)
        self.theta[node] += self.push[node][other] + least
        self.push[node][other] = -least

    def gather(self, node: int) -> None:
        """Move the min-marginals of all its edges to ``node``."""
        for other in self.push[node]:
            self._collect(node, other)

    def sweep(self, forward: bool, *, decode: bool = True, late: Callable[[], bool] | None = None) -> SweepResult:
        """One pass; the bound after it, a choice, and for each option a bound on every choice that takes it.

        Where it gets ``late`` on the way, the bound is that from before, and choice and marginals are empty.
        """
        order = self.order if forward else self.order[::-1]
        behind, ahead = (self.earlier, self.later) if forward else (self.later, self.earlier)
        constant = self.graph.offset - float(self.prices @ self.graph.limits)
        bound = constant + math.fsum(float(self.theta[node].min()) for node in self.nodes)
        bound_before = bound
        choice: dict[int, int] = {}
        marginals: dict[int, Array] = {}
        handed_least: dict[int, float] = {}
        for at, node in enumerate(order, 1):
            if at % A_LOOK == 0:
                self._count(A_LOOK)
                if late is not None and late():
                    return SweepResult(bound_before, {}, {})
            if decode:
                choice[node] = self._decode(node, behind[node], choice)
            before = float(self.theta[node].min()) + sum(handed_least[other] for other in behind[node])
            for other in behind[node]:
                self._collect(node, other)
            theta = self.theta[node]
            least = float(theta.min())
            bound += least - before
            marginals[node] = theta + (bound - least)
            share = 1.0 / max(len(behind[node]), len(ahead[node]), 1)
            handed_least[node] = share * least
            if ahead[node]:
                part = theta * share
                for other in ahead[node]:
                    self.push[node][other] += part
                self.theta[node] = theta - part * len(ahead[node])
        self._count(len(order) % A_LOOK)
        bound = constant + math.fsum(float(self.theta[node].min()) for node in self.nodes)
        return SweepResult(bound, choice, marginals)

    def _decode(self, node: int, earlier: list[int], choice: dict[int, int]) -> int:
        """The cheapest option given what earlier nodes chose."""
        total = self.theta[node].copy()
        for other in earlier:
            column = np.minimum(self.graph.neighbours[other][node][choice[other]], BARRED)
            total += column + self.push[node][other]
        return int(total.argmin())

    # -- multipliers -----------------------------------------------------------------------------------------------

    def _price_usages(self, change: Array) -> None:
        if not change.any():
            return
        total = np.concatenate([[0.0], np.cumsum(change)])
        for node in self.nodes:
            for row in self.graph.rows[node]:
                self.theta[node] += (total[row.end] - total[row.start]) * row.amount

    def pair_bounds(self, u: int, v: int, lower_bound: float) -> Array:
        """Right after a sweep: a bound on every choice that takes options a of u and b of v."""
        left = self.theta[u] - self.theta[u].min() + self.push[u][v]
        right = self.theta[v] - self.theta[v].min() + self.push[v][u]
        return np.asarray(self.graph.neighbours[u][v] + left[:, None] + right + lower_bound)
