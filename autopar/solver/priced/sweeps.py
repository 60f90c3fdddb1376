"""Sequential tree-reweighted message passing (Kolmogorov 2006) on flat arrays; messages outlive changes of costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.solver.clock import tick
from autopar.solver.priced.elimination import Slots
from autopar.solver.problem import Array, IndexArray


class _Side(NamedTuple):
    """The edges of a node to earlier nodes, or to later ones.

    Args:
        start, width: its part of the tables, shape (options, ``width``): all options of all neighbours.
        out: where messages to the neighbours go.
        edge: which of the edges each column belongs to; ``first``: where each begins.
        base: the first message of these edges among those to the node.
    """

    start: int
    width: int
    out: IndexArray
    edge: IndexArray
    first: IndexArray
    others: IndexArray
    base: int


class _Node(NamedTuple):
    node: int
    size: int
    cost_at: int
    inbox: int
    earlier: _Side | None
    later: _Side | None


class Sweeps:
    """Messages between the nodes of ``order``."""

    def __init__(self, order: Sequence[int], slots: Slots, sizes: Sequence[int], first: Sequence[int]) -> None:
        rank = {node: at for at, node in enumerate(order)}
        around: dict[int, list[tuple[int, int, int, int]]] = {node: [] for node in order}
        for (u, v), at in slots.items():
            around[u].append((v, at, sizes[v], 1))
            around[v].append((u, at, 1, sizes[v]))
        inbox, end = {}, 0
        for node in order:
            around[node].sort(key=lambda edge: rank[edge[0]])
            inbox[node] = end
            end += len(around[node]) * sizes[node]
        box = {(node, edge[0]): inbox[node] + i * sizes[node] for node in order for i, edge in enumerate(around[node])}
        self._messages = np.zeros(end)
        self._nodes: list[_Node] = []
        self._index_parts: list[IndexArray] = []
        self._filled = 0
        for node in order:
            edges = around[node]
            behind = sum(rank[edge[0]] < rank[node] for edge in edges)
            parts = (edges[:behind], 0), (edges[behind:], behind)
            earlier, later = (self._side(node, part, base, sizes, box) for part, base in parts)
            self._nodes.append(_Node(node, sizes[node], first[node], inbox[node], earlier, later))
        self._index = np.concatenate(self._index_parts) if self._index_parts else np.zeros(0, dtype=np.int64)
        self._index_parts.clear()
        tick("compiled element", self._filled)
        self._tables = np.zeros(0)
        self._costs = np.zeros(0)

    def _side(
        self,
        node: int,
        edges: list[tuple[int, int, int, int]],
        base: int,
        sizes: Sequence[int],
        box: dict[tuple[int, int], int],
    ) -> _Side | None:
        if not edges:
            return None
        counts = [sizes[other] for other, *_ in edges]
        columns = np.concatenate([at + np.arange(n) * step for (_, at, _, step), n in zip(edges, counts, strict=True)])
        rows = np.repeat([step for _, _, step, _ in edges], counts)
        self._index_parts.append((columns + np.arange(sizes[node])[:, None] * rows).ravel())
        out = np.concatenate([box[other, node] + np.arange(n) for (other, *_), n in zip(edges, counts, strict=True)])
        first = np.cumsum([0, *counts[:-1]])
        side = _Side(
            self._filled,
            len(columns),
            out,
            np.repeat(np.arange(len(edges)), counts),
            first,
            np.array([other for other, *_ in edges], dtype=np.int64),
            base,
        )
        self._filled += sizes[node] * len(columns)
        return side

    @property
    def elements(self) -> int:
        return self._filled

    def load(self, costs: Array, tables: Array) -> None:
        """Take costs and tables as they are now."""
        tick("loaded element", len(self._index))
        self._costs, self._tables = costs, tables[self._index]

    def forget(self) -> None:
        """All messages are zero again."""
        self._messages[:] = 0.0

    def sweep(self, *, forward: bool, choice: IndexArray | None = None, marginals: Array | None = None) -> float:
        """One pass; a bound on what the nodes cost together.

        Args:
            choice: where the best options given those of the nodes before are written.
            marginals: where a bound on every choice that takes an option is raised, but for the bound itself.
        """
        tick("node of a sweep", len(self._nodes))
        tick("element of a message", self._filled / 2)
        bound, messages, tables = 0.0, self._messages, self._tables
        for node, size, cost_at, inbox, earlier, later in self._nodes if forward else reversed(self._nodes):
            near, far = (earlier, later) if forward else (later, earlier)
            behind = 0 if near is None else len(near.others)
            ahead = 0 if far is None else len(far.others)
            received = messages[inbox : inbox + (behind + ahead) * size].reshape(-1, size)
            total = self._costs[cost_at : cost_at + size] + received.sum(axis=0)
            if choice is not None:
                given = total
                if near is not None:
                    stretch = tables[near.start : near.start + size * near.width].reshape(size, near.width)
                    given = total - received[near.base : near.base + behind].sum(axis=0)
                    given = given + stretch[:, near.first + choice[near.others]].sum(axis=1)
                choice[node] = given.argmin()
            share = 1.0 / max(ahead, behind, 1)
            least = float(total.min())
            bound += (1 - ahead * share) * least
            if marginals is not None:
                marginals[cost_at : cost_at + size] = total - least
            if far is not None:
                stretch = tables[far.start : far.start + size * far.width].reshape(size, far.width)
                handed = share * total[:, None] - received[far.base : far.base + ahead].T
                sent = stretch + (handed if ahead == 1 else handed[:, far.edge])
                messages[far.out] = sent.min(axis=0)
        return bound
