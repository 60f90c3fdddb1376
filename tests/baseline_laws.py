"""Plan captured models on many meshes and budgets, for the law that no baseline beats the plan."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import cache

import torch

from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh
from autopar.planner import Options, Planned, plan_graph
from autopar.tracer import ColoTracer
from autopar.tracer.calls import bind
from autopar.tracer.tracer import as_call
from tests.models import ZOO

MESHES = [(2,), (4,), (8,), (2, 2), (2, 4), (4, 2)]
BUDGETS = ["all", "half", "least"]
"""The device's memory, the budget that half of the baselines fit in, and the peak of the smallest baseline."""

TIME_LIMIT_S = 30.0


@cache
def captured(name: str) -> Graph:
    model, inputs = ZOO[name].made(torch.float32)
    return ColoTracer("auto").capture(model, bind(model, *as_call(inputs))).graph


def plan_on(name: str, mesh: tuple[int, ...], budget: str = "all", **options: object) -> Planned:
    """Plan a model of the zoo on part of a DGX H100."""
    graph, arranged = captured(name), Mesh(mesh)
    cluster = Cluster.load("dgx-h100").sized(arranged.size)
    asked = replace(Options(time_limit_s=TIME_LIMIT_S, compare=True), **options)
    if budget != "all":
        asked = replace(asked, memory_budget_bytes=_bytes(budget, name, mesh))
    return plan_graph(graph, arranged, cluster, asked)


@cache
def _free(name: str, mesh: tuple[int, ...]) -> Planned:
    return plan_on(name, mesh)


def _bytes(budget: str, name: str, mesh: tuple[int, ...]) -> int:
    peaks = [b.peak_memory for b in _free(name, mesh).baselines]
    return min(peaks) if budget == "least" else int(statistics.median_high(peaks))


def no_baseline_is_better(planned: Planned) -> None:
    """Assert that no baseline has a smaller cost, beyond the default gap, or a shorter simulated step."""
    fitting = [b for b in planned.baselines if b.fits]
    assert planned.baselines, "nothing was compared"
    assert planned.timeline.seconds <= min((b.step_time for b in fitting), default=1e30) * (1 + 1e-9)
    assert planned.solution.objective <= min((b.objective for b in fitting), default=1e30) * (1 + Options().gap)
    assert planned.solution.lower_bound <= planned.solution.objective
