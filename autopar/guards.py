"""What a captured program read beside its tensors, and whether that has changed since.

Capture runs the user's Python once. A program therefore depends on the attributes, options and functions that this run
read, as Dynamo's programs do, and like those it may run again only while they are unchanged. A read is identified by
the attribute's path in the model, so that a copy of the model is checked by what the copy holds.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar._torch import without_modes
from autopar.attributes import CONTAINERS, MISSING

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
BY_IDENTITY = (
    FunctionType,
    BuiltinFunctionType,
    type,
    ModuleType,
    property,
    functools.cached_property,
    staticmethod,
    classmethod,
)

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


@dataclass(frozen=True)
class Difference:
    """A value that has changed since capture, and its position ``at`` in the order in which values are checked."""

    what: str
    old: str
    new: str
    at: int = 0

    def __str__(self) -> str:
        if self.old == self.new:
            return f"{self.what} has other values"
        return f"{self.what} was {self.old} and is {self.new}"


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


class View:
    """Computes comparable images of values: data by type and text, containers by content, functions by identity.

    Other objects are compared by type and by which of the objects seen so far they are: an attribute that capture read
    of an object is a read of its own, so an equal object may take the object's place.

    Args:
        identity: compare tensors and objects by identity, which is right within one process where nothing is copied.
    """

    def __init__(self, *, identity: bool = False) -> None:
        self._numbers: dict[int, int] = {}
        self._of_object: Callable[[Any], Any] = _Same if identity else self._number
        self._of_tensor: Callable[[Tensor], Any] = _Same if identity else _image_of

    def _number(self, value: Any) -> Any:
        return type_of(value), self._numbers.setdefault(table_key(value), len(self._numbers))

    def __call__(self, value: Any, depth: int = 0) -> Any:
        if value is MISSING or isinstance(value, BY_IDENTITY):
            return _Same(value)
        if isinstance(value, DATA):
            return type(value), repr(value)
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes() if value.nbytes <= LARGEST_BYTES else id(value)
        if isinstance(value, CONTAINERS):
            return self._contents(value, depth)
        if isinstance(value, functools.partial):
            return functools.partial, *(self(v, depth + 1) for v in (value.func, value.args, value.keywords))
        if isinstance(value, MethodType):
            return MethodType, _Same(value.__func__), self._of_object(value.__self__)
        held = compared_attributes(value, depth)
        return self._of_object(value) if held is None else (type(value), self(held, DEEPEST - 1))

    def _contents(self, value: Any, depth: int) -> Any:
        if depth == DEEPEST:
            return type(value), _Same(value)
        if len(value) > LONGEST:
            return type(value), len(value)
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(self(x, depth + 1) for x in value)
        if isinstance(value, dict):
            return type(value), tuple((self(k, depth + 1), self(v, depth + 1)) for k, v in value.items())
        return type(value), tuple(self(x, depth + 1) for x in value)


def _image_of(tensor: Tensor) -> Any:
    return (nn.Parameter, tuple(tensor.shape)) if isinstance(tensor, nn.Parameter) else _TensorImage.of(tensor)


def compared_attributes(value: Any, depth: int) -> dict[str, Any] | None:
    """Return the attributes of an object that is compared by them, or None if it is compared otherwise."""
    closed = isinstance(value, nn.Module) or is_watched(type(value)) or depth > 1
    return None if closed else instance_dict(value)


@dataclass(frozen=True)
class _Same:
    """An object that is compared by identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, eq=False)
class _TensorImage:
    """A tensor that is not a parameter; the program holds its values."""

    tensor: Tensor
    version: int | None
    values: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorImage:
        known = not tensor.is_meta and type(tensor) is Tensor and tensor.layout is torch.strided
        small = known and tensor.numel() * tensor.element_size() <= LARGEST_BYTES
        return cls(tensor, version_of(tensor), tensor.detach().clone() if small else None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _TensorImage) or self._meta() != other._meta():
            return False
        if self.values is None or other.values is None:
            return self.tensor is other.tensor and self.version == other.version
        return torch.equal(self.values, other.values.to(self.values.device))

    def _meta(self) -> tuple[Any, ...]:
        return type(self.tensor), self.tensor.shape, self.tensor.dtype, self.tensor.requires_grad

    def __hash__(self) -> int:
        return hash((self.tensor.shape, self.tensor.dtype))


def version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed in place; None for inference tensors, which do not count it."""
    return None if tensor.is_inference() else tensor._version


def type_of(value: Any) -> type:
    """Return the class as the user wrote it; a parallel model's class is a subclass of that."""
    return vars(type(value)).get("_autopar_original", type(value))  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Condition:
    """A Python value that the forward takes from a tensor which depends on buffers alone.

    Args:
        buffers: names of the buffers.
        compute: computes the tensor from the buffers.
        method: the method that takes the value from the tensor, such as ``__bool__``.
        value: the value at capture.
    """

    buffers: tuple[str, ...]
    compute: Callable[..., Tensor]
    method: str
    value: Any = None

    def with_value(self, values: Sequence[Tensor]) -> Condition:
        """Return the condition with the value that these buffers give."""
        return replace(self, value=self.evaluate(values))

    def evaluate(self, values: Sequence[Tensor]) -> Any:
        """Return the value for these buffers, which are not changed."""
        with without_modes(), torch.no_grad():
            return getattr(self.compute(*[v.detach().cpu().clone() for v in values]), self.method)()

    def difference(self, model: nn.Module) -> Difference | None:
        """Return the difference if the buffers of ``model`` give another value than at capture, else None."""
        now = self.evaluate([model.get_buffer(name) for name in self.buffers])
        if (type(now), repr(now)) == (type(self.value), repr(self.value)):
            return None
        return Difference(f"a condition on {', '.join(self.buffers)}", repr(self.value), repr(now))


