"""The optimum of a narrow problem of any length: nodes leave one by one, each by a minimum over its options (Bertele &
Brioschi 1972)."""

from __future__ import annotations

from functools import reduce

import numpy as np

from autopar.solver import Problem
from autopar.solver.problem import Array

Table = tuple[tuple[int, ...], Array]
"""Seconds for the options of some nodes, in ascending order, one axis each."""


def eliminated(problem: Problem) -> float:
    """Seconds; the limit is left out. Infinite where no choice is allowed."""
    tables: list[Table] = [((node,), cost) for node, cost in enumerate(problem.costs)]
    tables += [((e.u,), np.diagonal(e.cost)) for e in problem.edges if e.u == e.v]
    tables += [((e.u, e.v), e.cost) for e in problem.edges if e.u < e.v]
    tables += [((e.v, e.u), e.cost.T) for e in problem.edges if e.u > e.v]
    left, total = set(range(len(problem.costs))), 0.0
    while left:
        node = min(left, key=lambda n: (len({other for scope, _ in tables if n in scope for other in scope}), n))
        left.discard(node)
        mine = [table for table in tables if node in table[0]]
        scope = tuple(sorted({other for around, _ in mine for other in around}))
        least = reduce(np.add, (_over(scope, table) for table in mine)).min(axis=scope.index(node))
        tables = [table for table in tables if node not in table[0]]
        if len(scope) > 1:
            tables.append((tuple(other for other in scope if other != node), least))
        else:
            total += float(least)
    return total


def _over(scope: tuple[int, ...], table: Table) -> Array:
    """The table with an axis for each node of ``scope``, of one element where it does not depend on the node."""
    around, values = table
    shape = iter(values.shape)
    return values.reshape([next(shape) if node in around else 1 for node in scope])
