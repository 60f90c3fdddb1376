"""A first choice in no time: node by node, the cheapest option that leaves every neighbour one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.solver.problem import Array, Problem


def greedy_choice(problem: Problem) -> tuple[int, ...] | None:
    """A choice without forbidden pairs, whatever it uses; None where the greedy way is blocked."""
    around: list[list[tuple[int, Array]]] = [[] for _ in problem.costs]
    for edge in problem.edges:
        if edge.u != edge.v:
            around[edge.u].append((edge.v, edge.cost))
            around[edge.v].append((edge.u, edge.cost.T))
    # What each option costs with the neighbours chosen so far.
    total = [np.asarray(cost, dtype=float).copy() for cost in problem.costs]
    for edge in problem.edges:
        if edge.u == edge.v:
            total[edge.u] += np.diagonal(edge.cost)
    choice = [-1] * len(total)
    for node in range(len(total)):
        option = _cheapest(total[node], around[node], total, choice)
        if option is None:
            return None
        choice[node] = option
        for other, matrix in around[node]:
            if choice[other] < 0:
                total[other] += matrix[option]
    return tuple(choice)


def _cheapest(
    costs: Array, around: Sequence[tuple[int, Array]], total: Sequence[Array], choice: Sequence[int]
) -> int | None:
    for option in np.argsort(costs, kind="stable"):
        if not np.isfinite(costs[option]):
            return None
        open_ends = ((total[other], matrix[option]) for other, matrix in around if choice[other] < 0)
        if all(np.isfinite(there + step).any() for there, step in open_ends):
            return int(option)
    return None
