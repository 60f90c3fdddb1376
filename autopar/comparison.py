"""The chosen plan beside the known ways to train in parallel: seconds, bytes moved, peak memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn
from typing_extensions import Unpack

from autopar import api
from autopar.arguments import as_cluster
from autopar.mesh import Cluster
from autopar.pipelining import records_by_hand
from autopar.plan_options import PlanOptions, lists_options, planner_options
from autopar.planning import MeshLike
from autopar.plans import Plan
from autopar.plans.pipeline import PipelinePlan
from autopar.plans.records import BaselineRecord
from autopar.plans.table import seconds, size
from autopar.tracer.calls import bind
from autopar.tracer.tracer import as_call

CHOSEN = "autopar"


@dataclass(frozen=True)
class Comparison:
    """``plan`` is what was chosen; ``rows`` have its figures first, then those of every baseline that applies."""

    plan: Plan | PipelinePlan
    rows: tuple[BaselineRecord, ...]

    @property
    def baselines(self) -> tuple[BaselineRecord, ...]:
        return self.rows[1:]

    def __str__(self) -> str:
        chosen = self.rows[0]
        head = f"{self.plan.model} on mesh {self.plan.mesh}, cluster {self.plan.cluster}"
        names = f"  {'':<14}{'step time':>11}{'plan cost':>11}{'bytes moved':>14}{'peak memory':>14}{'slower by':>12}"
        rows = (chosen, *sorted(self.baselines, key=lambda r: r.step_time))
        return "\n".join([head, names, *(_line(row, chosen) for row in rows)])


def _line(row: BaselineRecord, chosen: BaselineRecord) -> str:
    times = f"  {row.name:<14}{seconds(row.step_time):>11}{seconds(row.objective):>11}"
    return f"{times}{size(row.bytes):>14}{size(row.peak_memory):>14}{_slower(row, chosen):>12}".rstrip()


def _slower(row: BaselineRecord, chosen: BaselineRecord) -> str:
    if row is chosen:
        return ""
    if not row.fits:
        return "over budget"
    return f"{row.step_time / chosen.step_time:.2f} x" if chosen.step_time else "1.00 x"


@lists_options
def compare(
    model: nn.Module,
    meta_inputs: Any,
    mesh: MeshLike = None,
    cluster: str | Path | Cluster | None = None,
    *,
    progress: Callable[[str], None] | None = None,
    **options: Unpack[PlanOptions],
) -> Comparison:
    """Plan ``model`` and compare the plan with DDP, ZeRO, HSDP, tensor and sequence parallelism and their combinations.

    Each baseline is a set of constraints on the same problem: the same solver completes it, the same model prices it,
    and it is simulated on the same ranks. ``autopar.plan(..., search="baseline:ZeRO-3")`` gives it as a plan.

    Args:
        model, meta_inputs, mesh, cluster, progress: as for ``autopar.plan``.
        options: see ``autopar.PlanOptions``. Constraints hold for the chosen plan, not for the baselines.
    """
    plan = api.plan(model, meta_inputs, mesh, cluster, compare=True, progress=progress, **options)
    if isinstance(plan, PipelinePlan):
        return _beside_pipelines_by_hand(plan, model, meta_inputs, cluster, options)
    baselines = plan.baselines
    if not baselines:
        free = cast(PlanOptions, {k: v for k, v in options.items() if k not in ("constraints", "time_limit")})
        other = api.plan(model, meta_inputs, plan.mesh, cluster, compare=True, progress=progress, **free)
        assert isinstance(other, Plan)
        baselines = other.baselines
    chosen = BaselineRecord(
        CHOSEN, plan.objective, plan.step_time, sum(c.bytes for c in plan.collectives), plan.peak_memory, True
    )
    return Comparison(plan, (chosen, *baselines))


def _beside_pipelines_by_hand(
    plan: PipelinePlan, model: nn.Module, meta_inputs: Any, cluster: Any, options: PlanOptions
) -> Comparison:
    call = bind(model, *as_call(meta_inputs))
    wanted = planner_options(model, call, options)
    sent = plan.micro_batches * sum(c.bytes for c in plan.collectives)
    chosen = BaselineRecord(CHOSEN, plan.step_time, plan.step_time, sent, plan.peak_memory, True)
    return Comparison(plan, (chosen, *records_by_hand(model, call, plan, as_cluster(cluster), wanted)))
