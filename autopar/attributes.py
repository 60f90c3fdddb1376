"""Tensors that a forward leaves in attributes of modules: outputs that it does not return."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from autopar.structure import Structure

CONTAINERS = (list, dict, deque)
Place = tuple[str, str]
"""The path of a module, and the name of an attribute."""

Held = tuple[Any, Any]
"""What an attribute holds, and what is in that."""


class _Missing:
    """What an attribute has that is not there."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()


@dataclass(frozen=True)
class Left:
    """What a call leaves in one attribute.

    Args:
        how: ``"set"``, or what becomes of the container that is there: it is filled anew, or the new part is added.
        value: the new value, or the new part of it; its paths are names of outputs.
        also: other attributes that hold the same container.
    """

    place: Place
    how: Literal["set", "fill", "add"]
    value: Structure
    also: tuple[Place, ...] = ()

    @property
    def names(self) -> list[str]:
        """Of the attributes, as the user would write them after ``self``."""
        return [".".join(filter(None, place)) for place in (self.place, *self.also)]

    def give(self, model: nn.Module, outputs: Mapping[str, Any]) -> None:
        """Leave it in ``model``, made of ``outputs`` by name."""
        value = self.value.build([outputs.get(path) for path in self.value.paths])
        held = _attributes(model, self.place)
        container = held.get(self.place[1])
        if self.how == "set" or not isinstance(container, CONTAINERS):
            held[self.place[1]] = value
            return
        if self.how == "fill":
            container.clear()
        _add(container, value)


def _add(container: Any, value: Any) -> None:
    if isinstance(container, dict):
        container.update(value)
    else:
        container.extend(value)


def _attributes(model: nn.Module, place: Place) -> dict[str, Any]:
    return vars(model.get_submodule(place[0]))


def content(value: Any) -> Any:
    """What is in a container now, whatever is put into it or taken out later; another value as it is."""
    return copy.copy(value) if isinstance(value, CONTAINERS) else value


def remember(before: dict[Place, Held], model: nn.Module, places: Iterable[Place]) -> None:
    """Note in ``before`` what is held in places that it does not have yet."""
    for place in places:
        if place not in before:
            value = _attributes(model, place).get(place[1], MISSING)
            before[place] = value, content(value)


@contextlib.contextmanager
def as_before(model: nn.Module, before: Mapping[Place, Held]) -> Iterator[None]:
    """For a capture: attributes are as they were before any call, and afterwards as they are."""
    now: dict[Place, Held] = {}
    remember(now, model, before)
    try:
        _hold(model, before)
        yield
    finally:
        _hold(model, now)


def _hold(model: nn.Module, held: Mapping[Place, Held]) -> None:
    """The same objects, since others may hold them too."""
    for place, (value, inside) in held.items():
        attributes = _attributes(model, place)
        if value is MISSING:
            attributes.pop(place[1], None)
            continue
        attributes[place[1]] = value
        if isinstance(value, CONTAINERS):
            value.clear()
            _add(value, inside)
