"""The modules of a model and where each of its tensors is kept, found once: to walk a model takes longer than all else
that a call does beside its program."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.guards import Binding, Guards
from autopar.runtime.materialize import is_placed
from autopar.structure import is_dense

_KEPT_AS = "_autopar_tables"
Table = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """Which tensors a model holds, and where.

    Args:
        digest: equal for layouts with the same shapes, placements and ties, and the same names without a tensor.
        loose: parameters and buffers, by path, that the user put there after the model was made parallel.
    """

    tensors: list[Any]
    digest: str
    loose: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Tables:
    """What a model consists of; right while ``holds``. The tensors themselves may be replaced.

    Args:
        inner: every module of the model once, without the model itself, which would then never be freed at once.
        children: every module's table of modules, and ``kept`` its parameters and its buffers, the model's own first.
        held: what the former hold.
        names: the keys of the latter.
        places: table and key of each parameter and buffer by its path.
        layouts: the last one.
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
        """Whether ``model`` still has these modules, and they tensors of these names."""
        modules = (model, *self.inner)
        same = all(map(operator.is_, _kept(modules), self.kept))
        same = same and all(map(operator.is_, [m._modules for m in modules], self.children))
        return same and _values(self.children) == self.held and _keys(self.kept) == self.names

    def tensor(self, path: str) -> Any:
        """The parameter or buffer of a path."""
        table, key = self.places[path]
        return table[key]

    def modes(self, model: nn.Module) -> tuple[bool, ...]:
        """Which modules train."""
        return model.training, *[module.training for module in self.inner]

    @property
    def layout(self) -> Layout:
        """The layout of the model as it is now."""
        tensors = _values(self.kept)
        if not self.layouts or not all(map(operator.is_, tensors, self.layouts[0].tensors)):
            self.layouts[:] = [_layout(tensors, self.places)]
        return self.layouts[0]

    def meet(self, guards: Guards, model: nn.Module) -> bool:
        """Whether ``model`` is as it was when a program was captured from it."""
        binding = self.bindings.get(guards)
        if binding is not None and binding.is_unchanged():
            return not any(condition.difference(model) for condition in guards.conditions)
        if (binding is not None and binding.holds_other_data()) or guards.difference(model) is not None:
            return False
        self.bindings[guards] = guards.bind(model)
        return True

    @property
    def parameters(self) -> list[Tensor]:
        """Every parameter once."""
        found = {id(p): p for table in self.kept[::2] for p in table.values()}
        found.pop(id(None), None)
        return list(found.values())


def tables(model: nn.Module) -> Tables:
    """The tables of ``model`` as it is now."""
    known: Tables | None = model.__dict__.get(_KEPT_AS)
    if known is None or not known.holds(model):
        known = model.__dict__[_KEPT_AS] = _tables(model)
    return known


def without_tables(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a model that a copy of it takes over."""
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
    held = [(path, t) for path, t in zip(places, tensors, strict=True) if t is not None and is_dense(t)]
    said = [
        (path, first.setdefault(id(t), path), tuple(t.shape), t.placements if isinstance(t, DTensor) else None)
        for path, t in held
    ]
    loose = tuple(path for path, t in held if not is_placed(t))
    return Layout(tensors, hashlib.blake2b(repr(said).encode(), digest_size=16).hexdigest(), loose)


def _kept(modules: Any) -> list[Table]:
    return [table for module in modules for table in (module._parameters, module._buffers)]


def _values(tables: tuple[Table, ...]) -> list[Any]:
    return [value for table in tables for value in table.values()]


def _keys(tables: tuple[Table, ...]) -> list[str]:
    return [key for table in tables for key in table]


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, by path, in torch's order."""
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
