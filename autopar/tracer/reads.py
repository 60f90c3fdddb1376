"""Records which attributes, options and functions a forward reads during capture, for the program's guards.

Reads of attributes are observed through ``__getattribute__`` of modules and of the objects that they hold. Globals and
closures cannot be observed, so those named in the code of functions that were read count as read.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from torch import Tensor, nn

from autopar.attributes import CONTAINERS, MISSING
from autopar.bindings import (
    DATA,
    DEEPEST,
    LONGEST,
    AttributeKey,
    Read,
    Scope,
    Step,
    instance_dict,
    is_watched,
    look_up,
    table_key,
)
from autopar.errors import CaptureError
from autopar.guards import BY_IDENTITY
from autopar.tracer.blame import is_installed, is_ours
from autopar.tracer.hooks import OF_ALL_MODULES, hooks_of_all_modules
from autopar.tracer.known_values import KnownValues

HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"})
_OF_MODULES = frozenset({*vars(nn.Module()), *vars(nn.Module)}) - HOOKS - {"_modules", "forward"}
"""torch's own attributes, and what a program's key covers already: parameters, buffers and modes."""
_OF_ROOT = HOOKS | {"forward"}
"""The root's own hooks and a replaced forward, which run around the program at every call."""
_COMPARED = (*DATA, *CONTAINERS, Tensor, FunctionType)

_ALL_MODULES = Scope("torch.nn.modules.module", hooks_of_all_modules)

_current: ContextVar[Recorder | None] = ContextVar("current", default=None)


class Recorder:
    """Collects what the forward of a model reads; the model is a copy of the user's on fake tensors.

    Args:
        known: answers the forward's requests for values of buffers.
    """

    def __init__(self, model: nn.Module, known: KnownValues) -> None:
        self.known = known
        self._paths: dict[int, tuple[str, tuple[Step, ...]]] = {}
        for path, module in model.named_modules():
            self._paths[id(vars(module))] = path, ()
        self._seen: dict[AttributeKey, Read] = {}
        self._held: list[Any] = []
        self._parameters = frozenset(map(id, model.parameters()))
        self._functions = {f.__code__: f for f in _functions_of(type(model).forward)}
        self._kinds = dict.fromkeys(k for m in model.modules() for k in type(m).__mro__ if _is_of_user(k))
        self._patched: dict[type, Any] = {}

    def reads(self, changed: Collection[AttributeKey], equal: Mapping[str, Iterable[str]]) -> list[Read]:
        """Return what was read.

        Args:
            changed: attributes that the forward itself changes, whose changes are not visible outside.
            equal: modules that were not run, by the equal module that was.
        """
        named = _named_by(self._functions.values(), self._kinds)
        found = [read for place, read in (*self._seen.items(), *named.items()) if place not in changed]
        for path, others in equal.items():
            within = [r for r in found if isinstance(r.root, str) and (r.root == path or r.root.startswith(f"{path}."))]
            found += [replace(r, root=other + str(r.root)[len(path) :]) for other in others for r in within]
        return [*found, *(Read(_ALL_MODULES, (), name) for name in OF_ALL_MODULES)]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Observe reads while the forward runs."""
        self._patch(nn.Module)
        try:
            yield
        finally:
            for kind, original in self._patched.items():
                _restore(kind, original)
            self._patched.clear()

    def note(self, owner: Any, name: str, value: Any) -> None:
        key = table_key(owner)
        path = self._paths.get(key)
        if path is None or (key, name) in self._seen:
            return
        root, steps = path
        if isinstance(owner, nn.Module) and (name in _OF_MODULES or (name in _OF_ROOT and not root and not steps)):
            return
        read = self._seen[key, name] = Read(root, steps, name)
        if value is MISSING:
            _refuse_unregistered(owner, read, self._parameters)
            return
        for function in _functions_of(look_up(owner, name).value):  # a property's functions do not show in its value
            self._functions.setdefault(function.__code__, function)
        self._follow(value, root, (*steps, ("attribute", name)), 0)

    def _follow(self, value: Any, root: str, steps: tuple[Step, ...], depth: int) -> None:
        """Observe the objects that a value holds, and record its functions."""
        for function in _functions_of(value):
            self._functions.setdefault(function.__code__, function)
        if isinstance(value, CONTAINERS):
            self._follow_items(value, root, steps, depth)
        elif isinstance(value, functools.partial):
            self._follow(value.func, root, (*steps, ("attribute", "func")), depth + 1)
        elif not isinstance(value, (*DATA, *BY_IDENTITY, Tensor, MethodType)):
            if self._paths.setdefault(table_key(value), (root, steps)) == (root, steps):
                self._held.append(value)  # keeps another object from reusing its identity
            self._patch(type(value))

    def _follow_items(self, value: Any, root: str, steps: tuple[Step, ...], depth: int) -> None:
        if depth == DEEPEST or len(value) > LONGEST or isinstance(value, (set, frozenset)):
            return
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            self._follow(item, root, (*steps, ("item", key)), depth + 1)

    def _patch(self, kind: type) -> None:
        if kind in self._patched or (kind is not nn.Module and (issubclass(kind, nn.Module) or not is_watched(kind))):
            return
        original = vars(kind).get("__getattribute__", MISSING)
        setattr(kind, "__getattribute__", _noting(cast(Any, kind.__getattribute__), self))  # noqa: B010
        self._patched[kind] = original


def _refuse_unregistered(owner: Any, read: Read, registered: Collection[int]) -> None:
    """Refuse a trained parameter of a module in a plain list: the program would hold it as a constant.

    Raises:
        CaptureError: the module has a parameter that is trained but not registered.
    """
    parameter = owner._parameters.get(read.name) if isinstance(owner, nn.Module) and read.steps else None
    if parameter is not None and parameter.requires_grad and id(parameter) not in registered:
        raise CaptureError(
            f"The parameter {read} is trained but does not belong to the model.",
            found=f"{type(owner).__name__} in a plain attribute, which model.parameters() does not search",
            hint="keep modules in nn.ModuleList or nn.ModuleDict; call requires_grad_(False) on what is not trained.",
        )


def _restore(kind: type, original: Any) -> None:
    if original is MISSING:
        del kind.__getattribute__
    else:
        setattr(kind, "__getattribute__", original)  # noqa: B010


def _noting(original: Callable[[Any, str], Any], recorder: Recorder) -> Callable[[Any, str], Any]:
    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807
        try:
            value = original(self, name)
        except AttributeError:
            if not name.startswith("__"):
                recorder.note(self, name, MISSING)
            raise
        if not name.startswith("__"):
            recorder.note(self, name, value)
        return value

    return __getattribute__


def _functions_of(value: Any) -> Iterator[FunctionType]:
    """Yield the user's functions that using a value runs."""
    if isinstance(value, property):
        yield from _functions_of(value.fget)
    elif isinstance(value, functools.cached_property):
        yield from _functions_of(value.func)
    elif isinstance(value, (MethodType, staticmethod, classmethod)):
        yield from _functions_of(value.__func__)
    elif isinstance(value, FunctionType) and _is_users(value.__code__):
        yield value


