"""Exact reductions of a constraint network (PBQP: Scholz & Eckstein 2002, Hames & Scholz 2006), until none applies.

Each function returns whether it changed the graph; each alone keeps the optimal value and loses no way back to it.
"""

from __future__ import annotations

import numpy as np

from autopar import settings
from autopar.solver.clock import tick
from autopar.solver.problem import Array
from autopar.solver.reduce.alike import alike
from autopar.solver.reduce.dominance import WorkBudget, drop_dominated
from autopar.solver.reduce.graph import Graph, Row

ROUNDING = 1e-13
"""Relative difference below which a matrix counts as a sum of a row and a column."""


UNLIMITED = WorkBudget(np.inf)


def reduce(graph: Graph, work: WorkBudget) -> None:
    """Apply every reduction until nothing changes."""
    worn = False
    for reader in ("separable", "dominated"):
        graph.changed(reader, anew=True)
    while True:
        drop_forbidden(graph)
        graph.drop_loose_times()
        if worn or work.late():
            break
        before = graph.node_and_option_counts()
        tick("reduced node", before[0])
        changed = absorb_separable(graph)
        changed |= merge_determined(graph, work)
        changed |= eliminate(graph, work)
        taken = (1 - now / max(was, 1) for was, now in zip(before, graph.node_and_option_counts(), strict=True))
        if not changed or max(taken) < settings.NEAR:
            options = graph.size()[1]
            if not drop_dominated(graph, work):
                break
            worn = options - graph.size()[1] < settings.NEAR * options
    graph.forget_shared()


def drop_forbidden(graph: Graph) -> bool:
    """Arc consistency: an option without a finite partner at some neighbour goes, and so on."""
    changed = False
    waiting = graph.changed("supported")
    while waiting:
        for node in sorted(waiting):
            waiting.discard(node)
            if not graph.alive[node]:
                continue
            mask = np.isfinite(graph.costs[node])
            for matrix in graph.neighbours[node].values():
                supported = graph.once(_supported, matrix)
                if len(supported):
                    mask = mask & supported
            if not mask.all():
                changed = True
                graph.keep(node, mask)
    return changed


def _supported(matrix: Array) -> np.ndarray:
    """Which rows have a finite element; empty where all have."""
    supported = np.asarray(np.isfinite(matrix).any(axis=1))
    return supported[:0] if supported.all() else supported


def absorb_separable(graph: Graph) -> bool:
    """An edge that costs row[a] + column[b] is no edge: both parts go to the nodes."""
    changed = False
    fresh = set(graph.changed("separable"))
    graph.changed("separable").clear()
    for u, v in graph.pairs():
        if u not in fresh and v not in fresh:
            continue
        matrix = graph.neighbours[u][v]
        if len(graph.once(_separable, matrix)):
            graph.add_cost(u, matrix[:, 0])
            graph.add_cost(v, matrix[0] - matrix[0, 0])
            _settle_negative(graph, v)
            graph.drop_edge(u, v)
            changed = True
    return changed


def _separable(matrix: Array) -> Array:
    """The matrix itself if it costs row[a] + column[b], else none of it."""
    if not np.isfinite(matrix).all():
        return matrix[:0]
    if 1 in matrix.shape:
        return matrix
    rest = np.abs(matrix - matrix[:, :1] - (matrix[0] - matrix[0, 0]))
    return matrix if rest.max() <= ROUNDING * np.abs(matrix).max() else matrix[:0]


def _settle_negative(graph: Graph, node: int) -> None:
    """Costs stay >= 0: what is below goes to the constant."""
    least = float(graph.costs[node].min())
    if least < 0:
        graph.add_cost(node, -least)
        graph.offset += least


def merge_determined(graph: Graph, work: WorkBudget = UNLIMITED) -> bool:
    """A node whose best option follows from one neighbour's alone, whatever the rest does, joins that neighbour."""
    changed = False
    for node in graph.nodes():
        if node in graph.protected:
            continue
        if work.late():
            break
        for other, matrix in sorted(graph.neighbours[node].items()):
            chosen = _determined(graph, node, matrix)
            if chosen is not None and _merge_is_small(graph, node, other):
                merge(graph, node, other, chosen)
                changed = True
                break
    return changed


def _determined(graph: Graph, node: int, matrix: Array) -> np.ndarray | None:
    """The option of ``node`` for each option of the neighbour, if there is one that nothing can better."""
    only = graph.once(_only_finite, matrix)
    if len(only):
        return only
    if len(graph.neighbours[node]) > 1 or not graph.rows[node]:
        return None
    return _best_leaf_options(graph, node, matrix)


def _only_finite(matrix: Array) -> np.ndarray:
    """The one finite row of each column; empty when some column has more."""
    finite = np.isfinite(matrix)
    return finite.argmax(axis=0) if (finite.sum(axis=0) == 1).all() else np.zeros(0, dtype=np.int64)


