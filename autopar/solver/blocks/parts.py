"""A problem with repeated blocks, taken apart: one block of each run, and the ends, which are all the rest.

Blocks of a run meet in *seams*: a column of one block has edges to the next block. The next block holds a ghost of it,
and so do the ends behind the last block; a node outside that every block reads has a ghost in the block. Then the
cost of a choice is that of the ends plus that of every block, as long as ghosts choose what their originals do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.repetition import Run
from autopar.solver.problem import NO_SHIFT, Array, Edge, IndexArray, Problem, Usage


@dataclass(frozen=True, eq=False)
class Block:
    """One block of ``len(copies)`` equal ones. Its nodes are numbered: columns, ghosts of seams, ghosts of outer nodes.

    Args:
        copies: nodes of the whole problem, one row for each block.
        problem: the block alone.
        seams: (column, its ghost here, its original just before the run and its ghost behind it, in the ends).
        outer: (ghost here, its original in the ends).
    """

    copies: IndexArray
    problem: Problem
    seams: tuple[tuple[int, int, int, int], ...]
    outer: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return len(self.copies)


@dataclass(frozen=True, eq=False)
class Parts:
    """``ends``: the explicit nodes, in the order of ``explicit``, then the ghosts behind each run."""

    whole: Problem
    ends: Problem
    explicit: IndexArray
    blocks: tuple[Block, ...]


def take_apart(problem: Problem, runs: Sequence[Run], margin: int) -> Parts:
    """The parts of ``problem``, with the first and last ``margin`` (>= 1) blocks of each run left to the ends."""
    return _Apart(problem, [run.copies[margin : len(run.copies) - margin] for run in runs]).parts(runs, margin)


class _Apart:
    def __init__(self, problem: Problem, copies: Sequence[IndexArray]) -> None:
        self.problem = problem
        self.copies = copies
        size = len(problem.costs)
        self.run = np.full(size, -1)
        self.row = np.full(size, -1)
        self.column = np.full(size, -1)
        for index, rows in enumerate(copies):
            self.run[rows] = index
            self.row[rows] = np.arange(len(rows))[:, None]
            self.column[rows] = np.arange(rows.shape[1])
        self.explicit = np.flatnonzero(self.run < 0)
        self.place = np.full(size, -1)
        self.place[self.explicit] = np.arange(len(self.explicit))
        self.usages: dict[int, list[Usage]] = {}
        for usage in problem.usages:
            self.usages.setdefault(usage.node, []).append(usage)

    def parts(self, runs: Sequence[Run], margin: int) -> Parts:
        ends_u, ends_v = (np.array([getattr(e, end) for e in self.problem.edges], dtype=np.int64) for end in "uv")
        inside = (self.run[ends_u] < 0) & (self.run[ends_v] < 0)
        edges = [
            Edge(int(self.place[e.u]), int(self.place[e.v]), e.cost)
            for e in (self.problem.edges[i] for i in np.flatnonzero(inside))
        ]
        costs = [self.problem.costs[node] for node in self.explicit]
        blocks = []
        for index, run in enumerate(runs):
            second = (self.run[ends_u] == index) & (self.row[ends_u] == 1)
            second |= (self.run[ends_v] == index) & (self.row[ends_v] == 1)
            near = [self.problem.edges[i] for i in np.flatnonzero(second)]
            blocks.append(self._block(index, run.copies, margin, near, costs, edges))
        usages = [
            Usage(int(self.place[node]), usage.option, usage.start, usage.end)
            for node in self.explicit
            for usage in self.usages.get(int(node), ())
        ]
        ends = Problem(tuple(costs), tuple(edges), tuple(usages), trusted=True)
        return Parts(self.problem, ends, self.explicit, tuple(blocks))

    def _block(
        self,
        index: int,
        rows: IndexArray,
        margin: int,
        near: Sequence[Edge],
        end_costs: list[Array],
        end_edges: list[Edge],
    ) -> Block:
        """The block, read off the second copy; ghosts behind the run are added to the ends."""
        copies = self.copies[index]
        before, after = rows[margin - 1], rows[len(rows) - margin]
        costs = [self.problem.costs[node] for node in copies[1]]
        edges: list[Edge] = []
        ghosts: dict[int, int] = {}
        behind: dict[int, int] = {}
        outer: dict[int, int] = {}

        def local(node: int) -> int:
            """The number in the block of a node of the second copy, of the first (a ghost), or outside (a ghost)."""
            if self.run[node] == index and self.row[node] == 1:
                return int(self.column[node])
            known, key = (ghosts, int(self.column[node])) if self.run[node] == index else (outer, int(self.place[node]))
            if key not in known:
                known[key] = len(costs)
                costs.append(np.zeros(len(self.problem.costs[node])))
            return known[key]

        def in_ends(node: int) -> int:
            """The same edge one copy behind the last: to the explicit copy, from a ghost."""
            column = int(self.column[node])
            if self.row[node] == 1:
                return int(self.place[after[column]])
            if column not in behind:
                behind[column] = len(end_costs)
                end_costs.append(np.zeros(len(self.problem.costs[node])))
            return behind[column]

        for edge in near:
            if {int(self.row[n]) for n in (edge.u, edge.v) if self.run[n] == index} == {1, 2}:
                continue
            edges.append(Edge(local(edge.u), local(edge.v), edge.cost))
            if {int(self.row[n]) for n in (edge.u, edge.v) if self.run[n] == index} == {0, 1}:
                end_edges.append(Edge(in_ends(edge.u), in_ends(edge.v), edge.cost))
        usages = [
            Usage(c, usage.option, usage.start, usage.end)
            for c, node in enumerate(copies[1])
            for usage in self.usages.get(int(node), ())
        ]
        problem = Problem(tuple(costs), tuple(edges), tuple(usages), trusted=True)
        seams = tuple((c, ghosts[c], int(self.place[before[c]]), behind[c]) for c in sorted(ghosts))
        return Block(copies, problem, seams, tuple((ghost, node) for node, ghost in sorted(outer.items())))


@dataclass(frozen=True, eq=False)
class Tied:
    """The problem in which all blocks of a run choose alike. ``ends`` and ``blocks``: where their nodes went."""

    parts: Parts
    problem: Problem
    ends: IndexArray
    blocks: tuple[IndexArray, ...]

    def expand(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice of the whole problem that a tied choice means."""
        return tuple(np.asarray(choice, dtype=np.int64)[self.place].tolist())

    def project(self, choice: Sequence[int]) -> tuple[int, ...]:
        """A tied choice near one of the whole problem: of the nodes that are tied one decides."""
        tied = np.zeros(len(self.problem.costs), dtype=np.int64)
        tied[self.place] = choice
        return tuple(tied.tolist())

    @cached_property
    def place(self) -> IndexArray:
        """The tied node of each node of the whole problem."""
        place = np.zeros(len(self.parts.whole.costs), dtype=np.int64)
        place[self.parts.explicit] = self.ends[: len(self.parts.explicit)]
        for block, columns in zip(self.parts.blocks, self.blocks, strict=True):
            place[block.copies] = columns[: block.copies.shape[1]]
        return place


