"""What differs between two plans, with equal layers on one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from autopar.holding import ACTIONS
from autopar.plans.layers import folded
from autopar.plans.record import PlanRecord
from autopar.plans.table import seconds, size


def differences(a: PlanRecord, b: PlanRecord) -> str:
    """Compare model, mesh, cluster, predictions, memory and collectives by kind, specs, and what the backward keeps."""
    if a.digest == b.digest and a.mesh == b.mesh:
        return "The plans run the same program."
    lines = [f"{'':<22} {'this':>16}    {'other':<16}"]
    lines += [_row(*row) for row in _figures(a, b)]
    lines += _specs(a, b)
    lines += _actions(a, b)
    return "\n".join(lines)


def _row(name: str, this: str, other: str) -> str:
    return f"{name:<22} {this:>16} -> {other:<16}".rstrip()


def _figures(a: PlanRecord, b: PlanRecord) -> Iterator[tuple[str, str, str]]:
    if a.model != b.model or a.graph_digest != b.graph_digest:
        yield "model, graph", f"{a.model} {a.graph_digest[:6]}", f"{b.model} {b.graph_digest[:6]}"
    if str(a.mesh) != str(b.mesh):
        yield "mesh", str(a.mesh), str(b.mesh)
    if a.cluster != b.cluster:
        yield "cluster", a.cluster, b.cluster
    yield "step time", seconds(a.step_time), seconds(b.step_time)
    yield "plan cost", seconds(a.objective), seconds(b.objective)
    yield "peak memory", size(a.peak_memory), size(b.peak_memory)
    for kind in dict.fromkeys([*a.memory, *b.memory]):
        if a.memory.get(kind, 0) != b.memory.get(kind, 0):
            yield f"  {kind}", size(a.memory.get(kind, 0)), size(b.memory.get(kind, 0))
    yield "collectives", str(len(a.collectives)), str(len(b.collectives))
    launches = [Counter(c.kind for c in p.collectives) for p in (a, b)]
    sent = [Counter[str](), Counter[str]()]
    for count, plan in zip(sent, (a, b), strict=True):
        for c in plan.collectives:
            count[c.kind] += c.bytes
    for kind in sorted(set(launches[0]) | set(launches[1])):
        if (launches[0][kind], sent[0][kind]) != (launches[1][kind], sent[1][kind]):
            this, other = (f"{n[kind]}, {size(s[kind])}" for n, s in zip(launches, sent, strict=True))
            yield f"  {kind}", this, other


def _specs(a: PlanRecord, b: PlanRecord) -> list[str]:
    """Compare the specs of parameters, inputs, outputs and modules; those of single ops follow from these."""
    nodes = set(a.facts.nodes if a.facts else ()) | set(b.facts.nodes if b.facts else ())
    named = {n: f"{s} -> {b.specs[n]}" for n, s in a.specs.items() if n in b.specs and s != b.specs[n]}
    named = {n: change for n, change in named.items() if n not in nodes or n in a.parameters}
    return [f"{name}: {change}" for name, change in _folded(named)]


def _actions(a: PlanRecord, b: PlanRecord) -> list[str]:
    def word(plan: PlanRecord, name: str) -> str:
        return ACTIONS[plan.activations[name].action].text if name in plan.activations else "not needed"

    counts = Counter[tuple[str, str]]()
    for name in dict.fromkeys([*a.activations, *b.activations]):
        change = f"{word(a, name)} -> {word(b, name)}"
        if word(a, name) != word(b, name):
            module = a.facts.nodes[name].module if a.facts and name in a.facts.nodes else name
            counts[folded(module), change] += 1
    return [f"values of {module or 'the model'}: {change}  (x {n})" for (module, change), n in counts.items()]


def _folded(named: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, change in named.items():
        groups.setdefault((folded(name), change), []).append(name)
    for (name, change), found in groups.items():
        yield (name, f"{change}  (x {len(found)})") if len(found) > 1 else (found[0], change)
