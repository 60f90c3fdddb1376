"""Tables of a model's modules and tensors, built once: walking the model takes longer than everything else that a call
does besides its program."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.attributes import Absent, absent_from
from autopar.bindings import Binding
from autopar.guards import Guards
from autopar.runtime.materialize import is_placed
from autopar.structure import is_dense

_KEPT_AS = "_autopar_tables"
Table = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """Which tensors a model holds, and where.

    Args:
        digest: equal for layouts with the same shapes, placements, ties and names of missing tensors.
        loose: paths of parameters and buffers that the user added after the model was made parallel.
    """

    tensors: list[Any]
    digest: str
    loose: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Tables:
    """The structure of a model, valid while ``holds`` is true. The tensors themselves may be replaced.

    Args:
        inner: every module once, except the model itself: a reference cycle would delay its freeing.
        children: every module's table of submodules.
        kept: every module's tables of parameters and of buffers, the model's own first.
        held: the submodules in ``children``.
        names: the keys of ``kept``.
        places: table and key of each parameter and buffer by path.
        layouts: the latest layout, if one was computed.
        bindings: where the model holds what programs were captured from.
    """

    inner: tuple[nn.Module, ...]
    children: tuple[Table, ...]
    kept: tuple[Table, ...]
    held: list[nn.Module | None]
    names: list[str]
    places: Mapping[str, tuple[Table, str]]
    layouts: list[Layout] = field(default_factory=list)
    bindings: WeakKeyDictionary[Guards, Binding] = field(default_factory=WeakKeyDictionary)

    def holds(self, model: nn.Module) -> bool:
        """Whether ``model`` still consists of these modules with tensors of these names."""
        modules = (model, *self.inner)
        same = all(map(operator.is_, _kept(modules), self.kept))
        same = same and all(map(operator.is_, [m._modules for m in modules], self.children))
        return same and _values(self.children) == self.held and _keys(self.kept) == self.names

    def tensor(self, path: str) -> Any:
        """Return the parameter or buffer at a path."""
        table, key = self.places[path]
        return table[key]

    def modes(self, model: nn.Module) -> tuple[bool, ...]:
        """Return which modules are in training mode."""
        return model.training, *[module.training for module in self.inner]

    @property
    def layout(self) -> Layout:
        """The present layout of the model."""
        tensors = _values(self.kept)
        if not self.layouts or not all(map(operator.is_, tensors, self.layouts[0].tensors)):
            self.layouts[:] = [_layout(tensors, self.places)]
        return self.layouts[0]

    def meet(self, guards: Guards, model: nn.Module) -> bool:
        """Whether ``model`` is as it was when a program with these guards was captured from it."""
        binding = self.bindings.get(guards)
        if binding is not None and binding.is_unchanged():
            return not any(condition.difference(model) for condition in guards.conditions)
        if (binding is not None and binding.holds_other_data()) or guards.difference(model) is not None:
            return False
        self.bindings[guards] = guards.bind(model)
        return True

    @property
    def parameters(self) -> list[Tensor]:
        """Every parameter, once; on the meta device if other stages hold it."""
        held = [t if t is not None else _absent(table, key) for table in self.kept[::2] for key, t in table.items()]
        return list({id(t): t for t in held if t is not None}.values())


def tables(model: nn.Module) -> Tables:
    """Return the tables of ``model``, rebuilt if it has changed."""
    known: Tables | None = model.__dict__.get(_KEPT_AS)
    if known is None or not known.holds(model):
        known = model.__dict__[_KEPT_AS] = _tables(model)
    return known


def without_tables(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a model that a copy of it takes over."""
    return {name: value for name, value in attributes.items() if name != _KEPT_AS}


def _tables(model: nn.Module) -> Tables:
    walked = list(_walk(model))
    modules = [module for _, module in walked]
    children, kept = tuple(m._modules for m in modules), tuple(_kept(modules))
    places = {
        f"{path}.{name}" if path else name: (table, name)
        for path, module in walked
        for table in (module._parameters, module._buffers)
        for name in table
    }
    return Tables(tuple(modules[1:]), children, kept, _values(children), _keys(kept), places)


def _layout(tensors: list[Any], places: Mapping[str, tuple[Table, str]]) -> Layout:
    first: dict[int, str] = {}
    entries: list[tuple[Any, ...]] = []
    loose: list[str] = []
    for (path, place), tensor in zip(places.items(), tensors, strict=True):
        absent = _known(*place) if tensor is None else None
        known = tensor if absent is None else absent.tensor
        if known is None or not is_dense(known):
            continue
        entries.append((path, first.setdefault(id(known), path), tuple(known.shape), _placements(known, absent)))
        if absent is None and not is_placed(known):
            loose.append(path)
    return Layout(tensors, hashlib.blake2b(repr(entries).encode(), digest_size=16).hexdigest(), tuple(loose))


def _placements(tensor: Any, absent: Absent | None) -> Any:
    """Return how ranks hold a tensor; equal on those that hold it and on the others."""
    if absent is not None:
        return absent.placements
    return tensor.placements if isinstance(tensor, DTensor) else None


def _known(table: Table, key: str) -> Absent | None:
    return absent_from(table).get(key)


def _absent(table: Table, key: str) -> Tensor | None:
    known = _known(table, key)
    return None if known is None else known.tensor


def _kept(modules: Any) -> list[Table]:
    return [table for module in modules for table in (module._parameters, module._buffers)]


def _values(tables: tuple[Table, ...]) -> list[Any]:
    return [value for table in tables for value in table.values()]


def _keys(tables: tuple[Table, ...]) -> list[str]:
    return [key for table in tables for key in table]


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once, by path, in torch's order."""
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        prefix = f"{path}." if path else ""
        children = [(prefix + name, child) for name, child in module._modules.items() if child is not None]
        waiting += reversed(children)
