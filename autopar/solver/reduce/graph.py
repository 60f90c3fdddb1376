"""The problem while it shrinks: remaining options, one matrix for each pair of neighbours, and the way back.

Every change keeps the optimal value. Nodes that leave are recorded on a trail; ``expand`` replays it backwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.errors import InfeasibleError
from autopar.solver.clock import tick
from autopar.solver.problem import USAGE_TOLERANCE, Array, IndexArray, Problem
from autopar.solver.reduce.times import undominated_times


@dataclass(frozen=True, eq=False)
class Row:
    """What each option of one node uses at the times start <= t < end, above its least option."""

    start: int
    end: int
    amount: Array

    @cached_property
    def most(self) -> float:
        """What the largest option uses."""
        return float(np.maximum.reduce(self.amount))


@dataclass(frozen=True)
class _Removed:
    """A node that left: its best option follows from those of its neighbours (original option numbers)."""

    node: int
    options: IndexArray
    cost: Array
    neighbours: tuple[tuple[int, IndexArray, Array], ...]


class Graph:
    """A mutable constraint network. Options are kept in ascending order of their original numbers.

    Reductions leave ``protected`` nodes in place, and take no option from them that a price on it could make worth
    choosing: the rest stays exact whatever costs are added to them later.
    """

    def __init__(self, problem: Problem, protected: Iterable[int] = (), averaged: Iterable[int] = ()) -> None:
        self.problem = problem
        self.protected = frozenset(protected)
        self.averaged = frozenset(averaged)
        self.costs = [np.asarray(cost, dtype=float) for cost in problem.costs]
        self.options: list[IndexArray] = [np.arange(len(cost)) for cost in self.costs]
        self.neighbours: list[dict[int, Array]] = [{} for _ in self.costs]
        self.alive = [True] * len(self.costs)
        self.rows: list[list[Row]] = [[] for _ in self.costs]
        self.limits: Array = np.zeros(0)
        self.times: IndexArray = np.zeros(0, dtype=np.int64)
        self.offset = 0.0
        self._unsettled: set[int] = set()
        self._changed: dict[str, set[int]] = {}
        self._trail: list[_Removed] = []
        self._exchanges: list[tuple[int, IndexArray]] = []
        self._shared: dict[tuple[object, ...], tuple[np.ndarray, ...]] = {}
        for edge in problem.edges:
            if edge.u == edge.v:
                self.costs[edge.u] = self.costs[edge.u] + np.diagonal(edge.cost)
            else:
                self.add_edge(edge.u, edge.v, edge.cost)
        tick("edge of a graph", len(problem.edges))
        self._read_usages(problem)

    def copy(self) -> Graph:
        """Another graph that shrinks on its own. Arrays are shared: none is written to but ``limits``."""
        other = copy(self)
        other.costs, other.options, other.alive = list(self.costs), list(self.options), list(self.alive)
        other.neighbours = [dict(around) for around in self.neighbours]
        other.rows = [list(rows) for rows in self.rows]
        other.limits, other.times = self.limits.copy(), self.times.copy()
        other._unsettled, other._trail, other._shared = set(self._unsettled), list(self._trail), {}
        other._exchanges = list(self._exchanges)
        other._changed = {reader: set(changed) for reader, changed in self._changed.items()}
        return other

    # -- sizes -----------------------------------------------------------------------------------------------------

    def nodes(self) -> list[int]:
        """The nodes that remain, ascending."""
        return [node for node, alive in enumerate(self.alive) if alive]

    def pairs(self) -> list[tuple[int, int]]:
        """Each remaining edge once, as (u, v) with u < v."""
        return [(u, v) for u in self.nodes() for v in self.neighbours[u] if u < v]

    def size(self) -> tuple[int, int, int]:
        """Remaining nodes, options and pairs of options."""
        nodes = self.nodes()
        options = sum(len(self.costs[node]) for node in nodes)
        return len(nodes), options, sum(self.neighbours[u][v].size for u, v in self.pairs())

    def room(self) -> Array:
        """The limits, as that of which usages are told as shares: at least a byte, so that no share overflows."""
        return np.maximum(self.limits, 1.0)

    def node_and_option_counts(self) -> tuple[int, int]:
        """Remaining nodes and options."""
        nodes = self.nodes()
        return len(nodes), sum(len(self.costs[node]) for node in nodes)

    def least(self) -> float:
        """No choice costs less: the least of each node and of each edge, apart."""
        nodes, matrices = self.nodes(), {}
        for node in nodes:
            matrices.update({id(matrix): matrix for other, matrix in self.neighbours[node].items() if node < other})
        least = {key: float(matrix.min()) for key, matrix in matrices.items()}
        ends = (least[id(self.neighbours[u][v])] for u, v in self.pairs())
        return self.offset + math.fsum(float(self.costs[node].min()) for node in nodes) + math.fsum(ends)

    # -- changes ---------------------------------------------------------------------------------------------------

    def shared(self, key: tuple[object, ...], sources: tuple[Array, ...], make: Callable[[], np.ndarray]) -> np.ndarray:
        """A matrix derived from others, made once for all the edges that share them.

        ``key`` and the identities of ``sources`` name it; the sources are held, so an identity is never reused.
        """
        full_key = (*key, *map(id, sources))
        if full_key not in self._shared:
            self._shared[full_key] = (make(), *sources)
        return self._shared[full_key][0]

    def once(self, of: Callable[[Array], np.ndarray], matrix: Array) -> np.ndarray:
        """What ``of`` makes of a matrix, made once for all the edges that share it."""
        key = of, id(matrix)
        known = self._shared.get(key)
        if known is None:
            known = self._shared[key] = of(matrix), matrix
        return known[0]

    def forget_shared(self) -> None:
        """Release the matrices that only the cache still holds."""
        self._shared.clear()

    def changed(self, reader: str, *, anew: bool = False) -> set[int]:
        """The nodes whose costs, options or edges have changed since ``reader`` took them out of this set; at first,
        and ``anew``, all."""
        if anew or reader not in self._changed:
            self._changed[reader] = set(self.nodes())
        return self._changed[reader]

    def _touch(self, *nodes: int) -> None:
        for changed in self._changed.values():
            changed.update(nodes)

    def add_cost(self, node: int, cost: Array | float) -> None:
        """To each of its options."""
        self.costs[node] = self.costs[node] + cost
        self._touch(node)

    def transposed(self, matrix: Array) -> Array:
        return self.once(np.transpose, matrix)

    def set_edge(self, u: int, v: int, matrix: Array) -> None:
        self.neighbours[u][v] = matrix
        self.neighbours[v][u] = self.transposed(matrix)
        self._touch(u, v)

    def add_edge(self, u: int, v: int, matrix: Array) -> None:
        """Parallel edges are added up."""
        present = self.neighbours[u].get(v)
        if present is not None:
            total = self.shared(("sum",), (present, matrix), lambda: present + matrix)
            self.set_edge(u, v, total)
        else:
            self.set_edge(u, v, matrix)

    def drop_edge(self, u: int, v: int) -> None:
        del self.neighbours[u][v]
        del self.neighbours[v][u]
        self._touch(u, v)

    def keep(self, node: int, mask: np.ndarray) -> None:
        """Only the options where ``mask`` is true remain.

        Raises:
            InfeasibleError: none remains.
        """
        if mask.all():
            return
        if not mask.any():
            raise InfeasibleError("No choice is allowed.", found=f"node {node} has no option that fits its neighbours")
        self.costs[node] = self.costs[node][mask]
        self.options[node] = self.options[node][mask]
        self.rows[node] = [Row(row.start, row.end, row.amount[mask]) for row in self.rows[node]]
        name = mask.tobytes()
        for other, matrix in self.neighbours[node].items():
            kept = self.shared(("keep", name), (matrix,), lambda m=matrix: m[mask])  # type: ignore[misc]
            self.set_edge(node, other, kept)
        self._unsettled.add(node)
        self._touch(node)

    def exchange(self, node: int, instead: IndexArray) -> None:
        """Keep the options that ``instead`` gives for each: choices that had another are as good with that."""
        whole = np.arange(len(self.problem.costs[node]))
        whole[self.options[node]] = self.options[node][instead]
        self._exchanges.append((node, whole))
        self.keep(node, instead == np.arange(len(instead)))

    def remove(self, node: int) -> None:
        """Take the node out; its choice will follow from those of its present neighbours."""
        around = tuple((other, self.options[other], matrix) for other, matrix in self.neighbours[node].items())
        self._trail.append(_Removed(node, self.options[node], self.costs[node], around))
        for other in list(self.neighbours[node]):
            self.drop_edge(node, other)
        self.alive[node] = False
        self.rows[node] = []

    def expand(self, choice: dict[int, int]) -> tuple[int, ...]:
        """Original option numbers of every node, from local option indices of those that remain."""
        full = np.zeros(len(self.costs), dtype=np.int64)
        for node, option in choice.items():
            full[node] = self.options[node][option]
        for removed in reversed(self._trail):
            total = removed.cost
            for other, options, matrix in removed.neighbours:
                total = total + matrix[:, np.searchsorted(options, full[other])]
            full[removed.node] = removed.options[int(total.argmin())]
        return tuple(int(option) for option in full)

    def project(self, choice: tuple[int, ...]) -> dict[int, int]:
        """Local option indices of the remaining nodes; an option that is gone becomes one that is as good, or where
        none is known the cheapest one left."""
        options = list(choice)
        for node, instead in self._exchanges:
            options[node] = int(instead[options[node]])
        local = {}
        for node in self.nodes():
            at = int(np.searchsorted(self.options[node], options[node]))
            present = at < len(self.options[node]) and self.options[node][at] == options[node]
            local[node] = at if present else int(self.costs[node].argmin())
        return local

    # -- usages ----------------------------------------------------------------------------------------------------

    def _read_usages(self, problem: Problem) -> None:
        most = {id(option): option for option in (usage.option for usage in problem.usages)}  # several times share one
        used = {key: option.max() > 0 for key, option in most.items()}
        live = [usage for usage in problem.usages if usage.start < usage.end and used[id(usage.option)]]
        if not live or problem.limit == np.inf:
            return
        starts, ends = [usage.start for usage in live], [usage.end for usage in live]
        self.times = np.unique(starts + ends)
        places = (np.searchsorted(self.times, at).tolist() for at in (starts, ends))
        for usage, start, end in zip(live, *places, strict=True):
            self.rows[usage.node].append(Row(start, end, np.asarray(usage.option, dtype=float)))
        self.limits = np.full(len(self.times), problem.limit * (1 + USAGE_TOLERANCE))
        self._unsettled.update(self.nodes())
        self.drop_loose_times()

    def add_rows(self, node: int, rows: list[Row]) -> None:
        self.rows[node].extend(rows)
        self._unsettled.add(node)

    def _normalise_rows(self, node: int) -> None:
        """What every option uses is taken from the limit; equal intervals are added up, empty rows go."""
        merged: dict[tuple[int, int], Row] = {}
        for row in self.rows[node]:
            least = np.minimum.reduce(row.amount)
            if least > 0:
                self.limits[row.start : row.end] -= least
            if row.most > least:
                key = (row.start, row.end)
                above = row if least == 0 else Row(row.start, row.end, row.amount - least)
                merged[key] = Row(*key, merged[key].amount + above.amount) if key in merged else above
        self.rows[node] = list(merged.values())

    def drop_loose_times(self) -> None:
        """Times at which even the largest options fit constrain nothing; nor do those implied by another.

        Raises:
            InfeasibleError: at some time even the smallest options do not fit.
        """
        for node in sorted(self._unsettled):
            self._normalise_rows(node)
        self._unsettled.clear()
        if not len(self.limits):
            return
        if self.limits.min() < 0:
            over = -float(self.limits.min())
            raise InfeasibleError("No choice fits the limit.", found=f"the smallest options exceed it by {over:,.0f}")
        left: dict[tuple[int, int], float] = {}
        for node in self.nodes():
            if node not in self.averaged and any(row.most > self._left(row, left) for row in self.rows[node]):
                self.keep(node, ~self.oversized(node))
        rows = [row for node in self.nodes() for row in self.rows[node]]
        intervals = [(row.start, row.end) for row in rows]
        tick("interval", len(intervals))
        most = [row.most for row in rows]
        ends = np.array(intervals, dtype=np.int64).reshape(-1, 2)
        largest = np.zeros(len(self.limits) + 1)
        np.add.at(largest, ends[:, 0], most)
        np.subtract.at(largest, ends[:, 1], most)
        tight = np.cumsum(largest)[:-1] > self.limits
        self._keep_times(undominated_times(intervals, self.limits, tight))

    def _left(self, row: Row, known: dict[tuple[int, int], float]) -> float:
        """The least that is left of the limit at the times of a row."""
        span = (row.start, row.end)
        if span not in known:
            known[span] = float(self.limits[row.start : row.end].min())
        return known[span]

    def oversized(self, node: int) -> np.ndarray:
        """Which options exceed what is left at some time when every other node uses its least."""
        over = np.zeros(len(self.costs[node]), dtype=bool)
        for row in self.rows[node]:
            over |= row.amount > self.limits[row.start : row.end].min()
        return over

    def _keep_times(self, kept: IndexArray) -> None:
        if len(kept) == len(self.limits):
            return
        self.limits = self.limits[kept]
        place = np.searchsorted(kept, np.arange(len(self.times) + 1)).tolist()
        self.times = self.times[kept]
        for node in self.nodes():
            moved = (Row(place[row.start], place[row.end], row.amount) for row in self.rows[node])
            self.rows[node] = [row for row in moved if row.start < row.end]
