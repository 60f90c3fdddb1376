"""What a captured program read beside its tensors, and whether that has changed since.

Capture runs the user's Python once. A program therefore depends on the attributes, options and functions that this run
read, as Dynamo's programs do, and like those it may run again only while they are unchanged. A read is identified by
the attribute's path in the model, so that a copy of the model is checked by what the copy holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar._torch import without_modes
from autopar.attributes import CONTAINERS, MISSING
from autopar.bindings import (
    DATA,
    DEEPEST,
    LARGEST_BYTES,
    LONGEST,
    Binding,
    Read,
    compared_attributes,
    lookups,
    table_key,
    type_of,
    version_of,
)

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
        return cls(kept, tuple(view(found.value) for found in lookups(model, kept)), tuple(conditions))

    def difference(self, model: nn.Module) -> Difference | None:
        """Return the first value that has changed, or None."""
        view = View()
        found = lookups(model, self.reads)
        for i, (read, each, image) in enumerate(zip(self.reads, found, self.images, strict=True)):
            now = view(each.value)
            if now != image:
                return Difference(str(read), _text(image), _text(now), i)
        differing = (c.difference(model) for c in self.conditions)
        return next((replace(d, at=len(self.reads)) for d in differing if d is not None), None)

    def bind(self, model: nn.Module) -> Binding:
        """Locate in ``model`` what was read, which makes the next check cheap."""
        return Binding.to(lookups(model, self.reads))


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
