"""From a model and what the user asks to a capture, and from a capture to a plan."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopar import kernels, planner, settings
from autopar.arguments import as_mesh
from autopar.emission import emitted, lowered
from autopar.errors import ConstraintError, InfeasibleError, MeshError, PlanError
from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh, candidate_meshes
from autopar.planner import Options
from autopar.planner.answers.make_plan import make_plan
from autopar.planner.ranges import Sizes
from autopar.plans import Plan
from autopar.plans.pipeline import PipelinePlan
from autopar.precision import computing_in, stored_dtype
from autopar.ranged import carried_to, fitted, largest, over_range, resized
from autopar.runtime.agreement import world_size
from autopar.runtime.materialize import existing_dtensor
from autopar.solver.clock import limited, now
from autopar.spmd.placements import from_placements
from autopar.structure import is_dense
from autopar.tracer import Capture, ColoTracer
from autopar.tracer.calls import Call

MeshLike = Any


MESHES_TRIED = 4
"""With mesh=None so many of the candidate meshes are planned."""


def world_of(mesh: MeshLike, cluster: Cluster) -> int:
    """Ranks of the planned job: of the mesh, else of the process group, else of the cluster."""
    if mesh is not None:
        return as_mesh(mesh).size
    return world_size() if torch.distributed.is_initialized() else cluster.size


def capture_model(
    model: nn.Module,
    call: Call,
    options: Options,
    world: int,
    *,
    every: bool = False,
    trains: bool = True,
) -> Capture:
    """Capture the model on the batch of all ``world`` ranks as the graph that adds gradients up over
    ``options.accumulation_steps``."""
    return summing(capture_one_batch(model, call, options, world, every=every, trains=trains), options)


def summing(capture: Capture, options: Options) -> Capture:
    """Add to the graph of one batch that gradients add up over ``options.accumulation_steps``."""
    graph = planner.with_gradient_sums(capture.graph, options.accumulation_steps, options.dtype_of("reduce"))
    return dataclasses.replace(capture, graph=graph)


def capture_one_batch(
    model: nn.Module, call: Call, options: Options, world: int, *, every: bool = False, trains: bool = True
) -> Capture:
    """Capture the model on the batch of all ``world`` ranks, without sums of gradients."""
    whole = call if options.batch == "global" else with_batch(call, batch_of(call) * world)
    stored = functools.partial(stored_dtype, precision=options.mixed_precision)
    with computing_in(options.mixed_precision):
        tracer = ColoTracer(options.outputs, every_tangent=every, stored_dtype=stored, trains=trains)
        capture = tracer.capture(model, whole)
    return dataclasses.replace(capture, unsaved=_unsaved_buffers(model))


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are in no ``state_dict``, which an emitted file must bring along."""
    saved = set(model.state_dict(keep_vars=True))
    dense = ((n, b) for n, b in model.named_buffers() if type(b) is Tensor and is_dense(b))
    return {n: b.detach() for n, b in dense if n not in saved and not b.is_meta}


def batch_of(call: Call) -> int:
    """Dim 0 of the first input that has one."""
    return next((t.shape[0] for t in call.tensors if t.ndim), 1)


def with_batch(call: Call, batch: int) -> Call:
    """The call with another batch: every tensor whose dim 0 is the batch has ``batch`` rows, without values."""
    given = batch_of(call)

    def resized_to(t: Tensor) -> Tensor:
        if t.ndim and t.shape[0] == given:
            shape = (batch, *t.shape[1:])
            return torch.empty(shape, dtype=t.dtype, device="meta", requires_grad=t.requires_grad)
        return t

    return Call(call.structure, tuple(map(resized_to, call.tensors)))


