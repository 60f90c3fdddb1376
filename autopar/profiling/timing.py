"""Timing a function on all ranks at once, with repetitions that they agree on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

MINIMUM_BATCH_S = 2e-4
"""A batch of calls takes at least so long, that reading the clock and starting together do not count."""


@dataclass(frozen=True)
class Timing:
    """Median seconds of one call on the slowest rank, and the median relative deviation from it."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class Stopwatch:
    """Times functions that every rank calls, in the same order.

    Args:
        device: what to wait for before reading the clock.
        clock: seconds so far. The processor's time of the calling thread leaves out what other programs took, but
            also what other threads did.
        budget_s: seconds that one function is repeated for; the slowest rank's count.
        most: batches at most; ``least`` at least, however long they take.
    """

    device: torch.device
    budget_s: float
    least: int = 3
    most: int = 25
    clock: Callable[[], float] = time.perf_counter

    def time(self, function: Callable[[], object]) -> Timing:
        """Call ``function`` again and again; every rank does so equally often, so that collectives can be timed."""
        self._batch(function, 1)
        once = self._slowest([self._batch(function, 1)])[0]
        calls = max(1, int(MINIMUM_BATCH_S / once))
        if calls > 1:
            once = self._slowest([self._batch(function, calls)])[0]
        batches = self._repetitions(once * calls)
        return _timing([once, *self._slowest([self._batch(function, calls) for _ in range(batches - 1)])])

    def time_among(self, others: Callable[[], object], function: Callable[[], object]) -> Timing:
        """Seconds of a call of ``function`` after one of ``others``, which leave it cold caches, as in a program."""
        self._batch(function, 1)
        start = time.perf_counter()
        others()
        function()
        self._synchronize()
        once = self._slowest([time.perf_counter() - start])[0]
        taken = []
        for _ in range(self._repetitions(once)):
            others()
            taken.append(self._batch(function, 1))
        return _timing(self._slowest(taken))

    def _repetitions(self, seconds: float) -> int:
        return min(max(self.least, int(self.budget_s / seconds)), self.most)

    def _batch(self, function: Callable[[], object], calls: int) -> float:
        """Seconds of one call among ``calls``."""
        self._synchronize()
        start = self.clock()
        for _ in range(calls):
            function()
        self._synchronize()
        return max(self.clock() - start, 1e-9) / calls

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _slowest(self, seconds: list[float]) -> list[float]:
        """The largest of each entry among all ranks: equal on all of them, and a point where they meet."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return seconds
        agreed = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return [float(s) for s in agreed.tolist()]


def _timing(taken: list[float]) -> Timing:
    median = statistics.median(taken)
    return Timing(median, statistics.median(abs(t - median) for t in taken) / median)
