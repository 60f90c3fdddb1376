"""The linear program of a problem with repeated blocks, from one block of each run and the ends.

Every copy of a block may choose for itself, so what the linear program says of a block is the average of its copies: a
column agrees with its ghost but for what the two ends of the run differ by,

    m (x[column] - x[ghost]) + x[before the run] - x[ghost behind it] = 0,    x[ghost of an outer node] = x[outer node]

hold for the averages of every choice. So its optimum is a bound on the problem as it was given, whatever the number of
copies; it is the best that prices of seams and of the limit can prove (see ``relaxation``), and the duals of the limit
are these prices. A fractional value is a share of the copies: choices of the whole are then sought among the options
that are used, where some copies take one and the others another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from autopar import settings
from autopar.solver.blocks.bounds import Bounds
from autopar.solver.blocks.parts import Parts
from autopar.solver.dual.linear import expected_seconds, search_near, solve_relaxed
from autopar.solver.integer.equations import Equations
from autopar.solver.problem import Edge, IndexArray, Problem, Usage
from autopar.solver.reduce.dominance import WorkBudget
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.incumbent import Incumbent
from autopar.solver.reduce.reductions import reduce


def relax_blocks(incumbent: Incumbent, parts: Parts, seconds: float, expected: float = math.inf) -> None:
    """A bound, prices of the limit, and choices for the incumbent's problem.

    Args:
        expected: the most seconds that the linear program may be expected to take; else it is not begun.

    Raises:
        InfeasibleError: nothing is allowed within the limit.
    """
    deadline = incumbent.seconds() + seconds
    if incumbent.choice is not None and incumbent.usage_prices.prices.any():
        _raise_bound(incumbent, parts, settings.PART_SHARE * seconds)
        if incumbent.settled():
            return
    together, first = _together(parts)
    graph = Graph(together, _kept(parts, first), averaged=range(min(first), len(together.costs)))
    reduce(graph, WorkBudget(settings.WORK, lambda: incumbent.seconds() > deadline))
    if expected < math.inf and expected_seconds(graph) > expected:
        return
    known = () if incumbent.choice is None else _each_copy(parts, np.array(incumbent.choice))
    found = solve_relaxed(graph, incumbent, deadline, known, _equations(parts, first))
    if found is None:
        return
    incumbent.raise_bound(found.bound if incumbent.choice is None else min(found.bound, incumbent.objective))
    incumbent.expected = found.optimum
    search_near(incumbent, graph, found, deadline, lambda: Graph(parts.whole), _owners(parts, first))
    if incumbent.settled() and not incumbent.proven():
        _raise_bound(incumbent, parts, settings.SMALL_SHARE * (deadline - incumbent.seconds()))


def _raise_bound(incumbent: Incumbent, parts: Parts, seconds: float) -> None:
    """By message passing under the prices of the limit that the incumbent has."""
    latest = incumbent.seconds() + seconds
    Bounds(parts, incumbent.usage_prices, incumbent.traded).raise_bound(incumbent, latest, settings.ROUGH)


def _together(parts: Parts) -> tuple[Problem, list[int]]:
    """The ends, and each block once with the weight of all its copies; and where each begins."""
    costs, edges, usages = list(parts.ends.costs), list(parts.ends.edges), list(parts.ends.usages)
    first = []
    for block in parts.blocks:
        at, m = len(costs), block.count
        first.append(at)
        scaled = {id(x): m * x for x in (*block.problem.costs, *(e.cost for e in block.problem.edges))}
        costs += [scaled[id(c)] for c in block.problem.costs]
        edges += [Edge(e.u + at, e.v + at, scaled[id(e.cost)]) for e in block.problem.edges]
        usages += [Usage(u.node + at, m * u.option, u.start, u.end) for u in block.problem.usages]
    return Problem(tuple(costs), tuple(edges), tuple(usages), parts.whole.limit, trusted=True), first


def _kept(parts: Parts, first: list[int]) -> set[int]:
    kept: set[int] = set()
    for block, at in zip(parts.blocks, first, strict=True):
        for column, ghost, before, behind in block.seams:
            kept |= {column + at, ghost + at, before, behind}
        for ghost, node in block.outer:
            kept |= {ghost + at, node}
    return kept


def _each_copy(parts: Parts, choice: IndexArray) -> Iterable[tuple[int, ...]]:
    """A choice of the whole problem as choices of the ends and of each copy in turn, whose average it is."""
    ends = np.zeros(len(parts.ends.costs), dtype=np.int64)
    ends[: len(parts.explicit)] = choice[parts.explicit]
    copies = []
    for block in parts.blocks:
        rows = np.zeros((block.count, len(block.problem.costs)), dtype=np.int64)
        rows[:, : block.copies.shape[1]] = choice[block.copies]
        for column, ghost, before, behind in block.seams:
            rows[1:, ghost], rows[0, ghost], ends[behind] = rows[:-1, column], ends[before], rows[-1, column]
        for ghost, node in block.outer:
            rows[:, ghost] = ends[node]
        copies.append(rows)
    most = max(map(len, copies))
    return dict.fromkeys(
        (*ends.tolist(), *(o for rows in copies for o in rows[j % len(rows)].tolist())) for j in range(most)
    )


def _owners(parts: Parts, first: list[int]) -> dict[int, IndexArray]:
    """For a node of the ends or of a block: the nodes of the whole problem that it stands for."""
    owners = {i: parts.explicit[i : i + 1] for i in range(len(parts.explicit))}
    for block, at in zip(parts.blocks, first, strict=True):
        owners |= {column + at: block.copies[:, column] for column in range(block.copies.shape[1])}
    return owners


def _equations(parts: Parts, first: list[int]) -> Equations:
    """Those that hold for averages over copies."""
    found: list[list[tuple[int, float]]] = []
    for block, at in zip(parts.blocks, first, strict=True):
        m = float(block.count)
        for column, ghost, before, behind in block.seams:
            found.append([(column + at, m), (ghost + at, -m), (before, 1.0), (behind, -1.0)])
        found += [[(ghost + at, 1.0), (node, -1.0)] for ghost, node in block.outer]
    return found
