"""Which times can bind: those whose set of live rows is in no other's with a limit as tight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.solver.problem import Array, IndexArray


def undominated_times(intervals: Sequence[tuple[int, int]], limits: Array, tight: np.ndarray) -> IndexArray:
    """The tight times that no neighbour in time implies, ascending.

    Amounts are >= 0, so a time is implied by another that has all its rows and no larger limit. Going from t to the
    next time, the rows of t are all there when none ends, and those of the next were all there when none starts.
    """
    started = np.zeros(len(limits) + 1, dtype=np.int64)
    ended = np.zeros(len(limits) + 1, dtype=np.int64)
    for start, end in intervals:
        started[start] += 1
        ended[end] += 1
    starts, ends = np.cumsum(started), np.cumsum(ended)
    kept: list[int] = []
    for time in np.flatnonzero(tight):
        while kept and ends[time] == ends[kept[-1]] and limits[time] <= limits[kept[-1]]:
            kept.pop()
        implied = kept and starts[time] == starts[kept[-1]] and limits[time] >= limits[kept[-1]]
        if not implied:
            kept.append(int(time))
    return np.array(kept, dtype=np.int64)
