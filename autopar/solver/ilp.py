"""The integer program of what remains: binary x for each option, a flow >= 0 for each finite pair of an edge.

Flow links are equalities (sum_b e[a, b] = x[u, a] and sum_a e[a, b] = x[v, b]), whose relaxation is almost always
integral; forbidden pairs have no variable. Options that an edge cannot tell apart, as strategies that make one spec,
are one end of its flows: that halves them, and what is added up can be parted again, so the relaxation is no weaker.
One row a time that can bind keeps the usages within the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.solver.alike import alike
from autopar.solver.graph import Graph
from autopar.solver.problem import Array, IndexArray

MAX_USAGE_ENTRIES = 4_000_000

OBJECTIVE_SCALE = 1e4
USAGE_SCALE = 1e4
"""Solvers have absolute tolerances near 1e-7, so seconds and bytes are scaled to numbers of this size."""


@dataclass(frozen=True, eq=False)
class Model:
    """min cost @ x, row_lower <= A x <= row_upper, 0 <= x <= upper; A in compressed rows (starts, columns, values).

    ``cost * scale`` is in seconds. The first columns are the options of ``nodes``, those of node i from
    ``first[i]`` on. A flow goes between two groups of options, ``flow_ends``; ``members`` are (option, its group).
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
    flow_ends: tuple[IndexArray, IndexArray]
    members: tuple[IndexArray, IndexArray]

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
        options = self.first[-1]
        flows = len(self.flow_ends[0])
        option, group = self.members
        chosen = np.bincount(group, weights=values[option])
        values[options : options + flows] = chosen[self.flow_ends[0]] * chosen[self.flow_ends[1]]
        return values


@dataclass(frozen=True)
class IlpResult:
    """``choice`` is None when the solver found none; ``lower_bound`` in the model's seconds; inf when infeasible."""

    choice: dict[int, int] | None
    lower_bound: float
    finished: bool


@dataclass(frozen=True)
class IlpLimits:
    """Seconds, relative gap, and where to report (seconds since the start of the ILP, objective, bound)."""

    seconds: float
    gap: float
    report: Callable[[float, float], None] | None = None


def flow_count(graph: Graph) -> int:
    """How many flow variables the model of this graph has."""
    return sum(int(np.isfinite(_together(graph.neighbours[u][v])[0]).sum()) for u, v in graph.pairs())


def _together(matrix: Array) -> tuple[Array, IndexArray, IndexArray]:
    """A matrix with equal rows and equal columns once, and which of these each row and each column is."""
    rows, columns = alike(matrix), alike(matrix.T)
    return matrix[rows.first][:, columns.first], rows.number, columns.number


def usage_entries(graph: Graph) -> int:
    """How many entries the rows of usage of the model have: long lives at many times are many."""
    return sum(
        (row.end - row.start) * int(np.count_nonzero(row.amount)) for node in graph.nodes() for row in graph.rows[node]
    )


def is_small(graph: Graph, flows: int) -> bool:
    """Whether the model has at most so many flows, and no more entries of usage than memory and time allow."""
    return flow_count(graph) <= flows and usage_entries(graph) <= MAX_USAGE_ENTRIES


def build(graph: Graph, magnitude: float) -> Model:
    """The model of a graph; ``magnitude`` is the size of the objective in seconds, for scaling."""
    nodes = tuple(graph.nodes())
    first = np.concatenate([[0], np.cumsum([len(graph.costs[node]) for node in nodes])]).astype(np.int64)
    start_of = dict(zip(nodes, first[:-1].tolist(), strict=True))
    scale = magnitude / OBJECTIVE_SCALE if magnitude > 0 and math.isfinite(magnitude) else 1.0
    rows = _Rows(int(first[-1]))
    rows.add_groups(np.repeat(np.arange(len(nodes)), np.diff(first)), np.arange(first[-1]), len(nodes), 1.0)
    costs = [graph.costs[node] for node in nodes]
    for u, v in graph.pairs():
        matrix, group_u, group_v = _together(graph.neighbours[u][v])
        a, b = np.nonzero(np.isfinite(matrix))
        costs.append(matrix[a, b])
        rows.add_flows((a, b), (group_u, group_v), (start_of[u], start_of[v]))
    _add_usages(graph, rows, start_of)
    cost = np.concatenate(costs) / scale if costs else np.zeros(0)
    integer = np.arange(len(cost)) < first[-1]
    starts, columns, values, lower, upper = rows.arrays()
    return Model(
        cost, np.ones(len(cost)), integer, starts, columns, values, lower, upper, scale, nodes, first,
        rows.flow_ends(), rows.members(),
    )  # fmt: skip


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
        self._groups = 0
        self._ends: tuple[list[IndexArray], list[IndexArray]] = ([], [])
        self._members: tuple[list[IndexArray], list[IndexArray]] = ([], [])

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

    def add_flows(
        self, pairs: tuple[IndexArray, IndexArray], groups: tuple[IndexArray, IndexArray], starts: tuple[int, int]
    ) -> None:
        """New flow variables for ``pairs`` of groups of options, linked with both ends."""
        column = self.variables + np.arange(len(pairs[0]))
        self.variables += len(column)
        for end, group, start, ends in zip(pairs, groups, starts, self._ends, strict=True):
            options, count = start + np.arange(len(group)), int(group.max(initial=-1)) + 1
            self.add_entries(end, column, np.ones(len(end)))
            self.add_entries(group, options, -np.ones(len(group)))
            self.close(np.zeros(count), np.zeros(count))
            ends.append(end + self._groups)
            self._members[0].append(options)
            self._members[1].append(group + self._groups)
            self._groups += count

    def flow_ends(self) -> tuple[IndexArray, IndexArray]:
        """The two groups of each flow."""
        return _joined(self._ends[0]), _joined(self._ends[1])

    def members(self) -> tuple[IndexArray, IndexArray]:
        """Options and the groups that they are in."""
        return _joined(self._members[0]), _joined(self._members[1])

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
    weight = USAGE_SCALE / np.maximum(graph.limits, 1e-300)
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
