"""Better choices near a known one: one node at a time, two neighbours at a time, whole trees of nodes at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from autopar.solver.clock import A_LOOK, tick
from autopar.solver.problem import BARRED, Array
from autopar.solver.reduce.graph import Graph

Late = Callable[[], bool]


def _never() -> bool:
    return False


class Search:
    """A choice that only gets better: first less forbidden, then less over the limit, then cheaper."""

    def __init__(self, graph: Graph, choice: dict[int, int]) -> None:
        self.graph = graph
        self.choice = dict(choice)
        self.used = np.zeros(len(graph.limits))
        self._moves, self._asked, self._elements = 1, 0, 0
        self._stirred = dict.fromkeys(self.choice, 1)  # the last move of a node or one beside it
        self._hubs: dict[int, tuple[int, Array]] = {}  # moves when it was told, and what a node's options cost
        self._looked: dict[tuple[int, ...], int] = {}  # moves when one or two nodes were last looked at
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
        self._moves += 1
        for other in (node, *self.graph.neighbours[node]):
            self._stirred[other] = self._moves

    def _is_settled(self, *nodes: int) -> bool:
        """Whether nothing that these nodes depend on has changed since they were last asked about."""
        seen, self._looked[nodes] = self._looked.get(nodes, 0), self._moves
        return not len(self.graph.limits) and all(self._stirred[node] <= seen for node in nodes)

    def used_by_others(self, nodes: tuple[int, ...]) -> Array:
        """What all nodes but these use at each time."""
        used = self.used.copy()
        for node in nodes:
            for row in self.graph.rows[node]:
                used[row.start : row.end] -= row.amount[self.choice[node]]
        return np.asarray(used)

    def conditional(self, node: int, without: tuple[int, ...] = ()) -> Array:
        """Seconds of each option of a node, given its neighbours' choices (except ``without``)."""
        if len(without) == 1 and without[0] in self.graph.neighbours[node]:
            column = self.graph.neighbours[node][without[0]][:, self.choice[without[0]]]
            if np.isfinite(column).all():
                return np.asarray(self._of_hub(node) - column, dtype=float)
        self._asked += len(self.graph.neighbours[node])
        total: Array = self.graph.costs[node].copy()
        for other, matrix in self.graph.neighbours[node].items():
            if other not in without:
                total += np.minimum(matrix[:, self.choice[other]], BARRED)
        return np.asarray(total, dtype=float)

    def _of_hub(self, node: int) -> Array:
        """``conditional``, kept while no neighbour chooses anew: each of thousands asks for it."""
        known = self._hubs.get(node)
        if known is None or self._stirred[node] > known[0]:
            known = self._hubs[node] = self._moves, self.conditional(node)
        return known[1]

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
        tick("element of a message", self._elements)
        self._asked = self._elements = 0
        return late()

    def improve_nodes(self, late: Late = _never) -> bool:
        """Every node in turn takes its best option; whether any changed."""
        changed = False
        for at, node in enumerate(self.graph.nodes(), 1):
            if at % A_LOOK == 0 and self._is_late(late):
                break
            if self._is_settled(node):
                continue
            total = self.conditional(node)
            if self.graph.rows[node]:
                total = total + self.overuse_price * self._overuse(node)
            best = int(total.argmin())
            if total[best] < total[self.choice[node]]:
                self.take(node, best)
                changed = True
        return changed

    def improve_pairs(self, late: Late = _never) -> bool:
        """Every two neighbours in turn take their best pair of options, as far as the limit allows."""
        changed = False
        for at, (u, v) in enumerate(self.graph.pairs(), 1):
            if at % A_LOOK == 0 and self._is_late(late):
                break
            changed |= not self._is_settled(u, v) and self._improve_pair(u, v)
        return changed

    def _improve_pair(self, u: int, v: int) -> bool:
        self._elements += self.graph.neighbours[u][v].size
        left, right = self.conditional(u, (v,)), self.conditional(v, (u,))
        total = np.minimum(self.graph.neighbours[u][v], BARRED) + left[:, None] + right
        present = total[self.choice[u], self.choice[v]]
        a, b = divmod(int(total.argmin()), total.shape[1])
        if total[a, b] >= present - 1e-12 * abs(present):
            return False
        if not (self.graph.rows[u] or self.graph.rows[v]):
            self.take(u, a)
            self.take(v, b)
            return True
        return self._take_if_it_fits(u, v, total, float(present))

    def _take_if_it_fits(self, u: int, v: int, total: Array, present: float) -> bool:
        old = self.choice[u], self.choice[v]
        over = float(np.maximum(self.used - self.graph.limits, 0).sum())
        candidates = np.argsort(total, axis=None, kind="stable")[:32]
        for flat in candidates:
            a, b = divmod(int(flat), total.shape[1])
            if total[a, b] >= present - 1e-12 * abs(present):
                break
            self.take(u, a)
            self.take(v, b)
            if float(np.maximum(self.used - self.graph.limits, 0).sum()) <= over:
                return True
            self.take(u, old[0])
            self.take(v, old[1])
        return False

    def descend(self, seconds_left: Callable[[], float], *, pairs: bool = True, rounds: int = 20) -> None:
        """Moves of one node, then of two, until none helps."""

        def late() -> bool:
            return seconds_left() < 0

        for _ in range(rounds):
            for _ in range(rounds):
                if self._is_late(late) or not self.improve_nodes(late):
                    break
            if not pairs or self._is_late(late) or not self.improve_pairs(late):
                break
        self._is_late(late)
