"""What the solver is asked and what it answers: numbers only.

A problem is a weighted constraint network: minimise ``sum of costs[v][x_v] + sum of edges' cost[x_u, x_v]`` while at
every time the usages of the chosen options stay within ``limit``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.errors import SolverError
from autopar.solver.clock import tick

Array: TypeAlias = npt.NDArray[np.float64]
IndexArray: TypeAlias = npt.NDArray[np.int64]

BARRED = 1e30
"""Stands for a forbidden pair while choices are compared, so that comparisons among bad options mean something."""

USAGE_TOLERANCE = 1e-9
"""Usage may exceed the limit by this share of it: sums of floats in another order differ by so much."""


@dataclass(frozen=True, eq=False)
class Edge:
    """A cost between two nodes. ``cost`` has shape (S_u, S_v), in seconds; ``math.inf`` forbids a pair."""

    u: int
    v: int
    cost: Array


@dataclass(frozen=True, eq=False)
class Usage:
    """What each option of ``node`` uses (bytes, >= 0, shape (S_node,)) at the times start <= t < end."""

    node: int
    option: Array
    start: int
    end: int


NO_SHIFT: Mapping[int, int] = MappingProxyType({})
"""Of a problem in which nothing repeats."""


@dataclass(frozen=True, eq=False)
class Problem:
    """``costs``: one vector of seconds for each node (>= 0, inf forbids the option); ``limit``: bytes at every time.
    ``shift``: where blocks repeat, nodes and their likes one block further on; None if nobody has looked. ``trusted``:
    made of another problem's costs and usages, which were looked at.

    Raises:
        SolverError: a shape that does not fit, or a number that is negative or nan.
    """

    costs: tuple[Array, ...]
    edges: tuple[Edge, ...]
    usages: tuple[Usage, ...] = ()
    limit: float = math.inf
    shift: Mapping[int, int] | None = None
    trusted: InitVar[bool] = False

    def __post_init__(self, trusted: bool) -> None:
        if not trusted:
            self._check()

    def _check(self) -> None:
        tick("evaluated edge", len(self.edges))
        checked: set[int] = set()
        sizes = [_vector_size(cost, node, checked) for node, cost in enumerate(self.costs)]
        for edge in self.edges:
            expected = (sizes[edge.u], sizes[edge.v])
            if edge.cost.shape != expected:
                raise SolverError(
                    f"The edge {edge.u} - {edge.v} has costs of the wrong shape.",
                    found=f"{edge.cost.shape}, where the nodes have {expected} options",
                )
            if id(edge.cost) not in checked:
                checked.add(id(edge.cost))
                _check_values(edge.cost, f"the edge {edge.u} - {edge.v}")
        for usage in self.usages:
            if usage.option.shape != (sizes[usage.node],):
                raise SolverError(
                    f"A usage of node {usage.node} has the wrong shape.",
                    found=f"{usage.option.shape}, where the node has {sizes[usage.node]} options",
                )
            if id(usage.option) not in checked:
                checked.add(id(usage.option))
                _check_values(usage.option, f"a usage of node {usage.node}")

    def size(self) -> dict[str, int]:
        """Nodes, options, edges and pairs of options."""
        counts = {"nodes": len(self.costs), "options": sum(map(len, self.costs)), "edges": len(self.edges)}
        return counts | {"pairs": sum(edge.cost.size for edge in self.edges)}


@dataclass(frozen=True, eq=False)
class UsagePrices:
    """Seconds a byte that the limit costs at each of ``times``, which ascend; between two of them it costs nothing."""

    times: Array = field(default_factory=lambda: np.zeros(0))
    prices: Array = field(default_factory=lambda: np.zeros(0))

    def of(self, start: int, end: int) -> float:
        """Seconds for a byte that is used while start <= t < end."""
        first, last = np.searchsorted(self.times, (start, end))
        return float(self._sums[last] - self._sums[first]) if last > first else 0.0

    @cached_property
    def _sums(self) -> Array:
        return np.concatenate([[0.0], np.cumsum(self.prices)])

    def at(self, times: IndexArray) -> Array:
        """The price at each of ``times``, 0 where none is known."""
        known = dict(zip(self.times.tolist(), self.prices.tolist(), strict=True))
        return np.array([known.get(time, 0.0) for time in times.tolist()])

    def total(self) -> float:
        return float(self.prices.sum())


Messages: TypeAlias = Mapping[int, tuple[IndexArray, Mapping[int, Array]]]
"""Of each node, its options by their numbers in the problem, and what each of its edges was handed of their costs."""


class Traded(NamedTuple):
    """What message passing leaves of the pieces of a problem with repeated blocks: what each has passed, and the prices
    at which they trade (see ``blocks.pieces``)."""

    messages: tuple[Messages, ...]
    prices: tuple[Array, ...]


class Duals(NamedTuple):
    """What a solve leaves for the solve of a similar problem to start from.

    ``usage_prices``: of the limit, where it binds. ``messages``: of the problem and of its tied form, keyed by their
    numbers of nodes. ``traded``: of its pieces.
    """

    usage_prices: UsagePrices = UsagePrices()
    messages: Mapping[int, Messages] = MappingProxyType({})
    traded: Traded | None = None


NO_DUALS = Duals()


@dataclass(frozen=True)
class TraceEntry:
    """The best objective and bound known after so many seconds of counted work, and the phase that found them."""

    seconds: float
    objective: float
    lower_bound: float
    phase: str = ""


@dataclass(frozen=True)
class Solution:
    """The chosen option of each node, its objective in seconds, and a bound that no choice can beat.

    ``proven``: the gap is within what was asked. ``size``: counts of the problem, of what reductions left, of the ILP.
    ``method``: in words, what found and proved it. ``trace``: how objective and bound approached each other.
    ``cut_off``: whether time ended the search.
    """

    choice: tuple[int, ...]
    objective: float
    lower_bound: float
    proven: bool
    size: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    method: str = ""
    trace: tuple[TraceEntry, ...] = ()
    duals: Duals = field(default=NO_DUALS, compare=False)
    cut_off: bool = False

    @property
    def gap(self) -> float:
        """(objective - lower_bound) / objective; 0 when the objective is 0."""
        return relative_gap(self.objective, self.lower_bound)


def relative_gap(objective: float, lower_bound: float) -> float:
    """(objective - lower_bound) / objective; 0 when the objective is 0, inf when there is none."""
    if objective == 0:
        return 0.0
    if math.isinf(objective):
        return math.inf
    return (objective - lower_bound) / abs(objective)


def evaluate(problem: Problem, choice: Sequence[int]) -> tuple[float, bool]:
    """The objective of a choice in seconds, and whether nothing forbidden is chosen and the limit holds."""
    tick("evaluated edge", len(problem.edges))
    objective = math.fsum([cost.item(option) for cost, option in zip(problem.costs, choice, strict=True)])
    objective += math.fsum([edge.cost.item(choice[edge.u], choice[edge.v]) for edge in problem.edges])
    within = peak_usage(problem, choice) <= problem.limit * (1 + USAGE_TOLERANCE)
    return objective, math.isfinite(objective) and within


def peak_usage(problem: Problem, choice: Sequence[int]) -> float:
    """The largest usage at any time, in bytes."""
    live = [usage for usage in problem.usages if usage.start < usage.end]
    if not live:
        return 0.0
    times = np.unique([usage.start for usage in live] + [usage.end for usage in live])
    starts = np.searchsorted(times, [usage.start for usage in live])
    ends = np.searchsorted(times, [usage.end for usage in live])
    amounts = np.array([usage.option[choice[usage.node]] for usage in live], dtype=float)
    change = np.zeros(len(times))
    np.add.at(change, starts, amounts)
    np.subtract.at(change, ends, amounts)
    return float(np.cumsum(change).max())


def _vector_size(cost: Any, node: int, checked: set[int]) -> int:
    """How many options a node has; equal nodes share an array, which is looked at once."""
    if id(cost) not in checked:
        if np.ndim(cost) != 1 or len(cost) == 0:
            raise SolverError(
                f"Expected a vector of at least one option for the costs of node {node}.",
                found=f"shape {np.shape(cost)}",
            )
        checked.add(id(cost))
        _check_values(cost, f"the costs of node {node}")
    return len(cost)


def _check_values(values: Array, what: str) -> None:
    # One comparison finds negative numbers and nan alike.
    if not (values >= 0).all():
        wrong = values[~(values >= 0)][:3]
        raise SolverError(f"Costs and usages must be numbers >= 0; {what} has another.", found=str(wrong))
