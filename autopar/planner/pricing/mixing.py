"""Better choices from known ones: every block follows one of them, and not all blocks the same.

The weighted sum of paths that a search minimises is least where all equal blocks choose alike, and then one path is
longer than the others: all layers gather their parameters over a slow link, or none does. The longest path is shorter
where some layers do the one and some the other. Lagrangian relaxation finds what to combine but combines nothing
itself: the best weights of the paths are a convex combination of choices. Here each block, and each connected part of
what is in no block, is a node whose options are the known choices, as in the restricted master problem of Dantzig and
Wolfe (1960), in whole numbers; it is improved by steps in which some blocks in a row go over to another choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.planner.problem.variables import Decisions
from autopar.solver import Run, Usage
from autopar.solver.clock import tick
from autopar.solver.problem import Array, IndexArray

WORTH = 1e-4
"""The relative gain of a step that is worth taking."""

FORBIDDEN_S = 1e6
"""Seconds of a pair of options that is not allowed."""


@dataclass(frozen=True)
class Segments:
    """What chooses together. ``of``: the segment of each variable; ``chains``: the segments of each run of blocks in
    their order, and each other one by itself."""

    of: IndexArray
    chains: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return sum(map(len, self.chains))


def segments(d: Decisions, runs: Sequence[Run]) -> Segments:
    """Return a segment for each block of the runs, and for each connected part of what is in none."""
    import networkx as nx

    of = np.full(len(d.variables), -1)
    chains: list[tuple[int, ...]] = []
    count = 0
    for run in runs:
        chains.append(tuple(range(count, count + len(run.copies))))
        of[run.copies] = np.array(chains[-1])[:, None]
        count += len(run.copies)
    rest = nx.Graph()
    rest.add_nodes_from(np.flatnonzero(of < 0).tolist())
    rest.add_edges_from((u.source, u.target) for u in d.uses if u.source in rest and u.target in rest)
    for part in nx.connected_components(rest):
        of[list(part)] = count
        chains.append((count,))
        count += 1
    return Segments(of, tuple(chains))


class Entries(NamedTuple):
    """Seconds of variables and of pairs: entry i is ``flat[start + width * option of row + option of column]`` seconds
    of a term, of ``terms``; the column of a single variable is -1."""

    terms: int
    flat: Array
    term: IndexArray
    start: IndexArray
    width: IndexArray
    row: IndexArray
    column: IndexArray


class Mixing:
    """The problem of which known choice each segment follows.

    Args:
        total: the objective for the seconds of the cost terms in the last dimension.
        choices: the known ones.
        usages, limit: what they use of what is limited.
    """

    def __init__(
        self,
        segments: Segments,
        entries: Entries,
        total: Callable[[Array], Array],
        choices: Sequence[Sequence[int]],
        usages: Sequence[Usage] = (),
        limit: float = np.inf,
    ) -> None:
        self.segments, self.total, self.limit = segments, total, limit
        self.terms = entries.terms
        self.choices = np.array([(*choice, 0) for choice in choices], dtype=np.int64)
        tick("mixed use", len(self.choices) * len(entries.row))
        self.own = self._own(entries)
        self.around = self._between(entries)
        self.used = self._used(usages)

    @property
    def _ways(self) -> range:
        return range(len(self.choices))

    def _own(self, entries: Entries) -> Array:
        """The seconds of the cost terms by segment and choice, from what is inside the segment."""
        of = self.segments.of
        inside = (entries.column < 0) | (of[entries.row] == of[entries.column])
        term, start, width, row, column = (np.asarray(a)[inside] for a in entries[2:])
        terms, at = self.terms, of[row]
        found = []
        for choice in self.choices:
            seconds = np.minimum(entries.flat[start + width * choice[row] + choice[column]], FORBIDDEN_S)
            summed = np.bincount(at * terms + term, seconds, self.segments.count * terms)
            found.append(summed.reshape(-1, terms))
        return np.stack(found, axis=1)

    def _between(self, entries: Entries) -> list[list[tuple[int, Array]]]:
        """For each segment its neighbours, with the seconds by choice of the segment and of the neighbour."""
        of = self.segments.of
        outside = (entries.column >= 0) & (of[entries.row] != of[entries.column])
        term, start, width, row, column = (np.asarray(a)[outside] for a in entries[2:])
        ends, at = np.unique(np.stack([of[row], of[column]]), axis=1, return_inverse=True)
        terms, count, ways = self.terms, ends.shape[1], len(self._ways)
        tick("mixed use", len(row) * ways * ways)
        found = np.zeros((count, ways, ways, terms))
        for i in self._ways:
            for j in self._ways:
                seconds = entries.flat[start + width * self.choices[i][row] + self.choices[j][column]]
                summed = np.bincount(at.ravel() * terms + term, np.minimum(seconds, FORBIDDEN_S), count * terms)
                found[:, i, j] = summed.reshape(-1, terms)
        around: list[list[tuple[int, Array]]] = [[] for _ in range(self.segments.count)]
        for (u, v), pair in zip(ends.T.tolist(), found, strict=True):
            around[u].append((v, pair))
            around[v].append((u, pair.transpose(1, 0, 2)))
        return around

    def _used(self, usages: Sequence[Usage]) -> Array:
        """What is used at each time, by segment and choice."""
        found = np.zeros((self.segments.count, len(self._ways), max((u.end for u in usages), default=0) + 1))
        for usage in usages:
            used = usage.option[self.choices[:, usage.node]]
            found[self.segments.of[usage.node], :, usage.start] += used
            found[self.segments.of[usage.node], :, usage.end] -= used
        return found.cumsum(axis=2)[..., :-1]

    def best(self) -> tuple[int, ...] | None:
        """Return the best choice that is found; None where no known choice is within the limit."""
        firsts = [[way] * self.segments.count for way in self._ways]
        seconds = [self._seconds(ways) for ways in firsts]
        fitting = [w for w in self._ways if np.all(self.used[:, w].sum(axis=0) <= self.limit)]
        if not fitting:
            return None
        way = min(fitting, key=lambda w: float(self.total(seconds[w])))
        ways = self._descend(firsts[way], seconds[way])
        chosen = np.array(ways)[self.segments.of]
        return tuple(self.choices[chosen, np.arange(len(chosen))].tolist())

    def _seconds(self, ways: Sequence[int]) -> Array:
        """The seconds of the cost terms where each segment goes its way."""
        found = self.own[np.arange(len(ways)), ways].sum(axis=0)
        for u, neighbours in enumerate(self.around):
            for v, pair in neighbours:
                if u < v:
                    found = found + pair[ways[u], ways[v]]
        return np.asarray(found, dtype=np.float64)

    def _descend(self, ways: list[int], seconds: Array) -> list[int]:
        used = self.used[np.arange(len(ways)), ways].sum(axis=0)
        total = float(self.total(seconds))
        while True:
            best: tuple[float, tuple[int, ...], int] = (total * (1 - WORTH), (), 0)
            for chain in self.segments.chains:
                for first in range(len(chain)):
                    changes = self._changes(chain[first:], ways)
                    totals = self.total(seconds + changes)
                    if len(used):
                        more = (
                            self.used[chain[first:], :]
                            - self.used[chain[first:], [ways[s] for s in chain[first:]]][:, None]
                        )
                        totals[np.any(used + more.cumsum(axis=0) > self.limit, axis=2)] = np.inf
                    least = float(totals.min())
                    if least < best[0]:
                        size, way = np.unravel_index(int(totals.argmin()), totals.shape)
                        best = (least, chain[first : first + int(size) + 1], int(way))
            if not best[1]:
                return ways
            for segment in best[1]:
                ways[segment] = best[2]
            seconds = self._seconds(ways)
            used = self.used[np.arange(len(ways)), ways].sum(axis=0)
            total = float(self.total(seconds))

    def _changes(self, chain: Sequence[int], ways: Sequence[int]) -> Array:
        """How they change where the first 1, 2, ... segments of a chain go each way."""
        change = np.zeros((len(self._ways), self.terms))
        found, gone = [], set[int]()
        every = np.arange(len(self._ways))
        tick("changed element", len(chain) * change.size)
        for segment in chain:
            change = change + self.own[segment] - self.own[segment, ways[segment]]
            for other, pair in self.around[segment]:
                if other in gone:
                    change = change + pair[every, every] - pair[ways[segment]]
                else:
                    change = change + pair[:, ways[other]] - pair[ways[segment], ways[other]]
            gone.add(segment)
            found.append(change)
        return np.stack(found)