@dataclass(frozen=True, eq=False)
class Guards:
    """What a program was captured from: reads, with an image of the value of each, and the conditions on buffers."""

    reads: tuple[Read, ...] = ()
    images: tuple[Any, ...] = ()
    conditions: tuple[Condition, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, reads: Iterable[Read], conditions: Iterable[Condition] = ()) -> Guards:
        """Return guards for the present state of ``model``."""
        kept = tuple(dict.fromkeys(reads))
        view = View()
        return cls(kept, tuple(view(found.value) for found in _lookups(model, kept)), tuple(conditions))

    def difference(self, model: nn.Module) -> Difference | None:
        """Return the first value that has changed, or None."""
        view = View()
        found = _lookups(model, self.reads)
        for i, (read, each, image) in enumerate(zip(self.reads, found, self.images, strict=True)):
            now = view(each.value)
            if now != image:
                return Difference(str(read), _text(image), _text(now), i)
        differing = (c.difference(model) for c in self.conditions)
        return next((replace(d, at=len(self.reads)) for d in differing if d is not None), None)

    def bind(self, model: nn.Module) -> Binding:
        """Locate in ``model`` what was read, which makes the next check cheap."""
        return Binding.to(_lookups(model, self.reads))


def _text(image: Any) -> str:
    """Return a short description of an image."""
    if isinstance(image, _Same):
        return getattr(image.value, "__qualname__", None) or repr(image.value)
    if isinstance(image, _TensorImage):
        values = image.values
        return f"a tensor {tuple(image.tensor.shape)}" if values is None or values.numel() > 1 else f"{values.tolist()}"
    kind, *rest = image
    if not isinstance(kind, type):
        return "an array"
    if issubclass(kind, CONTAINERS) and len(rest) == 1:
        return f"{kind.__name__} with {rest[0] if isinstance(rest[0], int) else len(rest[0])} items"
    return rest[0] if issubclass(kind, DATA) else kind.__qualname__


class _Registered:
    """Stands for a parameter or buffer of the model, which the program reads anew in each call."""


@dataclass(frozen=True)
class _Slot:
    """A place that is looked up by name, and its present value."""

    get: Callable[[str, Any], Any]
    name: str
    value: Any
    key: Any


@dataclass(frozen=True)
class _Lookup:
    """The value of a read, the places that decide it, and a table in which its name must not appear."""

    value: Any
    slots: tuple[_Slot, ...] = ()
    table: Mapping[str, Any] | None = None


_NOWHERE = _Lookup(MISSING)
_REGISTERED = _Lookup(_Registered())


def _lookups(model: nn.Module, reads: Sequence[Read]) -> Iterator[_Lookup]:
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


def look_up(owner: Any, name: str, *, registered: bool = False) -> _Lookup:
    """Look up an attribute where it is stored, without running a property.

    Args:
        registered: whether ``owner``, if it is a module, belongs to the model, and so do its parameters and buffers.
    """
    if owner is MISSING:
        return _NOWHERE
    if isinstance(owner, Scope):
        value = owner.get(name, MISSING)
        return _Lookup(value, (_Slot(owner.get, name, value, id(owner)),))
    table = instance_dict(owner)
    if table is not None and name in table:
        return _Lookup(table[name], (_Slot(table.get, name, table[name], id(table)),))
    if isinstance(owner, nn.Module):
        for kept in (owner._parameters, owner._buffers, owner._modules):
            if name in kept:
                return _REGISTERED if registered and isinstance(kept[name], Tensor) else _module_entry(kept, name)
    slots = []
    for kind in type_of(owner).__mro__:
        value = vars(kind).get(name, MISSING)
        slots.append(_Slot(vars(kind).get, name, value, kind))
        if value is not MISSING and not isinstance(value, MemberDescriptorType):
            return _Lookup(value, tuple(slots), table)
    if isinstance(owner, nn.Module):
        return _Lookup(MISSING, tuple(slots), table)
    value = getattr(owner, name, MISSING)
    return _Lookup(value, (_Slot(functools.partial(getattr, owner), name, value, id(owner)),))


def _module_entry(table: Mapping[str, Any], name: str) -> _Lookup:
    """Return a submodule or None, or a tensor of a module outside the model, whose values the program holds."""
    value = table[name]
    if not isinstance(value, Tensor):
        return _Lookup(value)
    return _Lookup(value.detach(), (_Slot(table.get, name, value, id(table)),))


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

    slots: tuple[_Slot, ...]
    values: list[Any]
    tables: list[Mapping[str, Any]]
    lengths: list[int]
    empty: list[Any] = field(default_factory=list)
    filled: list[tuple[Any, Any]] = field(default_factory=list)
    tensors: list[tuple[Tensor, int | None]] = field(default_factory=list)
    arrays: list[tuple[Any, bytes]] = field(default_factory=list)

    @classmethod
    def to(cls, found: Iterable[_Lookup]) -> Binding:
        slots: dict[tuple[Any, str], _Slot] = {}
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
