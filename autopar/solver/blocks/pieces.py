"""Message passing on ends and blocks, which trade prices until the sum of their bounds rises no more.

The price ``p`` of an option of a seam is added at the node before the run and at each block's column, and taken off at
the ghost behind the run and in each block. Where all that it would be taken off from has slack, raising ``p`` costs
nothing and gives slack to the others. So both sides meet halfway, as in max-sum diffusion, and the bound never falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.solver.blocks.relaxation import Prices, Relaxation
from autopar.solver.dual.dual import Dual, SweepResult
from autopar.solver.problem import Array

MOST_SLACK = 1e6
"""Seconds that stand for the slack of an option which is not there."""


class _End(NamedTuple):
    """A node of a piece where a price counts ``rate`` times, and its options in original numbers."""

    dual: Dual
    node: int
    options: np.ndarray
    rate: float

    def slack(self, size: int) -> Array:
        """How much lower the price may be for each option before the piece's bound falls."""
        self.dual.gather(self.node)
        theta = self.dual.theta[self.node]
        full = np.full(size, MOST_SLACK)
        full[self.options] = (theta - theta.min()) / self.rate
        return full

    def add(self, change: Array) -> None:
        self.dual.theta[self.node] = self.dual.theta[self.node] + self.rate * change[self.options]


class Pieces:
    """The pieces under prices that change. ``duals``: of the ends, then of each block, for one copy."""

    def __init__(self, relaxation: Relaxation) -> None:
        self.relaxation = relaxation
        self.weights = [1, *(block.count for block in relaxation.parts.blocks)]
        self.graphs = [relaxation.ends, *relaxation.blocks]
        self.found: list[SweepResult] = []
        self.prices = relaxation.no_prices()
        self.duals = [Dual(graph) for graph in self.graphs]

    def sweep(self, *, forward: bool) -> float:
        """One pass over each piece, then trade; the bound."""
        self.found = [piece.sweep(forward=forward, decode=False) for piece in self.duals]
        self._trade()
        return self._bound()

    def _bound(self) -> float:
        return float(sum(w * found.lower_bound for w, found in zip(self.weights, self.found, strict=True)))

    def _trade(self) -> None:
        seams, outer = [], []
        for r, block in enumerate(self.relaxation.parts.blocks):
            prices = self.prices.seams[r], self.prices.outer[r]
            seams.append(
                tuple(
                    price
                    + _meet(
                        [self._end(0, before), self._end(r + 1, column)],
                        [self._end(0, behind), self._end(r + 1, ghost)],
                        len(price),
                    )
                    for (column, ghost, before, behind), price in zip(block.seams, prices[0], strict=True)
                )
            )
            outer.append(
                tuple(
                    price + _meet([self._end(0, node, float(block.count))], [self._end(r + 1, ghost)], len(price))
                    for (ghost, node), price in zip(block.outer, prices[1], strict=True)
                )
            )
        self.prices = Prices(tuple(seams), tuple(outer))

    def _end(self, piece: int, node: int, rate: float = 1.0) -> _End:
        return _End(self.duals[piece], node, self.graphs[piece].options[node], rate)


def _meet(plus: Sequence[_End], minus: Sequence[_End], size: int) -> Array:
    """Move the price of each option so that both sides have the same slack; by how much it moved."""
    above = np.min([end.slack(size) for end in minus], axis=0)
    below = np.min([end.slack(size) for end in plus], axis=0)
    change = (above - below) / 2
    for end in plus:
        end.add(change)
    for end in minus:
        end.add(-change)
    return np.asarray(change)
