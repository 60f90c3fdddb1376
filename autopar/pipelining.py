"""From a capture to the plan of a pipeline, and from that plan back to the graphs of its stages."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from autopar import codegen, kernels, passes, planner, settings
from autopar.arguments import as_mesh
from autopar.emission import emitted, lowered
from autopar.errors import InfeasibleError, InputError, MeshError, PlanError
from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh, candidate_meshes, without_axis
from autopar.pipelines.actions import Schedule
from autopar.pipelines.request import AUTO, AXIS, Pipeline
from autopar.planner import Options, Planned
from autopar.planner.answers.make_plan import make_plan
from autopar.planner.graphs.accumulation import with_gradient_sums
from autopar.planner.graphs.dataflow import batch_size
from autopar.planner.pipeline.microbatches import OTHER_LOSS, MicroBatch, micro_batch
from autopar.planner.pipeline.search import pipelines_by_hand, plan_pipeline
from autopar.planner.pipeline.stages import Stage, cut, seams
from autopar.planner.search.candidates import budget_bytes
from autopar.planning import MeshLike, capture_one_batch
from autopar.plans import Plan
from autopar.plans.pipeline import PipelinePlan
from autopar.plans.records import BaselineRecord
from autopar.solver.clock import limited, now
from autopar.spmd import Lowered
from autopar.tracer import Capture
from autopar.tracer.calls import Call


@dataclass(frozen=True)
class Staged:
    """The graphs that a pipeline runs.

    Args:
        micro: what one micro-batch computes, before it is cut.
        stages: with the sums of their gradients over all micro-batches of an optimizer step.
    """

    micro: MicroBatch
    stages: tuple[Stage, ...]


def staged(graph: Graph, micro_batches: int, starts: Sequence[int], options: Options) -> Staged:
    """Return the graphs of the stages that begin with blocks ``starts``.

    Args:
        graph: the captured graph of the whole batch, without sums of gradients.

    Raises:
        InputError, PlanError: the batch cannot be cut into so many micro-batches.
    """
    micro = micro_batch(graph, micro_batches)
    steps, reduce = micro_batches * options.accumulation_steps, options.dtype_of("reduce")
    stages = cut(micro.graph, seams(micro.graph), starts)
    return Staged(
        micro, tuple(dataclasses.replace(s, graph=with_gradient_sums(s.graph, steps, reduce)) for s in stages)
    )


def is_pipelined(mesh: MeshLike, options: Options) -> bool:
    """Whether a pipeline is asked for: by a mesh axis ``pp``, or by the option beside a mesh."""
    return mesh is not None and (AXIS in as_mesh(mesh).names or options.pipeline is not None)


def planned_as_pipeline(
    model: nn.Module,
    call: Call,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    progress: Callable[[str], None] | None,
) -> tuple[PipelinePlan, Capture]:
    """Capture a model and plan it as a pipeline."""
    if progress is not None:
        progress("capture")
    asked_pipeline(mesh, options)
    began = time.perf_counter()
    capture = capture_one_batch(model, call, options, mesh.without(AXIS).size)
    captured_s = time.perf_counter() - began
    return _warned(pipeline_plan(capture, mesh, cluster, options, captured_s, progress)), capture


def with_pipelines(
    planned: Callable[[Callable[[Plan | None], float]], Plan],
    capture: Capture,
    size: int,
    cluster: Cluster,
    options: Options,
    progress: Callable[[str], None] | None,
) -> Plan | PipelinePlan:
    """Return the fastest of the plan without a pipeline and of the pipelines that may be faster.

    Args:
        planned: the search without a pipeline; it is given the share of its time that is for pipelines, by what they
            may gain.
        capture: without sums of gradients.

    Raises:
        InfeasibleError: neither fits.
    """
    plain: Plan | None = None
    refused: InfeasibleError | None = None
    sized = cluster.sized(size)
    with limited(options.time_limit_s):
        ends = now() + options.time_limit_s
        if options.pipeline is None or options.pipeline.stages == AUTO:
            try:
                plain = planned(lambda plan: _share_for_pipelines(plan, capture, size, sized, options))
            except InfeasibleError as error:
                refused = error
        found = list(_pipelines_that_may_pay(capture, plain, sized, options, ends, progress))
    best = min([p for p in (plain, *found) if p is not None], key=lambda p: p.step_time, default=None)
    if best is None:
        raise refused or _no_pipeline(options, size)
    others = tuple((str(p.mesh), p.step_time) for p in (plain, *found) if p is not None and p is not best)
    if isinstance(best, PipelinePlan):
        _warned(best)
    return dataclasses.replace(best, candidates=(*best.candidates, *others)) if others else best


def _share_for_pipelines(plan: Plan | None, capture: Capture, size: int, cluster: Cluster, options: Options) -> float:
    """Return the share of the time that is for pipelines: that of a step in which ``plan`` waits."""
    if plan is None:
        return 0.5
    may_pay = any(_may_pay(p, capture, plan, options) for p in _stage_counts(size, cluster, options))
    return 1 - _computing_s(plan) / plan.step_time if may_pay else 0.0


def _warned(plan: PipelinePlan) -> PipelinePlan:
    """Warn of micro-batches that change the loss; other notices are in the plan alone."""
    for notice in (n for n in plan.notices if OTHER_LOSS in n):
        warnings.warn(notice, stacklevel=5)
    return plan


def _no_pipeline(options: Options, size: int) -> MeshError:
    stages = options.pipeline.stages if options.pipeline is not None else AUTO
    return MeshError(
        f"No pipeline of {stages} stages was found for {size} ranks.",
        found=f"pipeline={stages!r}, {size} ranks",
        hint=f'give the mesh, as {{"{AXIS}": 2, "dp": {max(size // 2, 1)}}}, for the reason.',
    )


def _pipelines_that_may_pay(
    capture: Capture,
    plan: Plan | None,
    cluster: Cluster,
    options: Options,
    ends: float,
    progress: Callable[[str], None] | None,
) -> Iterator[PipelinePlan]:
    """Yield pipelines on ``cluster`` that may be faster than ``plan`` and those before them, or than nothing that fits.

    A pipeline computes as much as any plan, with a bubble on top, so it pays only where a plan waits for longer than
    that. One stage a node comes first, since it keeps all other messages inside nodes.

    Args:
        capture: without sums of gradients.
        ends: on ``clock.now``; until there is something that fits, the search goes on.
    """
    size = cluster.size
    least_s = math.inf if plan is None else plan.step_time
    for p in _stage_counts(size, cluster, options):
        if plan is not None and not _may_pay(p, capture, plan, options):
            continue
        part = without_axis(Mesh((p, size // p), (AXIS, "0")), AXIS, cluster)[1]
        for mesh in candidate_meshes(size // p, part)[:INNER_MESHES]:
            left_s = ends - now()
            if left_s < settings.LEAST_S and least_s < math.inf:
                return
            axes = {AXIS: p} | {f"{i}": n for i, n in enumerate(mesh.shape) if size > p}
            shape = Mesh(tuple(axes.values()), tuple(axes))
            each = dataclasses.replace(options, time_limit_s=max(left_s, settings.LEAST_S))
            with contextlib.suppress(InfeasibleError, PlanError, InputError):
                made = pipeline_plan(capture, shape, cluster, each, 0.0, progress, cutoff_s=least_s)
                least_s = min(least_s, made.step_time)
                yield made


INNER_MESHES = 2
"""Meshes that the ranks of a stage are tried in."""


def _stage_counts(size: int, cluster: Cluster, options: Options) -> list[int]:
    asked = AUTO if options.pipeline is None else options.pipeline.stages
    counts = [cluster.nodes, 2, 4, 8] if asked == AUTO else [int(asked)]
    return [p for p in dict.fromkeys(counts) if 1 < p <= size and size % p == 0]


def _may_pay(stages: int, capture: Capture, plan: Plan, options: Options) -> bool:
    """Whether a pipeline may be faster than a plan without one: its bubble is shorter than what that waits for."""
    if options.pipeline is not None and options.pipeline.stages != AUTO:
        return True
    batch = max(batch_size(capture.graph), 1)
    bubble = (stages - 1) / (stages - 1 + batch)
    return _computing_s(plan) < (1 - bubble) * plan.step_time


def _computing_s(plan: Plan) -> float:
    """Return the seconds of a step in which a rank computes."""
    return sum(op.seconds for op in plan.program.ops if op.kind == "compute")


def asked_pipeline(mesh: Mesh, options: Options) -> Pipeline:
    """Return what the mesh and the options ask of a pipeline together.

    Raises:
        MeshError: the mesh has no axis ``pp``, or one of another size than the stages that are asked for.
    """
    asked = options.pipeline or Pipeline()
    if AXIS not in mesh.names:
        raise MeshError(
            "A pipeline needs a mesh axis.",
            found=f"pipeline={asked.stages!r} on mesh {mesh}",
            hint=f'name the axis of the pipeline "{AXIS}": mesh={{"{AXIS}": 4, "dp": 2}}; or give no mesh.',
        )
    ranks = mesh.shape[mesh.names.index(AXIS)]
    if ranks == 1:
        raise MeshError(
            f"A pipeline needs at least two ranks along {AXIS}.",
            found=f"mesh {mesh}",
            hint=f"leave the axis {AXIS} out, or give it more ranks.",
        )
    if asked.stages not in (AUTO, ranks):
        raise MeshError(
            f"The mesh has {ranks} ranks along {AXIS}, and pipeline asks for {asked.stages}.",
            found=f"mesh {mesh}, Pipeline(stages={asked.stages})",
            hint="give the same number in both places, or only the mesh.",
        )
    return asked


def pipeline_plan(
    capture: Capture,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    captured_s: float = 0.0,
    progress: Callable[[str], None] | None = None,
    *,
    cutoff_s: float = math.inf,
) -> PipelinePlan:
    """Plan a pipeline on ``mesh``, which has the axis ``pp``.

    Args:
        capture: of the whole batch, without sums of gradients.
        cutoff_s: as for ``plan_pipeline``.

    Raises:
        MeshError, PlanError, InputError: what is asked does not fit the model, the batch or the mesh; or no pipeline
            is shorter than ``cutoff_s``.
        InfeasibleError: no pipeline fits the memory budget.
    """
    if options.ranges is not None:
        raise PlanError(
            "A pipeline is planned for one batch size.",
            found="dynamic_shapes",
            hint="leave dynamic_shapes out; another batch that the micro-batches divide compiles a program of its own.",
        )
    asked = asked_pipeline(mesh, options)
    sized = cluster.sized(mesh.size)
    began = time.perf_counter()
    found = plan_pipeline(capture.graph, mesh, sized, options, asked, progress, cutoff_s=cutoff_s)
    stage_mesh, part = without_axis(mesh, AXIS, sized)
    steps = found.schedule.micro_batches * options.accumulation_steps
    summing = dataclasses.replace(options, accumulation_steps=steps)
    made = [stage_plan(planned, capture, stage_mesh, part, summing) for planned in found.planned]
    plans = tuple(plan for plan, _ in made)
    prologue = None
    if found.micro.prologue is not None:
        free = dataclasses.replace(options, memory_budget_bytes=None, constraints={}, outputs="whole", search="joint")
        planned = planner.plan_graph(found.micro.prologue, stage_mesh, part, free, compare=False)
        prologue, _ = stage_plan(planned, capture, stage_mesh, part, free)
    return PipelinePlan(
        model=capture.graph.name,
        graph_digest=capture.graph.digest,
        mesh=mesh,
        cluster=sized.name,
        stages=plans,
        blocks=found.seams.blocks,
        starts=found.starts,
        schedule=found.schedule,
        costs=found.costs,
        prologue=prologue,
        outputs=dict(found.micro.outputs),
        buffers=dict(found.micro.buffers),
        split=tuple(
            split_source(plan, local) if _is_split(found.schedule, s) else "" for s, (plan, local) in enumerate(made)
        ),
        tied=tied_parameters(found.stages),
        step_time=found.seconds,
        lower_bound=found.bound,
        peaks=found.peaks,
        options={**plans[0].options, "accumulation_steps": options.accumulation_steps},
        notices=(*capture.notices, *found.micro.notices),
        candidates=found.considered,
        timings={"capture": captured_s, "search": time.perf_counter() - began},
    )


def records_by_hand(
    model: nn.Module, call: Call, plan: PipelinePlan, cluster: Cluster, options: Options
) -> tuple[BaselineRecord, ...]:
    """Return the figures of pipelines that people write by hand, with the plan's mesh and micro-batches."""
    capture = capture_one_batch(model, call, options, plan.stage_mesh.size)
    sized = cluster.sized(plan.mesh.size)
    budget = budget_bytes(sized, options)
    return tuple(
        BaselineRecord(
            name,
            found.seconds,
            found.seconds,
            plan.micro_batches * sum(op.wire_bytes for p in found.planned for op in p.program.ops),
            max(found.peaks),
            max(found.peaks) <= budget,
        )
        for name, found in pipelines_by_hand(capture.graph, plan.mesh, sized, options, plan.micro_batches)
    )


