"""Elimination that is compiled once and run under many costs: equal steps are one numpy operation.

Nodes with at most two neighbours leave in rounds of independent sets, each by a min-plus product into the costs of its
neighbour or the table of its two neighbours. Where no node can leave within the size that is allowed, one with many
neighbours is fixed to what a choice says, and the rest is exact given that: a hub and all that hangs on it move at
once (Bertele & Brioschi 1972; conditioning: Dechter 1990).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autopar.solver.clock import tick
from autopar.solver.priced.network import Pair
from autopar.solver.problem import Array, IndexArray

Slots = Mapping[Pair, int]
"""Where the table of each pair u < v begins, row by row."""


class _Step(NamedTuple):
    """``node`` leaves; ``around``: its neighbours, ascending, and where their tables begin; ``into``: where that of the
    two begins."""

    node: int
    around: tuple[Pair, ...]
    into: int


@dataclass
class Plan:
    """Who leaves when. ``left``: nodes that stay; ``slots``: their tables; ``fixed``: nodes that choose before, and
    ``tied``: their pairs with others and where the tables of these begin; ``made``: where tables that are written to
    begin, the table that each adds to, or -1, and its elements. They lie between ``start`` and ``end``."""

    start: int
    end: int
    rounds: list[list[_Step]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    slots: dict[Pair, int] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)
    tied: list[tuple[int, int, int]] = field(default_factory=list)
    made: dict[int, tuple[int, int]] = field(default_factory=dict)


def plan(
    sizes: list[int],
    nodes: Iterable[int],
    slots: Slots,
    end: int,
    most: float,
    *,
    fixed: Collection[int] = (),
    weight: Callable[[int, int], float] | None = None,
) -> Plan:
    """The order in which nodes leave with tables of at most ``most`` elements over a node and its neighbours.

    Args:
        end: where new tables may begin.
        fixed: nodes that have chosen already.
        weight: of a node and how many neighbours it has; where nothing can leave, the node of largest weight is fixed.
            Without it, what is left stays.
    """
    found = Plan(end, end, fixed=set(fixed))
    around: dict[int, dict[int, int]] = {node: {} for node in nodes if node not in found.fixed}
    for (u, v), at in slots.items():
        if u in around and v in around:
            around[u][v] = around[v][u] = at
        elif u in around or v in around:
            found.tied.append((u, v, at))
    hubs = [] if weight is None else [(-weight(node, len(others)), node) for node, others in around.items()]
    heapq.heapify(hubs)
    waiting = set(around)
    while waiting or (weight is not None and around):
        steps = _round(sizes, around, waiting, most)
        if steps:
            waiting |= _leave(sizes, around, steps, found)
        elif weight is not None and around:
            hub = _heaviest(hubs, around, weight)
            waiting = set(around.pop(hub))
            found.fixed.add(hub)
            for other in waiting:
                del around[other][hub]
        else:
            break
    found.left = sorted(around)
    found.slots = {(u, v): at for u in found.left for v, at in around[u].items() if u < v}
    return found


def _heaviest(
    hubs: list[tuple[float, int]], around: Mapping[int, Mapping[int, int]], weight: Callable[[int, int], float]
) -> int:
    """The node of largest weight. ``hubs``: a heap of what they weighed once: degrees change as others leave."""
    while True:
        heavy, node = heapq.heappop(hubs)
        if node in around:
            present = -weight(node, len(around[node]))
            if present == heavy:
                return node
            heapq.heappush(hubs, (present, node))


def _round(sizes: list[int], around: Mapping[int, Mapping[int, int]], waiting: set[int], most: float) -> list[int]:
    """Nodes that leave together, the cheapest first: no two are neighbours. Those that have to wait stay in
    ``waiting``."""
    able: list[tuple[int, int]] = []
    for node in waiting:
        others = around.get(node)
        if others is None or len(others) > 2:
            continue
        work = sizes[node]
        for other in others:
            work *= sizes[other]
        if len(others) < 2 or work <= most:
            able.append((work, node))
    able.sort()
    waiting.clear()
    blocked: set[int] = set()
    steps: list[int] = []
    for _, node in able:
        if node in blocked:
            waiting.add(node)
        else:
            blocked.update(around[node])
            steps.append(node)
    tick("planned node", len(able))
    return steps


def _leave(sizes: list[int], around: dict[int, dict[int, int]], nodes: list[int], found: Plan) -> set[int]:
    """Take the nodes out; who may leave next."""
    touched: set[int] = set()
    steps: list[_Step] = []
    for node in nodes:
        others = tuple(sorted(around.pop(node).items()))
        for other, _ in others:
            del around[other][node]
            touched.add(other)
        steps.append(_Step(node, others, -1))
    for i, step in enumerate(steps):
        if len(step.around) == 2:
            (u, _), (v, _) = step.around
            at = around[u].get(v, -1)
            if at not in found.made:
                found.made[found.end] = (at, sizes[u] * sizes[v])
                at, found.end = found.end, found.end + sizes[u] * sizes[v]
                around[u][v] = around[v][u] = at
            steps[i] = step._replace(into=at)
    found.rounds.append(steps)
    return touched


@dataclass(frozen=True)
class _Side:
    """The tables between nodes that leave and a neighbour of each: where they begin, the strides of the options of
    both, and their elements, shape (options, options of the neighbour, nodes); or, where they are written to,
    ``index``: where these are."""

    others: IndexArray
    at: IndexArray
    stride: IndexArray
    other_stride: IndexArray
    table: Array | None
    index: IndexArray | None

    def read(self, tables: Array) -> Array:
        return self.table if self.table is not None else np.asarray(tables[self.index])

    def given(self, tables: Array, options: IndexArray, choice: IndexArray) -> Array:
        """Of all options, with what the neighbours choose."""
        return np.asarray(tables[self.at + self.other_stride * choice[self.others] + options * self.stride])


@dataclass(frozen=True)
class _Group:
    """Steps of one shape. ``to``: where what they make is added; ``first``: where those that add to one place begin,
    None where each has its own."""

    nodes: IndexArray
    costs: IndexArray
    sides: tuple[_Side, ...]
    to: IndexArray
    first: IndexArray | None
    work: int


class Program:
    """A plan as numpy operations on flat costs and tables.

    Args:
        known: the tables as far as they never change; None where all of them may.
    """

    def __init__(self, sizes: IndexArray, first: IndexArray, made: Plan, known: Array | None) -> None:
        self._sizes, self._first = sizes, first
        self.fixed: IndexArray = np.array(sorted(made.fixed), dtype=np.int64)
        self.start, self.end, self.left, self.slots = made.start, made.end, made.left, made.slots
        self._copies = [(to, at, count) for to, (at, count) in made.made.items() if at >= 0]
        self._groups: list[_Group] = []
        for steps in made.rounds:
            shapes: dict[tuple[object, ...], list[_Step]] = {}
            for step in steps:
                around = [(int(sizes[other]), known is None or at in made.made) for other, at in step.around]
                shapes.setdefault((int(sizes[step.node]), *around), []).append(step)
            self._groups += [self._group(group, key[1:], known) for key, group in shapes.items()]
        self._read_tied(made)
        self.work = sum(group.work for group in self._groups)

    def _group(self, steps: list[_Step], around: tuple[object, ...], known: Array | None) -> _Group:
        steps.sort(key=lambda step: [other for other, _ in step.around])
        nodes = np.array([step.node for step in steps], dtype=np.int64)
        size = int(self._sizes[nodes[0]])
        sides = [self._side(nodes, [s.around[i] for s in steps], bool(a[1]), known) for i, a in enumerate(around)]  # type: ignore[index]
        to, first = np.zeros(0, dtype=np.int64), None
        shape = [int(self._sizes[side.others[0]]) for side in sides]
        if sides:
            others = np.stack([side.others for side in sides])
            new = np.concatenate([[True], (others[:, 1:] != others[:, :-1]).any(axis=0)])
            starts = np.flatnonzero(new)
            first = None if len(starts) == len(steps) else starts
            base = np.array([s.into for s in steps])[starts] if len(sides) == 2 else self._first[others[0, starts]]
            offsets = np.arange(int(np.prod(shape))).reshape(*shape, 1)
            to = base + offsets
        costs = self._first[nodes] + np.arange(size)[:, None]
        return _Group(nodes, costs, tuple(sides), to, first, int(size * np.prod(shape) * len(steps)))

    def _side(self, nodes: IndexArray, around: list[Pair], written: bool, known: Array | None) -> _Side:
        others, at = np.array(around, dtype=np.int64).T
        low = nodes < others
        stride, other_stride = np.where(low, self._sizes[others], 1), np.where(low, 1, self._sizes[nodes])
        mine, theirs = np.arange(self._sizes[nodes[0]]), np.arange(self._sizes[others[0]])
        index = at + mine[:, None, None] * stride + theirs[None, :, None] * other_stride
        if written or known is None:
            return _Side(others, at, stride, other_stride, None, index)
        table = known[index]
        if (table == table[:, :, :1]).all():
            table = np.ascontiguousarray(table[:, :, :1])
        return _Side(others, at, stride, other_stride, table, None)

    def _read_tied(self, made: Plan) -> None:
        """Of the tables between a fixed node and another: what the other pays for each of its options."""
        of, at, step, to = [], [], [], []
        for u, v, begin in made.tied:
            hub, other = (u, v) if u in made.fixed else (v, u)
            strides = (int(self._sizes[v]), 1) if hub == u else (1, int(self._sizes[v]))
            options = np.arange(self._sizes[other])
            of.append(np.full(len(options), hub))
            at.append(begin + options * strides[1])
            step.append(np.full(len(options), strides[0]))
            to.append(self._first[other] + options)
        joined = [np.concatenate(a).astype(np.int64) if a else np.zeros(0, dtype=np.int64) for a in (of, at, step, to)]
        self._hub, self._hub_at, self._hub_step, self._hub_to = joined

    def _begin(self, tables: Array) -> None:
        """Tables that are made begin with those that they add to."""
        tables[self.start : self.end] = 0.0
        for to, at, count in self._copies:
            tables[to : to + count] = tables[at : at + count]

    def forward(self, costs: Array, tables: Array, choice: IndexArray | None = None) -> None:
        """Add what nodes say as they leave to ``costs`` and ``tables``; fixed nodes choose as in ``choice``."""
        tick("group of steps", len(self._groups))
        tick("element of a step", self.work)
        self._begin(tables)
        if choice is not None and len(self._hub):
            costs += np.bincount(self._hub_to, tables[self._hub_at + choice[self._hub] * self._hub_step], len(costs))
        for group in self._groups:
            if not group.sides:
                continue
            near = group.sides[0].read(tables) + costs[group.costs][:, None, :]
            if len(group.sides) == 1:
                least = near.min(axis=0)
                costs[group.to] += least if group.first is None else np.add.reduceat(least, group.first, axis=-1)
            else:
                far = group.sides[1].read(tables)
                least = near[0][:, None, :] + far[0][None, :, :]
                for mine in range(1, len(near)):
                    np.minimum(least, near[mine][:, None, :] + far[mine][None, :, :], out=least)
                tables[group.to] += least if group.first is None else np.add.reduceat(least, group.first, axis=-1)

    def backward(self, costs: Array, tables: Array, choice: IndexArray) -> None:
        """The best options of all nodes that left, given the others', into ``choice``."""
        for group in reversed(self._groups):
            total = costs[group.costs]
            options = np.arange(len(total))[:, None]
            for side in group.sides:
                total = total + side.given(tables, options, choice)
            choice[group.nodes] = total.argmin(axis=0)

    def alone(self, costs: Array) -> float:
        """What nodes that leave without a neighbour cost."""
        return float(sum(costs[group.costs].min(axis=0).sum() for group in self._groups if not group.sides))
