"""For a rest too large for one integer program: parts are solved exactly, the others' choices held fixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopar.errors import AutoparError
from autopar.solver.dual.search import Search
from autopar.solver.problem import Edge, Problem, Solution, Usage
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.incumbent import Incumbent

MAX_PART_PAIRS = 150_000
PART_SECONDS = 5.0
SEED = 0


def improve_parts(
    graph: Graph, incumbent: Incumbent, solve_part: Callable[[Problem, float, Sequence[int]], Solution]
) -> None:
    """Solve connected parts around random nodes until the time is up; each better choice is offered."""
    if incumbent.choice is None:
        return
    search = Search(graph, graph.project(incumbent.choice))
    if not search.feasible():
        return
    random = np.random.default_rng(SEED)
    nodes = graph.nodes()
    unchanged = 0
    while incumbent.seconds_left() > 0.5 and not incumbent.proven() and unchanged < 3 * len(nodes):
        part = _connected_part(graph, nodes[int(random.integers(len(nodes)))], random)
        seconds = min(PART_SECONDS, incumbent.seconds_left() - 0.3)
        unchanged = 0 if _improve_part(graph, search, part, seconds, solve_part) else unchanged + 1
        incumbent.offer(graph.expand(search.choice), "message passing and solving parts")


def _connected_part(graph: Graph, centre: int, random: np.random.Generator) -> list[int]:
    """Nodes near ``centre``, as many as an integer program solves fast."""
    part, pairs = [centre], 0
    frontier = sorted(graph.neighbours[centre])
    while frontier:
        node = frontier.pop(int(random.integers(len(frontier))))
        pairs += sum(graph.neighbours[node][other].size for other in graph.neighbours[node] if other in part)
        if pairs > MAX_PART_PAIRS:
            break
        part.append(node)
        frontier = sorted({*frontier, *graph.neighbours[node]} - set(part))
    return sorted(part)


def _improve_part(
    graph: Graph,
    search: Search,
    part: list[int],
    seconds: float,
    solve_part: Callable[[Problem, float, Sequence[int]], Solution],
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
    return Problem(tuple(costs), tuple(edges), tuple(usages), limit if len(room) else np.inf)
