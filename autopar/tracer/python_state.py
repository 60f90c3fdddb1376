"""Plain Python data that a forward changes: counters, lists and caches in modules, classes and the user's files.

A captured program keeps the values from its capture. If a forward only writes such data, a notice is enough; if it also
computes with them, the second call would need another program.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopar._torch import TorchDispatchMode
from autopar.attributes import MISSING, MUTABLE_CONTAINERS, add_items
from autopar.bindings import LONGEST
from autopar.guards import View
from autopar.tracer.blame import is_installed, is_ours

_DATA = (bool, int, float, complex, str, bytes, type(None))
_CACHED = type(cache(len))
_SHORT = 60
_OF_MODULES = frozenset(vars(nn.Module())) | {"training"}


@dataclass(frozen=True)
class Place:
    """A name that holds plain data, in a module, a class or a file; ``by_library`` if the user did not write it."""

    owner: Any
    name: str
    text: str
    by_library: bool

    def held(self) -> Any:
        return vars(self.owner).get(self.name, MISSING)

    def assign(self, value: Any) -> None:
        if value is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


@dataclass(frozen=True)
class Held:
    """What a place held: the object, its contents if it is a container, and an image to compare it by."""

    value: Any
    content: Any
    image: Any


@dataclass(frozen=True)
class Change:
    """A change by a forward of the plain data at a place."""

    place: Place
    old: Held
    new: Held

    @property
    def verb(self) -> str:
        return "is set" if isinstance(self.new.value, Tensor) else "changes"

    def __str__(self) -> str:
        return f"{_text(self.old)} becomes {_text(self.new)}"


_NOTHING = Held(MISSING, MISSING, MISSING)
State = dict[tuple[int, str], tuple[Place, Held]]


def plain_state(model: nn.Module) -> State:
    """Return every name that the forward of ``model`` could change without torch noticing, with its value."""
    found: State = {}
    for path, module in model.named_modules():
        _add(found, module, f"{path}." if path else "", not is_users_file(type(module).__module__))
    for kind in _classes(model):
        _add(found, kind, f"{kind.__name__}.", not is_users_file(kind.__module__))
    for file in _files(model):
        _add(found, file, "", not is_users_file(file.__name__))
    return found


def _classes(model: nn.Module) -> Iterable[type]:
    """Return the classes of ``model``, and those in the user's files."""
    files = [vars(file).values() for file in _files(model) if is_users_file(file.__name__)]
    own = [k for values in files for k in values if isinstance(k, type) and is_users_file(k.__module__)]
    return dict.fromkeys([*own, *(k for m in model.modules() for k in type(m).__mro__ if not _is_of_torch(k))])


def _files(model: nn.Module) -> Iterable[ModuleType]:
    """Return the files that define the model's classes and the functions that it holds, and what the user's own files
    import of each other."""
    made = [x for m in model.modules() for x in (*type(m).__mro__, *vars(m).values())]
    found: dict[str, ModuleType] = {}
    waiting: list[Any] = [x for x in made if isinstance(x, (type, FunctionType)) and not _is_of_torch(x)]
    while waiting:
        x = waiting.pop()
        name = _module_name(x)
        if name in found or (file := sys.modules.get(name)) is None:
            continue
        found[name] = file
        if is_users_file(name):
            others = vars(file).values()
            waiting += [
                o for o in others if isinstance(o, (type, FunctionType, ModuleType)) and is_users_file(_module_name(o))
            ]
    return found.values()


def _module_name(x: Any) -> str:
    return x.__name__ if isinstance(x, ModuleType) else x.__module__


def _add(found: State, owner: Any, prefix: str, by_library: bool) -> None:
    for name, value in vars(owner).items():
        place = Place(owner, name, prefix + name, by_library)
        if isinstance(value, (*_DATA, *MUTABLE_CONTAINERS, tuple, Tensor)):
            if name not in _OF_MODULES and not name.startswith("__"):
                found[id(owner), name] = place, _held(value)
        elif _is_users_object(value) and (id(value), "") not in found:
            found[id(value), ""] = place, _NOTHING
            _add(found, value, f"{place.text}.", by_library)


