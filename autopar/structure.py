"""Flattens nested inputs and outputs into lists of tensors, and rebuilds them.

torch's pytree leaves out unregistered dataclasses, but models return those too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Build = Callable[[Sequence[Any]], Any]
Leaf = tuple[str, Any]


@dataclasses.dataclass(frozen=True)
class Structure:
    """Where each tensor sits in a nested value.

    Args:
        paths: a name for each tensor, such as ``"logits"`` or ``"hidden_states.0"``.
        build: puts tensors (in the order of ``paths``) back into a value of the same structure.
        plain: paths and values of the plain data (numbers, text, None) beside the tensors.
        dropped: paths of objects that are not tensors and were replaced by None, with their type's name.
        first: the path of the first element of a tuple or the first field of a dataclass.
    """

    paths: tuple[str, ...]
    build: Build
    plain: tuple[Leaf, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    first: str | None = None


def flatten(value: Any) -> tuple[list[torch.Tensor], Structure]:
    """Return the tensors in ``value`` and its structure, which keeps plain data (numbers, text, None)."""
    found = _Found([], [], [])
    build = _take_apart(value, "", found)
    paths = tuple(p for p, _ in found.tensors)
    structure = Structure(paths, build, tuple(found.plain), tuple(found.dropped), _first(value))
    return [t for _, t in found.tensors], structure


def _first(value: Any) -> str | None:
    if isinstance(value, (tuple, list)):
        return next(iter(getattr(value, "_fields", ("0",))), None)
    if dataclasses.is_dataclass(value):
        return next((f.name for f in dataclasses.fields(value) if f.init), None)
    return None


@dataclasses.dataclass(frozen=True)
class _Found:
    tensors: list[Leaf]
    plain: list[Leaf]
    dropped: list[tuple[str, str]]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense: neither sparse nor nested nor quantized."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _take_apart(value: Any, path: str, found: _Found) -> Build:
    if isinstance(value, torch.Tensor):
        index = len(found.tensors)
        found.tensors.append((path or "0", value))
        return lambda tensors: tensors[index]
    children, rebuild = _children(value)
    if children is None:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
            found.plain.append((path or "0", value))
            return lambda _: value
        found.dropped.append((path or "0", type(value).__name__))
        return lambda _: None
    parts = [(k, _take_apart(v, f"{path}.{k}" if path else str(k), found)) for k, v in children]
    return lambda tensors: rebuild([(k, b(tensors)) for k, b in parts])


def _children(value: Any) -> tuple[list[tuple[Any, Any]] | None, Callable[[list[tuple[Any, Any]]], Any]]:
    kind = type(value)
    if isinstance(value, Mapping):
        # A Hugging Face ModelOutput is both a mapping and a dataclass; as a mapping it omits fields that are None.
        if dataclasses.is_dataclass(kind):
            return list(value.items()), lambda items: kind(**dict(items))
        return list(value.items()), lambda items: kind(items) if kind is not dict else dict(items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True)), lambda items: kind(**dict(items))
    if isinstance(value, (tuple, list)):
        return list(enumerate(value)), lambda items: kind(v for _, v in items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
        return fields, lambda items: kind(**dict(items))
    return None, lambda _: value
