"""The linear program of a problem with repeated blocks and a limit, from one block of each run and the ends.

Every copy of a block may choose for itself, so what the linear program says of a block is the average of its copies: a
column agrees with its ghost but for what the two ends of the run differ by,

    m (x[column] - x[ghost]) + x[before the run] - x[ghost behind it] = 0,    x[ghost of an outer node] = x[outer node]

hold for the averages of every choice. So its optimum is a bound on the problem as it was given, whatever the number of
copies; it is the best that prices of seams and of the limit can prove (see ``relaxation``), and the duals of the limit
are these prices. A fractional value is a share of the copies: choices of the whole are then sought among the options
that are used, where some copies take one and the others another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar.errors import InfeasibleError
from autopar.solver.blocks.bounds import Bounds
from autopar.solver.blocks.parts import Parts
from autopar.solver.dual.linear import NEAR_FLOWS, ROUNDING, WORK, solve_exactly, solve_relaxed
from autopar.solver.dual.nearest import USED
from autopar.solver.integer.equations import Equations
from autopar.solver.integer.ilp import is_slow
from autopar.solver.problem import Array, Edge, IndexArray, Problem, Usage
from autopar.solver.reduce.dominance import WorkBudget
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.incumbent import Incumbent
from autopar.solver.reduce.reductions import drop_forbidden, reduce

ROUGH, RAISING_SHARE = 0.03, 0.15
"""A bound that was told by the nearest columns alone is raised until it rises by less than the one, of the gap, or the
other of the time is over."""

NEAR_SHARES = ((0, 0.3), (NEAR_FLOWS, 0.3), (4 * NEAR_FLOWS, 0.5))
"""Flows of the integer programs on what is nearest to what is used, and their shares of the time left."""


@dataclass(frozen=True)
class _Solved:
    """The ends and blocks reduced, and how far each option of their nodes is from being used, in seconds."""

    graph: Graph
    optimum: float
    bound: float
    distance: Mapping[int, Array]
    owners: Mapping[int, IndexArray]


def relax_blocks(incumbent: Incumbent, parts: Parts, seconds: float) -> None:
    """A bound, prices of the limit, and choices for the incumbent's problem.

    Raises:
        InfeasibleError: nothing is allowed within the limit.
    """
    deadline = incumbent.seconds() + seconds
    solved = _solve(incumbent, parts, deadline)
    if solved is None:
        return
    incumbent.raise_bound(solved.bound if incumbent.choice is None else min(solved.bound, incumbent.objective))
    incumbent.expected = solved.optimum
    for flows, share in NEAR_SHARES:
        if incumbent.settled() or incumbent.seconds() > deadline:
            break
        near = _near(parts.whole, solved, flows)
        if near is not None and not (flows and is_slow(near) and incumbent.refused()):
            solve_exactly(near, incumbent, share * (deadline - incumbent.seconds()), solved.optimum)
    if incumbent.settled() and not incumbent.proven():
        latest = incumbent.seconds() + RAISING_SHARE * (deadline - incumbent.seconds())
        Bounds(parts, incumbent.usage_prices).raise_bound(incumbent, latest, ROUGH)


def _near(whole: Problem, solved: _Solved, flows: int) -> Graph | None:
    """The whole problem with the options that are used, and as many of the nearest as make about ``flows`` flows; None
    where they allow nothing."""
    reaches = np.unique(np.concatenate([*solved.distance.values(), np.zeros(1)]))
    reaches = reaches[np.isfinite(reaches)]
    low, high = 0, len(reaches) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _flows(solved, reaches[middle]) <= flows else (low, middle - 1)
    try:
        graph = Graph(whole)
        for node, far in solved.distance.items():
            for copy in solved.owners.get(node, np.zeros(0)).tolist():
                graph.keep(copy, far[graph.options[copy]] <= reaches[low])
        drop_forbidden(graph)
    except InfeasibleError:
        return None
    return graph


def _flows(solved: _Solved, reach: float) -> int:
    kept = {node: int((far <= reach).sum()) for node, far in solved.distance.items()}
    return sum(kept[u] * kept[v] * len(solved.owners.get(u, (0,))) for u, v in solved.graph.pairs())


def _solve(incumbent: Incumbent, parts: Parts, deadline: float) -> _Solved | None:
    together, first = _together(parts)
    graph = Graph(together, _kept(parts, first), averaged=range(min(first), len(together.costs)))
    reduce(graph, WorkBudget(WORK))
    found = solve_relaxed(graph, incumbent, deadline, _equations(parts, first)) if len(graph.limits) else None
    if found is None:
        return None
    owners = _owners(parts, first)
    distance: dict[int, Array] = {}
    for node, values in found.values.items():
        reduced = found.reduced[node] / len(owners.get(node, (0,)))
        distance[node] = np.full(len(together.costs[node]), np.inf)
        distance[node][graph.options[node]] = np.where(values > USED, 0.0, reduced + ROUNDING)
    return _Solved(graph, found.optimum, found.bound, distance, owners)


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
    return Problem(tuple(costs), tuple(edges), tuple(usages), parts.whole.limit), first


def _kept(parts: Parts, first: list[int]) -> set[int]:
    kept: set[int] = set()
    for block, at in zip(parts.blocks, first, strict=True):
        for column, ghost, before, behind in block.seams:
            kept |= {column + at, ghost + at, before, behind}
        for ghost, node in block.outer:
            kept |= {ghost + at, node}
    return kept


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
