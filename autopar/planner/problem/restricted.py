"""Problems in which most is decided: few options of each node are left, and only one of most nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from autopar.errors import AutoparError
from autopar.solver import Edge, Fallback, Gap, Problem, Solution, Tied, Usage, solve, sum_of_least

Kept = Sequence[npt.NDArray[np.int64]]
"""The options that are left of each node."""


def solve_sliced(
    problem: Problem,
    kept: Kept,
    time_limit: float,
    backend: str,
    gap: float | Gap,
    known: Sequence[int] | None = None,
    fallback: Fallback | None = None,
) -> Solution | None:
    """Find the best choice among the options ``kept`` of each node; None if there is none or time runs out. It begins
    with the ``known`` one, and goes on from ``fallback`` where it finds none."""
    if not all(map(len, kept)):
        return None
    open_nodes = [node for node, options in enumerate(kept) if len(options) > 1] or [0]
    sliced, certain = _sliced(problem, kept, open_nodes)
    if not math.isfinite(certain) or (problem.usages and sum_of_least(sliced) > problem.limit):
        return None
    begin = () if known is None else (_among(known, kept, open_nodes),)

    def instead() -> tuple[int, ...] | None:
        found = None if fallback is None else fallback()
        return None if found is None else _among(found, kept, open_nodes)

    try:
        found = solve(sliced, time_limit=time_limit, backend=backend, gap=gap, warm_starts=begin, fallback=instead)
    except AutoparError:
        return None
    choice = np.array([options[0] for options in kept], dtype=np.int64)
    choice[open_nodes] = [kept[node][option] for node, option in zip(open_nodes, found.choice, strict=True)]
    return replace(found, choice=tuple(choice.tolist()))


def solve_alike(
    problem: Problem, kept: Kept, time_limit: float, backend: str, gap: float | Gap, folded: Tied | None
) -> tuple[int, ...] | None:
    """Find the best choice as ``solve_sliced`` does, but where every block keeps the same options, all blocks choose
    alike too, if they can. Then this costs what one block of each run costs.

    Args:
        folded: the problem with its blocks tied together; None where nothing repeats.
    """
    tied = None if folded is None else _tied(kept, folded)
    if folded is not None and tied is not None:
        found = solve_sliced(folded.problem, tied, time_limit, backend, gap)
        if found is not None:
            return folded.expand(found.choice)
    solved = solve_sliced(problem, kept, time_limit, backend, gap)
    return None if solved is None else solved.choice


def _tied(kept: Kept, folded: Tied) -> list[npt.NDArray[np.int64]] | None:
    """Return the options that are left of each tied node; None if those of nodes that are tied differ."""
    names: dict[bytes, int] = {}
    of = np.array([names.setdefault(options.tobytes(), len(names)) for options in kept])
    nodes, first = np.unique(folded.place, return_index=True)
    example = np.zeros(len(folded.problem.costs), dtype=np.int64)
    example[nodes] = first
    if (of != of[example[folded.place]]).any():
        return None
    tied = [np.arange(len(cost)) for cost in folded.problem.costs]
    for node, i in zip(nodes.tolist(), first.tolist(), strict=True):
        tied[node] = kept[i]
    return tied


def _among(choice: Sequence[int], kept: Kept, open_nodes: Sequence[int]) -> tuple[int, ...]:
    """Return a choice in terms of the options that are kept; of a node that takes another one, the first."""
    return tuple(int((kept[node] == choice[node]).argmax()) for node in open_nodes)


def _sliced(problem: Problem, kept: Kept, open_nodes: Sequence[int]) -> tuple[Problem, float]:
    """Return the problem of the nodes that still have a choice, and the seconds that are certain.

    What is certain counts in the costs and usages of that problem.
    """
    names = [options.tobytes() for options in kept]
    made: dict[tuple[object, ...], npt.NDArray[np.float64]] = {}

    def cut(edge: Edge) -> npt.NDArray[np.float64]:
        key = (id(edge.cost), names[edge.u], names[edge.v])
        if key not in made:
            made[key] = np.ascontiguousarray(edge.cost[np.ix_(kept[edge.u], kept[edge.v])])
        return made[key]

    position = {node: i for i, node in enumerate(open_nodes)}
    only = [int(options[0]) for options in kept]
    costs = [problem.costs[node][kept[node]] for node in open_nodes]
    certain = [cost.item(only[node]) for node, cost in enumerate(problem.costs) if node not in position]
    edges: list[Edge] = []
    for edge in problem.edges:
        u, v = position.get(edge.u), position.get(edge.v)
        if u is not None and v is not None:
            edges.append(Edge(u, v, cut(edge)))
        elif u is not None:
            costs[u] += edge.cost[kept[edge.u], only[edge.v]]
        elif v is not None:
            costs[v] += edge.cost[only[edge.u], kept[edge.v]]
        else:
            certain.append(edge.cost.item(only[edge.u], only[edge.v]))
    total = math.fsum(certain)
    costs[0] = costs[0] + total
    usages = [
        Usage(position[u.node], u.option[kept[u.node]], u.start, u.end) for u in problem.usages if u.node in position
    ]
    used: dict[tuple[int, int], list[float]] = {}
    for usage in problem.usages:
        if usage.node not in position:
            used.setdefault((usage.start, usage.end), []).append(float(usage.option[only[usage.node]]))
    usages += [Usage(0, np.full(len(costs[0]), math.fsum(sizes)), *span) for span, sizes in used.items()]
    known = problem.shift
    shift = known and {position[n]: position[like] for n, like in known.items() if n in position and like in position}
    return Problem(tuple(costs), tuple(edges), tuple(usages), problem.limit, shift, trusted=True), total
