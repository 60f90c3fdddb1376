"""The best part of another choice: where two choices differ falls into pieces that are independent of each other.

Nodes that choose otherwise and are joined by edges make a piece; what pieces change adds up. So the pieces that save
most for what they use, at some prices, are taken as long as the limit holds.
"""

from __future__ import annotations

import numpy as np

from autopar.solver.clock import tick
from autopar.solver.priced.network import Network
from autopar.solver.problem import Array, IndexArray


def crossover(
    network: Network, choice: IndexArray, used: Array, other: IndexArray, prices: Array, *, free_room: bool = False
) -> tuple[IndexArray, Array, float]:
    """``choice`` with the pieces of ``other`` that save something and fit; what it uses, and how much dearer it is.

    Args:
        used: what ``choice`` uses at each time.
        prices: for all of the limit at each time.
        free_room: whether also to take what saves nothing but is worth it at the prices.
    """
    nodes, piece, saved = _pieces(network, choice, other)
    if not len(nodes):
        return choice, used, 0.0
    rows, of_node = _rows_of(network, nodes)
    at = network.row_first[rows]
    change = network.amounts[at + other[nodes[of_node]]] - network.amounts[at + choice[nodes[of_node]]]
    uses = change != 0
    rows, change, owner = rows[uses], change[uses], piece[of_node[uses]]
    start, end = network.row_start[rows], network.row_end[rows]
    total = np.concatenate([[0.0], np.cumsum(prices / network.whole)])
    paid = np.bincount(owner, change * (total[end] - total[start]), len(saved))
    wanted = (saved < 0) | ((saved + paid < 0) if free_room else False)
    ratio = np.full(len(saved), -np.inf)
    dear = (saved < 0) & (paid > 0)
    ratio[dear] = saved[dear] / paid[dear]
    pieces = np.flatnonzero(wanted)
    order = np.argsort(owner, kind="stable")
    begins = np.searchsorted(owner[order], np.arange(len(saved) + 1))
    start, end, change = start[order], end[order], change[order]
    used, taken = used.copy(), np.zeros(len(saved), dtype=bool)
    for i in pieces[np.lexsort((saved[pieces], ratio[pieces]))].tolist():
        mine = slice(begins[i], begins[i + 1])
        taken[i] = _take(network, used, start[mine], end[mine], change[mine])
    result = choice.copy()
    moved = nodes[taken[piece]]
    result[moved] = other[moved]
    tick("flat element", len(nodes))
    tick("piece", len(pieces))
    return result, used, float(saved[taken].sum())


def _take(network: Network, used: Array, start: IndexArray, end: IndexArray, change: Array) -> bool:
    """Add to what is used, unless it then is over the limit where more is used than before."""
    if not len(start):
        return True
    if len(start) == 1:
        window, change = slice(start[0], end[0]), change[0]
        if change > 0 and (used[window] + change > network.limits[window]).any():
            return False
        used[window] += change
        return True
    low, high = int(start.min()), int(end.max())
    more = np.zeros(high - low + 1)
    np.add.at(more, start - low, change)
    np.subtract.at(more, end - low, change)
    more = np.cumsum(more)[:-1]
    after = used[low:high] + more
    if ((after > network.limits[low:high]) & (more > 0)).any():
        return False
    used[low:high] = after
    return True


def _pieces(network: Network, choice: IndexArray, other: IndexArray) -> tuple[IndexArray, IndexArray, Array]:
    """Nodes that choose otherwise, the piece of each, and how much dearer each piece is."""
    tick("flat element", 2 * len(network.edge_at))
    differs = choice != other
    u, v = network.ends
    label = np.arange(len(choice))
    joined = np.flatnonzero(differs[u] & differs[v])
    a, b = u[joined], v[joined]
    while True:
        least = np.minimum(label[a], label[b])
        before = label.copy()
        np.minimum.at(label, label[a], least)
        np.minimum.at(label, label[b], least)
        label = label[label[label]]
        if (label == before).all():
            break
    nodes: IndexArray = np.flatnonzero(differs).astype(np.int64)
    piece: IndexArray = np.unique(label[nodes], return_inverse=True)[1].astype(np.int64)
    count = int(piece.max()) + 1 if len(nodes) else 0
    first, cost = network.first[nodes], network.cost
    dearer = np.bincount(piece, cost[first + other[nodes]] - cost[first + choice[nodes]], count)
    of_node = np.full(len(choice), -1)
    of_node[nodes] = piece
    edges = np.flatnonzero(differs[u] | differs[v])
    u, v = u[edges], v[edges]
    at, width = network.edge_at[edges], network.sizes[v]
    change = network.tables[at + other[u] * width + other[v]] - network.tables[at + choice[u] * width + choice[v]]
    return (
        nodes,
        piece,
        np.asarray(dearer + np.bincount(np.maximum(of_node[u], of_node[v]), change, count), dtype=float),
    )


def _rows_of(network: Network, nodes: IndexArray) -> tuple[IndexArray, IndexArray]:
    """The rows of these nodes, and for each the place of its node among them."""
    begin = network.rows_begin[nodes]
    count = network.rows_begin[nodes + 1] - begin
    of_node = np.repeat(np.arange(len(nodes)), count)
    offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return begin[of_node] + offset, of_node
