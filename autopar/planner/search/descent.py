"""Down from a choice of a small peak, by what programs really hold.

What rows set aside for an option may have been due to others, so that they bar choices that hold less. Here one
decision after the other is changed near the moment of the peak, together with those that no longer go with it, and
stays changed where the exact peak is lower. The number of programs that are looked at limits it, so that the same
choice leads to the same one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.planner.memory.active_set import ActiveSet
from autopar.planner.problem.variables import Variable
from autopar.planner.search.rounds import Result, Rounds
from autopar.solver import Problem
from autopar.solver.clock import now

MOST_OPS = 20_000
"""Ops of all programs that are scheduled and measured on the way: about a second and a half of the processor."""

MOST_TOGETHER = 6
"""Decisions that change together, at most: one, and what has to go with it."""

_Change = tuple[int, int]
"""A variable and an option of it."""


@dataclass(frozen=True)
class _Neighbours:
    """Which options go together.

    Args:
        problem: without rows.
    """

    problem: Problem

    @cached_property
    def of(self) -> list[list[tuple[int, npt.NDArray[np.bool_]]]]:
        """For each variable its neighbours, and whether a pair of options, its own first, is allowed."""
        allowed = {id(e.cost): np.isfinite(e.cost) for e in self.problem.edges}
        found: list[list[tuple[int, npt.NDArray[np.bool_]]]] = [[] for _ in self.problem.costs]
        for e in self.problem.edges:
            found[e.u].append((e.v, allowed[id(e.cost)]))
            found[e.v].append((e.u, allowed[id(e.cost)].T))
        return found

    def changed(self, choice: Sequence[int], variable: int, option: int) -> tuple[int, ...] | None:
        """``choice`` with ``option``, and with others of those that do not go with it, as few as there is need for;
        None where that is not found."""
        if not math.isfinite(self.problem.costs[variable][option]):
            return None
        new, fixed, waiting = list(choice), {variable: option}, [variable]
        new[variable] = option
        while waiting:
            at = waiting.pop(0)
            for other, allowed in self.of[at]:
                if allowed[new[at], new[other]]:
                    continue
                if other in fixed or len(fixed) == MOST_TOGETHER:
                    return None
                instead = self._instead(new, other, fixed)
                if instead is None:
                    return None
                new[other] = fixed[other] = instead
                waiting.append(other)
        return tuple(new)

    def _instead(self, choice: Sequence[int], variable: int, fixed: dict[int, int]) -> int | None:
        """An option of ``variable`` that goes with all that is ``fixed``, and with as many others as can be."""
        fits, misfits = np.isfinite(self.problem.costs[variable]), np.zeros(len(self.problem.costs[variable]))
        for other, allowed in self.of[variable]:
            if other in fixed:
                fits = fits & allowed[:, fixed[other]]
            else:
                misfits += ~allowed[:, choice[other]]
        return int(np.argmin(np.where(fits, misfits, math.inf))) if fits.any() else None


def descended(rounds: Rounds, rows: ActiveSet, best: Result, deadline: float) -> Result:
    """The smallest that is found from ``best`` on, until it fits the budget. Every change is tried once before any is
    tried again."""
    neighbours, left = _Neighbours(rounds.objective.problem()), MOST_OPS
    tried: set[_Change] = set()
    began = best
    while left > 0 and now() <= deadline and best.memory.peak_bytes > rounds.budget:
        nearby = ((c, other) for c, other in _near(neighbours, rows, best) if c not in tried)
        smaller = None
        for change, choice in nearby:
            tried.add(change)
            if left <= 0 or now() > deadline:
                break
            if rounds.hides(choice):
                found = rounds.of_choice(choice)
                left -= len(found.program.ops)
                if _height(found) < _height(best):
                    smaller = found
                    break
        if smaller is not None:
            best = smaller
        elif best is began:
            break
        else:
            began = best
            tried.clear()
    return best


def _height(result: Result) -> tuple[int, int]:
    """The peak, and how often it is reached."""
    timeline = result.memory.timeline
    return max(timeline), sum(held == max(timeline) for held in timeline)


def _near(neighbours: _Neighbours, rows: ActiveSet, best: Result) -> list[tuple[_Change, tuple[int, ...]]]:
    """Choices that do not hold more where ``best`` holds most, as far as rows see: those that hold least first, then
    those that differ nearest to it."""
    choice, d = best.solution.choice, rows.decisions
    place = rows.peak_point(best.program, best.memory.timeline)
    more_than_best = rows.difference_from(place, choice)
    ranked: dict[tuple[int, ...], tuple[float, float, _Change]] = {}
    for at, variable in enumerate(d.variables):
        far = abs(d.graph.order.get(_maker(variable), 0) - place)
        for option in range(len(variable.options)):
            other = neighbours.changed(choice, at, option) if option != choice[at] else None
            if other is not None and other not in ranked and (more := more_than_best(other)) <= 0:
                ranked[other] = more, far, (at, option)
    return [(ranked[other][2], other) for other in sorted(ranked, key=ranked.__getitem__)]


def _maker(variable: Variable) -> str:
    """The node that makes what is decided about."""
    if variable.node is not None:
        return variable.node.name
    return variable.value.node if variable.value is not None else ""
