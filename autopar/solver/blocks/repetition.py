"""Repeated blocks of a problem: nodes of equal costs and usages, which edges of one matrix join."""

from __future__ import annotations

import numpy as np

from autopar import settings
from autopar.repetition import Network, Run, grown, repetition
from autopar.solver.clock import tick
from autopar.solver.problem import Problem


def find_runs(problem: Problem) -> tuple[Run, ...]:
    """Runs of at least ``FOLDED_LEAST`` equal blocks; empty where nothing repeats."""
    if problem.shift is not None and not problem.shift:
        return ()
    network = _network(problem)
    found = grown(network, problem.shift) if problem.shift else repetition(network)
    tick("node of runs", found.looks)
    return found.runs


def _network(problem: Problem) -> Network:
    by_identity: dict[int, int] = {}
    by_value: dict[object, int] = {}

    def label(array: np.ndarray) -> int:
        found = by_identity.get(id(array))
        if found is None:
            found = by_identity[id(array)] = by_value.setdefault(array.tobytes(), len(by_value))
        return found

    used: list[list[tuple[int, int, int]]] = [[] for _ in problem.costs]
    for usage in problem.usages:
        if usage.start < usage.end:
            used[usage.node].append((usage.start, usage.end, label(usage.option)))
    kinds: dict[object, int] = {}
    labels = [
        kinds.setdefault((label(cost), tuple(sorted(rows))), len(kinds))
        for cost, rows in zip(problem.costs, used, strict=True)
    ]
    matrices: dict[int, int] = {}
    edges = ((matrices.setdefault(id(edge.cost), len(matrices)), edge.u, edge.v) for edge in problem.edges)
    return Network.of(labels, edges, [len(cost) for cost in problem.costs], least=settings.FOLDED_LEAST)
