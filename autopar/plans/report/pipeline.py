"""The page of a pipeline's report: its stages, and one step as a Gantt chart of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from autopar.pipelines.actions import Action
from autopar.plans.pipeline_table import Shown, block_range
from autopar.plans.report.markup import number, rows, section, tag
from autopar.plans.report.page import document
from autopar.plans.table import seconds, size

WIDTH, ROW = 1000.0, 34.0
"""Width of the chart, and height of the row of a rank, in SVG units."""

MOST_MARKED = 600
"""Actions up to which each is marked with its micro-batch; the marks of more would not be legible."""

KINDS = {"F": "forward", "B": "backward", "I": "backward of the inputs", "W": "backward of the weights"}


def pipeline_page(plan: Shown, digest: str) -> str:
    """Return the report of a pipeline as the text of a file."""
    title = f"{plan.model} on mesh {plan.mesh}, cluster {plan.cluster}"
    toggle = tag("button", "light or dark", type="button", id="theme")
    parts = [
        section("step", "One step", gantt(plan)),
        section("stages", "Stages", _stages(plan)),
        section("candidates", "Other pipelines", _candidates(plan)),
    ]
    if plan.notices:
        parts.append(section("notices", "Notices", tag("ul", *(tag("li", escape(n)) for n in plan.notices))))
    return document(title, tag("header", tag("h1", escape(title)), toggle, _cards(plan)), parts, digest)


def _cards(plan: Shown) -> str:
    s = plan.schedule
    waits = f"(ranks x step - their work) / (ranks x step), {s.ranks} ranks of {seconds(plan.step_time)}"
    cards = [
        ("step time", seconds(plan.step_time), "longest path through all actions and messages of the schedule"),
        ("schedule", f"{s.name}, {s.micro_batches} micro-batches", f"{s.stages} stages on {s.ranks} ranks along pp"),
        ("waiting", f"{plan.bubble:.1%}", waits),
        ("gap", f"{plan.gap:.2%}", f"(step - bound) / step, bound {seconds(plan.lower_bound)}: no pipeline is shorter"),
        ("peak memory", size(plan.peak_memory), "most bytes that a device of any rank holds, from the schedule"),
    ]
    return tag("dl", *(tag("div", tag("dt", k), tag("dd", number(v, how))) for k, v, how in cards), class_="cards")


def gantt(plan: Shown) -> str:
    """Draw what each rank runs over the seconds of a step; what is empty is waiting."""
    height = ROW * plan.schedule.ranks
    svg = tag(
        "svg",
        *_bars(plan),
        viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
        class_="gantt",
        role="img",
        aria_label="what each rank runs over a step",
    )
    names = (tag("li", tag("i", class_=f"key g{kind}"), escape(text)) for kind, text in KINDS.items())
    ranks = tag("p", f"one row for each rank along pp, rank 0 on top, from 0 to {seconds(plan.step_time)}")
    return tag("ul", *names, class_="legend") + svg + ranks


def _bars(plan: Shown) -> Iterator[str]:
    timeline = plan.timeline
    scale = WIDTH / timeline.seconds if timeline.seconds else 0.0
    marked = len(timeline.starts) <= MOST_MARKED
    for rank, actions in enumerate(plan.schedule.order):
        for action in actions:
            begin, end = timeline.starts[action] * scale, timeline.ends[action] * scale
            yield _bar(action, begin, max(end - begin, 0.5), rank * ROW, timeline.starts[action], marked=marked)


def _bar(action: Action, x: float, width: float, y: float, start_s: float, *, marked: bool) -> str:
    kind, stage, micro = action
    told = tag("title", f"{KINDS[kind]} of stage {stage}, micro-batch {micro}, from {seconds(start_s)}")
    box = tag(
        "rect", told, x=f"{x:.2f}", y=f"{y + 3:.1f}", width=f"{width:.2f}", height=f"{ROW - 6:.0f}", class_=f"g{kind}"
    )
    if not marked or width < 12:
        return box
    return box + tag("text", str(micro), x=f"{x + width / 2:.2f}", y=f"{y + ROW / 2 + 4:.1f}")


def _stages(plan: Shown) -> str:
    costs = plan.costs
    body = [
        [
            str(s),
            str(plan.schedule.rank_of[s]),
            escape(block_range(plan, s)),
            number(str(plan.in_flight[s]), "most micro-batches between their forward and the end of their backward"),
            number(seconds(costs.forward[s]), "simulated streams of the forward"),
            number(seconds(costs.backward_input[s]), "simulated, up to the gradient that the stage before waits for"),
            number(seconds(costs.backward_weight[s]), "simulated, the rest of the backward"),
            number(seconds(costs.send[s]), "one message to the next stage") if s < len(costs.send) else "",
            number(size(plan.stages[s].peak_memory), "live bytes with the micro-batches in flight"),
        ]
        for s in range(len(plan.stages))
    ]
    head = ["stage", "rank", "blocks", "in flight", "forward", "input", "weight", "send", "peak"]
    return rows(head, body, "seconds of one micro-batch")


def _candidates(plan: Shown) -> str:
    if not plan.candidates:
        return tag("p", "No other pipeline was considered.")
    body = [[escape(text), number(seconds(s), "from the seconds of the blocks")] for text, s in plan.candidates]
    return rows(["pipeline", "step time"], body, "as they were estimated before their stages were planned")
