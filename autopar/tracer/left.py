"""Which tensors a forward leaves in attributes of modules, and whether every call leaves them in the same way."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from autopar._torch import DynamicOutputShapeException
from autopar.attributes import CONTAINERS, MISSING, Held, Left, Place, content
from autopar.structure import Structure, flatten
from autopar.tracer.python_state import Change, Depending, _is_users, tensors_in

_OF_MODULES = frozenset(vars(nn.Module()))
Attributes = Mapping[Place, Held]
Found = list[tuple[Left, list[Tensor]]]


@dataclass(frozen=True)
class Findings:
    """What two calls, one after the other, show of the tensors that a forward leaves.

    Args:
        left: in attributes, in the same way every time.
        fixed: what depends on no data, as in caches.
        unfit: where it leaves that, or something else the second time.
        lost: names of what holds tensors that depend on data, and is none of ``left``.
    """

    left: tuple[Left, ...] = ()
    fixed: tuple[Left, ...] = ()
    unfit: frozenset[Place] = frozenset()
    lost: tuple[str, ...] = ()


class Returned(Protocol):
    """What the last call of a model changed and left."""

    @property
    def changes(self) -> Mapping[str, Change]: ...
    @property
    def left(self) -> tuple[Left, ...]: ...


def looked_through(
    flat: nn.Module, returned: Returned, inputs: Sequence[Tensor], mode: AbstractContextManager[Any]
) -> Findings:
    """Call ``flat`` twice, on fake tensors; as far as it runs on them."""
    first = returned.left
    try:
        with mode, Depending((*flat.parameters(), *flat.buffers(), *inputs)) as data:
            made = list(flat(*inputs))
            first, changes = returned.left, returned.changes
            flat(*inputs)
    except DynamicOutputShapeException:  # what a mask chooses has a shape in an export alone
        unknown = [each for each in first if each.how != "set"]
        left = tuple(each for each in first if each.how == "set")
        return Findings(left, (), frozenset(u.place for u in unknown), tuple(u.names[0] for u in unknown))
    paths = [path for each in first for path in each.value.paths]
    values = dict(zip(paths, made[len(made) - len(paths) :], strict=True))
    fixed = tuple(each for each in first if not any(values[path] in data for path in each.value.paths))
    unfit = {each.place for each in fixed} | unlike(first, returned.left)
    again = {each.place: each for each in returned.left}
    left = tuple(again[each.place] for each in first if each.place not in unfit)
    lost = [n for n, c in changes.items() if not is_part(n, left) and any(t in data for t in tensors_in([c]))]
    return Findings(left, fixed, frozenset(unfit), tuple(lost))


def is_part(name: str, left: Sequence[Left]) -> bool:
    """Whether a name is that of an attribute in which something is left, or of a part of that."""
    return any(f"{name}.".startswith(f"{n}.") for each in left for n in each.names)


def attributes(model: nn.Module) -> Attributes:
    """What the attributes of the user's modules and of torch's hold, and what is in them."""
    return {place: (value, content(value)) for place, value in _attributes(model)}


def _attributes(model: nn.Module) -> Iterator[tuple[Place, Any]]:
    for path, module in model.named_modules():
        owner = type(module).__module__
        if _is_users(owner) or owner.partition(".")[0] == "torch":
            own = ((name, value) for name, value in vars(module).items() if name not in _OF_MODULES)
            yield from (((path, name), value) for name, value in own if not _is_made_of_parameters(module, name))


def _is_made_of_parameters(module: nn.Module, name: str) -> bool:
    """As ``weight`` is of ``weight_g`` and ``weight_v`` by ``weight_norm``, whose hook sets it in every call."""
    return any(parameter.startswith(f"{name}_") for parameter in module._parameters)


def left_in(model: nn.Module, before: Attributes, left_out: Collection[Place]) -> Found:
    """What a forward has left in attributes since ``before``."""
    own = {id(t) for t in (*model.parameters(), *model.buffers())}
    found: dict[Any, Any] = {}
    for place, value in _attributes(model):
        key = id(value) if isinstance(value, CONTAINERS) else place
        if key in found:  # a container that several modules hold is changed once
            found[key] = found[key] and _also(place, *found[key])
        elif place not in left_out:
            found[key] = _left(place, value, *before.get(place, (MISSING, MISSING)))
    return [(left, ts) for left, ts in filter(None, found.values()) if ts and not any(id(t) in own for t in ts)]


def _also(place: Place, left: Left, tensors: list[Tensor]) -> tuple[Left, list[Tensor]]:
    return dataclasses.replace(left, also=(*left.also, place)), tensors


def _left(place: Place, value: Any, held: Any, old: Any) -> tuple[Left, list[Tensor]] | None:
    if value is not held:
        return _as_outputs(place, "set", value)
    if not isinstance(value, CONTAINERS):
        return None
    if isinstance(value, dict):
        new = {k: v for k, v in value.items() if k not in old or old[k] is not v}
        return _as_outputs(place, "add" if old.keys() <= value.keys() else "fill", new if new else {})
    start = list(value)[: len(old)]
    if all(a is b for a, b in zip(start, old, strict=False)) and len(start) == len(old):
        return _as_outputs(place, "add", list(value)[len(old) :])
    return _as_outputs(place, "fill", list(value))


def _as_outputs(place: Place, how: Any, value: Any) -> tuple[Left, list[Tensor]] | None:
    tensors, structure = flatten(value)
    if structure.dropped:
        return None
    name = "self." + ".".join(filter(None, place))
    alone = isinstance(value, Tensor)
    paths = tuple(name if alone else f"{name}.{path}" for path in structure.paths)
    return Left(place, how, dataclasses.replace(structure, paths=paths)), tensors


@contextlib.contextmanager
def same_objects(model: nn.Module) -> Iterator[None]:
    """An export leaves every module a container of its own where several had one."""
    held = [(vars(m), name, v) for m in model.modules() for name, v in vars(m).items() if isinstance(v, CONTAINERS)]
    try:
        yield
    finally:
        for attributes, name, value in held:
            if name in attributes and name not in _OF_MODULES:
                attributes[name] = value


def unlike(first: Sequence[Left], second: Sequence[Left]) -> set[Place]:
    """Places in which the second call leaves something else than the first."""
    again = {left.place: left.value for left in second}
    return {left.place for left in first if not _alike(left.value, again.get(left.place))}


def _alike(a: Structure, b: Structure | None) -> bool:
    return b is not None and a.paths == b.paths and repr(a.plain) == repr(b.plain)
