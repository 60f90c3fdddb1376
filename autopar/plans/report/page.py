"""The page of a report: its sections, and the numbers with their formulas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from html import escape
from importlib.resources import files

from autopar.plans.record import PlanRecord
from autopar.plans.records import BaselineRecord, Collective
from autopar.plans.report.charts import memory_chart, timeline_chart
from autopar.plans.report.markup import number, rows, section, tag
from autopar.plans.report.nodes import mesh_figure
from autopar.plans.report.tree import model_tree
from autopar.plans.table import seconds, size, utilization

SECTIONS = {
    "mesh": "Mesh",
    "model": "Model",
    "memory": "Memory over time",
    "timeline": "Timeline",
    "collectives": "Collectives",
    "baselines": "Baselines",
    "planning": "Planning",
}


def page(plan: PlanRecord) -> str:
    """Return the report of a plan as the text of a file."""
    body = {
        "mesh": mesh_figure(plan),
        "model": model_tree(plan) if plan.facts else _no_facts(),
        "memory": memory_chart(plan) if plan.facts and plan.facts.history else _no_facts(),
        "timeline": timeline_chart(plan) if plan.facts else _no_facts(),
        "collectives": _collectives(plan),
        "baselines": _baselines(plan),
        "planning": _planning(plan),
    }
    links = tag("nav", *(tag("a", title, href=f"#{name}") for name, title in SECTIONS.items()), aria_label="sections")
    title = f"{plan.model} on mesh {plan.mesh}, cluster {plan.cluster}"
    toggle = tag("button", "light or dark", type="button", id="theme")
    head = tag("header", tag("h1", escape(title)), toggle, _cards(plan), links)
    parts = [section(name, SECTIONS[name], content) for name, content in body.items()]
    return document(title, head, parts, plan.digest)


def document(title: str, head: str, parts: Iterable[str], digest: str) -> str:
    """Return a file of its own, with style and script inside so that nothing is fetched."""
    foot = tag(
        "footer",
        f"Predictions of autopar's cost models for plan {digest}; hover over a number, or tab to "
        "it, to see how it was computed.",
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            tag("title", escape(title)),
            tag("style", _resource("style.css")),
            "</head><body>",
            head,
            tag("main", *parts),
            foot,
            tag("div", id="tip", role="tooltip", hidden="hidden"),
            f"<script>{_resource('script.js')}</script>",
            "</body></html>",
        ]
    )


def _resource(name: str) -> str:
    return files("autopar.plans.report").joinpath(name).read_text()


def _no_facts() -> str:
    return tag("p", "This plan was saved in format 1, which lacks the data for this section: plan again.")


def _cards(plan: PlanRecord) -> str:
    """Return the headline figures."""
    f = plan.facts
    bound = f"({seconds(plan.objective)} - {seconds(plan.lower_bound)}) / {seconds(plan.objective)}"
    gap = f"{plan.gap:.2%}" if plan.lower_bound > 0 else "unknown"
    kinds = " + ".join(f"{k} {size(v)}" for k, v in plan.memory.items())
    summed = "sum of the chosen options' seconds in the integer program, minus what overlaps with computation"
    cards = [
        ("step time", seconds(plan.step_time), f"simulated streams: {_busy(plan)}; without the optimizer step"),
        (
            "peak memory",
            size(plan.peak_memory),
            f"largest sum of live bytes at any moment on the fullest device: {kinds}",
        ),
        ("plan cost", seconds(plan.objective), summed),
        ("gap", gap, f"(cost - bound) / cost = {bound}: no plan can cost less than the bound"),
    ]
    if plan.host_memory:
        cards.append(("host memory", size(plan.host_memory), "offloaded activations and optimizer state of one device"))
    if f and f.flops:
        peak = f"{f.peak_flops_per_s / 1e12:,.0f} TFLOP/s in {f.dtype}"
        could = f"{seconds(plan.step_time)} x {plan.mesh.size:,} devices x {peak}"
        cards.append(("MFU", utilization(plan), f"{f.needed_flops:.4g} FLOPs of the step / ({could})"))
    if f and plan.throughput:
        kind, amount = ("tokens", f.tokens) if f.tokens else ("samples", f.samples)
        cards.append(
            (f"{kind} per second", f"{plan.throughput:,.0f}", f"{amount:,} {kind} / {seconds(plan.step_time)}")
        )
    return tag("dl", *(tag("div", tag("dt", k), tag("dd", number(v, how))) for k, v, how in cards), class_="cards")


def _busy(plan: PlanRecord) -> str:
    if plan.facts is None:
        return "compute and communication side by side"
    work: dict[str, float] = defaultdict(float)
    for _, stream, start, end in plan.facts.intervals:
        work[stream] += end - start
    return ", ".join(f"{stream} busy {seconds(s)}" for stream, s in work.items())


def _collectives(plan: PlanRecord) -> str:
    """Return one table per axis."""
    if not plan.collectives:
        return tag("p", "None: no rank sends anything.")
    tables = []
    for axis, name in enumerate(plan.mesh.names):
        groups: dict[tuple[str, str], list[Collective]] = defaultdict(list)
        for c in plan.collectives:
            if c.axis == axis:
                groups[c.kind, c.phase].append(c)
        if groups:
            caption = f"axis {escape(name)}, {plan.mesh.shape[axis]} ranks"
            body = [_collective(plan, axis, kind, phase, found) for (kind, phase), found in groups.items()]
            tables.append(rows(["kind", "phase", "launches", "bytes", "time", "rate", "algorithm"], body, caption))
    return "".join(tables)


def _collective(plan: PlanRecord, axis: int, kind: str, phase: str, found: list[Collective]) -> list[str]:
    sent, took = sum(c.bytes for c in found), sum(c.seconds for c in found)
    algorithm = plan.facts.axes[axis].algorithms.get(kind, "") if plan.facts else ""
    how = "each launch: latency + bytes / bandwidth of the fastest algorithm for its size; the sum of all launches"
    return [
        escape(kind),
        phase,
        number(f"{len(found):,}", "launches in a step"),
        number(size(sent), "sum of all messages: gathered size of an all-gather, local size of any other"),
        number(seconds(took), how),
        number(f"{sent / took / 1e9:.3g} GB/s" if took else "", "bytes / time"),
        number(algorithm, "the fastest of the library's algorithms for the largest message of this kind"),
    ]


def _baselines(plan: PlanRecord) -> str:
    """List the plan first, then the baselines for the same model, mesh and prices."""
    if not plan.baselines:
        return tag("p", "No baseline was simulated; plan with compare=True to see all of them.")
    slowest = max([plan.step_time, *(b.step_time for b in plan.baselines)]) or 1.0
    own = [
        _bar(plan.step_time / slowest, "this plan"),
        number(seconds(plan.step_time), "simulated"),
        number(size(plan.peak_memory), "largest sum of live bytes"),
        "1.00 ×",
    ]
    ordered = sorted(plan.baselines, key=lambda b: b.step_time)
    body = [own, *(_baseline(plan, b, slowest) for b in ordered)]
    return rows(
        ["way", "step time", "peak memory", "relative to the plan"], body, "for the same model, mesh and prices"
    )


def _baseline(plan: PlanRecord, b: BaselineRecord, slowest: float) -> list[str]:
    ratio = b.step_time / plan.step_time if plan.step_time else 1.0
    how = f"{seconds(b.step_time)} / {seconds(plan.step_time)}"
    verdict = number(f"{ratio:.2f} ×", how) + ("" if b.fits else " " + tag("em", "over the budget"))
    cost = f"simulated like the plan; its cost in the integer program is {seconds(b.objective)}"
    return [
        _bar(b.step_time / slowest, b.name),
        number(seconds(b.step_time), cost),
        number(size(b.peak_memory), "largest sum of live bytes"),
        verdict,
    ]


def _bar(share: float, name: str) -> str:
    return tag("span", escape(name), class_="bar", style=f"--share:{share:.3f}")


def _planning(plan: PlanRecord) -> str:
    body = [
        [escape(stage), number(seconds(s), "wall clock while the plan was made")] for stage, s in plan.timings.items()
    ]
    asked = ", ".join(f"{k}={v}" for k, v in plan.options.items() if v not in (None, {}, ""))
    notes = "".join(tag("li", escape(n)) for n in plan.notices)
    return (
        rows(["stage", "took"], body, "where planning spent its time")
        + tag("p", escape(f"solver: {plan.solver.get('method', '')}. Options: {asked}."))
        + (tag("ul", notes) if notes else "")
    )
