"""Finds the tensors that a forward stores in attributes of modules, and whether every call stores them alike."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from autopar._torch import DynamicOutputShapeException
from autopar.attributes import MISSING, OUTPUT_CONTAINERS, AttributeOutput, Held, Place, snapshot
from autopar.structure import Structure, flatten
from autopar.tracer.python_state import Change, DependencyRecorder, is_users_file, tensors_in

_OF_MODULES = frozenset(vars(nn.Module()))
Attributes = Mapping[Place, Held]
Found = list[tuple[AttributeOutput, list[Tensor]]]


@dataclass(frozen=True)
class Findings:
    """What two calls in a row show of the tensors that a forward stores.

    Args:
        attribute_outputs: stored in attributes, alike in both calls.
        fixed: stored, but independent of data, as in caches.
        unusable: places of ``fixed``, and those in which the second call stores something else.
        lost: names of other places that hold tensors which depend on data.
    """

    attribute_outputs: tuple[AttributeOutput, ...] = ()
    fixed: tuple[AttributeOutput, ...] = ()
    unusable: frozenset[Place] = frozenset()
    lost: tuple[str, ...] = ()


class Returned(Protocol):
    """What the last call of a model changed and stored in attributes."""

    @property
    def changes(self) -> Mapping[str, Change]: ...
    @property
    def attribute_outputs(self) -> tuple[AttributeOutput, ...]: ...


def trial_calls(
    flat: nn.Module, returned: Returned, inputs: Sequence[Tensor], mode: AbstractContextManager[Any]
) -> Findings:
    """Call ``flat`` twice on fake tensors, as far as it runs on them."""
    first = returned.attribute_outputs
    try:
        with mode, DependencyRecorder((*flat.parameters(), *flat.buffers(), *inputs)) as data:
            made = list(flat(*inputs))
            first, changes = returned.attribute_outputs, returned.changes
            flat(*inputs)
    except DynamicOutputShapeException:  # a masked selection has a shape during an export only
        unknown = [each for each in first if each.how != "set"]
        outputs = tuple(each for each in first if each.how == "set")
        return Findings(outputs, (), frozenset(u.place for u in unknown), tuple(u.names[0] for u in unknown))
    paths = [path for each in first for path in each.value.paths]
    values = dict(zip(paths, made[len(made) - len(paths) :], strict=True))
    fixed = tuple(each for each in first if not any(values[path] in data for path in each.value.paths))
    unusable = {each.place for each in fixed} | unlike(first, returned.attribute_outputs)
    second = {each.place: each for each in returned.attribute_outputs}
    outputs = tuple(second[each.place] for each in first if each.place not in unusable)
    lost = [n for n, c in changes.items() if not is_part(n, outputs) and any(t in data for t in tensors_in([c]))]
    return Findings(outputs, fixed, frozenset(unusable), tuple(lost))


def is_part(name: str, outputs: Sequence[AttributeOutput]) -> bool:
    """Whether a name is that of an attribute in ``outputs``, or of a part of one."""
    return any(f"{name}.".startswith(f"{n}.") for each in outputs for n in each.names)


def attributes(model: nn.Module) -> Attributes:
    """Return the values of attributes of the user's and torch's modules, with snapshots of their contents."""
    return {place: (value, snapshot(value)) for place, value in _attributes(model)}


def _attributes(model: nn.Module) -> Iterator[tuple[Place, Any]]:
    for path, module in model.named_modules():
        owner = type(module).__module__
        if is_users_file(owner) or owner.partition(".")[0] == "torch":
            own = ((name, value) for name, value in vars(module).items() if name not in _OF_MODULES)
            yield from (((path, name), value) for name, value in own if not _is_made_of_parameters(module, name))


def _is_made_of_parameters(module: nn.Module, name: str) -> bool:
    """Whether a hook such as that of ``weight_norm`` sets the attribute in every call, from ``weight_g`` and others."""
    return any(parameter.startswith(f"{name}_") for parameter in module._parameters)


def outputs_since(model: nn.Module, before: Attributes, excluded: Collection[Place]) -> Found:
    """Return what a forward has stored in attributes since ``before``."""
    own = {id(t) for t in (*model.parameters(), *model.buffers())}
    found: dict[Any, Any] = {}
    for place, value in _attributes(model):
        key = id(value) if isinstance(value, OUTPUT_CONTAINERS) else place
        if key in found:  # a container that several modules share changes only once
            found[key] = found[key] and _also(place, *found[key])
        elif place not in excluded:
            found[key] = _new_output(place, value, *before.get(place, (MISSING, MISSING)))
    return [(output, ts) for output, ts in filter(None, found.values()) if ts and not any(id(t) in own for t in ts)]


def _also(place: Place, output: AttributeOutput, tensors: list[Tensor]) -> tuple[AttributeOutput, list[Tensor]]:
    return dataclasses.replace(output, also=(*output.also, place)), tensors


def _new_output(place: Place, value: Any, held: Any, old: Any) -> tuple[AttributeOutput, list[Tensor]] | None:
    if value is not held:
        return _as_outputs(place, "set", value)
    if not isinstance(value, OUTPUT_CONTAINERS):
        return None
    if isinstance(value, dict):
        new = {k: v for k, v in value.items() if k not in old or old[k] is not v}
        return _as_outputs(place, "add" if old.keys() <= value.keys() else "fill", new if new else {})
    start = list(value)[: len(old)]
    if all(a is b for a, b in zip(start, old, strict=False)) and len(start) == len(old):
        return _as_outputs(place, "add", list(value)[len(old) :])
    return _as_outputs(place, "fill", list(value))


def _as_outputs(place: Place, how: Any, value: Any) -> tuple[AttributeOutput, list[Tensor]] | None:
    tensors, structure = flatten(value)
    if structure.dropped:
        return None
    name = "self." + ".".join(filter(None, place))
    alone = isinstance(value, Tensor)
    paths = tuple(name if alone else f"{name}.{path}" for path in structure.paths)
    return AttributeOutput(place, how, dataclasses.replace(structure, paths=paths)), tensors


@contextlib.contextmanager
def same_objects(model: nn.Module) -> Iterator[None]:
    """Restore containers that several modules share, of which an export gives each module its own."""
    held = [
        (vars(m), name, v) for m in model.modules() for name, v in vars(m).items() if isinstance(v, OUTPUT_CONTAINERS)
    ]
    try:
        yield
    finally:
        for attributes, name, value in held:
            if name in attributes and name not in _OF_MODULES:
                attributes[name] = value


def unlike(first: Sequence[AttributeOutput], second: Sequence[AttributeOutput]) -> set[Place]:
    """Return the places in which the second call stores something else than the first."""
    values = {output.place: output.value for output in second}
    return {output.place for output in first if not _alike(output.value, values.get(output.place))}


def _alike(a: Structure, b: Structure | None) -> bool:
    return b is not None and a.paths == b.paths and repr(a.plain) == repr(b.plain)
