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

MOST_VISITS = 500_000
"""Visits of columns by augmenting paths, over all moves, after which columns stay where they are: those of ten networks
took up to 271,000, and one table of Demucs, in which nothing repeats, 56 s."""


def least_crossing(begins: Sequence[int], links: Sequence[Link]) -> list[int]:
    """The beginnings of the columns that make the weighted sum of row distances least, or as small as it gets within
    ``MOST_VISITS``."""
    placed, left = list(begins), MOST_VISITS
    for _ in range(ROUNDS):
        moved, visits = _best_move(placed, links, left)
        left -= visits
        if not moved or left < 0:
            break
        for column in moved:
            placed[column] += 1
    return placed


def _best_move(begins: Sequence[int], links: Sequence[Link], most: int) -> tuple[set[int], int]:
    """The columns to move one row on, and the visits that took; none when no move lowers the sum."""
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
    flow, visits = _saturate(capacity, source, sink, most)
    if flow >= sum(amount for amount in gain if amount > 0):
        return set(), visits
    return _reached(capacity, source).keys() - {source}, visits


def _add(capacity: list[dict[int, int]], u: int, v: int, amount: int) -> None:
    capacity[u][v] = capacity[u].get(v, 0) + amount
    capacity[v].setdefault(u, 0)


def _saturate(capacity: list[dict[int, int]], source: int, sink: int, most: int) -> tuple[int, int]:
    """Maximum flow by shortest augmenting paths (Edmonds & Karp 1972), and the visits that took: after ``most`` of them
    it ends. Leaves the residual capacities."""
    total = visits = 0
    while True:
        parent = _reached(capacity, source)
        visits += len(parent)
        if sink not in parent or visits > most:
            return total, visits
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
