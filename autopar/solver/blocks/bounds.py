"""What folding knows about the whole problem: a bound that rises, and the optimum where blocks can be contracted."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

from autopar.errors import InfeasibleError
from autopar.solver.blocks.parts import Parts
from autopar.solver.blocks.pieces import Pieces
from autopar.solver.blocks.powers import contract
from autopar.solver.blocks.relaxation import Relaxation
from autopar.solver.problem import USAGE_TOLERANCE, UsagePrices, relative_gap
from autopar.solver.reduce.incumbent import Incumbent

MAX_SWEEPS = 1000
LEAST_SWEEPS, SWEEPS_A_LOOK = 6, 2
"""Messages take some sweeps to come around; then the bound is looked at after each to and fro."""
TELLING = 0.25
"""Of the gap that was asked, what a bound may leave: raising it on takes time that nobody asked for."""

AT_ONCE = 1e8
"""Element operations of a contraction that is done before anything else: a few tenths of a second."""

MOST_WORK = 6e8


class Bounds:
    """A bound that rises with more message passing and better bounds of the parts."""

    def __init__(self, parts: Parts, usage_prices: UsagePrices) -> None:
        self.parts = parts
        self.relaxation = Relaxation(parts, usage_prices)
        paid = usage_prices.total()
        self.constant = paid * parts.whole.limit * (1 + USAGE_TOLERANCE) if paid else 0.0
        self.ends, self.blocks = self.relaxation.ends, self.relaxation.blocks
        self.pruned = False

    @cached_property
    def pieces(self) -> Pieces:
        return Pieces(self.relaxation)

    def raise_bound(self, incumbent: Incumbent, deadline: float, stalled: float) -> None:
        """By message passing, until it rises no more by ``stalled``, a share of the gap; no later than the deadline."""

        def enough(bound: float) -> float:
            worth = incumbent.objective if incumbent.choice is not None else abs(bound)
            return stalled * max(worth + self.constant - bound, max(0.5 * incumbent.gap, 1e-9) * abs(worth))

        def told(bound: float) -> bool:
            return relative_gap(incumbent.objective, bound - self.constant) <= TELLING * incumbent.gap

        pieces, most = self.pieces, incumbent.cutoff() + self.constant

        def leave_out() -> None:
            if incumbent.choice is not None:
                pieces.leave_out(most)
                self.pruned = True

        try:
            best = _ascend(
                lambda forward: pieces.sweep(forward=forward),
                lambda: incumbent.seconds() > deadline,
                enough,
                told,
                leave_out,
            )
        except InfeasibleError:
            best = most
        # Choices that cost more than the best one may have been left out.
        incumbent.raise_bound(min(best - self.constant, incumbent.objective))

    def contract(self, incumbent: Incumbent, deadline: float, most: float = MOST_WORK) -> bool:
        """The optimum under the prices of the limit, and so the best bound of theirs; whether it was found.

        Raises:
            InfeasibleError: no choice is allowed.
        """
        try:
            found = contract(self.parts, self.ends, self.blocks, most, lambda: incumbent.seconds() > deadline)
        except InfeasibleError:
            if not self.pruned:
                raise
            incumbent.raise_bound(incumbent.objective)
            return True
        if found is None:
            return False
        incumbent.offer(found.choice.tolist(), "powers of blocks")
        incumbent.raise_bound(min(found.value - self.constant, incumbent.objective))
        return True


def _ascend(
    sweep: Callable[[bool], float],
    late: Callable[[], bool],
    enough: Callable[[float], float],
    told: Callable[[float], bool],
    between: Callable[[], None] = lambda: None,
) -> float:
    """Sweep to and fro until the bound rises no more by what is enough, tells enough, or it is late; the bound."""
    last = best = -math.inf
    for count in range(MAX_SWEEPS):
        best = max(best, sweep(count % 2 == 1))
        if count % SWEEPS_A_LOOK == SWEEPS_A_LOOK - 1:
            if late() or (count >= LEAST_SWEEPS - 1 and best - last <= enough(best)):
                break
            last = best
        if told(best):
            break
        if count % SWEEPS_A_LOOK == SWEEPS_A_LOOK - 1:
            between()
    return best
