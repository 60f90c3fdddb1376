"""Better choices near a known one, one node at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from autopar import settings
from autopar.solver.clock import A_LOOK, tick
from autopar.solver.problem import BARRED, Array
from autopar.solver.reduce.graph import Graph

Late = Callable[[], bool]


class Search:
    """A choice that only gets better: first less forbidden, then less over the limit, then cheaper."""

    def __init__(self, graph: Graph, choice: dict[int, int]) -> None:
        self.graph = graph
        self.choice = dict(choice)
        self.used = np.zeros(len(graph.limits))
        self._asked = 0
        self._fresh = set(self.choice)  # nodes beside which, or of which, the choice has changed since a look
        for node in graph.nodes():
            self._account(node, self.choice[node], 1.0)
        highest = max((float(cost.max(where=np.isfinite(cost), initial=0.0)) for cost in graph.costs), default=0.0)
        self.overuse_price = 1e3 * (highest + 1.0)

    # -- what a choice costs ---------------------------------------------------------------------------------------

    def objective(self) -> float:
        """Seconds, inf when something forbidden is chosen."""
        costs = [float(self.graph.costs[node][option]) for node, option in self.choice.items()]
        edges = [float(self.graph.neighbours[u][v][self.choice[u], self.choice[v]]) for u, v in self.graph.pairs()]
        return self.graph.offset + math.fsum(costs) + math.fsum(edges)

    def feasible(self) -> bool:
        return bool((self.used <= self.graph.limits).all()) and math.isfinite(self.objective())

    def _account(self, node: int, option: int, sign: float) -> None:
        for row in self.graph.rows[node]:
            self.used[row.start : row.end] += sign * row.amount[option]

    def take(self, node: int, option: int) -> None:
        """Change one choice."""
        self._account(node, self.choice[node], -1.0)
        self.choice[node] = option
        self._account(node, option, 1.0)
        self._fresh.update((node, *self.graph.neighbours[node]))

    def used_by_others(self, nodes: tuple[int, ...]) -> Array:
        """What all nodes but these use at each time."""
        used = self.used.copy()
        for node in nodes:
            for row in self.graph.rows[node]:
                used[row.start : row.end] -= row.amount[self.choice[node]]
        return np.asarray(used)

    def conditional(self, node: int, without: tuple[int, ...] = ()) -> Array:
        """Seconds of each option of a node, given its neighbours' choices (except ``without``)."""
        self._asked += len(self.graph.neighbours[node])
        total: Array = self.graph.costs[node].copy()
        for other, matrix in self.graph.neighbours[node].items():
            if other not in without:
                total += np.minimum(matrix[:, self.choice[other]], BARRED)
        return np.asarray(total, dtype=float)

    def _overuse(self, node: int) -> Array:
        """How far each option would be over the limit, relative to it and added over times, the others staying."""
        over = np.zeros(len(self.graph.costs[node]))
        rows = self.graph.rows[node]
        if not rows:
            return over
        first, last = min(row.start for row in rows), max(row.end for row in rows)
        mine = np.zeros((len(over), last - first))
        for row in rows:
            mine[:, row.start - first : row.end - first] += row.amount[:, None]
        room = self.graph.limits[first:last] - (self.used[first:last] - mine[self.choice[node]])
        excess = np.maximum(mine - room - 1e-12 * self.graph.limits[first:last], 0.0)
        return np.asarray((excess / self.graph.room()[first:last]).sum(axis=1))

    # -- moves -----------------------------------------------------------------------------------------------------

    def _is_late(self, late: Late) -> bool:
        tick("conditional cost", self._asked)
        self._asked = 0
        return late()

    def improve_nodes(self, late: Late = lambda: False) -> bool:
        """Every node in turn takes its best option; whether any changed."""
        changed = False
        for at, node in enumerate(self.graph.nodes(), 1):
            if at % A_LOOK == 0 and self._is_late(late):
                break
            if node not in self._fresh and not len(self.graph.limits):
                continue
            self._fresh.discard(node)
            total = self.conditional(node)
            if self.graph.rows[node]:
                total = total + self.overuse_price * self._overuse(node)
            best = int(total.argmin())
            if total[best] < total[self.choice[node]]:
                self.take(node, best)
                changed = True
        return changed

    def descend(self, seconds_left: Callable[[], float]) -> None:
        """Moves until none helps."""

        def late() -> bool:
            return seconds_left() < 0

        for _ in range(settings.ROUNDS):
            if self._is_late(late) or not self.improve_nodes(late):
                break
        self._is_late(late)
