"""The errors that autopar raises on purpose: what went wrong, what was found, and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class AutoparError(Exception):
    """Base class of all deliberate errors. The message has three parts: what, ``found:`` and ``hint:``.

    Args:
        what: one sentence that says what is wrong, in the user's terms.
        found: the offending value as text, with units.
        hint: what the user can do about it.
    """

    def __init__(self, what: str, *, found: str = "", hint: str = "") -> None:
        self.what, self.found, self.hint = what, found, hint
        lines = [what]
        if found:
            lines.append(f"  found: {found}")
        if hint:
            lines.append(f"  hint:  {hint}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.found, self.hint)


def _rebuild(kind: type[AutoparError], what: str, found: str, hint: str) -> AutoparError:
    return kind(what, found=found, hint=hint)


class CaptureError(AutoparError):
    """The model could not be captured as a graph."""


class SpecError(AutoparError):
    """A sharding spec cannot be parsed, or does not fit its tensor or mesh."""


class MeshError(AutoparError):
    """A mesh or cluster description is invalid or does not fit the world size."""


class RuleError(AutoparError):
    """A sharding rule cannot be parsed, is registered twice, or does not fit its op."""


class ConstraintError(AutoparError):
    """A constraint matches nothing, cannot be met, or contradicts another."""


@dataclass(frozen=True)
class Shortfall:
    """How much less a memory budget has than the smallest that was found to work, in bytes a device.

    Args:
        by_kind: the least, by kind of memory.
        mesh_shape: of the mesh on which that works.
        late: whether the search ended for lack of time, so that a smaller budget may work too.
    """

    budget_bytes: float
    by_kind: Mapping[str, int]
    mesh_shape: tuple[int, ...]
    late: bool

    @property
    def least_bytes(self) -> int:
        return sum(self.by_kind.values())


class InfeasibleError(AutoparError):
    """No plan fits the memory budget; the hint names the smallest budget that would do.

    ``shortfall`` is None where the solver raises the error, and ``leanest`` makes the planner's plan of the smallest
    peak that was found. Pickling drops both.
    """

    shortfall: Shortfall | None = None
    leanest: Callable[[], Any] | None = None

    @property
    def least_bytes(self) -> float:
        """The smallest budget that was found to work; infinite where that is not known."""
        return math.inf if self.shortfall is None else self.shortfall.least_bytes


class SolverError(AutoparError):
    """The solver is missing or failed."""


class PlanError(AutoparError):
    """A plan cannot be read, or belongs to another model."""


class InputError(AutoparError):
    """Inputs differ in structure, number of dims or dtype from those planned."""


class RankError(AutoparError):
    """The ranks disagree, or another rank failed."""


class RoomError(RankError):
    """A router sends a rank more rows than it has room for. Every rank raises it, before anything has changed."""
