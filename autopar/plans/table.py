"""A plan as a table of at most 100 columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.plans.plan import Plan

WIDTH = 100


def table(plan: Plan) -> str:
    """Head, memory, one row for each distinct parameter (repeated layers folded), collectives by kind and axis."""
    bound = f"at most {plan.gap:.2%} above the best possible ({seconds(plan.lower_bound)})"
    kinds = ", ".join(f"{k} {size(v)}" for k, v in plan.memory.items())
    lines = [
        f"{plan.model} on mesh {plan.mesh}, cluster {plan.cluster}",
        f"  step time    {seconds(plan.step_time)} predicted",
        f"  plan cost    {seconds(plan.objective)}, {bound}",
        f"  peak memory  {size(plan.peak_memory)} a device: {kinds}",
    ]
    lines += [f"  host memory  {size(plan.host_memory)} a device: {_on_host(plan)}"] if plan.host_memory else []
    lines += [""]
    lines += _columns(["parameter", "spec", "bytes a device"], _parameters(plan))
    lines += ["", *_columns(["collective", "phase", "axis", "launches", "bytes", "time"], _collectives(plan))]
    if plan.candidates:
        lines += ["", "meshes tried: " + ", ".join(f"{m} {seconds(s)}" for m, s in plan.candidates)]
    lines += [f"note: {n}" for n in plan.notices]
    return "\n".join(_wrapped(lines))


def _on_host(plan: Plan) -> str:
    """What the host holds."""
    away = sum(op.kind == "offload" for op in plan.program.ops)
    states = len(plan.offloaded_optimizer)
    parts = [f"{away} activations"] * bool(away) + [f"optimizer state of {states} parameters"] * bool(states)
    return ", ".join(parts)


def _wrapped(lines: Sequence[str]) -> list[str]:
    import textwrap

    out: list[str] = []
    for line in lines:
        long = len(line) > WIDTH
        out += textwrap.wrap(line, WIDTH, subsequent_indent="    ", drop_whitespace=False) if long else [line]
    return [line.rstrip() for line in out]


def _parameters(plan: Plan) -> list[list[str]]:
    """Layers that are alike but for their number share a row."""
    rows: dict[tuple[str, str], list[int]] = {}
    for name, held in plan.parameters.items():
        key = (re.sub(r"\.\d+(?=\.|$)", ".*", name), str(plan.specs[name]))
        rows.setdefault(key, []).append(held)
    return [
        [name, spec, f"{size(sum(held))}  (x {len(held)})"]
        if len(held) > 1
        else [_single(plan, name, spec), spec, size(held[0])]
        for (name, spec), held in rows.items()
    ]


def _single(plan: Plan, pattern: str, spec: str) -> str:
    for name in plan.parameters:
        if re.sub(r"\.\d+(?=\.|$)", ".*", name) == pattern and str(plan.specs[name]) == spec:
            return name
    return pattern


def _collectives(plan: Plan) -> list[list[str]]:
    groups: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    for c in plan.collectives:
        groups.setdefault((c.kind, c.phase, c.axis), []).append((c.bytes, c.seconds))
    rows = []
    for (kind, phase, axis), launches in groups.items():
        total, time = sum(b for b, _ in launches), sum(s for _, s in launches)
        rows.append([kind, phase, plan.mesh.names[axis], str(len(launches)), size(total), seconds(time)])
    return rows or [["none", "", "", "0", "0 B", "0 s"]]


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    over = sum(widths) + 2 * len(widths) + 2 - WIDTH
    if over > 0:
        widths[0] = max(widths[0] - over, 20)

    def line(cells: Sequence[str]) -> str:
        return "  " + "  ".join(_cut(c, w).ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip()

    return [line(head), "  " + "  ".join("-" * w for w in widths), *map(line, rows)]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[-(width - 1) :]


def size(n: float) -> str:
    """Bytes, in binary units."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:.2f} {unit}"
    return f"{n:.0f} B"


def seconds(s: float) -> str:
    """Seconds, in the unit that reads best."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if s >= scale:
            return f"{s / scale:.3g} {unit}" if s < 1000 * scale else f"{s / scale:,.0f} {unit}"
    return f"{s:.3g} s" if s else "0 s"
