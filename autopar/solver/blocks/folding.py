"""Deep problems at the price of shallow ones: repeated blocks choose alike, and one block of each run bounds them all.

The tied problem has the ends and one block of each run; its choices are choices of the whole. The bound does not ask
the blocks to choose alike (see ``relaxation``), so that the gap holds for the problem as it was given.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeAlias

from autopar import settings
from autopar.errors import InfeasibleError
from autopar.repetition import Run
from autopar.solver.blocks.blocks_linear import relax_blocks
from autopar.solver.blocks.bounds import Bounds
from autopar.solver.blocks.parts import Tied, take_apart, tie
from autopar.solver.blocks.repetition import find_runs
from autopar.solver.problem import Messages, Problem, UsagePrices
from autopar.solver.reduce.incumbent import Gap, Incumbent


@dataclass(frozen=True)
class Part:
    """What is solved without folding; ``size`` and ``messages`` are written to."""

    problem: Problem
    gap: Gap
    warm_starts: tuple[tuple[int, ...], ...] = ()
    size: dict[str, int] = field(default_factory=dict)
    messages: dict[int, Messages] = field(default_factory=dict)


class Attempt(Protocol):
    """Goes on with a part from where it was left."""

    def __call__(self, seconds: float, *, exact: bool, aim: float) -> Incumbent:
        """For so many seconds more. Without ``exact``, by message passing alone. ``aim``: an objective that is good
        enough."""


BeginPart: TypeAlias = Callable[[Part], Attempt]


def fold(problem: Problem, known: Sequence[Run] | None = None) -> Tied | None:
    """The problem with the blocks of each run tied together; None where that would leave most of it. ``known``: runs of
    equal blocks, for who has found them."""
    runs = find_runs(problem) if known is None else known
    tied = 2 * settings.FOLDED_MARGIN + 1  # blocks that are left of a run
    saved = sum((len(run.copies) - tied) * run.copies.shape[1] for run in runs)
    if saved < settings.SAVED * len(problem.costs):
        return None
    return tie(take_apart(problem, runs, settings.FOLDED_MARGIN))


def solve_folded(
    incumbent: Incumbent, tied: Tied, begin_part: BeginPart, size: dict[str, int], *, linear: bool
) -> None:
    """Better choices and bounds for the incumbent's problem, which has no limit, until it is proven or a share of the
    time is spent.

    Blocks that cannot choose alike say nothing about the whole: then nothing is found.

    Args:
        linear: whether linear programs can be solved.
    """
    size.update({f"folded_{name}": count for name, count in tied.problem.size().items()})
    folding = _Folding(incumbent, tied, begin_part, size, linear)
    with contextlib.suppress(InfeasibleError):
        for exact in (False, True, True):
            if incumbent.proven() or incumbent.seconds_left() <= 0:
                break
            share = settings.MAIN_SHARE if exact else settings.PART_SHARE
            folding.turn(share * incumbent.seconds_left(), exact=exact)


class _Folding:
    """The tied problem, its best choice so far, and the bound."""

    def __init__(
        self, incumbent: Incumbent, tied: Tied, begin_part: BeginPart, size: dict[str, int], linear: bool
    ) -> None:
        self.incumbent, self.tied, self.size = incumbent, tied, size
        self.begin_part, self.linear = begin_part, linear
        self.bounds = Bounds(tied.parts, UsagePrices(), incumbent.traded)

    @cached_property
    def part(self) -> Part:
        incumbent = self.incumbent
        known = () if incumbent.choice is None else (self.tied.project(incumbent.choice),)
        return Part(
            self.tied.problem, lambda _: settings.PART_OF_GAP * incumbent.gap, known, messages=incumbent.messages
        )

    @cached_property
    def attempt(self) -> Attempt:
        return self.begin_part(self.part)

    def turn(self, seconds: float, *, exact: bool) -> None:
        """A better choice and a better bound, each in half of the time. A bound comes first, so that no choice is
        looked for that is much better than it has to be. What local search finds near the known ones comes before that:
        it leaves less to bound, and is often good enough. So does the linear program of blocks, where it is quick."""
        if not exact:
            self._tied_choice(seconds / 4, exact=False, aim=math.inf)
            if self.linear:
                most = settings.SIDE_SHARE * self.incumbent.seconds_left()
                relax_blocks(self.incumbent, self.tied.parts, most, expected=most)
            if not self.incumbent.proven():
                self._raise_bound(seconds / 2, settings.ROUGH)
            if self.incumbent.proven():
                return
        self._tied_choice(seconds / 2, exact=exact)
        for stalled in (settings.FINE,) if exact else (settings.ROUGH, settings.FINE):
            if not self.incumbent.proven():
                self._raise_bound(seconds / 2, stalled)

    def _raise_bound(self, seconds: float, stalled: float) -> None:
        self.bounds.raise_bound(self.incumbent, self.incumbent.seconds() + seconds, stalled)

    def _tied_choice(self, seconds: float, *, exact: bool, aim: float | None = None) -> None:
        """The best choice in which blocks are alike, or one that costs no more than ``aim``.

        Raises:
            InfeasibleError: blocks cannot choose alike.
        """
        aim = self.incumbent.bound() / (1 - self.incumbent.gap) if aim is None else aim
        found = self.attempt(seconds, exact=exact, aim=aim)
        self.size.update({f"folded_{name}": count for name, count in self.part.size.items()})
        if found.choice is not None:
            self.incumbent.offer(self.tied.expand(found.choice), f"equal blocks, {found.found_by}")
