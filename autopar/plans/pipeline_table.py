"""Print the plan of a pipeline: its stages, and one step as a timeline in text."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonpath
from typing import Protocol

from autopar.mesh import Mesh
from autopar.pipelines.actions import Action, Schedule
from autopar.pipelines.makespan import Costs, Timeline
from autopar.plans.differences import differences
from autopar.plans.record import PlanRecord
from autopar.plans.table import columns, painted, seconds, size, wrapped

LINE = 88
"""Characters of a line of the timeline."""


class Shown(Protocol):
    """What the table shows of a plan."""

    @property
    def model(self) -> str: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def cluster(self) -> str: ...
    @property
    def blocks(self) -> tuple[str, ...]: ...
    @property
    def starts(self) -> tuple[int, ...]: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def costs(self) -> Costs: ...
    @property
    def step_time(self) -> float: ...
    @property
    def lower_bound(self) -> float: ...
    @property
    def peaks(self) -> tuple[int, ...]: ...
    @property
    def notices(self) -> tuple[str, ...]: ...
    @property
    def candidates(self) -> tuple[tuple[str, float], ...]: ...
    @property
    def stages(self) -> Sequence[PlanRecord]: ...
    @property
    def timeline(self) -> Timeline: ...
    @property
    def in_flight(self) -> tuple[int, ...]: ...
    @property
    def peak_memory(self) -> int: ...
    @property
    def bubble(self) -> float: ...
    @property
    def gap(self) -> float: ...


def pipeline_table(plan: Shown, *, colour: bool = False) -> str:
    """Return the headline figures, a row for each stage, and the timeline of a step, in lines of at most 100 columns.

    Args:
        colour: whether to add a terminal's escape codes.
    """
    schedule = plan.schedule
    lines = [f"{plan.model} on mesh {plan.mesh}, cluster {plan.cluster}"]
    chunks = f", {schedule.stages // schedule.ranks} stages a rank" if schedule.stages > schedule.ranks else ""
    lines += [
        (
            f"  {'schedule':<12} {schedule.name}, {schedule.ranks} ranks along pp, "
            f"{schedule.micro_batches} micro-batches{chunks}"
        ),
        f"  {'step time':<12} {seconds(plan.step_time)} predicted, {plan.bubble:.1%} of it waiting",
        f"  {'bound':<12} at most {plan.gap:.2%} above the best possible ({seconds(plan.lower_bound)})",
        f"  {'peak memory':<12} {size(plan.peak_memory)} a device",
        "",
        *columns(
            ["stage", "rank", "blocks", "", "in flight", "forward", "input", "weight", "send", "peak"], _rows(plan)
        ),
        "",
        *timeline_lines(schedule, plan.timeline),
    ]
    if plan.candidates:
        lines += ["", "also considered: " + ", ".join(f"{text} {seconds(s)}" for text, s in plan.candidates)]
    lines += [f"note: {n}" for n in plan.notices]
    lines = wrapped(lines)
    return "\n".join(painted(lines) if colour else lines)


def _rows(plan: Shown) -> list[list[str]]:
    ends = [*plan.starts[1:], len(plan.blocks)]
    costs, rows = plan.costs, []
    for s, (start, end) in enumerate(zip(plan.starts, ends, strict=True)):
        rows.append(
            [
                str(s),
                str(plan.schedule.rank_of[s]),
                block_range(plan, s),
                str(end - start),
                str(plan.in_flight[s]),
                seconds(costs.forward[s]),
                seconds(costs.backward_input[s]),
                seconds(costs.backward_weight[s]),
                seconds(costs.send[s]) if s < len(costs.send) else "",
                size(plan.stages[s].peak_memory),
            ]
        )
    return rows


def block_range(plan: Shown, stage: int) -> str:
    """Return the first and the last block of a stage."""
    ends = [*plan.starts[1:], len(plan.blocks)]
    named = [name for name in plan.blocks[plan.starts[stage] : ends[stage]] if name]
    if not named:
        return f"blocks {plan.starts[stage]} to {ends[stage] - 1}"
    if named[0] == named[-1]:
        return named[0]
    folder = commonpath([named[0], named[-1]]).rpartition(".")[0]
    return f"{named[0]} to {named[-1].removeprefix(f'{folder}.') if folder else named[-1]}"


def timeline_lines(schedule: Schedule, timeline: Timeline, width: int = LINE) -> list[str]:
    """Return a line for each rank: the micro-batch of each action over the time that it takes, dots where it waits.

    Forwards are digits, backwards letters (``a`` is micro-batch 0); the part for the weights alone is ``w``.
    """
    scale = width / timeline.seconds if timeline.seconds else 0.0
    lines = [f"one step of {seconds(timeline.seconds)}: forwards 0-9, backwards a-z, weights w, waiting ."]
    for rank, actions in enumerate(schedule.order):
        cells = ["."] * width
        for action in actions:
            begin, end = round(timeline.starts[action] * scale), round(timeline.ends[action] * scale)
            for at in range(min(begin, width - 1), max(min(end, width), min(begin, width - 1) + 1)):
                cells[at] = _mark(action)
        lines.append(f"  {rank:>3}  {''.join(cells)}")
    return lines


def _mark(action: Action) -> str:
    if action.kind == "W":
        return "w"
    return str(action.micro_batch % 10) if action.kind == "F" else "abcdefghijklmnopqrstuv"[action.micro_batch % 22]


def pipeline_differences(a: Shown, b: Shown) -> str:
    """Compare what the tables of two pipelines show, and the plans of their stages."""
    figures = [
        ("mesh", str(a.mesh), str(b.mesh)),
        ("cluster", a.cluster, b.cluster),
        ("schedule", a.schedule.name, b.schedule.name),
        ("micro-batches", str(a.schedule.micro_batches), str(b.schedule.micro_batches)),
        ("stages", str(a.schedule.stages), str(b.schedule.stages)),
        ("first blocks", " ".join(map(str, a.starts)), " ".join(map(str, b.starts))),
        ("step time", seconds(a.step_time), seconds(b.step_time)),
        ("waiting", f"{a.bubble:.1%}", f"{b.bubble:.1%}"),
        ("peak memory", size(a.peak_memory), size(b.peak_memory)),
    ]
    lines = [f"{'':<22} {'this':>16}    {'other':<16}"]
    lines += [f"{name:<22} {this:>16} -> {other:<16}".rstrip() for name, this, other in figures if this != other]
    if len(a.stages) == len(b.stages):
        for s, (this, other) in enumerate(zip(a.stages, b.stages, strict=True)):
            if this.digest != other.digest:
                lines += ["", f"stage {s}", *(f"  {line}" for line in differences(this, other).splitlines()[1:])]
    return "\n".join(lines)