def stage_plan(
    planned: Planned, capture: Capture, mesh: Mesh, cluster: Cluster, options: Options
) -> tuple[Plan, Lowered]:
    """Return the plan of one stage with its emitted program, and the program."""
    graph = planned.decisions.graph
    made = make_plan(planned, graph, mesh, cluster, options, "", ())
    local = lowered(made, graph)
    source = emitted(made, local, dataclasses.replace(capture, graph=graph))
    named = sorted({name for op in planned.program.ops for name in op.kernels})
    return dataclasses.replace(made, source=source, kernels={name: kernels.source(name) for name in named}), local


def _is_split(schedule: Schedule, stage: int) -> bool:
    return any(a.kind == "I" and a.stage == stage for a in schedule.order[schedule.rank_of[stage]])


def split_source(plan: Plan, local: Lowered) -> str:
    """Return the text of a stage's backward in two parts; "" where it cannot be split."""
    halves = passes.split_backward(local, plan.program)
    return "" if halves is None else codegen.emit(halves, plan.mesh, [SPLIT_TITLE])


SPLIT_TITLE = "The backward in two parts: forward is that of the inputs, backward and accumulate that of the weights."


def tied_parameters(stages: Sequence[Stage]) -> Mapping[str, tuple[int, ...]]:
    """Return the parameters that several stages hold, with these stages."""
    found: dict[str, list[int]] = {}
    for s, stage in enumerate(stages):
        for name in dict.fromkeys(i.name for i in stage.graph.inputs if i.kind == "parameter"):
            found.setdefault(name, []).append(s)
    return {name: tuple(held) for name, held in found.items() if len(held) > 1}
