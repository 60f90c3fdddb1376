"""The integer program of what remains: binary x for each option, flows >= 0 on the arcs of each edge's network.

Flow links are equalities (in the plainest network sum_b e[a, b] = x[u, a] and sum_a e[a, b] = x[v, b]), whose
relaxation is almost always integral; forbidden pairs have no way. Options that an edge cannot tell apart, as strategies
that make one spec, are one end of its flows: that halves them, and what is added up can be parted again, so the
relaxation is no weaker. One row a time that can bind keeps the usages within the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar import settings
from autopar.solver.clock import tick
from autopar.solver.integer.network import Network, network_of
from autopar.solver.problem import Array, IndexArray, Problem
from autopar.solver.reduce.alike import alike
from autopar.solver.reduce.graph import Graph

OBJECTIVE_SCALE = 1e4
USAGE_SCALE = 1e4
"""Solvers have absolute tolerances near 1e-7, so seconds and bytes are scaled to numbers of this size."""


class ModelEdge(NamedTuple):
    """``u`` and ``v``: the first columns of their options; ``first``: that of the arcs of ``network``."""

    u: int
    v: int
    first: int
    network: Network


@dataclass(frozen=True, eq=False)
class Model:
    """min cost @ x, row_lower <= A x <= row_upper, 0 <= x <= upper; A in compressed rows (starts, columns, values).

    ``cost * scale`` is in seconds. The first columns are the options of ``nodes``, those of node i from
    ``first[i]`` on.
    """

    cost: Array
    upper: Array
    integer: np.ndarray
    starts: IndexArray
    columns: IndexArray
    values: Array
    row_lower: Array
    row_upper: Array
    scale: float
    nodes: tuple[int, ...]
    first: IndexArray
    edges: tuple[ModelEdge, ...] = ()

    def size(self) -> dict[str, int]:
        return {
            "ilp_variables": len(self.cost),
            "ilp_binaries": int(self.integer.sum()),
            "ilp_constraints": len(self.row_lower),
            "ilp_nonzeros": len(self.columns),
        }

    def choice(self, values: Array) -> dict[int, int]:
        """Local option of each node: the largest of its variables."""
        return {
            node: int(np.argmax(values[start:end]))
            for node, start, end in zip(self.nodes, self.first[:-1], self.first[1:], strict=True)
        }

    def point(self, choice: dict[int, int]) -> Array:
        """The values of all variables for a choice that respects what is forbidden."""
        values = np.zeros(len(self.cost))
        for node, start in zip(self.nodes, self.first[:-1], strict=True):
            values[start + choice[node]] = 1.0
        chosen = {start: choice[node] for node, start in zip(self.nodes, self.first[:-1].tolist(), strict=True)}
        for edge in self.edges:
            values[[edge.first + arc for arc in edge.network.way(chosen[edge.u], chosen[edge.v])]] = 1.0
        return values


@dataclass(frozen=True)
class IlpResult:
    """``choice`` is None when the solver found none; ``lower_bound`` in the model's seconds; inf when infeasible."""

    choice: dict[int, int] | None
    lower_bound: float
    finished: bool


@dataclass(frozen=True)
class IlpLimits:
    """Seconds, relative gap, and what to tell of each objective and bound: it says whether they are near enough."""

    seconds: float
    gap: float
    report: Callable[[float, float], bool] | None = None


def flow_count(graph: Graph, most: float = math.inf) -> int:
    """How many flow variables the model of this graph has; of more than ``most`` not all are counted."""
    counts: dict[int, int] = {}
    total = 0
    for u, v in graph.pairs():
        matrix = graph.neighbours[u][v]
        if id(matrix) not in counts:
            counts[id(matrix)] = int(np.isfinite(_together(matrix)[0]).sum())
        total += counts[id(matrix)]
        if total > most:
            break
    return total


def _together(matrix: Array) -> tuple[Array, IndexArray, IndexArray]:
    """A matrix with equal rows and equal columns once, and which of these each row and each column is."""
    tick("matrix of flows", 1)
    rows, columns = alike(matrix), alike(matrix.T)
    return matrix[rows.first][:, columns.first], rows.number, columns.number


def usage_entries(graph: Graph) -> int:
    """How many entries the rows of usage of the model have: long lives at many times are many."""
    return sum(
        (row.end - row.start) * int(np.count_nonzero(row.amount)) for node in graph.nodes() for row in graph.rows[node]
    )


def is_small(graph: Graph, flows: int) -> bool:
    """Whether the model has at most so many flows, and no more entries of usage than memory and time allow."""
    return flow_count(graph, flows) <= flows and usage_entries(graph) <= settings.MAX_FLOWS


def is_slow(graph: Graph) -> bool:
    """Whether the integer program of a graph with a limit takes longer than a second or so."""
    return bool(len(graph.limits)) and not is_small(graph, settings.FLOWS_A_SECOND)


def begins_slow(problem: Problem) -> bool:
    """Whether the integer program of ``problem`` would, were nothing reduced."""
    return bool(problem.usages) and sum(edge.cost.size for edge in problem.edges) > settings.FLOWS_A_SECOND


