"""Dual ascent and local search in turns, and what they prove superfluous is taken out."""

from __future__ import annotations

import itertools
import math

import numpy as np

from autopar import settings
from autopar.errors import InfeasibleError
from autopar.solver.dual.dual import Dual
from autopar.solver.dual.search import Search
from autopar.solver.problem import Array, Messages, relative_gap
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.incumbent import Incumbent
from autopar.solver.reduce.reductions import drop_forbidden


def search_from(
    graph: Graph,
    choice: dict[int, int],
    incumbent: Incumbent,
    found_by: str,
    until: float = math.inf,
) -> bool:
    """Improve a choice by local search, no later than ``until`` (seconds since the start), and offer it."""
    search = Search(graph, choice)
    search.descend(lambda: min(incumbent.seconds_left(), until - incumbent.seconds()))
    return incumbent.offer(graph.expand(search.choice), found_by)


def ascend(
    graph: Graph,
    incumbent: Incumbent,
    prices: Array | None,
    deadline: float,
    *,
    choice_only: bool = False,
    known: Messages | None = None,
) -> Messages:
    """Sweep until the bound stalls, the gap closes or the clock (seconds since the start) reaches the deadline.

    Options that every better choice avoids are removed from the graph on the way, when they are many, and at the end.
    Prices of usages stay as they are. With ``choice_only`` it also ends when the gap is small and no
    better choice was found for long. It goes on from ``known`` messages, and returns its own.
    """
    dual = Dual.of(graph, prices, known)
    best = -math.inf
    superfluous = _Superfluous(graph)
    stalled, found = 0, 0
    for count in itertools.count():
        looks = count % 8 == 1 or (count < 8 and count % 2 == 1)
        result = dual.sweep(
            forward=count % 2 == 1,
            decode=looks,
            late=lambda: incumbent.seconds() > deadline,
        )
        incumbent.raise_bound(result.lower_bound)
        if not result.marginals:
            break
        if looks and search_from(graph, result.choice, incumbent, "message passing"):
            found = count
        if (
            choice_only
            and count - found >= settings.PATIENCE
            and relative_gap(incumbent.objective, incumbent.bound()) < settings.NEAR
        ):
            break
        superfluous.note(result.marginals, incumbent.cutoff())
        progress = result.lower_bound - best
        best = max(best, result.lower_bound)
        span = incumbent.objective - best if incumbent.choice else abs(best)
        stalled = 0 if progress > settings.STALL * abs(span) else stalled + 1
        if incumbent.proven() or incumbent.seconds() > deadline or stalled >= settings.PATIENCE:
            break
        if count % 4 == 3 and superfluous.many():
            superfluous.remove()
            dual = Dual.of(graph, prices, dual.messages())
    superfluous.remove()
    return dual.messages()


class _Superfluous:
    """For each option whether every better choice avoids it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._reset()

    def _reset(self) -> None:
        self.masks = {node: np.zeros(len(self.graph.costs[node]), dtype=bool) for node in self.graph.nodes()}

    def note(self, marginals: dict[int, Array], cutoff: float) -> None:
        for node, marginal in marginals.items():
            self.masks[node] |= marginal > cutoff

    def many(self) -> bool:
        gone = sum(int(mask.sum()) for mask in self.masks.values())
        return gone > settings.SAVED * sum(map(len, self.masks.values()))

    def remove(self) -> None:
        """Take them out of the graph, and what then has no partner at some neighbour.

        Raises:
            InfeasibleError: nothing better is left.
        """
        if any(mask.all() for mask in self.masks.values()):
            raise InfeasibleError("Nothing better is left.")
        for node, mask in self.masks.items():
            self.graph.keep(node, ~mask)
        drop_forbidden(self.graph)
        self.graph.forget_shared()
        self._reset()


def bar_superfluous_pairs(graph: Graph, incumbent: Incumbent, prices: Array, known: Messages | None = None) -> int:
    """Forbid the pairs of options that every better choice avoids; how many. ``known``: messages to begin with.

    Raises:
        InfeasibleError: no choice is better than the incumbent.
    """
    dual = Dual.of(graph, prices, known)
    barred = {(u, v): np.zeros(graph.neighbours[u][v].shape, dtype=bool) for u, v in graph.pairs()}
    for count in range(6):
        if incumbent.seconds_left() < 0:
            return 0
        result = dual.sweep(forward=count % 2 == 1, decode=False)
        incumbent.raise_bound(result.lower_bound)
        for (u, v), mask in barred.items():
            mask |= dual.pair_bounds(u, v, graph.neighbours[u][v], result.lower_bound) > incumbent.cutoff()
    total = 0
    for (u, v), mask in barred.items():
        mask &= np.isfinite(graph.neighbours[u][v])
        if mask.any():
            total += int(mask.sum())
            graph.set_edge(u, v, np.where(mask, np.inf, graph.neighbours[u][v]))
    return total
