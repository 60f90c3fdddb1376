"""Constraints by the user: which names a glob matches, and which specs it forces on them."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.errors import ConstraintError, SpecError
from autopar.ir import Graph, Input, Node, Output, Value
from autopar.mesh import Mesh
from autopar.planner.problem.styles import LAYER_STYLES, STYLES, is_style, style_spec
from autopar.sharding import ShardingSpec

PARTIAL_HINT = "a stored tensor is whole or cut, never partial: leave out the P."


@dataclass(frozen=True)
class Forced:
    """Resolved constraints: the spec of placeholders by node, of outputs by name, and of values inside the graph."""

    placeholders: Mapping[str, ShardingSpec]
    outputs: Mapping[str, ShardingSpec]
    values: Mapping[Value, ShardingSpec]


def resolve(graph: Graph, mesh: Mesh, constraints: Mapping[str, str], aliases: Mapping[str, str]) -> Forced:
    """Expand the globs of ``constraints`` over the graph.

    Raises:
        ConstraintError: a glob matches nothing, two constraints contradict each other, or no DTensor can have the spec.
        SpecError: a spec is neither a style nor readable, or does not fit.
    """
    if not constraints:
        return Forced({}, {}, {})
    names = constrained_names(graph, aliases)
    chosen: dict[tuple[str, object], tuple[ShardingSpec, str]] = {}
    for pattern, text in constraints.items():
        for name, spec in _specs_of(graph, mesh, names, pattern, text).items():
            target = names[name]
            spec.check(target.ndim, mesh, name)
            if spec.partial:
                raise ConstraintError(f"The constraint on {name} is partial.", found=str(spec), hint=PARTIAL_HINT)
            _require_placements(graph, mesh, name, target, spec)
            earlier = chosen.get(target.key)
            if earlier is not None and earlier[0] != spec:
                raise ConstraintError(
                    f"Two constraints contradict each other on {name}.",
                    found=f"{earlier[1]!r} wants {earlier[0]}, {pattern!r} wants {spec}" + _tie_note(name, aliases),
                    hint="keep one of them; tied parameters are one tensor and take one spec.",
                )
            chosen[target.key] = (spec, pattern)
    return Forced(
        {str(k): s for (kind, k), (s, _) in chosen.items() if kind == "placeholder"},
        {str(k): s for (kind, k), (s, _) in chosen.items() if kind == "output"},
        {k: s for (kind, k), (s, _) in chosen.items() if kind == "value" and isinstance(k, Value)},
    )


def _require_placements(graph: Graph, mesh: Mesh, name: str, target: _Target, spec: ShardingSpec) -> None:
    """Reject specs that no DTensor can have.

    Users hold DTensors, whose placements can express decreasing order of axes on a dim only for even shards.
    """
    kind, at = target.key
    if kind == "value" or (kind == "placeholder" and graph.input_of[str(at)].kind == "input"):
        return
    for dim, axes in enumerate(spec.dims):
        if list(axes) != sorted(axes) and target.shape[dim] % prod(mesh.shape[a] for a in axes):
            raise ConstraintError(
                f"No DTensor has the spec of the constraint on {name}.",
                found=f"{spec} on mesh {mesh}, dim {dim} of size {target.shape[dim]}",
                hint="write the axes in increasing order, as in S01, or choose a size that they divide.",
            )


def _parsed(pattern: str, text: str) -> ShardingSpec:
    try:
        return ShardingSpec.parse(text)
    except SpecError as error:
        if text[:1] in ("R", "S", "-"):
            raise
        near = difflib.get_close_matches(text.partition(" ")[0], STYLES, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise SpecError(
            f"The constraint on {pattern!r} is neither a spec nor a style.",
            found=repr(text),
            hint=f"{meant}Styles are {', '.join(STYLES)}; a spec has {error.hint}",
        ) from None


def _specs_of(
    graph: Graph, mesh: Mesh, names: Mapping[str, _Target], pattern: str, text: str
) -> dict[str, ShardingSpec]:
    """Return the spec that a constraint forces on each name it matches."""
    styled = is_style(text)
    spec = ShardingSpec.replicated(0) if styled else _parsed(pattern, text)
    found = matches(pattern, names)
    if not found:
        raise _names_nothing(pattern, names)
    if not styled:
        return dict.fromkeys([m for m in found if names[m].ndim == spec.ndim] or found[:1], spec)
    if text.split(maxsplit=1)[0] in LAYER_STYLES:
        found = list(dict.fromkeys([*found, *_parameters_of(graph, names, found)]))
    return {
        m: style_spec(text, names[m].shape, mesh, graph, _parameter(graph, names[m]), m.rpartition(".")[0])
        for m in found
    }


def _parameters_of(graph: Graph, names: Mapping[str, _Target], modules: Sequence[str]) -> list[str]:
    """Return the parameters of the modules themselves, not of the modules inside them."""
    asked = {m for m in modules if names[m].key[0] == "value"}
    return [n for n, t in names.items() if n.rpartition(".")[0] in asked and _parameter(graph, t) is not None]


def _parameter(graph: Graph, target: _Target) -> str | None:
    """Return the node of ``target`` if it is a parameter."""
    kind, at = target.key
    return str(at) if kind == "placeholder" and graph.input_of[str(at)].kind == "parameter" else None


def without_constraint(
    graph: Graph, mesh: Mesh, constraints: Mapping[str, str], aliases: Mapping[str, str], name: str
) -> dict[str, str]:
    """Return the constraints on everything but ``name``. A glob that matches it is spelled out for its other
    matches."""
    names = constrained_names(graph, aliases)
    left_out = {names[n].key for n in matches(name, names)}
    kept: dict[str, str] = {}
    for pattern, text in constraints.items():
        meant = _specs_of(graph, mesh, names, pattern, text)
        if any(names[m].key in left_out for m in meant):
            kept.update({m: str(spec) for m, spec in meant.items() if names[m].key not in left_out})
        else:
            kept[pattern] = text
    return kept


def those_that_apply(graph: Graph, constraints: Mapping[str, str], aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the constraints that say something about a part of the graph that they were made for."""
    names = constrained_names(graph, aliases)

    def applies(pattern: str, text: str) -> bool:
        found = matches(pattern, names)
        return bool(found) and (is_style(text) or any(names[m].ndim == _parsed(pattern, text).ndim for m in found))

    return {pattern: text for pattern, text in constraints.items() if applies(pattern, text)}


