"""Nodes of the problem for bytes that depend on the options of two variables, or of three.

What one variable decides may be held only under certain options of another: an operand takes memory of its own if it is
read in another spec than it is made in, and a result does until it is gathered if the backward keeps what was gathered.
A node whose states fit the options of all of them says which is the case, and holds the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.planner.memory.points import ProgramPoint
from autopar.solver import Edge, Problem, Usage

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PairNode:
    """Bytes that depend on the options of two variables, or of three.

    Args:
        fits: for each of ``variables``, 0 where an option (row) allows a state (column), else infinity. Options
            that are allowed together have a state; the first that all allow says what is held.
        first, last: the points between which the bytes are held.
        sizes: bytes by state.
        running: bytes by state while the node of the last point runs, if other ones.
        throughout: bytes by state at every point of the step.
    """

    variables: tuple[int, ...]
    fits: tuple[Array, ...]
    first: ProgramPoint
    last: ProgramPoint
    sizes: Array
    running: Array | None = None
    throughout: Array | None = None

    def held(self, point: ProgramPoint) -> Array | None:
        """Return the bytes by state at a point; None where nothing is held."""
        if not self.first <= point <= self.last:
            return self.throughout
        there = self.running if self.running is not None and point.running else self.sizes
        return there if self.throughout is None else there + self.throughout

    def state(self, choice: Sequence[int]) -> int:
        """Return the state of a choice of all variables."""
        allowed = zip(self.variables, self.fits, strict=True)
        return int(np.argmin(sum(fits[choice[v]] for v, fits in allowed)))


@dataclass(frozen=True, eq=False)
class PairNodes:
    """The nodes of all pairs; those that hold anything at the points of a problem are added to it."""

    nodes: Sequence[PairNode]

    def extend(self, problem: Problem, points: Sequence[ProgramPoint]) -> Problem:
        """Return ``problem`` with the nodes that hold anything at one of ``points``; the i-th point is time i."""
        costs, edges, usages = list(problem.costs), list(problem.edges), list(problem.usages)
        free: dict[int, Array] = {}
        for pair, held in self._held_at(points):
            node, count = len(costs), len(pair.sizes)
            costs.append(free.setdefault(count, np.zeros(count)))
            edges += [Edge(v, node, fits) for v, fits in zip(pair.variables, pair.fits, strict=True)]
            usages += [Usage(node, sizes, time, time + 1) for time, sizes in held]
        return replace(problem, costs=tuple(costs), edges=tuple(edges), usages=tuple(usages), trusted=True)

    def extend_choice(self, choice: Sequence[int], points: Sequence[ProgramPoint]) -> tuple[int, ...]:
        """Return ``choice`` with the states of the nodes that ``extend`` adds."""
        return (*choice, *(pair.state(choice) for pair, _ in self._held_at(points)))

    def bytes(self, choice: Sequence[int], point: ProgramPoint) -> float:
        """Return the bytes that all pairs hold at ``point``."""
        return sum(float(held[0][1][pair.state(choice)]) for pair, held in self._held_at((point,)))

    def _held_at(self, points: Sequence[ProgramPoint]) -> Iterator[tuple[PairNode, list[tuple[int, Array]]]]:
        for pair in self.nodes:
            held = [(time, sizes) for time, p in enumerate(points) if (sizes := pair.held(p)) is not None]
            if held:
                yield pair, held


def fits(allowed: npt.ArrayLike) -> Array:
    """Return 0 where an option allows a state, and infinity elsewhere."""
    return np.where(np.asarray(allowed, dtype=bool), 0.0, math.inf)
