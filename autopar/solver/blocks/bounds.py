"""What folding knows about the whole problem: a bound that rises with more message passing."""

from __future__ import annotations

import itertools
import math
from functools import cached_property

from autopar import settings
from autopar.solver.blocks.parts import Parts
from autopar.solver.blocks.pieces import Pieces
from autopar.solver.blocks.relaxation import Relaxation
from autopar.solver.problem import USAGE_TOLERANCE, Traded, UsagePrices, relative_gap
from autopar.solver.reduce.incumbent import Incumbent


class Bounds:
    """A bound that rises with more message passing, which goes on from what is ``known`` of like pieces."""

    def __init__(self, parts: Parts, usage_prices: UsagePrices, known: Traded | None = None) -> None:
        self.known = known
        self.relaxation = Relaxation(parts, usage_prices)
        paid = usage_prices.total()
        self.constant = paid * parts.whole.limit * (1 + USAGE_TOLERANCE) if paid else 0.0

    @cached_property
    def pieces(self) -> Pieces:
        return Pieces(self.relaxation, self.known)

    def raise_bound(self, incumbent: Incumbent, deadline: float, stalled: float) -> None:
        """Sweep to and fro until the bound tells enough, or rises by less than ``stalled`` of the gap, or of half the
        gap that was asked for where that is larger; no later than the deadline."""
        last = best = -math.inf
        for count in itertools.count():
            best = max(best, self.pieces.sweep(forward=count % 2 == 1))
            if count % 2 == 1:  # to and fro
                worth = incumbent.objective if incumbent.choice is not None else abs(best)
                asked = max(0.5 * incumbent.gap, 1e-9) * abs(worth)
                rises = best - last > stalled * max(worth + self.constant - best, asked)
                if incumbent.seconds() > deadline or (count >= settings.LEAST_SWEEPS - 1 and not rises):
                    break
                last = best
            if relative_gap(incumbent.objective, best - self.constant) <= settings.PART_OF_GAP * incumbent.gap:
                break
        incumbent.raise_bound(best - self.constant)
        incumbent.traded = self.pieces.traded()
