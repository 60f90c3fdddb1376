"""Linear programs of many columns, from the nearest of them.

Of thousands of options a linear program uses one or two a node. Message passing tells how near each is to being used:
what it costs at the least to take it, under prices of the limit. The program of the nearest options has a tenth of the
columns and nearly always the same optimum; its prices of the limit and of the equations then go to all options, and
message passing under these proves how far the optimum can be (column generation: Gilmore and Gomory 1961; a bound from
any prices: Geoffrion 1974). Where that is too far, the options that are nearest under the new prices follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar import settings
from autopar.errors import InfeasibleError
from autopar.solver.dual.dual import Dual
from autopar.solver.integer import highs
from autopar.solver.integer.equations import Equations, coupled, paid
from autopar.solver.integer.ilp import USAGE_SCALE, Model, build
from autopar.solver.problem import Array
from autopar.solver.reduce.graph import Graph

USED = 1e-7
"""Values of the linear program above this count as used."""

Marginals = Mapping[int, Array]


@dataclass(frozen=True)
class Relaxed:
    """The optimum of a linear program, or nearly: for each option its value, and how much dearer than ``bound`` every
    choice is that takes it.

    Args:
        optimum, bound: of the program, and on every choice, in seconds: where not all columns were there, the bound may
            be below.
        prices: of the limit at each time of the graph, in seconds a byte.
    """

    optimum: float
    bound: float
    values: Marginals
    reduced: Marginals
    prices: Array


def relax_nearest(
    graph: Graph,
    equations: Equations,
    magnitude: float,
    known: Array,
    taken: Iterable[Mapping[int, int]],
    gap: float,
    seconds_left: Callable[[], float],
) -> Relaxed | None:
    """The linear program of ``graph`` to within ``gap``, or as near as it comes in a few rounds; None where there is no
    time for one, or the nearest options allow nothing.

    Args:
        magnitude: of the objective, in seconds.
        known: prices of the limit at a similar optimum; zeros where there are none.
        taken: options of known choices, which are in every program: so it allows something, and ends no higher.
    """
    whole = magnitude / graph.room()
    first = known if known.any() else settings.FIRST_PRICE * whole
    distance = _nearest(*(_told(graph, prices, seconds_left) for prices in (0.0 * whole, first)))
    relaxed: Relaxed | None = None
    used = {node: np.zeros(len(graph.costs[node]), dtype=bool) for node in graph.nodes()}
    for choice in taken:
        for node, option in choice.items():
            used[node][option] = True
    solved, share = 0, settings.NEAREST
    while solved < settings.FEW and seconds_left() > 0:
        part = _of_nearest(graph, distance, used, share)
        plain = build(part, magnitude)
        model = coupled(plain, part, equations)
        try:
            found = highs.solve_relaxation(model, seconds_left())
        except InfeasibleError:
            if share > settings.NEAREST or relaxed is not None:
                break
            dear = settings.FIRST_FACTOR * settings.FIRST_PRICE * whole
            share, distance = 2 * share, _nearest(distance, _told(graph, dear, seconds_left))
            continue
        if found is None:
            break
        solved += 1
        optimum, prices = found.objective * model.scale + graph.offset, prices_of(graph, plain, found)
        values = {n: np.zeros(len(graph.costs[n])) for n in graph.nodes()}
        for node, start, stop in zip(model.nodes, model.first[:-1], model.first[1:], strict=True):
            values[node][np.isin(graph.options[node], part.options[node])] = found.values[start:stop]
        free = paid(graph, part, equations, found.row_duals[len(plain.row_lower) :] * model.scale)
        least, bound = _proven(free, prices, optimum, gap, seconds_left)
        bound = bound if relaxed is None else max(bound, relaxed.bound)
        distance = {node: np.maximum(marginal - bound, 0.0) for node, marginal in least.items()}
        relaxed = Relaxed(optimum, bound, values, distance, prices)
        used = {node: used[node] | (value > USED) for node, value in values.items()}
        if optimum - bound <= gap * abs(optimum):
            break
    return relaxed


def prices_of(graph: Graph, plain: Model, found: highs.Relaxation) -> Array:
    """What a byte costs at each time of ``graph``, in seconds: duals of the last rows of the ``plain`` model."""
    end = len(plain.row_lower)
    held = -found.row_duals[end - len(graph.limits) : end]
    return np.maximum(held, 0.0) * plain.scale * USAGE_SCALE / graph.room()


def _told(graph: Graph, prices: Array, seconds_left: Callable[[], float]) -> dict[int, Array]:
    """How much dearer options are than the best of their node, at about the least, under prices of the limit."""
    dual, marginals = Dual.of(graph, prices), {node: np.zeros(len(graph.costs[node])) for node in graph.nodes()}
    for count in range(settings.LEAST_SWEEPS):
        found = dual.sweep(forward=count % 2 == 0, decode=False, late=lambda: seconds_left() <= 0)
        marginals = found.marginals or marginals
    return {node: marginal - marginal.min() for node, marginal in marginals.items()}


def _nearest(one: Marginals, other: Marginals) -> dict[int, Array]:
    """What is near under either prices."""
    return {node: np.minimum(far, other[node]) for node, far in one.items()}


def _of_nearest(graph: Graph, distance: Marginals, used: Mapping[int, npt.NDArray[np.bool_]], share: float) -> Graph:
    """With the nearest ``share`` of options, those that were used, and all of protected nodes."""
    reach = np.quantile(np.concatenate(list(distance.values())), min(share, 1.0), method="lower")
    part = graph.copy()
    for node, far in distance.items():
        if node not in graph.protected:
            near = (far <= reach) | (far == far.min())
            part.keep(node, near | used[node])
    return part


def _proven(
    graph: Graph, prices: Array, optimum: float, gap: float, seconds_left: Callable[[], float]
) -> tuple[dict[int, Array], float]:
    """What each option costs at the least, and a bound: no nearer to ``optimum`` than half of ``gap``."""
    dual, bound, far = Dual.of(graph, prices), -math.inf, []
    least = {node: np.full(len(graph.costs[node]), -np.inf) for node in graph.nodes()}
    for count in range(settings.ROUNDS):
        found = dual.sweep(forward=count % 2 == 0, decode=False, late=lambda: seconds_left() <= 0)
        bound = max(bound, found.lower_bound)
        for node, marginal in found.marginals.items():
            np.maximum(least[node], marginal, out=least[node])
        far.append(optimum - bound)
        stalled = count >= settings.LEAST_SWEEPS and far[-1] > (1 - settings.ROUGH) * far[-3]
        if not found.marginals or far[-1] <= 0.5 * gap * abs(optimum) or stalled:
            break
    return least, bound