def _is_users(code: CodeType) -> bool:
    file = Path(code.co_filename)
    return not is_installed(file) and not is_ours(file.resolve())


def _named_by(functions: Iterable[FunctionType], kinds: Iterable[type]) -> dict[AttributeKey, Read]:
    """Return globals and closure variables named in the code of functions, and of the functions that these call.

    Args:
        kinds: classes whose attributes functions can reach without naming the class, by ``type(self)``.
    """
    found: dict[AttributeKey, Read] = {}
    waiting, done, attributes = list(functions), set[CodeType](), set[str]()
    while waiting:
        function = waiting.pop()
        if function.__code__ in done:
            continue
        done.add(function.__code__)
        names, of_objects = _names_in(function.__code__)
        attributes |= of_objects
        variables = function.__globals__
        for name in names:
            read = Read(Scope("", variables.get), (), name)
            waiting += _note(found, id(variables), read, variables.get(name, MISSING), of_objects)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            read = Read(Scope(function.__qualname__, functools.partial(_in_cell, cell)), (), name)
            waiting += _note(found, id(cell), read, _in_cell(cell, name, MISSING), of_objects)
    for kind in kinds:
        _note_attributes(found, kind, kind.__qualname__, attributes)
    return found


def _in_cell(cell: Any, name: str, default: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet set
        return default


def _note(
    found: dict[AttributeKey, Read], table: int, read: Read, value: Any, attributes: AbstractSet[str]
) -> list[FunctionType]:
    """Count a variable as read, and also the attributes that a function reads of an object, a class or a file.

    Returns:
        Functions that may run.
    """
    foreign = isinstance(value, (type, ModuleType)) and not _is_of_user(value)
    if (table, read.name) in found or value is MISSING or foreign:
        return []
    functions = list(_functions_of(value))
    if isinstance(value, _COMPARED) or _attributes_of(value) is not None:
        found[table, read.name] = read
    if not isinstance(value, _COMPARED):
        functions += _note_attributes(found, value, read.name, attributes)
    return functions


def _note_attributes(
    found: dict[AttributeKey, Read], owner: Any, text: str, attributes: AbstractSet[str]
) -> list[FunctionType]:
    held = _attributes_of(owner) or {}
    functions: list[FunctionType] = []
    for name in sorted(attributes & held.keys()):
        if isinstance(held[name], _COMPARED):
            found[table_key(owner), name] = Read(Scope(text, functools.partial(_attribute, owner)), (), name)
            functions += _functions_of(held[name])
    return functions


def _attributes_of(value: Any) -> Mapping[str, Any] | None:
    return vars(value) if isinstance(value, (type, ModuleType)) else instance_dict(value)


def _attribute(owner: Any, name: str, default: Any) -> Any:
    return (_attributes_of(owner) or {}).get(name, default)


def _is_of_user(value: Any) -> bool:
    """Whether a file or class is the user's own, which includes code typed at a prompt."""
    module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
    file = getattr(module, "__file__", None)
    if file is None:
        return getattr(module, "__name__", "") == "__main__"
    return not is_installed(Path(file).resolve()) and not is_ours(Path(file).resolve())


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the global names that code reads, including functions inside it, and names of attributes."""
    names: list[str] = []
    attributes: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.append(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            inner_names, inner_attributes = _names_in(inner)
            names += inner_names
            attributes |= inner_attributes
    return tuple(dict.fromkeys(names)), frozenset(attributes)


@contextlib.contextmanager
def recording(model: nn.Module, copied: nn.Module) -> Iterator[Recorder]:
    """Record what forwards of ``copied``, a copy of ``model``, read; each runs under ``watched_reads``."""
    recorder = Recorder(copied, KnownValues(model, copied))
    token = _current.set(recorder)
    try:
        yield recorder
    finally:
        _current.reset(token)


@contextlib.contextmanager
def watched_reads() -> Iterator[None]:
    """Observe reads for the recorder of this capture while a forward runs."""
    recorder = _current.get()
    if recorder is None:
        yield
        return
    recorder.known.begin()
    with recorder.watching():
        yield


def answering() -> contextlib.AbstractContextManager[None]:
    """Answer requests for values of tensors while forwards run, if buffers determine the values."""
    recorder = _current.get()
    return recorder.known.answering() if recorder is not None else contextlib.nullcontext()
