"""Options that another never does worse than (Goldstein 1994, dead-end elimination) are dropped.

Option a goes when some other a' has cost[a] - cost[a'] >= sum over neighbours of max over b of (M[a', b] - M[a, b]) and
uses no more at any time: then exchanging a for a' never costs, whatever the neighbours chose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autopar import settings
from autopar.solver.clock import tick
from autopar.solver.problem import Array, IndexArray
from autopar.solver.reduce.alike import alike
from autopar.solver.reduce.graph import Graph

_FORBIDDEN = 1e200


@dataclass
class WorkBudget:
    """How many element operations may still be spent; counted, not timed, so that runs repeat exactly. Only where
    ``late`` says that there is no time left at all, reductions end where they are. What takes more than ``each`` by
    itself is left as it is: a few sweeps of messages over two large matrices take less than their product."""

    elements: float
    late: Callable[[], bool] = field(default=lambda: False)
    each: float = np.inf

    def spend(self, elements: int) -> None:
        self.elements -= elements
        tick("element of dominance", elements)


def drop_dominated(graph: Graph, work: WorkBudget) -> bool:
    """One round over all nodes that may have changed since they were last looked at; the smallest option remains among
    equals."""
    changed, fresh = False, graph.changed("dominated")
    for node in graph.nodes():
        size = len(graph.costs[node])
        if work.late():
            break
        if node not in fresh and not graph.rows[node]:  # what rows say also depends on the limits
            continue
        fresh.discard(node)
        if size > 1 and work.elements > 0 and node not in graph.protected:
            instead = _undominated(graph, node, work)
            if (instead != np.arange(size)).any():
                graph.exchange(node, instead)
                changed = True
    return changed


def _undominated(graph: Graph, node: int, work: WorkBudget) -> IndexArray:
    """For each option itself, or one that never does worse."""
    cost = graph.costs[node]
    tick("node of dominance", 1)
    gain = cost[:, None] - cost[None, :]
    for row in graph.rows[node]:
        gain = np.where(row.amount[None, :] <= row.amount[:, None], gain, -np.inf)
    np.fill_diagonal(gain, -np.inf)
    for matrix in graph.neighbours[node].values():
        if not (gain > -_FORBIDDEN / 2).any():
            break
        gain = gain - graph.shared(("worst",), (matrix,), lambda m=matrix: _worst_exchange(m, work))  # type: ignore[misc]
    return _keep_in_turn(gain)


def _worst_exchange(matrix: Array, work: WorkBudget) -> Array:
    """worst[a, a'] = max over b of (matrix[a', b] - matrix[a, b])."""
    if len(matrix) * matrix.size > work.each:
        return np.full((len(matrix), len(matrix)), np.inf)
    if len(matrix) * matrix.size <= settings.AT_ONCE:
        work.spend(len(matrix) * matrix.size)
        small = np.minimum(matrix.T, _FORBIDDEN, order="C")
        return np.asarray((small[:, None, :] - small[:, :, None]).max(axis=0))  # the first axis is the fastest
    rows, columns = alike(matrix), alike(matrix.T)
    bounded = np.minimum(matrix[np.ix_(rows.first, columns.first)], _FORBIDDEN)
    work.spend(bounded.shape[0] * bounded.size + matrix.size)
    worst = np.stack([(bounded - row).max(axis=1) for row in bounded])
    return np.asarray(worst[np.ix_(rows.number, rows.number)])


def _keep_in_turn(gain: Array) -> IndexArray:
    """Drop options from the largest down, each only for one that is still there."""
    instead = np.arange(len(gain))
    mask = np.ones(len(gain), dtype=bool)
    better = gain >= 0
    for option in np.flatnonzero(better.any(axis=1))[::-1]:
        able = better[option] & mask
        if able.any():
            mask[option] = False
            instead[option] = able.argmax()
    while not mask[instead].all():
        instead = instead[instead]
    return instead
