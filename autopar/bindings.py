"""Where a model holds what capture read, and a cheap check that nothing there has changed.

A ``Binding`` compares by identity, so it is fast and may report a change where the values are equal. ``guards`` then
compares the values.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar.attributes import CONTAINERS, MISSING, absent_from

DATA = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    np.generic,
)
"""Types of immutable values, which are compared by type and text."""
LONGEST = 1000
"""Containers with up to this many items are compared item by item; longer ones only by length."""
DEEPEST = 6
"""Containers nested up to this many levels are compared by content; deeper ones by identity."""
LARGEST_BYTES = 1 << 22
"""Bytes up to which the values of an array or tensor are kept for comparison; larger ones are compared by identity."""
_OWN = frozenset({"torch", "numpy", "builtins", "autopar", "types"})
_HEAP_TYPE = 1 << 9
"""The flag of classes created at run time, which can be modified (Py_TPFLAGS_HEAPTYPE)."""

Step = tuple[str, Any]
"""A step from an object to one that it holds: ``("attribute", name)`` or ``("item", key)``."""


@dataclass(frozen=True, eq=False)
class Scope:
    """Variables that functions can see: the globals of a file, the attributes of a class, or a closure's cells."""

    text: str
    get: Callable[[str, Any], Any]


@dataclass(frozen=True)
class Read:
    """An attribute that capture read.

    Args:
        root: the path of a module in the model, or a scope outside the model.
        steps: the steps from the root to the object that has the attribute.
        name: the name of the attribute.
    """

    root: str | Scope
    steps: tuple[Step, ...]
    name: str

    def __str__(self) -> str:
        parts = [self.root] if isinstance(self.root, str) else [self.root.text]
        parts += [key if kind == "attribute" else f"[{key!r}]" for kind, key in self.steps]
        return ".".join(filter(None, (*parts, self.name))).replace(".[", "[")


AttributeKey = tuple[int, str]
"""The ``table_key`` of the object that holds an attribute, and the attribute's name."""


def table_key(owner: Any) -> int:
    """Return a key for an owner of attributes; torch.export's stand-ins for a module share its attributes."""
    table = None if isinstance(owner, type) else instance_dict(owner)
    return id(owner) if table is None else id(table)


def instance_dict(value: Any) -> dict[str, Any] | None:
    """Return an instance's attributes if it keeps them in a dict, else None."""
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return table if isinstance(table, dict) else None


def is_watched(kind: type) -> bool:
    """Whether reads of an instance's attributes can be observed; if they cannot, all attributes count as read."""
    return bool(kind.__flags__ & _HEAP_TYPE) and kind.__module__.partition(".")[0] not in _OWN


def compared_attributes(value: Any, depth: int) -> dict[str, Any] | None:
    """Return the attributes of an object that is compared by them, or None if it is compared otherwise."""
    closed = isinstance(value, nn.Module) or is_watched(type(value)) or depth > 1
    return None if closed else instance_dict(value)


def version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed in place; None for inference tensors, which do not count it."""
    return None if tensor.is_inference() else tensor._version


def type_of(value: Any) -> type:
    """Return the class as the user wrote it; a parallel model's class is a subclass of that."""
    return vars(type(value)).get("_autopar_original", type(value))  # type: ignore[no-any-return]


class _Registered:
    """Stands for a parameter or buffer of the model, which the program reads anew in each call."""


@dataclass(frozen=True)
class Slot:
    """A place that is looked up by name, and its present value."""

    get: Callable[[str, Any], Any]
    name: str
    value: Any
    key: Any


@dataclass(frozen=True)
class Lookup:
    """The value of a read, the places that decide it, and a table in which its name must not appear."""

    value: Any
    slots: tuple[Slot, ...] = ()
    table: Mapping[str, Any] | None = None


_NOWHERE = Lookup(MISSING)
_REGISTERED = Lookup(_Registered())


def lookups(model: nn.Module, reads: Sequence[Read]) -> Iterator[Lookup]:
    """Yield where ``model`` holds each read."""
    owners: dict[tuple[Any, tuple[Step, ...]], Any] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for read in reads:
        where = read.root, read.steps
        if where not in owners:
            owners[where] = (
                _follow(modules.get(read.root, MISSING), read.steps)
                if isinstance(read.root, str)
                else _follow(read.root, read.steps)
            )
        yield look_up(owners[where], read.name, registered=not read.steps)


def _follow(owner: Any, steps: Iterable[Step]) -> Any:
    for kind, key in steps:
        if owner is MISSING:
            return MISSING
        try:
            owner = owner[key] if kind == "item" else look_up(owner, key).value
        except (LookupError, TypeError):
            return MISSING
    return owner


