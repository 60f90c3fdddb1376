"""For a rest too large for one integer program: parts are solved exactly, the others' choices held fixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopar import settings
from autopar.errors import AutoparError
from autopar.solver.dual.search import Search
from autopar.solver.problem import NO_SHIFT, Edge, Problem, Solution, Usage
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.incumbent import Incumbent

SolvePart = Callable[[Problem, float, Sequence[int]], Solution]


def improve_parts(graph: Graph, incumbent: Incumbent, solve_part: SolvePart) -> None:
    """Solve parts until the time is up or they give nothing for long; each better choice is offered.

    A part is connected, around a random node, or, under a limit, made of random nodes: what one of these frees of the
    limit another one uses, however far away.
    """
    if incumbent.choice is None:
        return
    search = Search(graph, graph.project(incumbent.choice))
    if not search.feasible():
        return
    random = np.random.default_rng(0)
    nodes = graph.nodes()
    began = found_s = incumbent.seconds()
    count = found = 0
    while incumbent.seconds_left() > 0 and not incumbent.proven():
        now = incumbent.seconds()
        if count - found > settings.ROUNDS and now - found_s > settings.IDLE_SHARE * (now - began):
            break
        count += 1
        order = random.permutation(nodes).tolist()
        part = (
            _random_part(graph, order) if count % 2 and len(graph.limits) else _connected_part(graph, order[0], random)
        )
        if not _improve_part(graph, search, part, min(settings.LEAST_S, incumbent.seconds_left()), solve_part):
            continue
        if incumbent.offer(graph.expand(search.choice), "solving parts"):
            found, found_s = count, incumbent.seconds()


def _random_part(graph: Graph, order: Sequence[int]) -> list[int]:
    """The first nodes of ``order``, as many as an integer program solves fast."""
    part: set[int] = set()
    pairs = 0
    for node in order:
        pairs += len(graph.costs[node])
        pairs += sum(matrix.size for other, matrix in graph.neighbours[node].items() if other in part)
        if pairs > settings.PART_PAIRS:
            break
        part.add(node)
    return sorted(part)


def _connected_part(graph: Graph, centre: int, random: np.random.Generator) -> list[int]:
    """Nodes near ``centre``, likewise."""
    part, pairs = {centre}, len(graph.costs[centre])
    frontier = sorted(graph.neighbours[centre])
    while frontier:
        node = frontier.pop(int(random.integers(len(frontier))))
        pairs += len(graph.costs[node])
        pairs += sum(matrix.size for other, matrix in graph.neighbours[node].items() if other in part)
        if pairs > settings.PART_PAIRS:
            break
        part.add(node)
        frontier = sorted({*frontier, *graph.neighbours[node]} - part)
    return sorted(part)


def _improve_part(
    graph: Graph,
    search: Search,
    part: list[int],
    seconds: float,
    solve_part: SolvePart,
) -> bool:
    problem = _part_problem(graph, search, part)
    present = [search.choice[node] for node in part]
    warm = present + [0] * (len(problem.costs) - len(part))
    try:
        solution = solve_part(problem, seconds, warm)
    except AutoparError:
        return False
    chosen = solution.choice[: len(part)]
    for node, option in zip(part, chosen, strict=True):
        search.take(node, option)
    return list(chosen) != present


def _part_problem(graph: Graph, search: Search, part: list[int]) -> Problem:
    """The part alone; one more node a time, of one option, uses what the rest leaves no room for."""
    place = {node: index for index, node in enumerate(part)}
    inside = tuple(part)
    costs = [search.conditional(node, inside) for node in part]
    edges = [
        Edge(place[u], place[v], matrix)
        for u in part
        for v, matrix in graph.neighbours[u].items()
        if v in place and u < v
    ]
    usages = [Usage(place[node], row.amount, row.start, row.end) for node in part for row in graph.rows[node]]
    room = np.maximum(graph.limits - search.used_by_others(inside), 0.0)
    limit = float(room.max(initial=0.0))
    for time in np.flatnonzero(room < limit).tolist():
        usages.append(Usage(len(costs), np.array([limit - room[time]]), time, time + 1))
        costs.append(np.zeros(1))
    return Problem(tuple(costs), tuple(edges), tuple(usages), limit if len(room) else np.inf, NO_SHIFT, trusted=True)
