"""Timing a function on all ranks at once, with repetitions that they agree on."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

MINIMUM_BATCH_S = 2e-4
"""A batch of calls takes at least so long, that reading the clock and starting together do not count."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call on the slowest rank, and the median relative deviation from them."""

    seconds: float
    spread: float


@dataclass
class Allowance:
    """Seconds for all measurements together. Once they are spent, each is made once.

    What is spent is counted in seconds that the ranks agreed on, so that they also agree on when to hurry.
    """

    total_s: float = math.inf
    spent_s: float = 0.0

    def repetitions(self, wanted: int, seconds: float) -> int:
        """As many as ``wanted``, each of so many seconds, or one."""
        granted = wanted if self.spent_s + wanted * seconds <= self.total_s else 1
        self.spent_s += granted * seconds
        return granted


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
    fastest: bool = False
    allowance: Allowance = field(default_factory=Allowance)

    def time(self, function: Callable[[], object]) -> Timing:
        """Call ``function`` again and again; every rank does so equally often, so that collectives can be timed."""
        self._batch(function, 1)
        once = self._slowest([self._batch(function, 1)])[0]
        calls = max(1, int(MINIMUM_BATCH_S / once))
        if calls > 1:
            once = self._slowest([self._batch(function, calls)])[0]
        batches = self._repetitions(once * calls)
        return self._timing([once, *self._slowest([self._batch(function, calls) for _ in range(batches - 1)])])

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
        return self._timing(self._slowest(taken))

    def once(self, function: Callable[[], object]) -> float:
        """Seconds of a single call on the slowest rank."""
        return self._slowest([self._batch(function, 1)])[0]

    def _repetitions(self, seconds: float) -> int:
        wanted = min(max(self.least, int(self.budget_s / seconds)), self.most)
        return self.allowance.repetitions(wanted, seconds)

    def _timing(self, taken: Sequence[float]) -> Timing:
        chosen = min(taken) if self.fastest else statistics.median(taken)
        return Timing(chosen, statistics.median(abs(t - chosen) for t in taken) / chosen)

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
        if not seconds:
            return seconds
        agreed = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return [float(s) for s in agreed.tolist()]
