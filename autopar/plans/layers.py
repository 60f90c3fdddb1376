"""A plan by the layers of the model: what each module's ops cost, hold and send, with equal layers merged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.holding import ACTIONS, KEEP
from autopar.plans.record import PlanRecord
from autopar.program import Op

REST = "(outside modules)"


@dataclass
class Layer:
    """One module's own ops and tensors, without those of its children; or the sum of all modules that are alike.

    Args:
        name: its path; for merged modules with ``*`` in place of the number.
        weights: specs of its own parameters and buffers, by attribute.
        activation: spec of its output.
        actions: how many of its values are held for the backward by each action.
        collectives: launches by kind.
        compute_s, communication_s: seconds of its ops, and of the collectives of its values and weights.
        weight_bytes, held_bytes: on one device, its parameters and what it keeps for the backward.
        flops: FLOPs of its ops on global tensors.
        count: number of merged modules.
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
        """The key of a row: layers with equal keys are merged, whichever of them carries a bucket of collectives."""
        return (folded(self.name), *sorted(self.weights.items()), self.activation, *sorted(self.actions))

    def add(self, other: Layer) -> None:
        """Add the figures of an equal layer."""
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
    """Replace the numbers in a path: ``h.3.mlp`` becomes ``h.*.mlp``."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def layers(plan: PlanRecord) -> dict[str, Layer]:
    """Return every module that owns ops or parameters, in program order."""
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
            layer.held_bytes += activation.bytes if activation.action == KEEP.name else 0
    return {m: layer for m, layer in found.items() if layer.seconds or layer.weights or layer.actions}


def _count(layer: Layer, op: Op) -> None:
    if op.exchanges and op.step is not None:
        layer.collectives[op.step.kind] += 1
    if op.is_collective:
        layer.communication_s += op.seconds
    else:
        layer.compute_s += op.seconds


def rows(plan: PlanRecord) -> list[Layer]:
    """Return the distinct layers. Layers that differ only in their number are merged."""
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
    """Yield every module with its distinct layer."""
    for layer in rows(plan):
        for module in layer.members:
            yield module, layer


def action_text(actions: Mapping[str, int]) -> str:
    """Return a text such as ``kept`` or ``3 kept, 2 recomputed``."""
    said = [(n, way.text) for name, way in ACTIONS.items() if (n := actions.get(name, 0))]
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
    """Return a text such as ``2 AG 1 RS``."""
    return " ".join(f"{n} {SHORT.get(k, k)}" for k, n in sorted(collectives.items()))
