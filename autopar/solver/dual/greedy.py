"""A first choice in no time: node by node, the cheapest option that leaves every neighbour one.

Where it uses too much, what is used gets a price at the times that are over the limit, higher each time, and the same
is done again: crude, but it needs neither reductions nor bounds, so that a huge problem under a tight limit has a
choice from the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from autopar.solver.problem import USAGE_TOLERANCE, Array, Problem, UsagePrices
from autopar.solver.reduce.usage import UsageTable, with_usages_priced

ROUNDS = 24
FIRST_PRICE = 0.1
"""Of what the choice costs, for all of the limit at all the times that are over it."""

DEARER = 2.0


def frugal_choice(
    problem: Problem, first: Sequence[int], cost: float, late: Callable[[], bool]
) -> tuple[int, ...] | None:
    """A choice within the limit, found from ``first``, which is not and costs ``cost``; None where none was."""
    table = UsageTable(problem)
    if not len(table.times) or not problem.limit > 0:
        return None
    used = table.of(first)
    prices = np.zeros(len(used))
    step = FIRST_PRICE * max(cost, 1e-300) / problem.limit
    for _ in range(ROUNDS):
        over = np.maximum(used / problem.limit - 1, 0.0)
        if over.max() <= USAGE_TOLERANCE:
            return tuple(first)
        if late() or not math.isfinite(step):
            return None
        prices += step * over / over.sum()
        step *= DEARER
        found = greedy_choice(with_usages_priced(problem, UsagePrices(table.times.astype(float), prices)))
        if found is None:
            return None
        first, used = found, table.of(found)
    return None


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
