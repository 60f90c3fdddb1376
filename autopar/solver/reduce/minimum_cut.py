"""Where to begin the rows of a table so that few edges join different rows: minimum cuts, one after another.

Minimising ``sum of w * |begin[q] - begin[p] + d|`` over integers is L-natural convex (Murota 2003): while some set of
columns can move by one row and lower it, the best such set is a minimum cut, and when none can, the sum is least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

Link = tuple[int, int, int, int]
"""Columns p and q, the distance d of the linked entries in their columns, and a weight."""

ROUNDS = 50


def least_crossing(begins: Sequence[int], links: Sequence[Link]) -> list[int]:
    """The beginnings of the columns that make the weighted sum of row distances least."""
    placed = list(begins)
    for _ in range(ROUNDS):
        moved = _best_move(placed, links)
        if not moved:
            break
        for column in moved:
            placed[column] += 1
    return placed


def _best_move(begins: Sequence[int], links: Sequence[Link]) -> set[int]:
    """The columns to move one row on; empty when no move lowers the sum."""
    source, sink = len(begins), len(begins) + 1
    capacity: list[dict[int, int]] = [{} for _ in range(len(begins) + 2)]
    gain = [0] * len(begins)
    for p, q, d, weight in links:
        distance = begins[q] - begins[p] + d
        if distance == 0:
            _add(capacity, p, q, weight)
            _add(capacity, q, p, weight)
        else:
            sign = 1 if distance > 0 else -1
            gain[p] += sign * weight
            gain[q] -= sign * weight
    for column, amount in enumerate(gain):
        if amount > 0:
            _add(capacity, source, column, amount)
        elif amount < 0:
            _add(capacity, column, sink, -amount)
    flow = _saturate(capacity, source, sink)
    if flow >= sum(amount for amount in gain if amount > 0):
        return set()
    return _reached(capacity, source).keys() - {source}


def _add(capacity: list[dict[int, int]], u: int, v: int, amount: int) -> None:
    capacity[u][v] = capacity[u].get(v, 0) + amount
    capacity[v].setdefault(u, 0)


def _saturate(capacity: list[dict[int, int]], source: int, sink: int) -> int:
    """Maximum flow by shortest augmenting paths (Edmonds & Karp 1972); leaves the residual capacities."""
    total = 0
    while True:
        parent = _reached(capacity, source)
        if sink not in parent:
            return total
        path = [sink]
        while path[-1] != source:
            path.append(parent[path[-1]])
        steps = list(zip(path[1:], path, strict=False))
        amount = min(capacity[u][v] for u, v in steps)
        for u, v in steps:
            capacity[u][v] -= amount
            capacity[v][u] += amount
        total += amount


def _reached(capacity: list[dict[int, int]], source: int) -> dict[int, int]:
    """Nodes within reach along residual capacity, with the node before each."""
    parent = {source: source}
    waiting = deque([source])
    while waiting:
        u = waiting.popleft()
        for v, room in capacity[u].items():
            if room > 0 and v not in parent:
                parent[v] = u
                waiting.append(v)
    return parent
