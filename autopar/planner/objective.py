"""What the search minimises: seconds of a step, of which the reductions of gradients hide behind computation.

A gradient's reduction is launched as soon as the gradient is there, and nothing of the program waits for it. So with
``W`` the seconds of all else (the launches of those reductions are in it), ``C`` of the backward's computation, ``A``
of the reductions' bytes, and ``o`` the share of a collective that computation beside it is spared (see
`planner.timeline`)::

    F(x) = W + (1 - o) (C + A) + o max(C, A)

The solver minimises sums. For every ``m`` in [0, 1] the sum that has ``(1 - m) C + m A`` in place of the maximum is
nowhere above F, so its least value is a bound on F (a Lagrangian relaxation, Geoffrion 1974), and equals F where the
choice hides all its reductions (m = 0) or nothing but reductions is left to wait for (m = 1).

Where gradients add up over n micro-batches, F is the mean of their seconds: a reduction comes in one of n, and hides
beside the computation of that one. So A and its launches are divided by n, and o is where it stands before C::

    F(x) = W + (1 - o / n) C + (1 - o) A / n + o / n max(C, A)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from autopar.planner.pricing import Array, Prices, Weights, costs, edges, reduces
from autopar.planner.variables import Decisions
from autopar.solver import Problem, Solution, Tied, Usage, evaluate, fold

Solve: TypeAlias = Callable[[Problem, Sequence[Sequence[int]]], Solution]

MOST_SOLVES = 4
"""Values of m that are tried: hardly ever more than the first is needed."""


@dataclass(frozen=True, eq=False)
class Objective:
    """The objective over the variables of ``decisions``; what is made once is kept, for all who ask it."""

    decisions: Decisions
    prices: Prices
    _sums: dict[float, Problem] = field(default_factory=dict)

    def problem(self, usages: tuple[Usage, ...] = (), limit: float = math.inf, m: float = 0.0) -> Problem:
        """The sum for one ``m``."""
        if m not in self._sums:
            o = self.prices.overlap
            weights = Weights(computing=1 - self._hidden * m, reducing=1 - o * (1 - m))
            self._sums[m] = Problem(
                costs(self.decisions, self.prices, weights), edges(self.decisions, self.prices, weights)
            )
        free = self._sums[m]
        return replace(free, usages=usages, limit=limit) if usages or math.isfinite(limit) else free

    @cached_property
    def _blocks(self) -> Tied | None:
        return fold(self.problem())

    def fold(self, problem: Problem) -> Tied | None:
        """``problem`` with repeated blocks tied together, found once for the free one."""
        return self._blocks if problem is self.problem() else fold(problem)

    def seconds(self, choice: Sequence[int]) -> float:
        """F of a choice."""
        hidden, _ = evaluate(self.problem(), choice)
        return hidden + self._hidden * max(self.uncovered(choice), 0.0)

    @property
    def _hidden(self) -> float:
        """Of a second of the backward's computation beside reductions, the share that overlap spares."""
        return self.prices.overlap / self.decisions.accumulation_steps

    def uncovered(self, choice: Sequence[int]) -> float:
        """``A - C`` in seconds: negative where the backward's computation can hide every reduction."""
        reducing = math.fsum(cost.item(choice[source], choice[target]) for source, target, cost in self._reductions)
        return reducing - math.fsum(cost.item(choice[at]) for at, cost in self._computations)

    @cached_property
    def _reductions(self) -> list[tuple[int, int, Array]]:
        """Where each gradient comes from and goes to, and the seconds of its bytes."""
        d = self.decisions
        stores = (h for h in d.handovers if reduces(d, h))
        return [
            (h.source, h.target, self.prices.reduction(d.variables[h.source], d.variables[h.target], h)[1])
            for h in stores
        ]

    @cached_property
    def _computations(self) -> list[tuple[int, Array]]:
        """The variables of the backward, and their seconds."""
        priced = enumerate(zip(self.decisions.variables, self.problem().costs, strict=True))
        return [(at, cost) for at, (v, cost) in priced if v.phase == "backward"]

    def minimize(self, asked: Problem, solve: Solve, gap: float) -> Solution:
        """The best choice under F within ``asked``'s usages and limit, with a bound on F.

        The least sum is concave in ``m``, and each choice is a line above it: the next ``m`` is where the lines of the
        last choices on either side cross (Kelley 1960).

        Args:
            asked: the problem at m = 0.
            solve: a problem, from choices to begin with.
            gap: relative, at which no more values of ``m`` are tried.
        """
        found = solve(asked, ())
        low, high = self._line(0.0, found), None
        found = replace(found, objective=self.seconds(found.choice))
        for _ in range(MOST_SOLVES - 1):
            if low.slope <= 0 or found.gap <= gap:
                break
            m = 1.0 if high is None else low.crossing(high)
            at = solve(self.problem(asked.usages, asked.limit, m), (found.choice,))
            line = self._line(m, at)
            found = _better(found, replace(at, objective=self.seconds(at.choice)))
            if m == 1.0 and line.slope >= 0:
                break
            low, high = (line, high) if line.slope > 0 else (low, line)
        proven = found.objective - found.lower_bound <= gap * found.objective
        return replace(found, lower_bound=min(found.lower_bound, found.objective), proven=proven)

    def _line(self, m: float, solution: Solution) -> _Line:
        return _Line(m, solution.objective, self._hidden * self.uncovered(solution.choice))


@dataclass(frozen=True)
class _Line:
    """The sum of one choice as ``m`` varies: its value at ``m``, and its slope."""

    m: float
    value: float
    slope: float

    def crossing(self, other: _Line) -> float:
        """The ``m`` at which both have the same value; this one rises and the other falls."""
        gap = other.value - self.value + self.slope * self.m - other.slope * other.m
        return min(max(gap / (self.slope - other.slope), self.m), other.m)


def _better(one: Solution, other: Solution) -> Solution:
    """The one of the least objective, with the larger bound and the seconds of both."""
    best = other if other.objective < one.objective else one
    return replace(best, lower_bound=max(one.lower_bound, other.lower_bound), seconds=one.seconds + other.seconds)
