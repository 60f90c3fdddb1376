"""What folding knows about the whole problem: a bound that rises, and the optimum where blocks can be contracted."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np

from autopar.errors import InfeasibleError
from autopar.solver.blocks.parts import Parts
from autopar.solver.blocks.pieces import Pieces
from autopar.solver.blocks.powers import contract
from autopar.solver.blocks.relaxation import Relaxation
from autopar.solver.dual.dual import Dual
from autopar.solver.problem import USAGE_TOLERANCE, Problem, UsagePrices, relative_gap
from autopar.solver.reduce.dominance import WorkBudget
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.incumbent import Incumbent
from autopar.solver.reduce.reductions import drop_forbidden, reduce

SolveBound = Callable[[Problem, float], float]
"""A bound on a problem, found in so many seconds."""

MAX_SWEEPS = 1000
LEAST_SWEEPS, SWEEPS_A_LOOK = 6, 2
"""Messages take some sweeps to come around; then the bound is looked at after each to and fro."""
TELLING = 0.25
"""Of the gap that was asked, what a bound may leave: raising it on takes time that nobody asked for."""

AT_ONCE = 1e8
"""Element operations of a contraction that is done before anything else: a few tenths of a second."""

MOST_WORK = 6e8

TELLING_SWEEPS = 8
"""Sweeps over each piece that tell which of its options no better choice takes."""

WORK = 1e8
"""Element operations that looking for dominated options of what is left may take."""


class Bounds:
    """A bound that rises with more message passing and better bounds of the parts."""

    def __init__(self, parts: Parts, usage_prices: UsagePrices) -> None:
        self.parts = parts
        self.relaxation = Relaxation(parts, usage_prices)
        paid = usage_prices.total()
        self.constant = paid * parts.whole.limit * (1 + USAGE_TOLERANCE) if paid else 0.0
        self.ends, self.blocks = self.relaxation.ends, self.relaxation.blocks
        self.pruned = self.coupled = False

    @cached_property
    def pieces(self) -> Pieces:
        return Pieces(self.relaxation)

    def begin_coupled(self, incumbent: Incumbent, deadline: float) -> None:
        """Begin again with the prices of all pieces together, where their trade got stuck."""
        self.coupled = True
        pieces = self.relaxation.coupled()
        dual = Dual(pieces.graph)
        _ascend(
            lambda forward: dual.sweep(forward=forward, decode=False).lower_bound,
            lambda: incumbent.seconds() > deadline,
            lambda bound: 0.01 * TELLING * incumbent.gap * abs(bound),
            lambda _: False,
        )
        self.pieces = Pieces(self.relaxation, (pieces, dual))

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

    def prune(self, incumbent: Incumbent, deadline: float) -> None:
        """Leave out the options that no choice better than the incumbent takes in even one copy of a block."""
        if incumbent.choice is None:
            return
        bounds, least = [], []
        for dual, numbers in zip(self.pieces.duals, self.pieces.numbers, strict=True):
            best, marginals = -math.inf, {node: np.full(len(t), -math.inf) for node, t in dual.theta.items()}
            for count in range(TELLING_SWEEPS):
                result = dual.sweep(forward=count % 2 == 1, decode=False)
                best = max(best, result.lower_bound)
                for node, marginal in result.marginals.items():
                    np.maximum(marginals[node], marginal, out=marginals[node])
                if incumbent.seconds() > deadline:
                    break
            bounds.append(best)
            least.append({node: marginals[place] for node, place in numbers.items()})
        bound = sum(weight * best for weight, best in zip(self.pieces.weights, bounds, strict=True))
        incumbent.raise_bound(bound - self.constant)
        room = incumbent.cutoff() + self.constant - bound
        graphs = [self.relaxation.ends, *self.relaxation.blocks]
        try:
            self.ends, *self.blocks = [
                _without(graph, marginals, best + room, lambda: incumbent.seconds() > deadline)
                for graph, marginals, best in zip(graphs, least, bounds, strict=True)
            ]
            self.pruned = True
        except InfeasibleError:
            incumbent.raise_bound(incumbent.objective)

    def solve_pieces(self, incumbent: Incumbent, deadline: float, solve_bound: SolveBound) -> None:
        """By the best bound that can be proven for each piece."""
        prices = self.pieces.prices
        blocks = [self.relaxation.priced_block(i, prices) for i in range(len(self.parts.blocks))]
        weights = [block.count for block in self.parts.blocks]
        left = max(deadline - incumbent.seconds(), 0.1)
        total = -self.constant
        for (problem, offset), weight in zip(
            [*blocks, self.relaxation.priced_ends(prices)], [*weights, 1], strict=True
        ):
            total += weight * (solve_bound(problem, left / (len(blocks) + 1)) + offset)
        incumbent.raise_bound(total)


def _without(graph: Graph, marginals: dict[int, np.ndarray], most: float, late: Callable[[], bool]) -> Graph:
    """``graph`` without the options whose marginals are above ``most``.

    Raises:
        InfeasibleError: nothing is left.
    """
    left = graph.copy()
    for node in graph.nodes():
        left.keep(node, marginals[node] <= most)
    drop_forbidden(left)
    reduce(left, WorkBudget(WORK, late))
    return left


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