def planned_over_range(
    search: Callable[[Capture], Plan], model: nn.Module, call: Call, capture: Capture, options: Options, size: int
) -> Plan:
    """The plan for a call, or for a range of sizes: under a budget that of the largest, which must fit it too."""
    ranges = options.ranges
    if ranges is None:
        return search(capture)

    def at(sizes: Sizes) -> Capture:
        return capture_model(model, resized(call, ranges, sizes), options, size)

    def ranged(made: Plan) -> Plan:
        return over_range(made, as_planned(capture, made), ranges, lambda sizes: as_planned(at(sizes), made))

    made = ranged(search(capture if options.memory_budget_bytes is None else at(largest(ranges))))
    return fitted(made, as_planned(capture, made), call) or ranged(search(capture))


def planned_on_meshes(
    capture: Capture,
    mesh: MeshLike,
    cluster: Cluster,
    size: int,
    options: Options,
    captured_s: float,
    progress: Callable[[str], None] | None,
    elsewhere: Callable[[Plan | None], float] = lambda _: 0.0,
) -> Plan:
    """The fastest plan on the mesh or, without one, on those that are worth a search.

    Args:
        elsewhere: given the plan on the first mesh, the share of the time left that is for a search of something else.
    """
    meshes = (as_mesh(mesh),) if mesh is not None else candidate_meshes(size, cluster)[:MESHES_TRIED]
    if mesh is None and options.constraints:
        raise MeshError(
            "Constraints name mesh axes, so the mesh must be given.",
            found="mesh=None with constraints",
            hint='write mesh=(2, 4) or mesh={"dp": 2, "tp": 4}.',
        )
    plans: list[tuple[Plan, Graph]] = []
    refused: list[InfeasibleError] = []
    with limited(options.time_limit_s):
        ends, quickest = now() + settings.WORK_SHARE * options.time_limit_s, 0.0
        # Those of fewer axes are searched sooner, and what they leave is for the others.
        for i, m in enumerate(sorted(meshes, key=lambda m: len(m.shape))):
            if i == 1:
                ends = now() + (1 - elsewhere(plans[0][0] if plans else None)) * (ends - now())
            began = now()
            work = (ends - began) / (len(meshes) - i)
            if work < quickest / 2:
                break
            each = dataclasses.replace(options, time_limit_s=work / settings.WORK_SHARE)
            try:
                plans.append(search_on(capture, m, cluster, each, captured_s, progress))
            except InfeasibleError as error:
                refused.append(error)
            quickest = min(quickest or math.inf, now() - began)
    if not plans:
        raise min(refused, key=lambda error: error.least_bytes)
    best, graph = min(plans, key=_speed)
    tried = tuple((str(p.mesh), p.step_time) for p, _ in plans) if len(plans) > 1 else ()
    asked = {**best.options, "time_limit_s": options.time_limit_s}
    return _with_source(dataclasses.replace(best, candidates=tried, options=asked), graph, capture)


def _speed(found: tuple[Plan, Graph]) -> tuple[float, int]:
    return found[0].step_time, found[0].peak_memory


def planned_on(
    capture: Capture,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    captured_s: float,
    progress: Callable[[str], None] | None,
) -> Plan:
    return _with_source(*search_on(capture, mesh, cluster, options, captured_s, progress), capture)


def search_on(
    capture: Capture,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    captured_s: float,
    progress: Callable[[str], None] | None,
) -> tuple[Plan, Graph]:
    """The plan on a mesh without the text of its program, and the form of the graph that was planned."""
    sized = cluster.sized(mesh.size)
    planned = planner.plan_forms(capture.graph, mesh, sized, options, progress)
    planned.timings["capture"] = captured_s
    graph = planned.decisions.graph
    return make_plan(planned, graph, mesh, sized, options, "", capture.notices), graph


def _with_source(made: Plan, graph: Graph, capture: Capture) -> Plan:
    started = time.perf_counter()
    source = emitted(made, lowered(made, graph), capture)
    lower_s = made.timings.get("lower", 0.0) + time.perf_counter() - started
    named = sorted({name for op in made.program.ops for name in op.kernels})
    return dataclasses.replace(
        made,
        source=source,
        timings={**made.timings, "lower": lower_s},
        kernels={name: kernels.source(name) for name in named},
    )


