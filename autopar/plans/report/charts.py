"""Charts of memory and of the streams over time, which can be explored with the keyboard."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate
from typing import NamedTuple

from autopar.plans.facts import Facts
from autopar.plans.record import PlanRecord
from autopar.plans.report.markup import tag
from autopar.plans.table import seconds, size

WIDTH, HEIGHT = 1000.0, 260.0
"""Size of a chart in SVG units."""

MOST_POINTS = 500
"""About how many points the memory chart keeps."""

MOST_BLOCKS = 1500
"""Blocks shorter than the step time over this are joined with their neighbours."""
MOST_EMPTY = 4
"""A budget of more than this many times the peak is not drawn, since the rest would be a stripe."""

TAIL = 0.03
"""Share of the chart's width for the optimizer step, which the simulation does not time."""


class Point(NamedTuple):
    """Bytes held from a moment on, by kind."""

    at_s: float
    held: dict[str, int]


def memory_points(plan: PlanRecord) -> list[Point]:
    """Return bytes by kind over the seconds of the step, thinned in a way that keeps every peak."""
    facts = plan.facts
    assert facts is not None
    times = _times(plan, facts)
    changes: dict[int, dict[str, int]] = defaultdict(dict)
    for kind, points in facts.history.items():
        for position, held in points:
            changes[position][kind] = held
    state = dict.fromkeys(facts.history, 0)
    found: list[Point] = []
    for position in sorted(changes):
        state = state | changes[position]
        found.append(Point(times[position], state))
    stride = max(len(found) // MOST_POINTS, 1)
    chunks = (found[i : i + stride] for i in range(0, len(found), stride))
    return [Point(c[0].at_s, max(c, key=lambda p: sum(p.held.values())).held) for c in chunks]


def _times(plan: PlanRecord, facts: Facts) -> list[float]:
    """Return the start of each op of the program, and of the optimizer step."""
    begun = [0.0] * (len(plan.program.ops) + 1)
    for at, stream, start, _ in facts.intervals:
        if at >= 0 and stream == "compute":
            begun[at] = start
    begun[-1] = plan.step_time
    return list(accumulate(begun, max))


def memory_chart(plan: PlanRecord) -> str:
    """Draw memory stacked by kind, with those that never change at the bottom and the budget as a line."""
    points = memory_points(plan)
    kinds = [k for k in points[0].held if any(p.held[k] for p in points)]
    top = highest(plan) * 1.05 or 1.0
    x = [p.at_s / (plan.step_time or 1.0) * WIDTH * (1 - TAIL) for p in points]
    ends = [*x[1:], WIDTH]
    below = [0.0] * len(points)
    areas = []
    for i, kind in enumerate(kinds):
        above = [b + p.held[kind] for b, p in zip(below, points, strict=True)]
        areas.append(tag("path", d=_area(x, ends, below, above, top), class_=f"k k{i}"))
        below = above
    line = _y(plan.budget, top)
    in_sight = 0 < plan.budget <= top
    budget = tag("line", x1=0, x2=WIDTH, y1=f"{line:.1f}", y2=f"{line:.1f}", class_="budget") if in_sight else ""
    data = json.dumps({"t": [p.at_s for p in points], "k": {k: [p.held[k] for p in points] for k in kinds}})
    svg = tag(
        "svg",
        *areas,
        budget,
        tag("line", x1=0, x2=0, y1=0, y2=HEIGHT, class_="cursor"),
        viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
        preserveAspectRatio="none",
        class_="chart",
        tabindex=0,
        role="img",
        aria_label="memory over time; arrow keys move the cursor",
        data_memory=data,
        data_step=plan.step_time,
        data_tail=TAIL,
    )
    legend = [tag("li", tag("i", class_=f"key k{i}"), escape(kind)) for i, kind in enumerate(kinds)]
    far = "" if in_sight else ", far above"
    legend += [tag("li", tag("i", class_="key budgetkey"), f"budget {size(plan.budget)}{far}")] if plan.budget else []
    said = tag("p", f"the peak is {size(plan.peak_memory)}", class_="said", role="status")
    return tag("ul", *legend, class_="legend") + svg + said


def highest(plan: PlanRecord) -> float:
    """Return the top of the byte axis: the budget, unless it dwarfs the peak."""
    return max(plan.peak_memory, plan.budget if plan.budget <= MOST_EMPTY * plan.peak_memory else 0)


def _y(held: float, top: float) -> float:
    return HEIGHT * (1 - held / top)


def _area(x: Sequence[float], ends: Sequence[float], low: Sequence[float], high: Sequence[float], top: float) -> str:
    """Return the outline: steps along ``high``, and back along ``low``."""
    up = " ".join(f"{a:.1f},{_y(h, top):.1f} {b:.1f},{_y(h, top):.1f}" for a, b, h in zip(x, ends, high, strict=True))
    back = [f"{b:.1f},{_y(v, top):.1f} {a:.1f},{_y(v, top):.1f}" for a, b, v in zip(x, ends, low, strict=True)]
    return f"M{up} {' '.join(reversed(back))}Z"


class Block(NamedTuple):
    """Work of one sort that a stream does without a pause."""

    start_s: float
    end_s: float
    sort: str
    text: str


def stream_blocks(plan: PlanRecord) -> dict[str, list[Block]]:
    """Return blocks by stream. Those too short to see are joined with neighbours of the same sort."""
    facts = plan.facts
    assert facts is not None
    found: dict[str, list[Block]] = {}
    for stream, block in sorted(_intervals(plan, facts), key=lambda b: (b[0], b[1].start_s)):
        found.setdefault(stream, []).append(block)
    short = plan.step_time / MOST_BLOCKS
    return {stream: list(_joined(blocks, short)) for stream, blocks in found.items()}


def _intervals(plan: PlanRecord, facts: Facts) -> Iterator[tuple[str, Block]]:
    for at, stream, start, end in facts.intervals:
        if at < 0:
            yield stream, Block(start, end, "host", "optimizer state from and to the host")
            continue
        op = plan.program.ops[at]
        where = facts.nodes[op.node].module if op.node in facts.nodes else ""
        took = seconds(end - start)
        if op.step is not None and op.is_collective:
            name = plan.mesh.names[op.step.axis]
            rest = op.seconds - op.launch_s
            text = (
                f"{op.step.kind} over {name}, {where or op.node}: {took} = {seconds(op.launch_s)} to launch + "
                f"{seconds(rest)} for {size(op.wire_bytes)}"
            )
            yield f"axis {name}", Block(start, end, op.step.kind, text)
        else:
            sort = "host" if stream == "host" else op.phase
            what = facts.nodes[op.node].op if op.node in facts.nodes else op.kind
            yield stream, Block(start, end, sort, f"{op.phase} {where or op.node}, {what}: {took}")


def _joined(blocks: Sequence[Block], short: float) -> Iterator[Block]:
    held: Block | None = None
    count = 1
    for block in blocks:
        if (
            held
            and block.sort == held.sort
            and block.start_s - held.end_s < short
            and block.end_s - held.start_s < (2 * short if count > 1 else short)
        ):
            count += 1
            held = Block(held.start_s, block.end_s, held.sort, "")
            continue
        if held:
            yield _named(held, count)
        held, count = block, 1
    if held:
        yield _named(held, count)


def _named(block: Block, count: int) -> Block:
    said = f"{count} short intervals of {block.sort}: {seconds(block.end_s - block.start_s)}"
    return block if count == 1 else block._replace(text=said)


LANE = 34
"""Height of a stream's lane in SVG units."""


def timeline_chart(plan: PlanRecord) -> str:
    """Draw one lane per stream, on a common time scale."""
    lanes = stream_blocks(plan)
    order = sorted(lanes, key=lambda s: (s != "compute", s == "host", s))
    scale = WIDTH / (plan.step_time or 1.0)
    drawn, sorts = [], dict.fromkeys(b.sort for s in order for b in lanes[s])
    for row, stream in enumerate(order):
        top = row * LANE + 14
        drawn.append(tag("text", escape(stream), x=2, y=top - 3, class_="lane"))
        for b in lanes[stream]:
            width = max((b.end_s - b.start_s) * scale, 0.3)
            drawn.append(
                tag(
                    "rect",
                    x=f"{b.start_s * scale:.2f}",
                    y=top,
                    width=f"{width:.2f}",
                    height=LANE - 18,
                    class_=f"b {b.sort}",
                    data_f=b.text,
                )
            )
    svg = tag(
        "svg",
        *drawn,
        viewBox=f"0 0 {WIDTH:.0f} {len(order) * LANE}",
        class_="timeline",
        tabindex=0,
        role="img",
        aria_label="what each stream does; arrow keys move from op to op",
    )
    legend = [tag("li", tag("i", class_=f"key b {sort}"), escape(sort)) for sort in sorts]
    scroller = tag("div", svg, class_="scroll")
    return tag("ul", *legend, class_="legend") + scroller + tag("p", "", class_="said", role="status")
