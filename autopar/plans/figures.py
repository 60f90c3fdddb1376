"""Memory over time and the timeline as matplotlib figures, for notebooks and papers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.errors import PlanError
from autopar.plans.record import PlanRecord
from autopar.plans.report.charts import highest, memory_points, stream_blocks

COLOURS = ("#4477aa", "#66ccee", "#228833", "#999933", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#332288")
SORTS: Mapping[str, str] = {
    "forward": "#4477aa",
    "backward": "#228833",
    "all_gather": "#ccbb44",
    "reduce_scatter": "#ee6677",
    "all_reduce": "#aa3377",
    "all_to_all": "#66ccee",
    "permute": "#999933",
    "host": "#bbbbbb",
}


def memory_figure(plan: PlanRecord) -> Any:
    """Return a ``matplotlib.figure.Figure`` of bytes, stacked by kind, over the time of the step."""
    figure, axes = _figure(plan)
    points = memory_points(plan)
    kinds = [k for k in points[0].held if any(p.held[k] for p in points)]
    times = [p.at_s * 1e3 for p in points]
    held = [[p.held[k] / 2**30 for p in points] for k in kinds]
    axes.stackplot(times, held, labels=kinds, colors=COLOURS, step="post")
    if 0 < plan.budget <= highest(plan):
        axes.axhline(plan.budget / 2**30, color="#d03a3a", linestyle="--", label="budget")
    axes.set(xlabel="ms", ylabel="GiB a device", title=f"{plan.model} on mesh {plan.mesh}")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def timeline_figure(plan: PlanRecord) -> Any:
    """Return a ``matplotlib.figure.Figure`` with one lane per stream, which shows what the stream does."""
    figure, axes = _figure(plan)
    lanes = stream_blocks(plan)
    names = sorted(lanes, key=lambda s: (s != "compute", s == "host", s))
    shown: set[str] = set()
    for row, name in enumerate(names):
        for sort in dict.fromkeys(b.sort for b in lanes[name]):
            bars = [(b.start_s * 1e3, (b.end_s - b.start_s) * 1e3) for b in lanes[name] if b.sort == sort]
            label = sort if sort not in shown else None
            shown.add(sort)
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=SORTS.get(sort, "#888888"), label=label)
    axes.set(xlabel="ms", yticks=range(len(names)), yticklabels=names, title=f"{plan.model} on mesh {plan.mesh}")
    axes.invert_yaxis()
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _figure(plan: PlanRecord) -> tuple[Any, Any]:
    """Return an empty figure that opens no window.

    Raises:
        PlanError: if matplotlib is missing or the plan holds no facts.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError(
            "Figures need matplotlib.", found="matplotlib is not installed", hint='pip install "autopar[plots]"'
        ) from None
    if plan.facts is None:
        raise PlanError("This plan has no facts to draw.", found="a plan of format 1", hint="plan again.")
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    return figure, figure.subplots()