def _best_leaf_options(graph: Graph, node: int, matrix: Array) -> np.ndarray | None:
    """For each option of a leaf's neighbour: the leaf's cheapest option, if it also uses the least at every time."""
    total = graph.costs[node][:, None] + matrix
    allowed = np.isfinite(total)
    cheapest = total == total.min(axis=0)
    frugal = np.ones_like(cheapest)
    for row in graph.rows[node]:
        amount = np.where(allowed, row.amount[:, None], np.inf)
        frugal &= amount == amount.min(axis=0)
    both = cheapest & frugal
    return both.argmax(axis=0) if both.any(axis=0).all() else None


def _merge_is_small(graph: Graph, node: int, other: int) -> bool:
    mine, theirs = len(graph.costs[node]), len(graph.costs[other])
    if mine == theirs and len(graph.neighbours[other]) < len(graph.neighbours[node]):
        # Each determines the other: the one with fewer edges moves.
        return False
    rest = [third for third in graph.neighbours[node] if third != other]
    before = mine * theirs + sum(mine * len(graph.costs[third]) for third in rest)
    after = sum(theirs * len(graph.costs[third]) for third in rest if third not in graph.neighbours[other])
    return after <= settings.FILL * before


def merge(graph: Graph, node: int, other: int, chosen: np.ndarray) -> None:
    """``node`` takes option ``chosen[b]`` whenever ``other`` takes b."""
    matrix = graph.neighbours[node][other]
    graph.add_cost(other, graph.costs[node][chosen])
    graph.add_cost(other, matrix[chosen, np.arange(len(chosen))])
    name = chosen.tobytes()
    for third, edge in list(graph.neighbours[node].items()):
        if third != other:
            moved = graph.shared(("take", name), (edge,), lambda m=edge: m[chosen])  # type: ignore[misc]
            graph.drop_edge(node, third)
            graph.add_edge(other, third, moved)
    graph.add_rows(other, [Row(row.start, row.end, row.amount[chosen]) for row in graph.rows[node]])
    follow = np.full(matrix.shape, np.inf)
    follow[chosen, np.arange(len(chosen))] = 0.0
    graph.costs[node] = np.zeros(len(graph.costs[node]))
    graph.set_edge(node, other, follow)
    graph.remove(node)


def eliminate(graph: Graph, work: WorkBudget = UNLIMITED) -> bool:
    """Nodes of degree 0, 1 and 2 that use nothing are minimised out (min-plus products)."""
    changed = False
    waiting = graph.nodes()
    while waiting:
        tick("eliminated node", len(waiting))
        touched: set[int] = set()
        for node in waiting:
            if work.late():
                return changed
            if graph.alive[node] and not graph.rows[node] and node not in graph.protected:
                around = list(graph.neighbours[node])
                if _eliminate_node(graph, node, work):
                    changed = True
                    touched.update(around)
        waiting = sorted(touched)
    return changed


def _eliminate_node(graph: Graph, node: int, work: WorkBudget) -> bool:
    around = sorted(graph.neighbours[node])
    if len(around) == 0:
        graph.offset += float(graph.costs[node].min())
    elif len(around) == 1:
        (other,) = around
        best = (graph.costs[node][:, None] + graph.neighbours[node][other]).min(axis=0)
        graph.add_cost(other, best)
    elif len(around) == 2 and _elimination_is_small(graph, node, around[0], around[1], work.each):
        _join(graph, node, *around)
    else:
        return False
    graph.remove(node)
    return True


def _elimination_is_small(graph: Graph, node: int, u: int, v: int, most: float) -> bool:
    mine, one, two = len(graph.costs[node]), len(graph.costs[u]), len(graph.costs[v])
    if mine * one * two > most:
        return False
    return v in graph.neighbours[u] or one * two <= settings.FILL * mine * (one + two)


def _join(graph: Graph, node: int, u: int, v: int) -> None:
    cost, left, right = graph.costs[node], graph.neighbours[node][u], graph.neighbours[node][v]
    product = graph.shared(("product", cost.tobytes()), (left, right), lambda: min_plus(left, cost, right))
    graph.add_edge(u, v, product)


def min_plus(left: Array, cost: Array, right: Array) -> Array:
    """result[b, c] = min over a of left[a, b] + cost[a] + right[a, c]."""
    if left.shape[0] * left.shape[1] * right.shape[1] <= settings.AT_ONCE:
        return _min_plus(left, cost, right)
    b, c = alike(left.T), alike(right.T)
    left, right = left[:, b.first], right[:, c.first]
    a = alike(np.concatenate([left, right], axis=1))
    least = np.full(len(a.first), np.inf)
    np.minimum.at(least, a.number, cost)
    small = _min_plus(left[a.first], least, right[a.first])
    return np.asarray(small[np.ix_(b.number, c.number)])


def _min_plus(left: Array, cost: Array, right: Array) -> Array:
    tick("row of a product", len(cost))
    tick("element of a product", len(cost) * left.shape[1] * right.shape[1])
    result = np.full((left.shape[1], right.shape[1]), np.inf)
    scratch = np.empty_like(result)
    for a in range(len(cost)):
        np.add((left[a] + cost[a])[:, None], right[a], out=scratch)
        np.minimum(result, scratch, out=result)
    return result