def as_shared(plan: Plan | PipelinePlan) -> Any:
    """What rank 0 tells the others; alone it keeps its plan, which can be asked why."""
    return plan if world_size() == 1 else plan.to_json()


def as_planned(capture: Capture, made: Plan) -> Capture:
    """The capture in the form that was planned: losses may be in chunks."""
    return dataclasses.replace(capture, graph=planner.as_planned(capture.graph, made.graph_digest, made.program))


def with_all_room(capture: Capture, made: Plan) -> tuple[Capture, Plan] | None:
    """The plan with room for whatever a router sends, and its capture; None where no rank gets more for it."""
    graph = planner.with_routed_experts(capture.graph, math.inf)
    capture = dataclasses.replace(capture, graph=planner.as_planned(graph, "", made.program))
    carried = carried_to(made, capture)
    return None if carried is None or carried is made else (capture, carried)


def belonging(plan: Plan, capture: Capture, call: Call) -> Plan:
    """The plan for this capture: as it is, or carried to a size of its range."""
    made = fitted(plan, capture, call)
    if made is None:
        graph = capture.graph
        raise PlanError(
            "The plan belongs to another model or other inputs.",
            found=f"a plan of {plan.model} for graph {plan.graph_digest}; this is {graph.name}, graph {graph.digest}",
            hint="plan again for this model and batch: autopar.plan(model, meta_inputs, ...), with dynamic_shapes for "
            "sizes that vary.",
        )
    return made


def placed_specs(model: nn.Module, capture: Capture, mesh: Mesh) -> dict[str, str]:
    """Constraints that leave every parameter of the program where it is."""
    used = {i.name for i in capture.graph.inputs if i.kind == "parameter"}
    return {
        name: str(from_placements(p.placements, p.ndim, mesh))
        for name, parameter in model.named_parameters()
        if name in used and (p := existing_dtensor(parameter)) is not None
    }


def mesh_of_shared(model: nn.Module, mesh: MeshLike) -> MeshLike:
    """The mesh of parameters that another parallel model has already; without such, the given one."""
    there = {
        n: p.device_mesh for n, parameter in model.named_parameters() if (p := existing_dtensor(parameter)) is not None
    }
    if not there:
        return mesh
    name, kept = next(iter(there.items()))
    other = next((m for m in there.values() if m != kept), mesh if mesh is not None else kept)
    if as_mesh(other).shape != as_mesh(kept).shape or (hasattr(other, "mesh_dim_names") and other != kept):
        raise MeshError(
            f"The parameter {name} belongs to another parallel model too, on another mesh.",
            found=f"{as_mesh(kept)} there, {as_mesh(other)} here",
            hint="make models that share parameters parallel on one mesh: pass the same mesh, or none.",
        )
    return kept


def with_shared(model: nn.Module, capture: Capture, mesh: MeshLike, options: Options, plan: Plan | None) -> Options:
    """The options with constraints that leave parameters of other parallel models as they are there.

    Raises:
        ConstraintError, PlanError: constraints, precision or the given plan want them otherwise.
    """
    there = placed_specs(model, capture, as_mesh(mesh)) if mesh is not None else {}
    for name, spec in there.items():
        wanted = options.constraints.get(name, spec) if plan is None else str(plan.specs[name])
        if wanted != spec:
            raise ConstraintError(
                f"The parameter {name} belongs to another parallel model too, which has it otherwise.",
                found=f"{spec} there, {wanted} in the {'constraints' if plan is None else 'plan'}",
                hint="leave it out of the constraints, and plan this model after the other was made parallel.",
            )
        dtype = stored_dtype(model.get_parameter(name), precision=options.mixed_precision)
        if (kept := existing_dtensor(model.get_parameter(name))) is not None and kept.dtype != dtype:
            raise PlanError(
                f"The parameter {name} belongs to another parallel model too, which stores it in another dtype.",
                found=f"{kept.dtype} there, {dtype} here",
                hint="give both models the same mixed_precision.",
            )
    return dataclasses.replace(options, constraints={**options.constraints, **there})