def matches(pattern: str, names: Mapping[str, object]) -> list[str]:
    """Return the names that a glob matches."""
    try:
        return [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]
    except re.error:  # brackets that hold no range of characters
        return []


@dataclass(frozen=True)
class _Target:
    key: tuple[str, object]
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)


def _tie_note(name: str, aliases: Mapping[str, str]) -> str:
    tied = [a for a, c in aliases.items() if name in (a, c)]
    return f" ({tied[0]} is tied to {aliases[tied[0]]})" if tied else ""


def constrained_names(graph: Graph, aliases: Mapping[str, str]) -> dict[str, _Target]:
    """Return everything that a constraint can name."""
    names: dict[str, _Target] = {}
    for module, node in module_outputs(graph).items():
        names[module] = _Target(("value", Value(node.name)), _shape(node))
    for node in graph.nodes:
        if node.op != "placeholder" and node.outputs and node.outputs[0] is not None:
            names.setdefault(node.name, _Target(("value", Value(node.name)), _shape(node)))
    for inp in graph.inputs:
        shape = _shape(graph.by_name[inp.node])
        if inp.kind in ("parameter", "buffer"):
            names[inp.name] = _Target(("placeholder", inp.node), shape)
        elif inp.kind == "input":
            names[f"input:{inp.name}"] = _Target(("placeholder", inp.node), shape)
    for out in graph.outputs:
        if out.kind == "output":
            names[f"output:{out.name}"] = _Target(("output", out.name), graph.meta(out.value).shape)
    for name, end in exchanged(graph).items():
        key, value = (
            (("placeholder", end.node), Value(end.node))
            if isinstance(end, Input)
            else (("output", end.name), end.value)
        )
        names[name] = _Target(key, graph.meta(value).shape)
    for alias, name in aliases.items():
        if name in names:
            names[alias] = names[name]
    return names


def exchanged(graph: Graph) -> dict[str, Input | Output]:
    """Return what a pipeline stage exchanges with its neighbours by its name: ``received:NAME``, ``sent:NAME``, and
    with ``.grad`` the gradients of both."""
    found: dict[str, Input | Output] = {}
    for i in graph.inputs:
        if graph.comes_from_stage(i):
            found[f"received:{i.name}" if i.kind == "received" else f"sent:{i.name}.grad"] = i
    for o in graph.outputs:
        if graph.goes_to_stage(o):
            found[f"sent:{o.name}" if o.kind == "sent" else f"received:{o.name.removeprefix('input:')}.grad"] = o
    return found


def _shape(node: Node) -> tuple[int, ...]:
    meta = node.outputs[0]
    return meta.shape if meta is not None else ()


def module_outputs(graph: Graph) -> dict[str, Node]:
    """Return the node that makes the result of each module: the last one of its forward."""
    last: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node.phase != "forward" or not node.module:
            continue
        if not node.outputs or node.outputs[0] is None:
            continue
        parts = node.module.split(".")
        for i in range(1, len(parts) + 1):
            last[".".join(parts[:i])] = node
    return last


def _names_nothing(pattern: str, names: Mapping[str, object]) -> ConstraintError:
    near = difflib.get_close_matches(pattern, list(names), n=4, cutoff=0.4)
    return ConstraintError(
        f"{pattern!r} matches no name in the model.",
        found=f"{len(names)} names, none of them a match",
        hint=f"the nearest names are {', '.join(near)}." if near else "see plan.specs for the names.",
    )
