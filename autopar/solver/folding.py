"""Deep problems at the price of shallow ones: repeated blocks choose alike, and one block of each run bounds them all.

The tied problem has the ends and one block of each run; its choices are choices of the whole. The bound does not ask
the blocks to choose alike (see ``relaxation``), so that the gap holds for the problem as it was given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from autopar.errors import InfeasibleError
from autopar.solver.dual import Dual
from autopar.solver.incumbent import Incumbent, UsagePrices
from autopar.solver.parts import Parts, Tied, take_apart, tie
from autopar.solver.problem import USAGE_TOLERANCE, Problem
from autopar.solver.relaxation import Relaxation
from autopar.solver.repetition import Run, find_runs

MARGIN = 1
"""So many blocks at both ends of a run choose for themselves: what precedes and follows the run may suit others."""

LEAST_COPIES = 2 * MARGIN + 3

SHARES = (0.4, 0.4, 0.6)
"""Of the time left, for each round of a better choice and a better bound; the first is by message passing alone."""

MAX_SWEEPS = 1000
STALLED = 1e-7
"""Relative rise of the bound over ten sweeps below which message passing ends."""

@dataclass(frozen=True)
class Part:
    """What is solved without folding; ``size`` is written to. Without ``exact``, message passing alone."""

    problem: Problem
    seconds: float
    gap: float
    exact: bool
    warm_starts: tuple[tuple[int, ...], ...] = ()
    size: dict[str, int] = field(default_factory=dict)


SolvePart: TypeAlias = Callable[[Part], Incumbent]


def foldable(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs that are long enough to be worth folding."""
    return tuple(run for run in runs if len(run.copies) >= LEAST_COPIES)


def fold(problem: Problem) -> Tied | None:
    """The problem with the blocks of each run tied together; None where nothing repeats often enough."""
    runs = foldable(find_runs(problem))
    return tie(take_apart(problem, runs, MARGIN)) if runs else None


def solve_folded(incumbent: Incumbent, tied: Tied, solve_part: SolvePart, size: dict[str, int]) -> None:
    """Better choices and bounds for the incumbent's problem, until it is proven or a share of the time is spent.

    Blocks that cannot choose alike say nothing about the whole: then nothing is found.
    """
    folding = _Folding(incumbent, tied, solve_part, size)
    with contextlib.suppress(InfeasibleError):
        for turn, share in enumerate(SHARES):
            folding.turn(share * max(incumbent.seconds_left(), 0.0), exact=turn > 0)
            if incumbent.proven():
                break


class _Folding:
    """The tied problem, its best choice so far, and the bound."""

    def __init__(self, incumbent: Incumbent, tied: Tied, solve_part: SolvePart, size: dict[str, int]) -> None:
        self.incumbent = incumbent
        self.parts = tied.parts
        self.solve_part = solve_part
        self.size = size
        self.tied = tied
        self.warm: tuple[tuple[int, ...], ...] = ()
        self.bounds: _Bounds | None = None

    def turn(self, seconds: float, *, exact: bool) -> None:
        """A better choice, then a better bound, each in half of the time."""
        part = Part(self.tied.problem, seconds / 2, 0.25 * self.incumbent.gap, exact, self.warm)
        found = self.solve_part(part)
        self.size.update({f"folded_{name}": count for name, count in part.size.items()})
        if found.choice is not None:
            self.warm = (found.choice,)
            self.incumbent.offer(self.tied.expand(found.choice), f"equal blocks, {found.found_by}")
        if self.bounds is None or len(found.usage_prices.times):
            self.bounds = _Bounds(self.parts, found.usage_prices)
        self.bounds.raise_bound(self.incumbent, seconds / 2, self.solve_part, exact)


class _Bounds:
    """A bound that rises with more message passing and better bounds of the parts."""

    def __init__(self, parts: Parts, usage_prices: UsagePrices) -> None:
        self.parts = parts
        self.relaxation = Relaxation(parts, usage_prices)
        self.coupled = self.relaxation.coupled()
        paid = usage_prices.total()
        self.constant = paid * parts.whole.limit * (1 + USAGE_TOLERANCE) if paid else 0.0
        self.dual = Dual(self.coupled.graph)

    def raise_bound(self, incumbent: Incumbent, seconds: float, solve_part: SolvePart, exact: bool) -> None:
        began = incumbent.seconds()
        self._pass_messages(incumbent, began + 0.4 * seconds)
        prices = self.relaxation.prices_of(self.coupled, self.dual)
        left = max(seconds - (incumbent.seconds() - began), 0.1)
        pieces = [self.relaxation.priced_block(i, prices) for i in range(len(self.parts.blocks))]
        weights = [block.count for block in self.parts.blocks]
        total = -self.constant
        for (problem, offset), weight in zip(
            [*pieces, self.relaxation.priced_ends(prices)], [*weights, 1], strict=True
        ):
            found = solve_part(Part(problem, left / (len(pieces) + 1), 0.1 * incumbent.gap, exact))
            total += weight * (found.bound() + offset)
        incumbent.raise_bound(total)

    def _pass_messages(self, incumbent: Incumbent, deadline: float) -> None:
        """Sweep until the bound rises no more; the ties' prices are what matters."""
        last = -np.inf
        for count in range(MAX_SWEEPS):
            bound = self.dual.sweep(forward=count % 2 == 1).lower_bound
            if count % 10 == 9:
                if incumbent.seconds() > deadline or bound - last <= STALLED * abs(bound):
                    break
                last = bound
