"""What choices use at each time, and usages as costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.solver.problem import Array, IndexArray, Problem, UsagePrices


class UsageTable:
    """The usages of a problem, read at the times at which some of them start: no other time has a larger sum."""

    def __init__(self, problem: Problem) -> None:
        live = [u for u in problem.usages if u.start < u.end]
        self.times: IndexArray = np.unique(np.array([u.start for u in live], dtype=np.int64))
        self._nodes = np.array([u.node for u in live], dtype=np.int64)
        sizes = [len(u.option) for u in live]
        self._first = np.concatenate([[0], np.cumsum(sizes)])[:-1].astype(np.int64)
        self._amounts = np.concatenate([u.option for u in live]) if live else np.zeros(0)
        self._start = np.searchsorted(self.times, [u.start for u in live])
        self._end = np.searchsorted(self.times, [u.end for u in live])

    def of(self, choice: Sequence[int] | IndexArray) -> Array:
        """Bytes at each of ``times``."""
        change = np.zeros(len(self.times) + 1)
        amounts = self._amounts[self._first + np.asarray(choice, dtype=np.int64)[self._nodes]]
        np.add.at(change, self._start, amounts)
        np.subtract.at(change, self._end, amounts)
        return np.asarray(np.cumsum(change)[:-1])


def with_usages_priced(problem: Problem, prices: UsagePrices) -> Problem:
    """Usages as costs."""
    costs = list(problem.costs)
    rates: dict[tuple[int, int], float] = {}
    for usage in problem.usages:
        span = (usage.start, usage.end)
        rate = rates[span] = rates[span] if span in rates else prices.of(*span)
        if rate:
            costs[usage.node] = costs[usage.node] + rate * usage.option
    return Problem(tuple(costs), problem.edges, shift=problem.shift, trusted=True)
