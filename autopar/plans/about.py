"""Describe what a plan does with one tensor."""

from __future__ import annotations

from autopar.holding import ACTIONS
from autopar.plans.layers import collective_text, layers
from autopar.plans.record import PlanRecord
from autopar.plans.report.cuts import describe
from autopar.plans.table import seconds, size


def about(plan: PlanRecord, name: str) -> str:
    """Return the tensor's spec, bytes, fate until the backward, and what its module sends; "" for an unknown name."""
    spec = plan.specs.get(name)
    if spec is None:
        return ""
    shape = plan.facts.shapes.get(name, ((), ""))[0] if plan.facts else ()
    lines = [f"{name} is {describe(spec, plan.mesh, shape)}"]
    if name in plan.parameters:
        lines.append(f"  {size(plan.parameters[name])} on a device")
    if name in plan.activations:
        a = plan.activations[name]
        lines.append(f"  {ACTIONS[a.action].text} for the backward as {a.spec}, {size(a.bytes)}")
    module = plan.facts.nodes[name].module if plan.facts and name in plan.facts.nodes else name
    owner = name.rpartition(".")[0] if name in plan.parameters else module
    layer = layers(plan).get(owner)
    if layer is not None:
        sent = f", sends {collective_text(layer.collectives)}" if layer.collectives else ", sends nothing"
        lines.append(f"  {layer.name}: {seconds(layer.seconds)} a step{sent}")
    return "\n".join(lines)
