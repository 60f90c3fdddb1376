"""Tensors that a forward stores in attributes of modules: outputs that it does not return."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from autopar.structure import Structure

OUTPUT_CONTAINERS = (list, dict, deque)
"""Containers whose items can be outputs of a captured call, since they have an order or keys."""
MUTABLE_CONTAINERS = (*OUTPUT_CONTAINERS, set)
"""Containers that a forward can change in place."""
CONTAINERS = (*MUTABLE_CONTAINERS, tuple, frozenset)
"""Containers that guards compare by content."""


@dataclass(frozen=True)
class Absent:
    """A parameter or buffer that the ranks of another pipeline stage hold.

    Args:
        tensor: on the meta device.
        name: its first name in the model.
        stages: those that hold it.
        placements: DTensor's placements there; None for a buffer.
    """

    tensor: Tensor
    name: str
    stages: tuple[int, ...]
    placements: Any = None


class Table(dict[str, Any]):
    """A module's table of parameters or buffers, in which those of other stages are None.

    Args:
        absent: what is known of these.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.absent: dict[str, Absent] = {}


def absent_from(table: Mapping[str, Any]) -> dict[str, Absent]:
    """Return what is known of the entries of a module's table that other stages hold."""
    return table.absent if isinstance(table, Table) else {}


Place = tuple[str, str]
"""The path of a module, and the name of an attribute."""

Held = tuple[Any, Any]
"""An attribute's value, and a snapshot of its content if it is a container."""


class _Missing:
    """Stands for the value of an attribute that does not exist."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()


@dataclass(frozen=True)
class AttributeOutput:
    """What a call stores in one attribute.

    Args:
        how: ``"set"`` assigns the value, ``"fill"`` replaces the existing container's items, ``"add"`` extends it.
        value: the new value, or the part that is added; its paths are names of outputs.
        also: other attributes that hold the same container.
    """

    place: Place
    how: Literal["set", "fill", "add"]
    value: Structure
    also: tuple[Place, ...] = ()

    @property
    def names(self) -> list[str]:
        """The attributes' names, as the user would write them after ``self``."""
        return [".".join(filter(None, place)) for place in (self.place, *self.also)]

    def assign(self, model: nn.Module, outputs: Mapping[str, Any]) -> None:
        """Store it in ``model``, built from ``outputs`` by name."""
        value = self.value.build([outputs.get(path) for path in self.value.paths])
        held = _attributes(model, self.place)
        container = held.get(self.place[1])
        if self.how == "set" or not isinstance(container, OUTPUT_CONTAINERS):
            held[self.place[1]] = value
            return
        if self.how == "fill":
            container.clear()
        add_items(container, value)


def add_items(container: Any, items: Any) -> None:
    """Add ``items`` to a mutable container."""
    if isinstance(container, (dict, set)):
        container.update(items)
    else:
        container.extend(items)


def _attributes(model: nn.Module, place: Place) -> dict[str, Any]:
    return vars(model.get_submodule(place[0]))


def snapshot(value: Any) -> Any:
    """Return a shallow copy of a container, which later changes do not affect; any other value unchanged."""
    return copy.copy(value) if isinstance(value, OUTPUT_CONTAINERS) else value


def record_attributes(before: dict[Place, Held], model: nn.Module, places: Iterable[Place]) -> None:
    """Record in ``before`` the values of attributes that it does not have yet."""
    for place in places:
        if place not in before:
            value = _attributes(model, place).get(place[1], MISSING)
            before[place] = value, snapshot(value)


@contextlib.contextmanager
def restored_attributes(model: nn.Module, before: Mapping[Place, Held]) -> Iterator[None]:
    """Restore, for a capture, the attributes from before any call; afterwards set them back."""
    now: dict[Place, Held] = {}
    record_attributes(now, model, before)
    try:
        _hold(model, before)
        yield
    finally:
        _hold(model, now)


def _hold(model: nn.Module, held: Mapping[Place, Held]) -> None:
    """Restore attributes and contents in the same objects, since others may hold them too."""
    for place, (value, items) in held.items():
        attributes = _attributes(model, place)
        if value is MISSING:
            attributes.pop(place[1], None)
            continue
        attributes[place[1]] = value
        if isinstance(value, OUTPUT_CONTAINERS):
            value.clear()
            add_items(value, items)
