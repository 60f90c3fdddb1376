"""A network with its leaves eliminated: bounds by messages on what is left, and moves that are exact but for hubs."""

from __future__ import annotations

import numpy as np

from autopar import settings
from autopar.solver.clock import tick
from autopar.solver.dual.dual import Dual
from autopar.solver.priced.elimination import Program, plan
from autopar.solver.priced.network import Network, Pair
from autopar.solver.problem import Array, IndexArray, Messages


class Core:
    """What is left of a network where nodes of at most two neighbours are gone. ``price`` says what options cost."""

    def __init__(self, network: Network, random: np.random.Generator) -> None:
        self.network = network
        self._random = random
        self._sizes = network.sizes.tolist()
        slots: dict[Pair, int] = dict(
            zip(zip(*network.ends.tolist(), strict=True), network.edge_at.tolist(), strict=True)
        )
        made = plan(self._sizes, range(len(self._sizes)), slots, len(network.tables), settings.LEAVES)
        self._leaves = Program(network.sizes, network.first, made, network.tables)
        self.nodes: IndexArray = np.array(made.left, dtype=np.int64)
        self._slots = made.slots
        self._around: dict[int, list[int]] = {node: [] for node in made.left}
        for u, v in made.slots:
            self._around[u].append(v)
            self._around[v].append(u)
        self._dual: Dual | None = None
        self._told = np.zeros(0)
        self._programs: list[Program] = []
        self._turn = 0
        self._tables = np.zeros(made.end)
        self._tables[: len(network.tables)] = network.tables
        self._read_conditionals()
        self.costs = network.cost
        self._options: IndexArray = np.concatenate(
            [np.arange(network.first[node], network.first[node + 1]) for node in made.left] or [np.zeros(0, np.int64)]
        )

    def _read_conditionals(self) -> None:
        """Of the tables between two nodes of the core: what each pays for its options, given the other's choice."""
        sizes, first = self.network.sizes, self.network.first
        pairs = np.array([(u, v, at) for (u, v), at in self._slots.items()], dtype=np.int64).reshape(-1, 3)
        u, v, at = pairs.T
        one = np.ones(len(u), dtype=np.int64)
        given, mine = np.concatenate([v, u]), np.concatenate([u, v])
        own_step, step = np.concatenate([sizes[v], one]), np.concatenate([one, sizes[v]])
        count = sizes[mine]
        option = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        self._given = np.repeat(given, count)
        self._given_at = np.repeat(np.concatenate([at, at]), count) + option * np.repeat(own_step, count)
        self._given_step = np.repeat(step, count)
        self._paid_to = np.repeat(first[mine], count) + option

    # -- programs ----------------------------------------------------------------------------------------------------

    def add_program(self, spread: float) -> None:
        """Another way to move: it fixes other hubs, the more so the larger ``spread`` is."""
        luck = np.exp(spread * self._random.standard_normal(len(self._sizes))) * np.sqrt(self.network.sizes)
        fixed: set[int] = set()
        most = settings.MOVES
        while True:
            made = plan(
                self._sizes,
                self.nodes.tolist(),
                self._slots,
                self._leaves.end,
                most,
                fixed=fixed,
                weight=lambda node, others: others * float(luck[node]),
            )
            if made.fixed == fixed:
                break
            # Without the tables of hubs that are fixed nodes leave in another order, which may get stuck elsewhere.
            fixed, most = made.fixed, 10 * most
        program = Program(self.network.sizes, self.network.first, made, None)
        if program.end > len(self._tables):
            self._tables = np.concatenate([self._tables, np.zeros(program.end - len(self._tables))])
            if self._dual is not None:  # its matrices were parts of the former tables
                self._dual = self._passing(self._dual.messages())
        self._programs.append(program)

    def programs(self) -> int:
        return len(self._programs)

    # -- under prices ------------------------------------------------------------------------------------------------

    def price(self, cost: Array) -> None:
        """Let the options of the network cost ``cost``."""
        self.costs = cost.copy()
        self._leaves.forward(self.costs, self._tables)

    def sweep(self, *, forward: bool, choice: IndexArray | None = None) -> float:
        """One pass of messages; a bound on what every choice costs under the present costs. ``choice``: where the best
        options given those of the nodes before are written."""
        if self._dual is None:
            self._dual = self._passing({})
        costs = self.costs[self._options]
        self._dual.add(costs - self._told)
        self._told = costs
        found = self._dual.sweep(forward, decode=choice is not None)
        if choice is not None:
            choice[list(found.choice)] = list(found.choice.values())
        return found.lower_bound + self._leaves.alone(self.costs)

    def forget(self) -> None:
        """What was passed."""
        self._dual = None

    def _passing(self, known: Messages) -> Dual:
        """Messages about the present costs."""
        first, neighbours = self.network.first, dict[int, dict[int, Array]]((node, {}) for node in self._around)
        for (u, v), at in self._slots.items():
            shape = self._sizes[u], self._sizes[v]
            table = self._tables[at : at + shape[0] * shape[1]].reshape(shape)
            neighbours[u][v], neighbours[v][u] = table, table.T
        self._told = self.costs[self._options]
        costs = {node: self.costs[first[node] : first[node + 1]] for node in neighbours}
        return Dual(costs, neighbours, known=known)

    def complete(self, choice: IndexArray) -> None:
        """The best options of all nodes outside the core, given those in it."""
        self._leaves.backward(self.costs, self._tables, choice)

    def move(self, choice: IndexArray, *, rounds: int) -> IndexArray:
        """A choice that costs no more: nodes one by one for some rounds, then all but a few hubs at once."""
        moved: IndexArray = choice.copy()
        self._descend(moved, rounds)
        program = self._programs[self._turn % len(self._programs)]
        self._turn += 1
        costs = self.costs.copy()
        program.forward(costs, self._tables, moved)
        program.backward(costs, self._tables, moved)
        self.complete(moved)
        return moved

    def _descend(self, choice: IndexArray, rounds: int) -> None:
        """Nodes of which no two are neighbours take their best options, those that gain most before others."""
        first = self.network.first
        for _ in range(rounds if len(self._paid_to) else 0):
            tick("flat element", len(self._paid_to))
            paid = self._tables[self._given_at + choice[self._given] * self._given_step]
            total = self.costs + np.bincount(self._paid_to, paid, len(self.costs))
            gain = (total[first[:-1] + choice] - np.minimum.reduceat(total, first[:-1]))[self.nodes]
            able = np.flatnonzero(gain > 0)
            blocked: set[int] = set()
            for node in self.nodes[able[np.argsort(-gain[able], kind="stable")]].tolist():
                if node not in blocked:
                    choice[node] = int(total[first[node] : first[node + 1]].argmin())
                    blocked.update(self._around[node])
            if not blocked:
                break