def tie(parts: Parts) -> Tied:
    """Ghosts become their originals; costs and usages of a block count once for every copy."""
    costs = list(parts.ends.costs)
    ends = np.arange(len(costs))
    edges = list(parts.ends.edges)
    usages = list(parts.ends.usages)
    places = []
    for block in parts.blocks:
        place = np.full(len(block.problem.costs), -1)
        for column, ghost, before, behind in block.seams:
            # The ghost behind the run is the one that stays; nothing else of the ends refers to it but its own edges.
            place[column] = place[ghost] = before
            ends[behind] = before
        for ghost, node in block.outer:
            place[ghost] = node
        for node, cost in enumerate(block.problem.costs):
            if place[node] < 0:
                place[node] = len(costs)
                costs.append(block.count * cost)
            else:
                costs[place[node]] = costs[place[node]] + block.count * cost
        scaled = {id(e.cost): block.count * e.cost for e in block.problem.edges}
        edges += [Edge(int(place[e.u]), int(place[e.v]), scaled[id(e.cost)]) for e in block.problem.edges]
        usages += [Usage(int(place[u.node]), block.count * u.option, u.start, u.end) for u in block.problem.usages]
        places.append(place)
    edges = [
        Edge(int(ends[e.u]) if e.u < len(ends) else e.u, int(ends[e.v]) if e.v < len(ends) else e.v, e.cost)
        for e in edges
    ]
    problem = Problem(tuple(costs), tuple(edges), tuple(usages), parts.whole.limit, NO_SHIFT, trusted=True)
    return Tied(parts, problem, ends, tuple(places))
