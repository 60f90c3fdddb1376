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
from autopar.solver.blocks.bounds import AT_ONCE, Bounds
from autopar.solver.blocks.parts import Tied, take_apart, tie
from autopar.solver.blocks.relaxation import Core
from autopar.solver.blocks.repetition import Run, find_runs
from autopar.solver.dual.dual import Pushes
from autopar.solver.problem import Problem, UsagePrices, relative_gap
from autopar.solver.reduce.incumbent import Incumbent

MARGIN = 1
"""So many blocks at both ends of a run choose for themselves: what precedes and follows the run may suit others."""

LEAST_COPIES = 2 * MARGIN + 3

SHARES = (0.4, 0.4, 0.6)
"""Of the time left, for each round of a better choice and a better bound; the first is by message passing alone."""

LEAST_SAVED = 0.2
"""Of the nodes, those that folding must save to be worth it."""

NEAR = 4.0
"""Times the gap that was asked: a bound that is so near the best choice is raised before a better one is looked for."""

ROUGH, FINE = 0.03, 0.003
"""Rise of the bound between two looks at it, as a share of the gap, below which message passing ends."""


@dataclass(frozen=True)
class Part:
    """What is solved without folding; ``size`` is written to. Without ``exact``, message passing alone. ``aim``: an
    objective that is good enough. ``pushes``: messages to begin with, of a problem that is reduced already."""

    problem: Problem
    seconds: float
    gap: float
    exact: bool
    warm_starts: tuple[tuple[int, ...], ...] = ()
    aim: float = -math.inf
    pushes: Pushes | None = None
    size: dict[str, int] = field(default_factory=dict)


SolvePart: TypeAlias = Callable[[Part], Incumbent]


def foldable(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs that are long enough to be worth folding."""
    return tuple(run for run in runs if len(run.copies) >= LEAST_COPIES)


def fold(problem: Problem, known: Sequence[Run] | None = None) -> Tied | None:
    """The problem with the blocks of each run tied together; None where that would leave most of it. ``known``: runs of
    equal blocks, for who has found them."""
    runs = foldable(find_runs(problem) if known is None else known)
    if sum((len(run.copies) - 2 * MARGIN - 1) * run.copies.shape[1] for run in runs) < LEAST_SAVED * len(problem.costs):
        return None
    return tie(take_apart(problem, runs, MARGIN))


def solve_folded(incumbent: Incumbent, tied: Tied, solve_part: SolvePart, size: dict[str, int]) -> None:
    """Better choices and bounds for the incumbent's problem, which has no limit, until it is proven or a share of the
    time is spent.

    Blocks that cannot choose alike say nothing about the whole: then nothing is found.
    """
    folding = _Folding(incumbent, tied, solve_part, size)
    with contextlib.suppress(InfeasibleError):
        folding.contract_at_once()
        for turn, share in enumerate(SHARES):
            if incumbent.proven() or incumbent.seconds_left() <= 0:
                break
            folding.turn(share * incumbent.seconds_left(), exact=turn > 0)


class _Folding:
    """The tied problem, its best choice so far, and the bound."""

    def __init__(
        self,
        incumbent: Incumbent,
        tied: Tied,
        solve_part: SolvePart,
        size: dict[str, int],
    ) -> None:
        self.incumbent = incumbent
        self.parts = tied.parts
        self.solve_part = solve_part
        self.size = size
        self.tied = tied
        self.warm = () if incumbent.choice is None else (tied.project(incumbent.choice),)
        self.bounds: Bounds | None = None
        size.update({f"folded_{name}": count for name, count in tied.problem.size().items()})

    def contract_at_once(self) -> None:
        """The optimum, where nothing is priced and blocks are narrow."""
        self.bounds = Bounds(self.parts, UsagePrices())
        deadline = self.incumbent.seconds() + self.incumbent.seconds_left()
        self.bounds.contract(self.incumbent, deadline, AT_ONCE)

    def turn(self, seconds: float, *, exact: bool) -> None:
        """A better choice and a better bound, each in half of the time; where there is no limit a bound comes first, so
        that no choice is looked for that is much better than it has to be. What local search finds near the known ones
        comes before that: it leaves less to bound, and is often good enough."""
        if not exact and self.bounds is not None:
            self._tied_choice(seconds / 4, exact=False, aim=math.inf)
            deadline = self.incumbent.seconds() + seconds / 2
            self.bounds.raise_bound(self.incumbent, deadline, ROUGH)
            near = relative_gap(self.incumbent.objective, self.incumbent.bound()) <= NEAR * self.incumbent.gap
            if near and not self.incumbent.proven():
                self.bounds.raise_bound(self.incumbent, deadline, FINE)
            if self.incumbent.proven():
                return
        found = self._tied_choice(seconds / 2, exact=exact)
        if self.bounds is None or (found is not None and len(found.usage_prices.times)):
            self.bounds = Bounds(self.parts, UsagePrices() if found is None else found.usage_prices)
        deadline = self.incumbent.seconds() + seconds / 2
        if not exact:
            self.bounds.raise_bound(self.incumbent, deadline, ROUGH)
        if not self.incumbent.proven():
            self.bounds.raise_bound(self.incumbent, deadline, FINE)
        if not self.incumbent.proven():
            self.bounds.contract(self.incumbent, deadline)

    def _tied_choice(self, seconds: float, *, exact: bool, aim: float | None = None) -> Incumbent | None:
        """The best choice in which blocks are alike, or one that costs no more than ``aim``; None where none is better
        than what is known.

        Raises:
            InfeasibleError: blocks cannot choose alike.
        """
        try:
            return self._solve_tied(seconds, exact, aim)
        except InfeasibleError:
            if self.bounds is None or not self.bounds.pruned:
                raise
            return None

    def _solve_tied(self, seconds: float, exact: bool, aim: float | None) -> Incumbent:
        """Solve the tied problem, or what its reduced pieces leave of it, where there is no limit."""
        core = self._core()
        problem, warm = (self.tied.problem, self.warm) if core is None else (core.problem, map(core.project, self.warm))
        if aim is None:
            aim = self.incumbent.bound() / (1 - self.incumbent.gap) - (0.0 if core is None else core.offset)
        pushes = None if core is None or self.bounds is None else core.pushes(self.bounds.pieces.messages())
        part = Part(problem, seconds, 0.25 * self.incumbent.gap, exact, tuple(warm), aim, pushes)
        found = self.solve_part(part)
        told = {name: count for name, count in part.size.items() if core is None or name.startswith("reduced_")}
        self.size.update({f"folded_{name}": count for name, count in told.items()})
        if found.choice is not None:
            choice = found.choice if core is None else core.expand(found.choice)
            self.warm = (choice,)
            self.incumbent.offer(self.tied.expand(choice), f"equal blocks, {found.found_by}")
        return found

    def _core(self) -> Core | None:
        """Of the pieces that are reduced already."""
        if self.bounds is None or len(self.incumbent.problem.usages):
            return None
        core = self.bounds.relaxation.core(self.tied)
        return core if core.problem.edges else None
