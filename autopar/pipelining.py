"""From a capture to the plan of a pipeline, and from that plan back to the graphs of its stages."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar import kernels, planner
from autopar.emission import emitted, lowered
from autopar.errors import MeshError, PlanError
from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh
from autopar.pipelines.request import AUTO, AXIS, Pipeline
from autopar.planner import Options, Planned
from autopar.planner.answers.make_plan import make_plan
from autopar.planner.graphs.accumulation import with_gradient_sums
from autopar.planner.pipeline.microbatches import MicroBatch, micro_batch
from autopar.planner.pipeline.search import PlannedPipeline, plan_pipeline
from autopar.planner.pipeline.stages import Stage, cut, seams
from autopar.plans import Plan
from autopar.plans.pipeline import PipelinePlan
from autopar.tracer import Capture


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
    return Staged(micro, tuple(dataclasses.replace(s, graph=with_gradient_sums(s.graph, steps, reduce)) for s in stages))


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
) -> PipelinePlan:
    """Plan a pipeline on ``mesh``, which has the axis ``pp``.

    Args:
        capture: of the whole batch, without sums of gradients.

    Raises:
        MeshError, PlanError, InputError: what is asked does not fit the model, the batch or the mesh.
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
    found = plan_pipeline(capture.graph, mesh, sized, options, asked, progress)
    part, stage_mesh = sized.part(mesh.without(AXIS).size), mesh.without(AXIS)
    plans = tuple(
        stage_plan(planned, capture, stage_mesh, part, _stage_options(found, options, s))
        for s, planned in enumerate(found.planned)
    )
    prologue = None
    if found.micro.prologue is not None:
        free = dataclasses.replace(options, memory_budget_bytes=None, constraints={}, outputs="whole", batch=options.batch)
        planned = planner.plan_graph(found.micro.prologue, stage_mesh, part, free, compare=False)
        prologue = stage_plan(planned, capture, stage_mesh, part, free)
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
        tied=tied_parameters(found.stages),
        step_time=found.seconds,
        lower_bound=found.bound,
        peaks=found.peaks,
        options={**plans[0].options, "accumulation_steps": options.accumulation_steps},
        notices=(*capture.notices, *found.micro.notices),
        candidates=found.considered,
        timings={"capture": captured_s, "search": time.perf_counter() - began},
    )


def _stage_options(found: PlannedPipeline, options: Options, stage: int) -> Options:
    return dataclasses.replace(options, accumulation_steps=found.schedule.micro_batches * options.accumulation_steps)


def stage_plan(planned: Planned, capture: Capture, mesh: Mesh, cluster: Cluster, options: Options) -> Plan:
    """Return the plan of one stage with its emitted program."""
    graph = planned.decisions.graph
    made = make_plan(planned, graph, mesh, cluster, options, "", ())
    source = emitted(made, lowered(made, graph), dataclasses.replace(capture, graph=graph))
    named = sorted({name for op in planned.program.ops for name in op.kernels})
    return dataclasses.replace(made, source=source, kernels={name: kernels.source(name) for name in named})


def tied_parameters(stages: Sequence[Stage]) -> Mapping[str, tuple[int, ...]]:
    """Return the parameters that several stages hold, with these stages."""
    found: dict[str, list[int]] = {}
    for s, stage in enumerate(stages):
        for name in dict.fromkeys(i.name for i in stage.graph.inputs if i.kind == "parameter"):
            found.setdefault(name, []).append(s)
    return {name: tuple(held) for name, held in found.items() if len(held) > 1}
