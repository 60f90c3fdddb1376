"""Time a function on all ranks at once, with the same number of repetitions on each."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from autopar._torch import keep_gpu_busy

MINIMUM_BATCH_S = 2e-4
"""Least seconds of a batch of calls, long enough that reading the clock and starting together do not matter."""

AHEAD_S = 2e-3
"""Seconds for which a GPU is kept busy at first while the host launches what is timed on the device."""

QUEUED = 256
"""Most calls of a batch that is timed on the device, whose queue of launches has to hold them all."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call on the slowest rank, and the median relative deviation from it."""

    seconds: float
    spread: float


@dataclass
class Allowance:
    """A time limit for all measurements together. Once it has passed, each is made only once.

    The elapsed time is the one that ranks last agreed on, so that they also agree on when to hurry.
    """

    total_s: float = math.inf
    passed_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def spent(self) -> bool:
        return self.passed_s > self.total_s


@dataclass(frozen=True)
class Stopwatch:
    """Times functions that every rank calls in the same order.

    Args:
        device: the device to synchronize before reading the clock.
        clock: a function that returns seconds. The processor time of the calling thread excludes other programs, but
            also other threads.
        budget_s: seconds to repeat one function for, on the slowest rank.
        most: most batches; ``least`` is the fewest, however long they take.
        quantile: the quantile of the batches' times that counts.
        on_device: read the GPU's clock instead, between the first and the last of the calls, which the host launches
            ahead. In a program a kernel costs that, as long as the host keeps ahead.
    """

    device: torch.device
    budget_s: float
    least: int = 3
    most: int = 25
    clock: Callable[[], float] = time.perf_counter
    quantile: float = 0.5
    allowance: Allowance = field(default_factory=Allowance)
    on_device: bool = False

    def time(self, function: Callable[[], object]) -> Timing:
        """Call ``function`` repeatedly, equally often on every rank, so that it may contain collectives."""
        self._batch(function, 1)
        once = self._slowest([self._batch(function, 1)])[0]
        calls = min(max(1, int(MINIMUM_BATCH_S / once)), QUEUED)
        if calls > 1:
            once = self._slowest([self._batch(function, calls)])[0]
        batches = self._repetitions(once * calls)
        return self._timing([once, *self._slowest([self._batch(function, calls) for _ in range(batches - 1)])])

    def time_among(self, others: Callable[[], object], function: Callable[[], object]) -> Timing:
        """Time calls of ``function`` that each follow a call of ``others``, which leaves the caches cold."""
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
        """Return the seconds of a single call on the slowest rank."""
        return self._slowest([self._batch(function, 1)])[0]

    def _repetitions(self, seconds: float) -> int:
        return 1 if self.allowance.spent else min(max(self.least, int(self.budget_s / seconds)), self.most)

    def _timing(self, taken: Sequence[float]) -> Timing:
        chosen = sorted(taken)[int(self.quantile * (len(taken) - 1))]
        return Timing(chosen, statistics.median(abs(t - chosen) for t in taken) / chosen)

    def _batch(self, function: Callable[[], object], calls: int) -> float:
        """Return the mean seconds of ``calls`` calls."""
        if self.on_device:
            return self._device_batch(function, calls)
        self._synchronize()
        start = self.clock()
        for _ in range(calls):
            function()
        self._synchronize()
        return max(self.clock() - start, 1e-9) / calls

    def _device_batch(self, function: Callable[[], object], calls: int) -> float:
        """Return the mean device seconds of ``calls`` calls, repeated until the host launched all of them ahead."""
        function()
        ahead_s = AHEAD_S
        while True:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._synchronize()
            begun = time.perf_counter()
            keep_gpu_busy(2 * ahead_s)
            start.record()
            for _ in range(calls):
                function()
            end.record()
            launched_s = time.perf_counter() - begun
            end.synchronize()
            if launched_s <= ahead_s:
                return float(max(start.elapsed_time(end) / 1e3, 1e-9)) / calls
            ahead_s = 2 * launched_s

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _slowest(self, seconds: list[float]) -> list[float]:
        """Return the maximum of each entry over all ranks, equal on all of them. This also synchronizes the ranks."""
        agreed = [*seconds, time.perf_counter() - self.allowance.started]
        if dist.is_initialized() and dist.get_world_size() > 1:
            exchanged = torch.tensor(agreed, dtype=torch.float64, device=self.device)
            dist.all_reduce(exchanged, dist.ReduceOp.MAX)
            agreed = [float(s) for s in exchanged.tolist()]
        self.allowance.passed_s = agreed.pop()
        return agreed
