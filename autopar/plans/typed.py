"""Check that data from a file has the types that its dataclass declares, at every depth.

A file may hold anything. Data that passes is plain and of a known form: names are strings, counts are whole and not
negative, choices are among those of their ``Literal``, and no number is NaN.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from autopar.ir import ITEMSIZE, TensorMeta

LARGEST = 2**63
"""Exclusive limit on counts."""

DEEPEST = 32
"""Deepest nesting of objects and lists in fields that hold arbitrary data."""

SIGNED = frozenset(
    {
        "axis",
        "dim",
        "to_dim",
        "operand",
        "windows",
        "fill",
        "objective",
        "lower_bound",
        "intervals",
        "history",
        "solver",
    }
)
"""Fields whose numbers may be negative: -1 means none, and windows begin before the first row."""

UNBOUNDED = frozenset({"fill", "objective", "lower_bound", "baselines", "solver"})
"""Fields whose numbers may be infinite."""

Check = Callable[[Any], bool]


def require(value: object, kind: Any, where: str) -> None:
    """Check that ``value`` is a ``kind``, given as a type annotation.

    Raises:
        ValueError: if it is not; names the first wrong entry.
    """
    if is_dataclass(value) and value.__class__ is kind:
        for name, check in _fields(kind):
            if not check(getattr(value, name)):
                raise ValueError(f"{where}.{name}: {_first_wrong(getattr(value, name), check)!r:.80}")
    elif not _check(kind, "")(value):
        raise ValueError(f"{where}: {value!r:.80}")


def _first_wrong(value: Any, check: Check) -> Any:
    """Return the wrong entry of a tuple or mapping, or the value itself."""
    entries = value.items() if isinstance(value, Mapping) else value if isinstance(value, tuple) else ()
    for entry in entries:
        one = dict([entry]) if isinstance(value, Mapping) else (entry,)
        if not check(one):
            return entry
    return value


@cache
def _fields(kind: Any) -> tuple[tuple[str, Check], ...]:
    hints = get_type_hints(kind)
    return tuple((f.name, _check(hints[f.name], f.name)) for f in fields(kind) if not f.name.startswith("_"))


@cache
def _check(kind: Any, field: str) -> Check:
    """Return the check for values of ``kind`` in a field of this name."""
    if kind in _PLAIN:
        return _PLAIN[kind](field)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return lambda v: isinstance(v, str) and v in inner
    if origin in (Union, types.UnionType):
        each = tuple(_check(k, field) for k in inner)
        return lambda v: any(check(v) for check in each)
    if origin is tuple:
        return _tuple(inner, field)
    if origin is not None and issubclass(origin, Mapping):
        value = _check(inner[1], field)
        return lambda v: isinstance(v, dict) and all(map(_is_text, v)) and all(map(value, v.values()))
    if kind is TensorMeta:
        return lambda v: type(v) is TensorMeta and v.dtype in ITEMSIZE and _shape(v.shape)
    return _record(kind)


def _tuple(inner: tuple[Any, ...], field: str) -> Check:
    if inner[1:] == (...,):
        each = _check(inner[0], field)
        return lambda v: isinstance(v, tuple) and all(map(each, v))
    checks = tuple(_check(k, field) for k in inner)

    def check(value: Any) -> bool:
        fits = isinstance(value, tuple) and len(value) == len(checks)
        return fits and all(each(v) for each, v in zip(checks, value, strict=True))

    return check


def _record(kind: Any) -> Check:
    """Return the check for a dataclass or named tuple."""
    if is_dataclass(kind):
        return lambda v: v.__class__ is kind and all(check(getattr(v, name)) for name, check in _fields(kind))
    checks = {name: _check(hint, name) for name, hint in get_type_hints(kind).items()}
    return lambda v: v.__class__ is kind and all(check(getattr(v, name)) for name, check in checks.items())


def _is_text(value: Any) -> bool:
    """Whether the value is a string without lone surrogates, which JSON can spell but which are not characters."""
    if not isinstance(value, str):
        return False
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def _whole(field: str) -> Check:
    least = -LARGEST if field in SIGNED else 0
    return lambda v: type(v) is int and least <= v < LARGEST


def _number(field: str) -> Check:
    least = -math.inf if field in SIGNED else 0
    most = math.inf if field in UNBOUNDED else float(LARGEST) ** 4

    def check(value: Any) -> bool:
        if type(value) is int:
            return max(least, -LARGEST) <= value < LARGEST
        return type(value) is float and least <= value <= most

    return check


def _plain(value: Any, depth: int = 0) -> bool:
    """Whether the value is JSON data of any form, but not so deep that recursion over it overflows the stack."""
    if isinstance(value, dict):
        return depth < DEEPEST and all(map(_is_text, value)) and all(_plain(v, depth + 1) for v in value.values())
    if isinstance(value, (list, tuple)):
        return depth < DEEPEST and all(_plain(v, depth + 1) for v in value)
    if isinstance(value, float):
        return not math.isnan(value)
    return value is None or isinstance(value, bool) or (type(value) is int and abs(value) < LARGEST) or _is_text(value)


_PLAIN: dict[Any, Callable[[str], Check]] = {
    int: _whole,
    float: _number,
    str: lambda _: _is_text,
    bool: lambda _: lambda v: isinstance(v, bool),
    type(None): lambda _: lambda v: v is None,
    Any: lambda _: _plain,
}

_shape = _tuple((int, ...), "shape")


def entries(value: Any) -> list[Any]:
    """Return the value if it is a list.

    Raises:
        TypeError: if it is not, which includes strings and mappings, though they can be iterated.
    """
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.60} is not a list")
    return value
