"""The paths between two specs that are cheapest for tensors of some size.

If a step of S bytes takes a + b S seconds, the cost of a path is linear in the tensor's size too, since the bytes of
all its steps grow in proportion. If a step takes the least of several such lines, one per algorithm, each combination
of lines counts as a path of its own. Only the paths on the lower envelope of all lines, a subset of the Pareto set by
latency and bytes sent, can be the cheapest. A path that holds more memory than its ends is allowed only up to the size
at which the excess stops being negligible, so there is one envelope for each such limit. A set is computed once and
serves all sizes.

The envelope is found by bisection (Eisner and Severance, 1976): a path that is cheapest at two sizes is cheapest
between them; otherwise the search continues at the size where the lines of the two paths cross.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol, cast, runtime_checkable

import numpy as np

from autopar.mesh import Mesh
from autopar.sharding.priced_graph import NEGLIGIBLE_BYTES, Floats, Ints, existing_arcs, overcut_by, proportion
from autopar.sharding.redistribution import Step, StepKind
from autopar.sharding.spec import ShardingSpec
from autopar.sharding.spec_graph import SpecGraph, graph_for


@runtime_checkable
class LinearPricing(Protocol):
    """Costs that can state each step's seconds as the minimum of lines in bytes."""

    @property
    def affine(self) -> bool:
        """Whether the minimum of ``lines`` equals the seconds for every kind and axis."""
        ...

    def lines(self, kind: StepKind, axis: int) -> tuple[tuple[float, float], ...]:
        """Return (alpha_s, beta_s_per_byte) of each algorithm for one step along mesh ``axis``."""
        ...


@dataclass(frozen=True)
class Line:
    """A path and its cost for tensors of any size.

    Args:
        steps: the steps of the path.
        specs: its specs, from the one before the first step on.
        prices: (alpha_s, beta_s_per_byte, units) of each step by the algorithm chosen for it. For a tensor of scale k
            the step moves k * units bytes.
        peak_units: largest sum of input and output of a step, in units; without steps, the size of the tensor.
        largest_scale: largest scale at which no step holds more than both ends plus ``NEGLIGIBLE_BYTES``.
    """

    steps: tuple[Step, ...]
    specs: tuple[ShardingSpec, ...]
    prices: tuple[tuple[float, float, int], ...]
    peak_units: int
    largest_scale: float

    @cached_property
    def alpha_s(self) -> float:
        return math.fsum(a for a, _, _ in self.prices)

    @cached_property
    def beta_s_per_scale(self) -> float:
        return math.fsum(b * units for _, b, units in self.prices)

    def seconds(self, scale: int) -> float:
        """Return the cost for a tensor of ``scale``, summed step by step as in the searches: rounding agrees."""
        total = 0.0
        for alpha, beta, units in self.prices:
            total += alpha + beta * (units * scale)
        return total


@dataclass(frozen=True)
class ParetoSet:
    """The paths from one spec to another that are each the cheapest for some size.

    Args:
        limits: largest scale of each range of sizes, increasing; the last is infinite.
        envelopes: the lines of each range, ordered from smallest to largest sizes.
    """

    limits: tuple[float, ...]
    envelopes: tuple[tuple[Line, ...], ...]

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """All distinct paths of the set."""
        return tuple(dict.fromkeys(line for lines in self.envelopes for line in lines))

    def best(self, scale: int) -> Line | None:
        """Return the cheapest path for tensors of ``scale``, with the fewest steps among ties; None without a path."""
        lines = self.envelopes[bisect_left(self.limits, scale)]
        return min(lines, key=lambda line: (line.seconds(scale), len(line.steps)), default=None)


