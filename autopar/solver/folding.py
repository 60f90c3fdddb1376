"""Deep problems at the price of shallow ones: repeated blocks choose alike, and one block of each run bounds them all.

The tied problem has the ends and one block of each run; its choices are choices of the whole. The bound does not ask
the blocks to choose alike (see ``relaxation``), so that the gap holds for the problem as it was given.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from autopar.errors import InfeasibleError
from autopar.solver.dual import Dual
from autopar.solver.incumbent import Incumbent
from autopar.solver.mixture import Mixing, few_rows
from autopar.solver.parts import Parts, Tied, take_apart, tie
from autopar.solver.problem import USAGE_TOLERANCE, Problem, UsagePrices, relative_gap
from autopar.solver.relaxation import Relaxation
from autopar.solver.repetition import Run, find_runs

MARGIN = 1
"""So many blocks at both ends of a run choose for themselves: what precedes and follows the run may suit others."""

LEAST_COPIES = 2 * MARGIN + 3

SHARES = (0.4, 0.4, 0.6)
"""Of the time left, for each round of a better choice and a better bound; the first is by message passing alone."""

PRICING_SHARE = 0.6
"""Of the time, for the prices of the limit, where few rows have one."""

TELLING_GAP = 0.02
"""A choice further from the best under some prices says nothing about them: the time was too short to find it."""

LEAST_SAVED = 0.2
"""Of the nodes, those that folding must save to be worth it."""

MAX_SWEEPS = 1000
SWEEPS_A_LOOK = 6
ROUGH, FINE = 0.1, 0.01
"""Rise of the bound over so many sweeps, as a share of the gap, below which message passing ends."""


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
    """The problem with the blocks of each run tied together; None where that would leave most of it."""
    runs = foldable(find_runs(problem))
    if sum((len(run.copies) - 2 * MARGIN - 1) * run.copies.shape[1] for run in runs) < LEAST_SAVED * len(problem.costs):
        return None
    return tie(take_apart(problem, runs, MARGIN))


def solve_folded(
    incumbent: Incumbent, tied: Tied, solve_part: SolvePart, size: dict[str, int], seeds: Sequence[Sequence[int]] = ()
) -> None:
    """Better choices and bounds for the incumbent's problem, until it is proven or a share of the time is spent.

    Blocks that cannot choose alike say nothing about the whole: then nothing is found.
    """
    folding = _Folding(incumbent, tied, solve_part, size, seeds)
    with contextlib.suppress(InfeasibleError):
        priced = few_rows(incumbent.problem)
        if priced:
            folding.price_limit()
        for turn, share in enumerate(SHARES[priced:], priced):
            if incumbent.proven() or incumbent.seconds_left() <= 0:
                break
            folding.turn(share * incumbent.seconds_left(), exact=turn > 0)


class _Folding:
    """The tied problem, its best choice so far, and the bound."""

    def __init__(
        self, incumbent: Incumbent, tied: Tied, solve_part: SolvePart, size: dict[str, int],
        seeds: Sequence[Sequence[int]],
    ) -> None:  # fmt: skip
        self.seeds = seeds
        self.incumbent = incumbent
        self.parts = tied.parts
        self.solve_part = solve_part
        self.size = size
        self.tied = tied
        self.warm = () if incumbent.choice is None else (tied.project(incumbent.choice),)
        self.bounds: _Bounds | None = None

    def price_limit(self) -> None:
        """Choices and a bound from the best prices of the limit."""
        began, share = self.incumbent.seconds(), PRICING_SHARE * self.incumbent.seconds_left()

        def left() -> float:
            return began + share - self.incumbent.seconds()

        def solve(problem: Problem, warm: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
            if left() <= 0:
                return None
            found = self.solve_part(Part(problem, left(), 0.25 * self.incumbent.gap, True, tuple(warm)))
            return found.choice if relative_gap(found.objective, found.bound()) <= TELLING_GAP else None

        prices = Mixing(self.incumbent, self.tied, solve, left).run(self.incumbent.usage_prices, self.seeds)
        self.incumbent.usage_prices = prices
        self.bounds = _Bounds(self.parts, prices)
        deadline = self.incumbent.seconds() + 0.5 * self.incumbent.seconds_left()
        self.bounds.raise_bound(self.incumbent, deadline, FINE)

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
        deadline = self.incumbent.seconds() + seconds / 2
        if not exact:
            self.bounds.raise_bound(self.incumbent, deadline, ROUGH)
        if not self.incumbent.proven():
            self.bounds.raise_bound(self.incumbent, deadline, FINE)
        if exact and not self.incumbent.proven():
            self.bounds.solve_pieces(self.incumbent, deadline, self.solve_part)


class _Bounds:
    """A bound that rises with more message passing and better bounds of the parts."""

    def __init__(self, parts: Parts, usage_prices: UsagePrices) -> None:
        self.parts = parts
        self.relaxation = Relaxation(parts, usage_prices)
        self.coupled = self.relaxation.coupled()
        paid = usage_prices.total()
        self.constant = paid * parts.whole.limit * (1 + USAGE_TOLERANCE) if paid else 0.0
        self.dual = Dual(self.coupled.graph)

    def raise_bound(self, incumbent: Incumbent, deadline: float, stalled: float) -> None:
        """By message passing, until it rises no more by ``stalled``, a share of the gap; no later than the deadline."""
        def enough(bound: float, weight: float = 1.0) -> float:
            worth = incumbent.objective if incumbent.choice is not None else abs(bound)
            return stalled * max(worth + self.constant - bound, max(0.5 * incumbent.gap, 1e-9) * abs(worth)) / weight

        middle = incumbent.seconds() + 0.6 * max(deadline - incumbent.seconds(), 0.0)
        near = _ascend(self.dual, lambda: incumbent.seconds() > middle, enough)
        bounds = [
            weight * _ascend(dual, lambda: incumbent.seconds() > deadline, lambda _, w=weight: enough(near, w))  # type: ignore[misc]
            for weight, dual in self.relaxation.duals(self.coupled, self.dual)
        ]
        incumbent.raise_bound(sum(bounds) - self.constant)

    def solve_pieces(self, incumbent: Incumbent, deadline: float, solve_part: SolvePart) -> None:
        """By the best bound that can be proven for each piece."""
        prices = self.relaxation.prices_of(self.coupled, self.dual)
        blocks = [self.relaxation.priced_block(i, prices) for i in range(len(self.parts.blocks))]
        weights = [block.count for block in self.parts.blocks]
        left = max(deadline - incumbent.seconds(), 0.1)
        total = -self.constant
        for (problem, offset), weight in zip(
            [*blocks, self.relaxation.priced_ends(prices)], [*weights, 1], strict=True
        ):
            found = solve_part(Part(problem, left / (len(blocks) + 1), 0.1 * incumbent.gap, exact=True))
            total += weight * (found.bound() + offset)
        incumbent.raise_bound(total)


def _ascend(dual: Dual, late: Callable[[], bool], enough: Callable[[float], float]) -> float:
    """Sweep until the bound rises no more by what is enough, or it is late; the bound."""
    last = best = -math.inf
    for count in range(MAX_SWEEPS):
        best = max(best, dual.sweep(forward=count % 2 == 1, decode=False).lower_bound)
        if count % SWEEPS_A_LOOK == SWEEPS_A_LOOK - 1:
            if late() or best - last <= enough(best):
                break
            last = best
    return best