def magnitude_of(graph: Graph, objective: float) -> float:
    """The size of what the nodes of ``graph`` cost, in seconds, for ``build``: that of a known choice, or, where
    ``objective`` is infinite, of the cheapest options."""
    known = objective - graph.offset
    if math.isfinite(known) and known > 0:
        return known
    return math.fsum(float(graph.costs[node].min()) for node in graph.nodes()) or graph.offset


def build(graph: Graph, magnitude: float) -> Model:
    """The model of a graph; ``magnitude`` is the size of the objective in seconds, for scaling."""
    nodes = tuple(graph.nodes())
    first = np.concatenate([[0], np.cumsum([len(graph.costs[node]) for node in nodes])]).astype(np.int64)
    start_of = dict(zip(nodes, first[:-1].tolist(), strict=True))
    scale = magnitude / OBJECTIVE_SCALE if magnitude > 0 and math.isfinite(magnitude) else 1.0
    rows = _Rows(int(first[-1]))
    rows.add_groups(np.repeat(np.arange(len(nodes)), np.diff(first)), np.arange(first[-1]), len(nodes), 1.0)
    costs = [np.concatenate([graph.costs[node] for node in nodes]) if nodes else np.zeros(0)]
    networks: dict[int, Network] = {}
    for u, v in graph.pairs():
        matrix = graph.neighbours[u][v]
        network = networks.get(id(matrix)) or networks.setdefault(id(matrix), network_of(matrix))
        rows.add_flows(network, start_of[u], start_of[v])
        costs[0][start_of[v] : start_of[v] + len(network.paid)] += network.paid
        costs.append(network.costs)
    _add_usages(graph, rows, start_of)
    tick("column", rows.variables)
    cost = np.concatenate(costs) / scale
    integer = np.arange(len(cost)) < first[-1]
    return Model(cost, np.ones(len(cost)), integer, *rows.arrays(), scale, nodes, first, tuple(rows.edges))


def _joined(parts: list[IndexArray]) -> IndexArray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


class _Rows:
    """Constraint rows as they are collected."""

    def __init__(self, variables: int) -> None:
        self.variables = variables
        self.count = 0
        self._rows: list[IndexArray] = []
        self._columns: list[IndexArray] = []
        self._values: list[Array] = []
        self._lower: list[Array] = []
        self._upper: list[Array] = []
        self.edges: list[ModelEdge] = []

    def add_entries(self, row: IndexArray, column: IndexArray, value: Array) -> None:
        self._rows.append(row + self.count)
        self._columns.append(column)
        self._values.append(value)

    def close(self, lower: Array, upper: Array) -> None:
        self._lower.append(lower)
        self._upper.append(upper)
        self.count += len(lower)

    def add_groups(self, group: IndexArray, column: IndexArray, groups: int, total: float) -> None:
        """The variables of each group add up to ``total``."""
        self.add_entries(group, column, np.ones(len(group)))
        self.close(np.full(groups, total), np.full(groups, total))

    def add_flows(self, network: Network, u: int, v: int) -> None:
        """New flow variables for the arcs of ``network``; what leaves a node is what its options send and what arrives
        there, less what is taken."""
        arcs = self.variables + np.arange(len(network.costs))
        self.edges.append(ModelEdge(u, v, self.variables, network))
        self.variables += len(arcs)
        sends, takes = u + np.arange(len(network.leaves)), v + np.arange(len(network.arrives))
        self.add_entries(network.tails, arcs, np.ones(len(arcs)))
        self.add_entries(network.heads, arcs, -np.ones(len(arcs)))
        self.add_entries(network.leaves, sends, -np.ones(len(sends)))
        self.add_entries(network.arrives, takes, np.ones(len(takes)))
        self.close(np.zeros(network.nodes), np.zeros(network.nodes))

    def arrays(self) -> tuple[IndexArray, IndexArray, Array, Array, Array]:
        row, column = _joined(self._rows), _joined(self._columns)
        value = np.concatenate(self._values) if self._values else np.zeros(0)
        # A node with several rows of usage at one time has several entries there: they are added up.
        place, inverse = np.unique(row * max(self.variables, 1) + column, return_inverse=True)
        starts = np.searchsorted(place, np.arange(self.count + 1) * max(self.variables, 1))
        total = np.bincount(inverse, weights=value, minlength=len(place))
        lower, upper = np.concatenate(self._lower), np.concatenate(self._upper)
        columns: IndexArray = (place % max(self.variables, 1)).astype(np.int64)
        weights: Array = total.astype(float)
        return starts.astype(np.int64), columns, weights, lower, upper


def _add_usages(graph: Graph, rows: _Rows, start_of: dict[int, int]) -> None:
    if not len(graph.limits):
        return
    # A limit of 0 leaves only options that use nothing; those with more are gone already.
    weight = USAGE_SCALE / graph.room()
    for node in graph.nodes():
        for row in graph.rows[node]:
            used = np.flatnonzero(row.amount)
            times = np.arange(row.start, row.end)
            rows.add_entries(
                np.repeat(times, len(used)),
                np.tile(used + start_of[node], len(times)),
                np.outer(weight[times], row.amount[used]).ravel(),
            )
    rows.close(np.full(len(graph.limits), -np.inf), np.minimum(graph.limits * weight, USAGE_SCALE))
