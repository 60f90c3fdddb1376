"""The best choice and the best bound so far, and the clock they race against."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from autopar import settings
from autopar.solver.clock import now
from autopar.solver.problem import (
    Duals,
    Messages,
    Problem,
    TraceEntry,
    Traded,
    UsagePrices,
    evaluate,
    relative_gap,
)

ROUNDING = 1e-9
"""Relative rounding of sums of costs: bounds closer to an objective than this are not told apart from it."""

Gap = Callable[[float], float]
"""The relative gap at which a search ends, of the objective that it has. It may grow with the work done."""


def gap_of(gap: float | Gap) -> Gap:
    """``gap`` for any objective, where it is a number."""
    return gap if callable(gap) else lambda _: gap


Refuses = Callable[[Sequence[int]], bool]
"""Whether a choice that is nearly the best is of no use, for what the problem does not say."""

Fallback = Callable[[], Sequence[int] | None]
"""A choice to go on from where none is found, if there is one."""


class Incumbent:
    """Offers that are worse are ignored, so that nothing found is ever lost."""

    def __init__(
        self,
        problem: Problem,
        time_limit: float,
        gap: float | Gap,
        progress: Callable[[TraceEntry], None] | None,
        refuses: Refuses | None = None,
    ) -> None:
        self.problem = problem
        self.gap_at = gap_of(gap)
        self.choice: tuple[int, ...] | None = None
        self.objective = math.inf
        self.lower_bound = 0.0  # no cost is negative
        self.found_by = ""
        self.phase = ""
        self.usage_prices = UsagePrices()
        self.messages: dict[int, Messages] = {}
        self.traded: Traded | None = None
        self.aim = -math.inf  # an objective that is good enough
        self.expected = -math.inf  # the optimum as far as it is known, proven or not
        self.trace: list[TraceEntry] = []
        self._progress, self._refuses = progress, refuses
        self._asked: tuple[tuple[int, ...], bool] | None = None
        self._began, self._started = now(), time.monotonic()
        self.time_limit = time_limit

    @property
    def duals(self) -> Duals:
        return Duals(self.usage_prices, self.messages, self.traded)

    def begin_with(self, duals: Duals) -> None:
        self.usage_prices, messages, self.traded = duals
        self.messages = dict(messages)

    @property
    def gap(self) -> float:
        """The relative gap at which the search ends now."""
        return self.gap_at(self.objective)

    def seconds(self) -> float:
        """By the clock of searches, which counts work."""
        return now() - self._began

    def seconds_on_the_wall(self) -> float:
        return time.monotonic() - self._started

    def seconds_left(self) -> float:
        return self.time_limit - self.seconds()

    def offer(self, choice: Sequence[int], found_by: str) -> bool:
        """Take the choice when it is allowed and cheaper, or as cheap and smaller in lexicographic order."""
        objective, feasible = evaluate(self.problem, choice)
        if not feasible or objective >= self.objective:
            return False
        self.choice, self.objective, self.found_by = tuple(map(int, choice)), objective, found_by
        self.note()
        return True

    def raise_bound(self, bound: float) -> None:
        """A bound above the objective is rounding: the two are then equal."""
        if bound > self.lower_bound:
            self.lower_bound = bound
            self.note()

    def bound(self) -> float:
        return min(self.lower_bound, self.objective)

    def proven(self) -> bool:
        """Whether the gap is as small as was asked, or as rounding can tell; or the objective is good enough."""
        if self.choice is None:
            return False
        if self.objective <= self.aim:
            return True
        return relative_gap(self.objective, self.bound()) <= max(self.gap, ROUNDING)

    def settled(self) -> bool:
        """Whether a choice is as good as was asked, proven or by what is expected."""
        return self.choice is not None and (self.proven() or self._is_within(self.gap))

    def refused(self) -> bool:
        """Whether the choice is nearly as good as can be, and of no use: asked before what takes long."""
        if self._refuses is None or self.choice is None or not self._is_within(settings.NEAR):
            return False
        if self._asked is None or self._asked[0] != self.choice:
            self._asked = self.choice, self._refuses(self.choice)
        return self._asked[1]

    def _is_within(self, gap: float) -> bool:
        # A linear program that lacks some columns may end above the objective; it says nothing about the optimum then.
        return abs(relative_gap(self.objective, self.expected)) <= gap

    def cutoff(self) -> float:
        """Whatever costs more than this can be left out."""
        return self.objective + ROUNDING * abs(self.objective)

    def note(self) -> None:
        """Write a line of the trace: what is known at this time, and the phase that it is."""
        entry = TraceEntry(self.seconds(), self.objective, self.bound(), self.phase)
        self.trace.append(entry)
        if self._progress is not None:
            self._progress(entry)
