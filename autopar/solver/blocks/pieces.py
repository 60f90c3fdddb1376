"""Message passing on ends and blocks, which trade prices until the sum of their bounds rises no more.

The price ``p`` of an option of a seam is added at the node before the run and at each block's column, and taken off at
the ghost behind the run and in each block. Where all that it would be taken off from has slack, raising ``p`` costs
nothing and gives slack to the others. So both sides meet halfway, as in max-sum diffusion, and the bound never falls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from autopar.solver.blocks.parts import Parts
from autopar.solver.blocks.relaxation import Relaxation
from autopar.solver.dual.dual import Dual, SweepResult
from autopar.solver.problem import Array, Messages, Traded

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
        theta = self.dual.gather(self.node)
        full = np.full(size, MOST_SLACK)
        full[self.options] = (theta - theta.min()) / self.rate
        return full

    def add(self, change: Array) -> None:
        self.dual.theta[self.node] += self.rate * change[self.options]


class _Link(NamedTuple):
    """Where the price of a seam or of an outer node is added, and where it is taken off."""

    plus: tuple[_End, ...]
    minus: tuple[_End, ...]

    def add(self, change: Array) -> None:
        for end in self.plus:
            end.add(change)
        for end in self.minus:
            end.add(-change)

    def meet(self, size: int) -> Array:
        """Move the price of each option so that both sides have the same slack; by how much it moved."""
        above = np.min([end.slack(size) for end in self.minus], axis=0)
        below = np.min([end.slack(size) for end in self.plus], axis=0)
        change = np.asarray((above - below) / 2)
        self.add(change)
        return change


class Pieces:
    """The pieces under prices that change. ``duals``: of the ends, then of each block, for one copy; ``prices``: of the
    seams and then the outer nodes of each block in turn, in seconds by option, those of one copy.

    Args:
        known: what pieces like these, under other costs, have passed and traded: they go on from there.
    """

    def __init__(self, relaxation: Relaxation, known: Traded | None = None) -> None:
        self.weights = [1, *(block.count for block in relaxation.parts.blocks)]
        self.prices = _no_prices(relaxation.parts)
        graphs = (relaxation.ends, *relaxation.blocks)
        messages: Sequence[Messages] = [{}] * len(graphs)
        sizes = [len(price) for price in self.prices]
        if known is not None and len(known.messages) == len(graphs) and [len(p) for p in known.prices] == sizes:
            messages, self.prices = known.messages, list(known.prices)
        self.duals = [Dual.of(graph, known=passed) for graph, passed in zip(graphs, messages, strict=True)]
        self.links = list(self._links(relaxation.parts))
        for link, price in zip(self.links, self.prices, strict=True):
            link.add(price)
        self.found: list[SweepResult] = []

    def _links(self, parts: Parts) -> Iterator[_Link]:
        def end(piece: int, node: int, rate: float = 1.0) -> _End:
            return _End(self.duals[piece], node, self.duals[piece].options[node], rate)

        for r, block in enumerate(parts.blocks, 1):
            for column, ghost, before, behind in block.seams:
                yield _Link((end(0, before), end(r, column)), (end(0, behind), end(r, ghost)))
            for ghost, node in block.outer:
                yield _Link((end(0, node, float(block.count)),), (end(r, ghost),))

    def traded(self) -> Traded:
        """What others can go on from, but for what bars options that are not there."""
        prices = (np.where(np.abs(price) < MOST_SLACK / 4, price, 0.0) for price in self.prices)
        return Traded(tuple(dual.messages() for dual in self.duals), tuple(prices))

    def sweep(self, *, forward: bool) -> float:
        """One pass over each piece, then trade; the bound."""
        self.found = [piece.sweep(forward=forward, decode=False) for piece in self.duals]
        self.prices = [price + link.meet(len(price)) for price, link in zip(self.prices, self.links, strict=True)]
        return float(sum(w * found.lower_bound for w, found in zip(self.weights, self.found, strict=True)))


def _no_prices(parts: Parts) -> list[Array]:
    ends, found = parts.ends.costs, list[Array]()
    for block in parts.blocks:
        found += [np.zeros(len(ends[before])) for _, _, before, _ in block.seams]
        found += [np.zeros(len(ends[node])) for _, node in block.outer]
    return found
