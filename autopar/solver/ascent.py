"""Dual ascent and local search in turns, and what they prove superfluous is taken out."""

from __future__ import annotations

import math

import numpy as np

from autopar.errors import InfeasibleError
from autopar.solver.dual import Dual
from autopar.solver.graph import Graph
from autopar.solver.incumbent import Incumbent
from autopar.solver.problem import Array
from autopar.solver.search import Search

STALL = 1e-4
"""Relative progress of the bound, as a share of the gap, below which a sweep counts as stalled."""


def search_from(
    graph: Graph, choice: dict[int, int], incumbent: Incumbent, found_by: str, *, pairs: bool = True
) -> bool:
    """Improve a choice by local search and offer it."""
    search = Search(graph, choice)
    search.descend(incumbent.seconds_left, pairs=pairs)
    return incumbent.offer(graph.expand(search.choice), found_by)


def ascend(graph: Graph, incumbent: Incumbent, sweeps: int, prices: Array | None, deadline: float) -> Dual:
    """Sweep until the bound stalls, the gap closes or the clock (seconds since the start) reaches the deadline.

    Options that every better choice avoids are removed from the graph at the end; the dual returned belongs to the
    graph before that. With usages, prices move after every second sweep.
    """
    dual = Dual(graph, prices)
    best_prices, best = dual.prices.copy(), -math.inf
    superfluous = {node: np.zeros(len(graph.costs[node]), dtype=bool) for node in graph.nodes()}
    boldness, stalled = 1.0, 0
    for count in range(sweeps):
        result = dual.sweep(forward=count % 2 == 1)
        incumbent.raise_bound(result.lower_bound)
        if count % 8 == 1 or (count < 8 and count % 2 == 1):
            search_from(graph, result.choice, incumbent, "message passing", pairs=count % 16 == 1)
        for node, marginal in result.marginals.items():
            superfluous[node] |= marginal > incumbent.cutoff()
        progress = result.lower_bound - best
        if progress > 0:
            best, best_prices = result.lower_bound, dual.prices.copy()
        span = incumbent.objective - best if incumbent.choice else abs(best)
        stalled = 0 if progress > STALL * abs(span) else stalled + 1
        if incumbent.proven() or incumbent.seconds() > deadline or stalled >= (30 if len(graph.limits) else 6):
            break
        if len(graph.limits) and count % 2 == 1:
            boldness = boldness if stalled < 6 else max(boldness * 0.8, 1e-3)
            dual.step_prices(result.choice, boldness * max(span, 1e-3 * abs(best)))
    dual.prices = best_prices
    _remove(graph, superfluous)
    return dual


def _remove(graph: Graph, superfluous: dict[int, np.ndarray]) -> None:
    for node, mask in superfluous.items():
        if mask.all():
            raise InfeasibleError("Nothing better is left.")
        graph.keep(node, ~mask)


def bar_superfluous_pairs(graph: Graph, incumbent: Incumbent, prices: Array) -> int:
    """Forbid the pairs of options that every better choice avoids; how many.

    Raises:
        InfeasibleError: no choice is better than the incumbent.
    """
    dual = Dual(graph, prices)
    barred = {(u, v): np.zeros(graph.neighbours[u][v].shape, dtype=bool) for u, v in graph.pairs()}
    for count in range(6):
        result = dual.sweep(forward=count % 2 == 1)
        incumbent.raise_bound(result.lower_bound)
        for (u, v), mask in barred.items():
            mask |= dual.pair_bounds(u, v, result.lower_bound) > incumbent.cutoff()
    total = 0
    for (u, v), mask in barred.items():
        mask &= np.isfinite(graph.neighbours[u][v])
        if mask.any():
            total += int(mask.sum())
            graph.set_edge(u, v, np.where(mask, np.inf, graph.neighbours[u][v]))
    return total