def look_up(owner: Any, name: str, *, registered: bool = False) -> Lookup:
    """Look up an attribute where it is stored, without running a property.

    Args:
        registered: whether ``owner``, if it is a module, belongs to the model, and so do its parameters and buffers.
    """
    if owner is MISSING:
        return _NOWHERE
    if isinstance(owner, Scope):
        value = owner.get(name, MISSING)
        return Lookup(value, (Slot(owner.get, name, value, id(owner)),))
    table = instance_dict(owner)
    if table is not None and name in table:
        return Lookup(table[name], (Slot(table.get, name, table[name], id(table)),))
    if isinstance(owner, nn.Module):
        for kept in (owner._parameters, owner._buffers, owner._modules):
            if name in kept:
                held = isinstance(kept[name], Tensor) or name in absent_from(kept)
                return _REGISTERED if registered and held else _module_entry(kept, name)
    slots = []
    for kind in type_of(owner).__mro__:
        value = vars(kind).get(name, MISSING)
        slots.append(Slot(vars(kind).get, name, value, kind))
        if value is not MISSING and not isinstance(value, MemberDescriptorType):
            return Lookup(value, tuple(slots), table)
    if isinstance(owner, nn.Module):
        return Lookup(MISSING, tuple(slots), table)
    value = getattr(owner, name, MISSING)
    return Lookup(value, (Slot(functools.partial(getattr, owner), name, value, id(owner)),))


def _module_entry(table: Mapping[str, Any], name: str) -> Lookup:
    """Return a submodule or None, or a tensor of a module outside the model, whose values the program holds."""
    value = table[name]
    if not isinstance(value, Tensor):
        return Lookup(value)
    return Lookup(value.detach(), (Slot(table.get, name, value, id(table)),))


@dataclass(frozen=True, eq=False)
class Binding:
    """Where one model holds what was read. While ``is_unchanged`` holds, nothing has to be compared by value.

    Args:
        slots: places by name.
        values: the value of each place.
        tables: attribute dicts of instances, in which a new name would hide a class attribute, with their ``lengths``.
        empty: containers without items.
        filled: the other containers, with their items.
        tensors: tensors, with how often each was changed in place.
        arrays: NumPy arrays, with their bytes.
    """

    slots: tuple[Slot, ...]
    values: list[Any]
    tables: list[Mapping[str, Any]]
    lengths: list[int]
    empty: list[Any] = field(default_factory=list)
    filled: list[tuple[Any, Any]] = field(default_factory=list)
    tensors: list[tuple[Tensor, int | None]] = field(default_factory=list)
    arrays: list[tuple[Any, bytes]] = field(default_factory=list)

    @classmethod
    def to(cls, found: Iterable[Lookup]) -> Binding:
        slots: dict[tuple[Any, str], Slot] = {}
        tables: dict[int, Mapping[str, Any]] = {}
        values: dict[int, Any] = {}
        for each in found:
            slots |= {(s.key, s.name): s for s in each.slots}
            values[id(each.value)] = each.value
            if each.table is not None:
                tables[id(each.table)] = each.table
        held = list(tables.values())
        made = cls(tuple(slots.values()), [s.value for s in slots.values()], held, list(map(len, held)))
        for value in values.values():
            made._watch(value, 0)
        return made

    def _watch(self, value: Any, depth: int) -> None:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            self.tensors.append((value, version_of(value)))
        elif isinstance(value, np.ndarray) and value.nbytes <= LARGEST_BYTES:
            self.arrays.append((value, value.tobytes()))
        elif (held := None if isinstance(value, CONTAINERS) else compared_attributes(value, depth)) is not None:
            self._watch(held, DEEPEST - 1)
        elif isinstance(value, CONTAINERS) and depth < DEEPEST:
            if not value:
                self.empty.append(value)
                return
            self.filled.append((value, _items(value)))
            if len(value) <= LONGEST:
                for item in value.values() if isinstance(value, dict) else value:
                    self._watch(item, depth + 1)

    def is_unchanged(self) -> bool:
        now = [s.get(s.name, MISSING) for s in self.slots]
        return (
            all(map(operator.is_, now, self.values))
            and list(map(len, self.tables)) == self.lengths
            and not any(self.empty)
            and all(_holds_items(value, items) for value, items in self.filled)
            and all(version_of(tensor) == version for tensor, version in self.tensors)
            and all(array.tobytes() == held for array, held in self.arrays)
        )

    def holds_other_data(self) -> bool:
        """Whether a place holds different plain data, which settles the question without comparing the rest."""
        now = (s.get(s.name, MISSING) for s in self.slots)
        return any(_is_other_data(old, new) for old, new in zip(self.values, now, strict=True) if old is not new)


def _is_other_data(old: Any, new: Any) -> bool:
    return isinstance(old, DATA) and isinstance(new, DATA) and (type(old), repr(old)) != (type(new), repr(new))


def _items(value: Any) -> Any:
    if len(value) > LONGEST:
        return None
    if isinstance(value, dict):
        return list(value), list(value.values())
    return set(value) if isinstance(value, (set, frozenset)) else list(value)


def _holds_items(value: Any, items: Any) -> bool:
    if items is None:
        return len(value) > LONGEST
    if isinstance(value, dict):
        keys, values = items
        return (
            len(value) == len(keys)
            and all(map(operator.is_, value, keys))
            and all(map(operator.is_, value.values(), values))
        )
    if isinstance(items, set):
        return bool(value == items)
    return len(value) == len(items) and all(map(operator.is_, value, items))