@dataclass(eq=False)
class LinearGraph:
    """A graph of specs for all tensors with proportional shapes.

    Args:
        leaving: for each node the arcs that leave it, once for each line of the step: (number of arc and line, head,
            alpha_s, beta_s_per_scale, peak units).
        local_units: bytes of the tensor of scale 1 at each node.
        priced: the arc and the step's price as in `Line`, by the number in ``leaving``.
    """

    graph: SpecGraph
    leaving: list[list[tuple[int, int, float, float, int]]]
    local_units: list[int]
    priced: list[tuple[int, tuple[float, float, int]]]

    def pareto_set(self, start: int, end: int) -> ParetoSet:
        if (start, end) not in self._sets:
            ranges = list(_Search(self, start, end).ranges())
            self._sets[start, end] = ParetoSet(tuple(r[0] for r in ranges), tuple(r[1] for r in ranges))
        return self._sets[start, end]

    def remaining(self, end: int) -> list[tuple[float, float]]:
        """Return lower bounds on alpha_s and beta_s_per_scale of all paths from each node to ``end``."""
        weights, heads, tails, begin = self._by_tail
        out = np.full((len(self.leaving), 2), np.inf)
        out[end] = 0.0
        while True:
            nearer = np.minimum(out[tails], np.minimum.reduceat(out[heads] + weights, begin, axis=0))
            if (nearer == out[tails]).all():
                return cast(list[tuple[float, float]], out.tolist())
            out[tails] = nearer

    @cached_property
    def _by_tail(self) -> tuple[Floats, Ints, Ints, Ints]:
        """Weights and heads of all arcs, sorted by tail; the distinct tails, and where the arcs of each begin."""
        arcs = [(tail, head, alpha, beta) for tail, out in enumerate(self.leaving) for _, head, alpha, beta, _ in out]
        tails, begin = np.unique(np.array([a[0] for a in arcs], dtype=np.int64), return_index=True)
        heads = np.array([a[1] for a in arcs], dtype=np.int64)
        return np.array([a[2:] for a in arcs]).reshape(-1, 2), heads, tails, begin

    @cached_property
    def _sets(self) -> dict[tuple[int, int], ParetoSet]:
        return {}


@dataclass(frozen=True)
class _Search:
    tensor: LinearGraph
    start: int
    end: int

    @cached_property
    def _remaining(self) -> list[tuple[float, float]]:
        return self.tensor.remaining(self.end)

    def ranges(self) -> Iterator[tuple[float, tuple[Line, ...]]]:
        """Yield (largest scale, envelope) of each range of sizes, starting at scale 1."""
        scale = 1
        while True:
            peak = self._allowed(scale)
            line = self._cheapest(scale, peak)
            if line is None:
                line = self._cheapest(scale, math.inf)
                yield math.inf, () if line is None else self._envelope(line, scale, math.inf, math.inf)
                return
            far = self._cheapest(line.largest_scale, peak)
            if far is not None and _costs_at_most(line, far, line.largest_scale):
                limit = line.largest_scale
                yield limit, (line,)
            else:
                limit = self._limit(peak)
                yield limit, self._envelope(line, scale, limit, peak)
            if limit == math.inf:
                return
            scale = int(limit) + 1

    def _ends(self) -> int:
        return self.tensor.local_units[self.start] + self.tensor.local_units[self.end]

    def _allowed(self, scale: int) -> float:
        """Return how many units a step may hold at ``scale``."""
        return self._ends() + NEGLIGIBLE_BYTES // scale

    def _limit(self, peak: float) -> float:
        """Return the largest scale that allows the steps with at most ``peak`` units."""
        held = max((a[4] for arcs in self.tensor.leaving for a in arcs if a[4] <= peak), default=0)
        return self._largest_scale(held)

    def _largest_scale(self, peak_units: int) -> float:
        beyond = peak_units - self._ends()
        return NEGLIGIBLE_BYTES // beyond if beyond > 0 else math.inf

    def _envelope(self, first: Line, low: float, high: float, peak: float) -> tuple[Line, ...]:
        """Return the lower envelope from ``low``, where ``first`` is lowest, to ``high``."""
        last = self._cheapest(high, peak)
        assert last is not None
        return (first, *self._between(first, last, low, high, peak))

    def _between(self, first: Line, last: Line, low: float, high: float, peak: float) -> tuple[Line, ...]:
        """Return the lines of the envelope after ``first``, up to and including ``last``."""
        if _costs_at_most(first, last, high):
            return ()
        meet = (last.alpha_s - first.alpha_s) / (first.beta_s_per_scale - last.beta_s_per_scale)
        if not low < meet < high:
            return (last,)
        middle = self._cheapest(meet, peak)
        assert middle is not None
        if _costs_at_most(first, middle, meet):
            return (last,)
        return (
            *self._between(first, middle, low, meet, peak),
            *self._between(middle, last, meet, high, peak),
        )

    def _cheapest(self, scale: float, peak: float) -> Line | None:
        """Find the cheapest path whose steps hold at most ``peak`` units with A*.

        At infinite scale paths compare by bytes, then by latency.
        """
        remaining = self._remaining
        of_alpha, of_beta = (0.0, 1.0) if scale == math.inf else (1.0, scale)
        by_bytes = scale == math.inf
        queue: list[tuple[float, float, int, tuple[int, ...], int, float, float]]
        queue = [(0.0, 0.0, 0, (), self.start, 0.0, 0.0)]
        done: set[int] = set()
        while queue:
            _, _, steps, taken, node, alpha, beta = heapq.heappop(queue)
            if node == self.end:
                return self._line(taken)
            if node in done:
                continue
            done.add(node)
            for number, head, step_alpha, step_beta, units in self.tensor.leaving[node]:
                rest_alpha, rest_beta = remaining[head]
                if head not in done and units <= peak and rest_alpha < math.inf:
                    a, b = alpha + step_alpha, beta + step_beta
                    first = of_alpha * (a + rest_alpha) + of_beta * (b + rest_beta)
                    second = a + rest_alpha if by_bytes else 0.0
                    heapq.heappush(queue, (first, second, steps + 1, (*taken, number), head, a, b))
        return None

    def _line(self, taken: Sequence[int]) -> Line:
        graph, units = self.tensor.graph, self.tensor.local_units
        arcs = [self.tensor.priced[i][0] for i in taken]
        nodes = [self.start, *(int(graph.head[a]) for a in arcs)]
        peak = max((units[a] + units[b] for a, b in zip(nodes, nodes[1:], strict=False)), default=units[self.start])
        return Line(
            tuple(graph.steps[a] for a in arcs),
            tuple(graph.nodes[n] for n in nodes),
            tuple(self.tensor.priced[i][1] for i in taken),
            peak,
            self._largest_scale(peak),
        )


