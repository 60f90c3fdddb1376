"""What a byte costs at each time: the dual of the limit, maximised by cutting planes, and choices from its optimum.

With a price vector p >= 0 on the rows of usage, ``min over x of cost(x) + p (usage(x) - limit)`` is a bound on the
problem, and it needs no rows. Each choice x found on the way is a plane above that concave function; where the lowest
of them is highest is the next p (Kelley 1960). At the optimum several choices tie, some within the limit and some not:
in a problem of many equal blocks some blocks take one of them and the others another (Dantzig and Wolfe 1960).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.integer import highs
from autopar.solver.problem import USAGE_TOLERANCE, Array

MOST_STEPS = 16
FEW_ROWS = 12
"""Rows up to which cutting planes converge in few steps."""

CLOSE = 3e-5
"""Relative distance between the planes and the function at which the prices are good enough."""

FIRST_CAP = 1.0
LAST_CAP = 1e4
"""Prices at first buy all of the limit for so many times the cost; eight times more as long as nothing fits."""


@dataclass(frozen=True, eq=False)
class Plane:
    """A choice: its cost, and what it uses beyond the limit at each time (shares of the limit)."""

    choice: tuple[int, ...]
    cost: float
    excess: Array

    @property
    def fits(self) -> bool:
        return bool((self.excess <= USAGE_TOLERANCE).all())

    def at(self, prices: Array) -> float:
        return self.cost + float(prices @ self.excess)


@dataclass(eq=False)
class Multipliers:
    """Prices of ``rows`` rows, in seconds for all of the limit, and the planes known.

    Args:
        oracle: a choice that is (nearly) cheapest under prices; None when it found none in time.
    """

    rows: int
    oracle: Callable[[Array], Plane | None]
    planes: list[Plane] = field(default_factory=list)
    prices: Array = field(default_factory=lambda: np.zeros(0))

    def maximise(self, start: Array, seconds_left: Callable[[], float]) -> None:
        """Find the best prices, beginning at ``start``; the planes that are known already count."""
        self.prices, best, cap = start, -math.inf, FIRST_CAP
        asked = start
        for _ in range(MOST_STEPS):
            plane = self.oracle(asked)
            if plane is None:
                return
            value = plane.at(asked)
            if value > best:
                best, self.prices = value, asked
            self.planes.append(plane)
            if not any(p.fits for p in self.planes) and asked.max() >= cap * self._scale() * (1 - 1e-9):
                cap *= 8
            ceiling, asked = self._highest(cap)
            if ceiling - best <= CLOSE * abs(best) or seconds_left() <= 0 or cap > LAST_CAP:
                return

    def _scale(self) -> float:
        return max((p.cost for p in self.planes), default=1.0) or 1.0

    def _highest(self, cap: float) -> tuple[float, Array]:
        """The highest point under all planes, with no price above ``cap`` times the largest cost."""
        scale = self._scale()
        planes = [(p.cost / scale, p.excess) for p in self.planes]
        with warnings.catch_warnings():
            # PuLP 3.3 deprecates for 4.0 what earlier versions only have.
            warnings.simplefilter("ignore", DeprecationWarning)
            top, prices = _highest_point(planes, self.rows, cap)
        return top * scale, prices * scale


def _highest_point(planes: Sequence[tuple[float, Array]], rows: int, cap: float) -> tuple[float, Array]:
    import pulp

    model = pulp.LpProblem("prices", pulp.LpMaximize)
    top = pulp.LpVariable("top")
    prices = [pulp.LpVariable(f"price_{i}", 0.0, cap) for i in range(rows)]
    model += top
    for cost, excess in planes:
        model += top - pulp.lpSum(float(e) * p for e, p in zip(excess, prices, strict=True)) <= cost
    model.solve(pulp.HiGHS(msg=False) if highs.is_installed() else pulp.PULP_CBC_CMD(msg=False))
    return float(top.value()), np.array([max(float(p.value() or 0.0), 0.0) for p in prices])
