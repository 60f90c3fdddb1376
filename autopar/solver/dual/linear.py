"""With a limit, the linear program first: it is nearly integral, and its dual values are the price of what is limited.

A handful of nodes of thousands come out fractional, as in a knapsack: one row, one item cut. So what the linear program
uses at all holds a choice close to its bound, and reduced costs tell which options no better choice takes (Dantzig,
Fulkerson and Johnson 1954; restricting to the support: Berthold 2014).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from autopar import settings
from autopar.errors import InfeasibleError
from autopar.solver.dual.ascent import search_from
from autopar.solver.dual.nearest import USED, Relaxed, prices_of, relax_nearest
from autopar.solver.integer import highs
from autopar.solver.integer.equations import Equations, coupled
from autopar.solver.integer.ilp import IlpLimits, build, flow_count, is_slow, magnitude_of
from autopar.solver.problem import Array, IndexArray, UsagePrices, relative_gap
from autopar.solver.reduce.dominance import WorkBudget
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.incumbent import Incumbent
from autopar.solver.reduce.reductions import drop_forbidden, reduce

RATE, FREE_RATE = 2.5e-10, 1.5e-5
"""Seconds: for the square of the flows, where programs of 35 and 450 thousand took .3 and 46 s; and for each flow where
nothing is limited, where programs of 20 thousand, .5, 1.1 and 1.4 million took .3, 5 to 10, 17 and 21 s."""

ROUNDING = 1e-15
"""Seconds: an option that is not used is further than one that is."""


def expected_seconds(graph: Graph) -> float:
    """About how long the linear program of ``graph`` takes; inf where it is too large."""
    flows = flow_count(graph, settings.MAX_FLOWS)
    if flows > settings.MAX_FLOWS:
        return math.inf
    if not len(graph.limits):
        return FREE_RATE * flows
    return RATE * (settings.NEAREST**2 * flows if flows > settings.MANY_FLOWS else flows) ** 2


def relax(graph: Graph, incumbent: Incumbent, seconds: float) -> bool:
    """Better choices, a better bound, and fewer options in ``graph``; whether the linear program was solved.

    Raises:
        InfeasibleError: nothing is allowed within the limit, or nothing better than the incumbent is left.
    """
    deadline = incumbent.seconds() + seconds
    known = () if incumbent.choice is None else (incumbent.choice,)
    found = solve_relaxed(graph, incumbent, deadline, known)
    if found is None:
        return False
    incumbent.raise_bound(found.bound)
    incumbent.expected = found.optimum
    _round(graph, found, incumbent, deadline)
    if incumbent.choice is not None:
        for node, reduced in found.reduced.items():
            graph.keep(node, found.bound + reduced <= incumbent.cutoff())
        reduce(graph, WorkBudget(settings.WORK, lambda: incumbent.seconds() > deadline))
    return True


def solve_relaxed(
    graph: Graph,
    incumbent: Incumbent,
    deadline: float,
    known: Iterable[tuple[int, ...]],
    equations: Equations = (),
) -> Relaxed | None:
    """The linear program of ``graph``; None where it did not end in time. The incumbent has its prices of the limit
    then.

    Args:
        known: choices of the graph's problem, on average within the limit and the equations.

    Raises:
        InfeasibleError: nothing is allowed within the limit.
    """
    magnitude, flows = magnitude_of(graph, incumbent.objective), flow_count(graph, settings.MAX_FLOWS)
    found = None
    if flows > settings.MANY_FLOWS and len(graph.limits):
        prices, taken = incumbent.usage_prices.at(graph.times), [graph.project(choice) for choice in known]
        gap = settings.PART_OF_GAP * incumbent.gap
        found = relax_nearest(graph, equations, magnitude, prices, taken, gap, lambda: deadline - incumbent.seconds())
    if found is None and flows <= settings.MAX_FLOWS:
        found = _solve_whole(graph, incumbent, deadline, equations, magnitude)
    if found is not None and len(graph.limits):
        incumbent.usage_prices = UsagePrices(graph.times.astype(float), found.prices)
    return found


def _solve_whole(
    graph: Graph, incumbent: Incumbent, deadline: float, equations: Equations, magnitude: float
) -> Relaxed | None:
    plain = build(graph, magnitude)
    model = coupled(plain, graph, equations)
    found = highs.solve_relaxation(model, deadline - incumbent.seconds())
    if found is None:
        return None
    spans = list(zip(model.nodes, model.first[:-1], model.first[1:], strict=True))
    optimum = found.objective * model.scale + graph.offset
    return Relaxed(
        optimum,
        optimum,
        {node: found.values[start:end] for node, start, end in spans},
        {node: np.maximum(found.reduced_costs[start:end], 0.0) * model.scale for node, start, end in spans},
        prices_of(graph, plain, found),
    )


def _round(graph: Graph, found: Relaxed, incumbent: Incumbent, deadline: float) -> None:
    """Choices among the options that the linear program uses, then among those and the nearest to them."""
    largest = {node: int(values.argmax()) for node, values in found.values.items()}
    search_from(graph, largest, incumbent, "linear program and local search")
    search_near(incumbent, graph, found, deadline, graph.copy, {node: np.array([node]) for node in found.values})


def _distances(graph: Graph, found: Relaxed, copies: Mapping[int, IndexArray]) -> dict[int, Array]:
    """How far each option of each node is from being used in one of its copies, in seconds, by original numbers."""
    distances = {}
    for node, values in found.values.items():
        reduced = found.reduced[node] / len(copies.get(node, (0,)))
        distances[node] = np.full(len(graph.problem.costs[node]), np.inf)
        distances[node][graph.options[node]] = np.where(values > USED, 0.0, reduced + ROUNDING)
    return distances


def search_near(
    incumbent: Incumbent,
    graph: Graph,
    found: Relaxed,
    deadline: float,
    whole: Callable[[], Graph],
    copies: Mapping[int, IndexArray],
) -> None:
    """The best choices among the options at distance 0, then among as many of the nearest as an integer program takes,
    and among more where that finds nothing better.

    Args:
        graph, found: the linear program and what it found.
        whole: a graph of the incumbent's problem, to be cut down.
        copies: the nodes there for which one of ``graph`` stands.
    """
    distance = _distances(graph, found, copies)
    reaches = np.unique(np.concatenate([*distance.values(), np.zeros(1)]))
    reaches = reaches[np.isfinite(reaches)]
    known, last = incumbent.objective, -1.0
    for flows in (0, settings.FLOWS, 4 * settings.FLOWS, 16 * settings.FLOWS):
        if (
            incumbent.settled()
            or incumbent.seconds() > deadline
            or (flows > settings.FLOWS and incumbent.objective < known)
        ):
            break
        reach = _furthest(reaches, flows, lambda reach: _flows(graph, distance, copies, reach))
        if reach == last:
            continue
        last, near = reach, whole()
        with contextlib.suppress(InfeasibleError):
            for node, far in distance.items():
                for copy in copies.get(node, np.zeros(0)).tolist():
                    near.keep(copy, far[near.options[copy]] <= reach)
            drop_forbidden(near)
            if not (flows and is_slow(near) and incumbent.refused()):
                _solve_exactly(near, incumbent, settings.SIDE_SHARE * (deadline - incumbent.seconds()), found.optimum)


def _furthest(reaches: Array, most: int, flows: Callable[[float], int]) -> float:
    """The largest of ascending reaches that makes at most so many flows; the first at least."""
    low, high = 0, len(reaches) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if flows(float(reaches[middle])) <= most else (low, middle - 1)
    return float(reaches[low])


def _flows(graph: Graph, distance: Mapping[int, Array], copies: Mapping[int, IndexArray], reach: float) -> int:
    kept = {node: int((far <= reach).sum()) for node, far in distance.items()}
    return sum(kept[u] * kept[v] * len(copies.get(u, (0,))) for u, v in graph.pairs())


def _solve_exactly(near: Graph, incumbent: Incumbent, seconds: float, bound: float) -> None:
    """The best choice in ``near``, to within a part of the gap that is asked for."""
    reduce(near, WorkBudget(settings.WORK))
    if not near.nodes():
        incumbent.offer(near.expand({}), "linear program")
        return

    def is_enough(objective: float, _: float) -> bool:
        best = min(objective + near.offset, incumbent.objective)
        return relative_gap(best, incumbent.bound()) <= incumbent.gap_at(best)

    model = build(near, max(bound - near.offset, 0.0) or near.offset)
    if highs.root_seconds(len(model.values)) > 2 * seconds:
        return
    result = highs.solve_highs(model, IlpLimits(seconds, settings.PART_OF_GAP * incumbent.gap, is_enough), None)
    if result.choice is not None:
        search_from(near, result.choice, incumbent, "linear program")