def _costs_at_most(line: Line, other: Line, scale: float) -> bool:
    """Whether ``line`` is at most as expensive as ``other`` at ``scale``, up to rounding."""
    pairs = [(line.beta_s_per_scale, other.beta_s_per_scale), (line.alpha_s, other.alpha_s)]
    if scale == math.inf:
        return all(a <= b * (1 + _ROUNDING) for a, b in pairs)
    mine, others = (x.alpha_s + x.beta_s_per_scale * scale for x in (line, other))
    return mine <= others * (1 + _ROUNDING)


_ROUNDING = 1e-13
"""Relative tolerance when costs of two lines are compared."""


def pareto_set(
    src: ShardingSpec, dst: ShardingSpec, shape: Sequence[int], itemsize: int, mesh: Mesh, costs: object
) -> tuple[ParetoSet, int] | None:
    """Return the Pareto set for tensors like the one of ``shape``, and that tensor's scale.

    Tensors share a set if they differ only in ``itemsize`` and in the lengths of dims that the size of the mesh
    divides. The scale is the size relative to the smallest of them.

    Returns:
        None if ``costs`` are not affine ``LinearPricing``, cannot be hashed, or a permute along several axes would take
        the maximum of lines that cross.
    """
    if not (isinstance(costs, LinearPricing) and costs.affine):
        return None
    graph = graph_for(len(shape), mesh, (src, dst))
    reduced, scale = proportion(shape, itemsize, mesh)
    start, end = graph.index[src], graph.index[dst]
    try:
        tensor = _linear_graph(graph, reduced, cast(Hashable, costs), overcut_by(graph, (start, end), shape))
    except TypeError:  # unhashable costs
        return None
    return None if tensor is None else (tensor.pareto_set(start, end), scale)


@lru_cache(maxsize=128)
def _linear_graph(
    graph: SpecGraph, shape: tuple[int, ...], costs: LinearPricing, overcut_dims: tuple[int, ...]
) -> LinearGraph | None:
    keys, key_of_arc = graph.prices
    offered = [_slowest_axis([costs.lines(kind, axis) for axis in axes]) for kind, axes in keys]
    arcs = existing_arcs(graph, shape, overcut_dims)
    units = graph.local_bytes(shape, 1)
    before, after = units[graph.tail[arcs]], units[graph.head[arcs]]
    moved: Ints = np.where(graph.gathers[arcs], after, before)
    leaving: list[list[tuple[int, int, float, float, int]]] = [[] for _ in graph.nodes]
    numbered: list[tuple[int, tuple[float, float, int]]] = []
    columns = (arcs, graph.tail[arcs], graph.head[arcs], key_of_arc[arcs], moved, before + after)
    for arc, tail, head, key, nbytes, peak in zip(*(c.tolist() for c in columns), strict=True):
        lines = offered[key]
        if lines is None:
            return None
        for alpha_s, beta_s_per_byte in lines:
            leaving[tail].append((len(numbered), head, alpha_s, beta_s_per_byte * nbytes, peak))
            numbered.append((arc, (alpha_s, beta_s_per_byte, nbytes)))
    return LinearGraph(graph, leaving, units.tolist(), numbered)


Lines = tuple[tuple[float, float], ...]


def _slowest_axis(along: Sequence[Lines]) -> Lines | None:
    """Return the maximum over the axes of a step, given its lines along each axis.

    None if no axis is the slowest for all sizes, so that the maximum is not a minimum of lines.
    """
    if len(set(along)) == 1:
        return along[0]
    if any(len(lines) > 1 for lines in along):
        return None
    highest = (max(lines[0][0] for lines in along), max(lines[0][1] for lines in along))
    return (highest,) if (highest,) in along else None
