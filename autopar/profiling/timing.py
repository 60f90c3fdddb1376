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
        budget_s: seconds that one function is repeated for; the slowest rank's count.
        most: batches at most; ``least`` at least, however long they take.
    """

    device: torch.device
    budget_s: float
    least: int = 3
    most: int = 25

    def time(self, function: Callable[[], object]) -> Timing:
        """Call ``function`` again and again; every rank does so equally often, so that collectives can be timed."""
        self._batch(function, 1)
        once = self._slowest([self._batch(function, 1)])[0]
        calls = max(1, int(MINIMUM_BATCH_S / once))
        if calls > 1:
            once = self._slowest([self._batch(function, calls)])[0]
        batches = min(max(self.least, int(self.budget_s / (once * calls))), self.most)
        taken = [once, *self._slowest([self._batch(function, calls) for _ in range(batches - 1)])]
        median = statistics.median(taken)
        return Timing(median, statistics.median(abs(t - median) for t in taken) / median)

    def _batch(self, function: Callable[[], object], calls: int) -> float:
        """Seconds of one call among ``calls``."""
        self._synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        self._synchronize()
        return max(time.perf_counter() - start, 1e-9) / calls

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
