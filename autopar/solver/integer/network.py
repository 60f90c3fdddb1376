"""An edge as a network to send flows through: what costs no more by way of a third option needs no arc of its own.

The costs of an edge are a transportation problem between the options of its two ends. A redistribution goes step by
step, so most pairs cost as much as two others: a -> k and k -> b, where k is an option of either end and taking the
same at both is best. Such options are one node, through which flows pass (a transshipment problem: Orden 1956), and an
arc that costs at least as much as another way goes. Neither changes what the cheapest flow costs, and the linear
programs of deep models on two mesh axes take a third of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar import settings
from autopar.solver.clock import tick
from autopar.solver.problem import Array, IndexArray
from autopar.solver.reduce.alike import alike

ROUNDING = 1e-12
"""Relative difference of costs that counts as none."""


@dataclass(frozen=True, eq=False)
class Network:
    """Arcs from ``tails`` to ``heads``, ``costs`` in seconds, among ``nodes`` nodes.

    Args:
        leaves: the node at which what each option of the first end sends starts.
        arrives: the node at which what each option of the second end takes is taken.
        paid: what every option of the second end costs besides, for whatever it takes.
        via: for two nodes whose arc is gone one between them, else -1.
        arc: the number of the arc between two nodes, or -1.
    """

    nodes: int
    tails: IndexArray
    heads: IndexArray
    costs: Array
    leaves: IndexArray
    arrives: IndexArray
    paid: Array
    via: IndexArray
    arc: IndexArray

    def way(self, option: int, other: int) -> list[int]:
        """The arcs of a cheapest way between an option of the first end and one of the second."""
        found: list[int] = []
        waiting = [(int(self.leaves[option]), int(self.arrives[other]))]
        while waiting:
            tail, head = waiting.pop()
            between = int(self.via[tail, head])
            if between >= 0:
                waiting += [(between, head), (tail, between)]
            elif tail != head:
                found.append(int(self.arc[tail, head]))
        return found


def network_of(matrix: Array) -> Network:
    """The network of an edge with these costs, infinite for pairs that are forbidden."""
    tick("network of an edge", 1)
    rows, columns = alike(matrix), alike(matrix.T)
    small = matrix[rows.first][:, columns.first]
    merged = _merged(small)
    first = [a for a, _ in merged]
    first += sorted(set(range(small.shape[0])) - set(first))
    second = [b for _, b in merged]
    second += sorted(set(range(small.shape[1])) - set(second))
    both, count = len(merged), len(first) + len(second) - len(merged)
    paid = np.array([small[a, b] for a, b in merged] + [0.0] * (len(second) - both))
    direct = np.full((count, count), np.inf)
    heads = np.array([*range(both), *range(len(first), count)], dtype=np.int64)
    direct[: len(first), heads] = small[np.ix_(first, second)] - paid
    np.fill_diagonal(direct, np.inf)
    via = _without_detours(direct, both)
    tails, ends = np.nonzero(np.isfinite(direct))
    arc = np.full(direct.shape, -1, dtype=np.int64)
    arc[tails, ends] = np.arange(len(tails))
    at_first, at_second = np.argsort(first), np.argsort(second)
    return Network(
        count,
        tails,
        ends,
        direct[tails, ends],
        at_first[rows.number],
        heads[at_second][columns.number],
        paid[at_second][columns.number],
        via,
        arc,
    )


def _merged(matrix: Array) -> list[tuple[int, int]]:
    """Pairs of options, one of each end, that may be one node: to send a -> b and i -> j costs no more than i -> b and
    a -> j, whatever i and j are."""
    if min(matrix.shape) * matrix.size > settings.MERGED or not matrix.size:
        return []
    finite = np.isfinite(matrix)
    with np.errstate(invalid="ignore"):  # an option without a partner
        least = matrix - matrix.min(axis=1, keepdims=True)
        least -= least.min(axis=0, keepdims=True)
    near = least <= ROUNDING * np.abs(matrix, where=finite, out=np.zeros_like(matrix)).max()
    found: list[tuple[int, int]] = []
    free = [np.ones(size, dtype=bool) for size in matrix.shape]
    failures = 0
    for a, b in np.argwhere(near & finite).tolist():
        if not (free[0][a] and free[1][b]) or failures > sum(matrix.shape):
            continue
        around = matrix[:, b][:, None] + (matrix[a] - matrix[a, b])
        if (matrix <= around + ROUNDING * np.abs(around)).all():
            found.append((a, b))
            free[0][a] = free[1][b] = False
        else:
            failures += 1
    return found


def _without_detours(direct: Array, both: int) -> IndexArray:
    """Take out arcs that cost at least as much as by way of one of the first ``both`` nodes, whose own arcs are there
    at that time; and say for each which. So every way that is left out still has arcs in the end."""
    via = np.full(direct.shape, -1, dtype=np.int64)
    for k in range(both):
        around = direct[:, k][:, None] + direct[k]
        detour = np.isfinite(direct) & (around <= direct + ROUNDING * np.abs(direct))
        detour[k] = detour[:, k] = False
        via[detour] = k
        direct[detour] = np.inf
    return via
