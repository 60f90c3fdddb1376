"""A plan by the layers of the model: what each module's ops cost, hold and send, alike layers together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.plans.record import PlanRecord
from autopar.program import Op

REST = "(outside modules)"
WORDS = {"keep": "kept", "recompute": "recomputed", "offload": "offloaded"}


@dataclass
class Layer:
    """One module's own ops and tensors, its children's left out; or the sum of all modules that are alike.

    Args:
        name: its path; of folded ones with ``*`` for what differs.
        weights: spec of each parameter and buffer that it owns, by attribute.
        activation: spec of its output.
        actions: how many of its values are kept, recomputed and offloaded for the backward.
        collectives: launches by kind.
        compute_s, communication_s: of its ops, and of the collectives of its values and weights.
        weight_bytes, held_bytes: on a device: its parameters, and what it keeps for the backward.
        flops: of its ops on whole tensors.
        count: so many modules are in it.
    """

    name: str
    weights: dict[str, str] = field(default_factory=dict)
    activation: str = ""
    actions: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    compute_s: float = 0.0
    communication_s: float = 0.0
    weight_bytes: int = 0
    held_bytes: int = 0
    flops: float = 0.0
    count: int = 1
    members: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.compute_s + self.communication_s

    def alike(self) -> tuple[object, ...]:
        """Layers that agree in this share a row; which of them carries a bucket of collectives makes no difference."""
        return (folded(self.name), *sorted(self.weights.items()), self.activation, *sorted(self.actions))

    def add(self, other: Layer) -> None:
        """Count an alike layer in."""
        self.compute_s += other.compute_s
        self.communication_s += other.communication_s
        self.weight_bytes += other.weight_bytes
        self.held_bytes += other.held_bytes
        self.flops += other.flops
        self.count += 1
        self.members += other.members
        self.actions += other.actions
        self.collectives += other.collectives


def folded(name: str) -> str:
    """``h.3.mlp`` as ``h.*.mlp``."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def layers(plan: PlanRecord) -> dict[str, Layer]:
    """Every module that owns ops or parameters, in the order of the model's program."""
    found: dict[str, Layer] = {}

    def at(module: str) -> Layer:
        if module not in found:
            found[module] = Layer(module or REST, activation=str(plan.specs.get(module, "")), members=[module])
        return found[module]

    nodes = plan.facts.nodes if plan.facts else {}
    for node in nodes.values():
        if node.op != "placeholder":
            at(node.module).flops += node.flops
    for op in plan.program.ops:
        if op.kind != "input" and op.node in nodes:
            _count(at(nodes[op.node].module), op)
    for name, held in plan.parameters.items():
        module, _, attribute = name.rpartition(".")
        layer = at(module)
        layer.weights[attribute] = str(plan.specs[name])
        layer.weight_bytes += held
    for name, activation in plan.activations.items():
        made = name if name in nodes else name.rpartition(".")[0]
        if made in nodes:
            layer = at(nodes[made].module)
            layer.actions[activation.action] += 1
            layer.held_bytes += activation.bytes if activation.action == "keep" else 0
    return {m: layer for m, layer in found.items() if layer.seconds or layer.weights or layer.actions}


def _count(layer: Layer, op: Op) -> None:
    if op.exchanges and op.step is not None:
        layer.collectives[op.step.kind] += 1
    if op.is_collective:
        layer.communication_s += op.seconds
    else:
        layer.compute_s += op.seconds


def rows(plan: PlanRecord) -> list[Layer]:
    """One for each distinct layer; those that differ in their number alone are one."""
    merged: dict[tuple[object, ...], Layer] = {}
    for layer in layers(plan).values():
        key = layer.alike()
        if key in merged:
            merged[key].add(layer)
        else:
            merged[key] = layer
    for layer in merged.values():
        if layer.count > 1:
            layer.name = folded(layer.name)
    return list(merged.values())


def members(plan: PlanRecord) -> Iterator[tuple[str, Layer]]:
    """Every module with its distinct layer."""
    for layer in rows(plan):
        for module in layer.members:
            yield module, layer


def action_text(actions: Mapping[str, int]) -> str:
    """``kept``, or ``3 kept, 2 recomputed``."""
    said = [(n, WORDS[a]) for a in WORDS if (n := actions.get(a, 0))]
    return said[0][1] if len(said) == 1 else ", ".join(f"{n} {word}" for n, word in said)


SHORT = {
    "all_gather": "AG",
    "reduce_scatter": "RS",
    "all_reduce": "AR",
    "all_to_all": "A2A",
    "permute": "PP",
    "slice": "",
}


def collective_text(collectives: Mapping[str, int]) -> str:
    """``2 AG 1 RS``."""
    return " ".join(f"{n} {SHORT.get(k, k)}" for k, n in sorted(collectives.items()))
