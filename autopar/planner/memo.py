"""Results that are computed once for all that ask."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Memo:
    """Results by name, by the objects that they are made of, which count by identity, and by values.

    Objects are kept alive, so that no other one gets the identity of one that is gone. Whoever asks again gets the same
    object, by which the solver finds repeated blocks.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, ...], tuple[Any, tuple[object, ...]]] = {}

    def of(self, name: str, objects: tuple[object, ...], make: Callable[[], T], *values: Hashable) -> T:
        """Return what ``make`` made first for these."""
        key = (name, *map(id, objects), *values)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = make(), objects
        result: T = known[0]
        return result