def _is_users_object(value: Any) -> bool:
    return is_users_file(type(value).__module__) and hasattr(value, "__dict__") and not isinstance(value, nn.Module)


def _held(value: Any) -> Held:
    content = copy.copy(value) if isinstance(value, MUTABLE_CONTAINERS) and len(value) <= LONGEST else value
    return Held(value, content, View(identity=True)(value))


def changed(before: State, after: State) -> Mapping[str, Change]:
    """Return what the forward changed, under the names that the user gave.

    A library is assumed to know what it does with its own data, so only the numbers in its modules are included.
    """
    found = _changed(before, after)
    return {c.place.text: c for c in found if not c.place.by_library or _is_number_of_module(c)}


def _changed(before: State, after: State) -> list[Change]:
    names = [k for k in after if k not in before or before[k][1].image != after[k][1].image]
    return [Change(after[k][0], before[k][1] if k in before else _NOTHING, after[k][1]) for k in names]


def _is_number_of_module(change: Change) -> bool:
    numbers = (bool, int, float)
    both = isinstance(change.old.value, numbers) and isinstance(change.new.value, numbers)
    return both and isinstance(change.place.owner, nn.Module)


@contextlib.contextmanager
def restored_state(model: nn.Module) -> Iterator[None]:
    """Restore afterwards what the forward changes in the body: all of the user's data, and a library's data if it holds
    tensors of a trace, which nothing else can use."""
    before = plain_state(model)
    cached = [(f, f.cache_info().currsize) for f in _cached_functions(model)]
    try:
        yield
    finally:
        for change in _changed(before, plain_state(model)):
            if not change.place.by_library or tensors_in([change]):
                _restore_content(change.old)
                change.place.assign(change.old.value)
        for function, size in cached:
            if function.cache_info().currsize > size:
                function.cache_clear()


class DependencyRecorder(TorchDispatchMode):
    """Records which tensors depend on ``roots`` while a forward runs."""

    def __init__(self, roots: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = {id(t): t for t in roots}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if any(id(x) in self._found for x in tree_leaves((args, kwargs))):
            self._found |= {id(x): x for x in tree_leaves((made, args if func._schema.is_mutable else ()))}
        return made

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._found


def tensors_in(changes: Iterable[Change]) -> list[Tensor]:
    return [x for change in changes for x in tree_leaves(change.new.content) if isinstance(x, Tensor)]


def _cached_functions(model: nn.Module) -> list[Any]:
    """Return functions under ``functools.cache``, in files and in classes."""
    return [f for owner in (*_files(model), *_classes(model)) for f in vars(owner).values() if isinstance(f, _CACHED)]


def _restore_content(held: Held) -> None:
    """Restore the contents of a container."""
    if isinstance(held.value, MUTABLE_CONTAINERS) and held.content is not held.value:
        content = copy.copy(held.content)
        held.value.clear()
        add_items(held.value, content)


def _text(held: Held) -> str:
    """Return a short description of a value; values in a trace have no content worth printing."""
    if isinstance(held.value, MUTABLE_CONTAINERS):
        if not any(isinstance(x, Tensor) for x in tree_leaves(held.content)) and len(repr(held.content)) < _SHORT:
            return repr(held.content)
        return f"a {type(held.value).__name__} of {len(held.content)}"
    if isinstance(held.value, Tensor):
        return f"a tensor {tuple(held.value.shape)}"
    return repr(held.value)[:_SHORT]


def _is_of_torch(x: Any) -> bool:
    return x.__module__.partition(".")[0] in ("torch", "builtins", "autopar")


@cache
def is_users_file(name: str) -> bool:
    """Whether a module, by the name under which it was imported, is the user's own."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and not is_installed(path := Path(file).resolve()) and not is_ours(path)
