"""Draw the model as a collapsible tree of modules, with pictures of the specs of weights and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from autopar.plans.layers import Layer, action_text, collective_text, layers
from autopar.plans.record import PlanRecord
from autopar.plans.report.cuts import describe, picture
from autopar.plans.report.markup import number, rows, tag
from autopar.plans.table import seconds, size


@dataclass
class Module:
    """A module of the model, or several equal ones, with its children."""

    name: str
    path: str
    own: Layer | None = None
    inside: dict[str, Module] = field(default_factory=dict)
    copies: list[str] = field(default_factory=list)

    def each(self) -> Iterator[Layer]:
        """Yield its own layer and those of its descendants, summed over all copies."""
        yield from () if self.own is None else (self.own,)
        for child in self.inside.values():
            yield from child.each()

    def absorb(self, other: Module) -> None:
        """Merge an equal module into this one."""
        self.copies += other.copies
        self.count(other)

    def count(self, other: Module) -> None:
        if self.own is not None and other.own is not None:
            self.own.add(other.own)
        for mine, its in zip(self.inside.values(), other.inside.values(), strict=True):
            mine.count(its)

    def kind(self) -> tuple[object, ...]:
        """A key that is equal for modules that differ only in their number."""
        own = self.own.alike()[1:] if self.own else ()
        return (*own, *((c.name, c.kind(), len(c.copies)) for c in self.inside.values()))


def model_tree(plan: PlanRecord) -> str:
    """Draw every module. Equal layers are merged and list their numbers."""
    root = Module(plan.model, "")
    for path, layer in layers(plan).items():
        at = root
        for i, part in enumerate(parts := path.split(".") if path else []):
            at = at.inside.setdefault(part, Module(part, ".".join(parts[: i + 1]), copies=[part]))
        at.own = layer
    _fold(root)
    return tag("div", _drawn(plan, root, opened=True), class_="tree")


def _fold(module: Module) -> None:
    """Merge equal numbered children."""
    for child in module.inside.values():
        _fold(child)
    kept: dict[object, Module] = {}
    for name, child in module.inside.items():
        key = child.kind() if name.isdecimal() else name
        if key in kept:
            kept[key].absorb(child)
        else:
            kept[key] = child
    module.inside = {c.name: c for c in kept.values()}


def numbers(copies: list[str]) -> str:
    """Return a text such as ``0–4, 7``."""
    found: list[list[int]] = []
    for n in map(int, copies):
        if found and n == found[-1][-1] + 1:
            found[-1][1:] = [n]
        else:
            found.append([n])
    return ", ".join("–".join(map(str, run)) for run in found)


def _drawn(plan: PlanRecord, module: Module, *, opened: bool = False) -> str:
    many = len(module.copies) > 1
    name = f"{numbers(module.copies)}" if many else module.name
    times = tag("span", f"× {len(module.copies)}", class_="times") if many else ""
    label = tag("span", tag("b", escape(name)), " ", times, class_="name")
    summary = tag("summary", label, _pictures(plan, module), _figures(module))
    body = _details(plan, module) + "".join(_drawn(plan, c) for c in module.inside.values())
    return f"<details{' open' if opened else ''}>{summary}{tag('div', body, class_='inside')}</details>"


def _pictures(plan: PlanRecord, module: Module) -> str:
    """Draw its weights, an arrow, and its output."""
    if module.own is None:
        return ""
    drawn = [_weight_picture(plan, module, attribute) for attribute in module.own.weights]
    output = plan.specs.get(module.path)
    made = [tag("span", "→", class_="arrow", aria_hidden="true"), picture(output, plan.mesh)] if output else []
    return tag("span", *drawn[:4], *made, class_="cuts")


def _weight_picture(plan: PlanRecord, module: Module, attribute: str) -> str:
    name = f"{module.path}.{attribute}" if module.path else attribute
    shape = plan.facts.shapes[name][0] if plan.facts and name in plan.facts.shapes else ()
    return picture(plan.specs[name], plan.mesh, shape)


def _figures(module: Module) -> str:
    found = list(module.each())
    compute, sent = sum(layer.compute_s for layer in found), sum(layer.communication_s for layer in found)
    weights, held = sum(layer.weight_bytes for layer in found), sum(layer.held_bytes for layer in found)
    each = "all copies together, " if len(module.copies) > 1 else ""
    time = f"{each}forward and backward: {seconds(compute)} of ops + {seconds(sent)} of collectives"
    memory = f"{each}on a device: {size(weights)} of parameters + {size(held)} kept for the backward"
    texts = number(seconds(compute + sent), time), number(size(weights + held), memory)
    return tag("span", *texts, class_="figures")


def _details(plan: PlanRecord, module: Module) -> str:
    """List its own weights, output, what is kept, and collectives."""
    own = module.own
    if own is None:
        return ""
    body = []
    for attribute, spec in own.weights.items():
        name = f"{module.path}.{attribute}" if module.path else attribute
        shape, dtype = plan.facts.shapes.get(name, ((), "")) if plan.facts else ((), "")
        said = describe(plan.specs[name], plan.mesh, shape)
        held = plan.parameters[name]
        local = list(plan.specs[name].local_shape(shape, plan.mesh)) if len(shape) == plan.specs[name].ndim else "?"
        body.append(
            [
                escape(attribute),
                f"{dtype}{list(shape)}",
                number(spec, said),
                number(size(held), f"local shape {local} x bytes of {dtype} = {held:,} B"),
            ]
        )
    listed = rows(["weight", "global", "spec", "per device"], body, "weights") if body else ""
    notes = []
    if own.activation:
        notes.append(f"output {own.activation}")
    if own.actions:
        notes.append(f"for the backward: {action_text(own.actions)}, {size(own.held_bytes)}")
    if own.collectives:
        notes.append(f"sends: {collective_text(own.collectives)} in {seconds(own.communication_s)}")
    return tag("p", escape("; ".join(notes))) * bool(notes) + listed
