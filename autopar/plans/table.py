"""Print a plan as a table of at most 100 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from itertools import accumulate

from autopar.plans.layers import SHORT, action_text, collective_text, folded, rows
from autopar.plans.record import PlanRecord

WIDTH = 100
COLOURS = {"head": "1", "spec": "36", "good": "32", "warn": "33", "faint": "2"}


def table(plan: PlanRecord, *, colour: bool = False) -> str:
    """Return the headline figures, one row per distinct layer, and the collectives by kind and axis.

    Args:
        colour: whether to add a terminal's escape codes.
    """
    lines = [f"{plan.model} on mesh {plan.mesh}, cluster {plan.cluster}"]
    lines += [f"  {name:<12} {text}" for name, text in _head(plan)]
    lines += ["", *_layers(plan)]
    lines += ["", *columns(["collective", "phase", "axis", "launches", "bytes", "time"], _collectives(plan))]
    if plan.candidates:
        lines += ["", "meshes tried: " + ", ".join(f"{m} {seconds(s)}" for m, s in plan.candidates)]
    lines += [f"note: {n}" for n in plan.notices]
    lines = wrapped(lines)
    return "\n".join(painted(lines) if colour else lines)


def trace_table(plan: PlanRecord) -> str:
    """Return what each phase of the search left: work and cost in seconds, and the gap to the bound at the time."""
    rows = []
    for r in plan.trace:
        gap = "" if not r.cost else f"{max(1 - r.bound / r.cost, 0.0):.2%}"
        rows.append([r.phase, f"{r.work:.1f} s", "" if r.cost is None else seconds(r.cost), seconds(r.bound), gap])
    return "\n".join(columns(["phase of the search", "work", "best cost", "bound", "gap"], rows))


def _head(plan: PlanRecord) -> list[tuple[str, str]]:
    """Return the labelled lines above the tables."""
    kinds = ", ".join(f"{k} {size(v)}" for k, v in plan.memory.items())
    bound = f"at most {plan.gap:.2%} above the best possible ({seconds(plan.lower_bound)})"
    if plan.lower_bound <= 0:
        bound = "how far above the best possible was not found in the time given"
    rate = speed(plan)
    head = [
        ("step time", f"{seconds(plan.step_time)} predicted" + (f", {rate}" if rate else "")),
        ("plan cost", f"{seconds(plan.objective)}, {bound}"),
        ("peak memory", f"{size(plan.peak_memory)} a device: {kinds}"),
    ]
    if plan.host_memory:
        head.append(("host memory", f"{size(plan.host_memory)} a device: {_on_host(plan)}"))
    if room := _expert_room(plan):
        head.append(("experts", room))
    return head


def speed(plan: PlanRecord) -> str:
    """Return MFU and tokens or samples per second; "" if the plan does not know its FLOPs."""
    f = plan.facts
    if f is None or not plan.step_time:
        return ""
    said = [f"MFU {utilization(plan)}"] if f.flops else []
    if f.tokens or f.samples:
        said.append(f"{plan.throughput:,.0f} {'tokens' if f.tokens else 'samples'}/s")
    return ", ".join(said)


def utilization(plan: PlanRecord) -> str:
    """Return MFU, and where it differs, what it is with the pairs that causal masks hide."""
    mfu, of_all = f"{plan.mfu:.1%}", f"{plan.mfu_of_all_pairs:.1%}"
    return mfu if mfu == of_all else f"{mfu} ({of_all} with what causal masks hide)"


def _layers(plan: PlanRecord) -> list[str]:
    if plan.facts is None:
        return columns(["parameter", "spec", "bytes a device"], _parameters(plan))
    body = []
    for row in rows(plan):
        copies = f"x {row.count}" if row.count > 1 else ""
        weights = " ".join(dict.fromkeys(row.weights.values()))
        sent = collective_text(row.collectives)
        body.append(
            [
                row.name,
                copies,
                weights,
                row.activation,
                action_text(row.actions),
                sent,
                seconds(row.seconds),
                size(row.weight_bytes + row.held_bytes),
            ]
        )
    return columns(["layer", "", "weights", "output", "for backward", "sends", "time", "bytes"], body)


def _parameters(plan: PlanRecord) -> list[list[str]]:
    """List the parameters alone, for a plan without facts (format 1)."""
    found: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for name, held in plan.parameters.items():
        found.setdefault((folded(name), str(plan.specs[name])), []).append((name, held))
    return [
        [
            name if len(held) > 1 else held[0][0],
            spec,
            size(sum(b for _, b in held)) + (f"  (x {len(held)})" if len(held) > 1 else ""),
        ]
        for (name, spec), held in found.items()
    ]


def _on_host(plan: PlanRecord) -> str:
    """Describe what the host holds."""
    away = sum(op.kind == "offload" for op in plan.program.ops)
    states = len(plan.offloaded_optimizer)
    parts = [f"{away} activations"] * bool(away) + [f"optimizer state of {states} parameters"] * bool(states)
    return ", ".join(parts)


def _expert_room(plan: PlanRecord) -> str:
    """Describe what is held back for routers that are not balanced; "" where ranks have the rows of their tokens."""
    program, changes, share = plan.program, [0.0] * (len(plan.program.ops) + 2), 1.0
    layers = 0
    for t in program.tensors.values():
        if not t.meta.choices or not t.spec.dims[t.meta.routed - 1] or t.host or program.root[t.name] != t.name:
            continue
        balanced = math.prod(t.meta.choices) / math.prod(t.meta.shape[t.meta.routed - 2 : t.meta.routed])
        layers, share = layers + (len(t.meta.shape) == t.meta.routed), min(share, balanced)
        begins = program.writer[t.name]
        changes[begins] += (1 - balanced) * t.bytes
        changes[program.last_read.get(t.name, begins) + 1] -= (1 - balanced) * t.bytes
    if not layers:
        return ""
    rooms = f"{size(max(accumulate(changes)))} more than if all get the mean"
    return f"spread in {layers} layers; each rank has room for {1 / share:.3g} times the mean, at most {rooms}"


def _collectives(plan: PlanRecord) -> list[list[str]]:
    groups: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    for c in plan.collectives:
        groups.setdefault((c.kind, c.phase, c.axis), []).append((c.bytes, c.seconds))
    body = []
    for (kind, phase, axis), launches in groups.items():
        total, time = sum(b for b, _ in launches), sum(s for _, s in launches)
        name = f"{kind} ({SHORT[kind]})" if SHORT.get(kind) else kind
        body.append([name, phase, plan.mesh.names[axis], str(len(launches)), size(total), seconds(time)])
    return body or [["none", "", "", "0", "0 B", "0 s"]]


def wrapped(lines: Sequence[str]) -> list[str]:
    """Break lines that are wider than the table."""
    out: list[str] = []
    for line in lines:
        long = len(line) > WIDTH
        out += textwrap.wrap(line, WIDTH, subsequent_indent="    ", drop_whitespace=False) if long else [line]
    return [line.rstrip() for line in out]


def columns(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Align the columns. If they are too wide for a line, the widest column shrinks."""
    widths = [max(len(r[i]) for r in [head, *body]) for i in range(len(head))]
    while sum(widths) + 2 * len(widths) > WIDTH:
        widths[max(range(len(widths)), key=lambda i: widths[i])] -= 1

    def line(cells: Sequence[str]) -> str:
        return "  " + "  ".join(_cut(c, w).ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip()

    return [line(head), "  " + "  ".join("-" * w for w in widths), *map(line, body)]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[-(width - 1) :]


def painted(lines: Sequence[str]) -> list[str]:
    """Add a terminal's colours: bold headings, faint rules, yellow notes."""
    out = []
    for i, line in enumerate(lines):
        rule = line.strip() and set(line.strip()) <= {"-", " "}
        heading = i + 1 < len(lines) and lines[i + 1].strip() and set(lines[i + 1].strip()) <= {"-", " "}
        style = "head" if heading or i == 0 else "faint" if rule else "warn" if line.startswith("note:") else ""
        label = line[2:15].rstrip() if line[:2] == "  " and line[2:15].rstrip() in LABELS else ""
        if label:
            out.append(f"  {_ansi(f'{label:<12}', 'spec')}{line[14:]}")
        else:
            out.append(_ansi(line, style) if style else line)
    return out


LABELS = ("step time", "plan cost", "peak memory", "host memory", "experts")


def _ansi(text: str, style: str) -> str:
    return f"\x1b[{COLOURS[style]}m{text}\x1b[0m"


def size(n: float) -> str:
    """Format bytes in binary units."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:.2f} {unit}"
    return f"{n:.0f} B"


def seconds(s: float) -> str:
    """Format seconds in the unit that reads best."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if s >= scale:
            return f"{s / scale:.3g} {unit}" if s < 1000 * scale else f"{s / scale:,.0f} {unit}"
    return f"{s:.3g} s" if s else "0 s"
