"""Turns the plan of a pipeline into a module that trains: each rank gets the parameters and programs of its stages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import codegen, passes, planner
from autopar.assembly import bind_to, builder, call_on_meta, described, executable_of, keep_states
from autopar.attributes import record_attributes, restored_attributes
from autopar.emission import with_emitted_source
from autopar.errors import PlanError
from autopar.ir import Value
from autopar.mesh import Cluster
from autopar.pipelines.request import AXIS, Pipeline
from autopar.pipelining import SPLIT_TITLE, Staged, pipeline_plan, staged
from autopar.planner import Options
from autopar.planner.pipeline.stages import Stage
from autopar.planning import MeshLike, as_planned, batch_of, capture_one_batch
from autopar.plans import Plan
from autopar.plans.pipeline import PipelinePlan, plan_from_json
from autopar.precision import policy_of, stored_dtype
from autopar.runtime.accumulation import Sums, watch_steps
from autopar.runtime.agreement import decided_on_rank_0, on_all_ranks
from autopar.runtime.execution import Executable
from autopar.runtime.frameworks import wrap_frameworks
from autopar.runtime.gathering import STAGED
from autopar.runtime.handing_over import refuse_unfit_state
from autopar.runtime.launch import device_mesh_for
from autopar.runtime.loading import accept_whole_tensors
from autopar.runtime.materialize import existing_dtensor, install, prepare
from autopar.runtime.module import parallel_class
from autopar.runtime.pipeline import absent
from autopar.runtime.pipeline.module import PipelineModule
from autopar.runtime.pipeline.norms import norms_over_pipelines
from autopar.runtime.pipeline.running import run_pipeline
from autopar.runtime.pipeline.simulation import PipelineSimulation, simulate_pipeline, simulated
from autopar.runtime.pipeline.state import PipelineProgram, PipelineState
from autopar.runtime.requests import variant_key
from autopar.runtime.variants import Variant
from autopar.sharding import ShardingSpec
from autopar.spmd import Lowered
from autopar.spmd.pipeline.stage import Parts, StagePrograms
from autopar.spmd.placements import from_placements, to_placements
from autopar.tracer import Capture
from autopar.tracer.calls import Call, bind
from autopar.tracer.tracer import as_call


def assemble_pipeline(
    model: nn.Module,
    meta_inputs: Any,
    capture: Capture,
    made: PipelinePlan,
    cluster: Cluster,
    options: Options,
    mesh: MeshLike,
    *,
    initialize: bool = True,
) -> nn.Module:
    """Shard this rank's parameters, drop the others, and swap the model's class; this cannot be undone.

    Args:
        capture: of the whole batch, without sums of gradients.
    """
    whole, part = _device_meshes(made, mesh)
    planned = call_on_meta(bind(model, *as_call(meta_inputs)))
    original = type(model)
    seed = decided_on_rank_0(torch.initial_seed)
    stored = functools.partial(stored_dtype, precision=options.mixed_precision)

    def place(module: nn.Module, names: Sequence[str] | None, specs: Mapping[str, ShardingSpec]) -> None:
        meant = {n: p for n, p in module.named_parameters() if names is None or n in names}
        optimizers = refuse_unfit_state({n: p for n, p in meant.items() if existing_dtensor(p) is None})
        elsewhere = {
            n for n, stages in state.held.items() if state.position not in absent.positions_of(stages, state.rank_of)
        }
        if names is not None:
            elsewhere &= set(names)
        replacements = on_all_ranks(
            lambda: prepare(
                module,
                specs,
                state.mesh,
                part,
                state.rank.coordinate,
                state.device,
                seed,
                stored,
                initialize=initialize,
                only=names,
                elsewhere=elsewhere,
            )
        )
        shapes = {n: tuple(p.shape) for n, p in meant.items()}
        placements = {n: tuple(to_placements(specs[n], state.mesh, shape)) for n, shape in shapes.items() if n in specs}
        install(replacements, optimizers, cast=policy_of(options.mixed_precision).master is None)
        absent.without(module, elsewhere, state.held, placements, stored)
        accept_whole_tensors(module)
        for parameter in module.parameters():
            setattr(parameter, STAGED, True)

    def compile_variant(module: nn.Module, call: Call) -> Variant:
        return _compile(module, state, call, cluster, options)

    at = whole.get_coordinate()
    assert at is not None and whole.mesh_dim_names is not None
    axis = whole.mesh_dim_names.index(AXIS)
    index = tuple(slice(None) if i == axis else c for i, c in enumerate(at))
    state = PipelineState(
        made.stage_mesh,
        part,
        bind_to(original),
        compile_variant,
        place,
        made,
        planned,
        options.batch == "local",
        options.mixed_precision,
        capture.graph,
        plain_evaluation=options.outputs == "auto",
        execute=run_pipeline,
        whole_mesh=whole,
        position=at[axis],
        along=tuple(whole.mesh[index].tolist()),
        rank_of=made.schedule.rank_of,
        tied=made.tied,
    )
    state.connect(whole.get_group(AXIS))
    variant = _variant(model, capture, made, options, state, planned, cluster)
    place(model, None, {n: spec for n, (spec, _) in variant.parameters.items()})
    with state.precision():
        state.add(variant_key(model, planned), variant)
    _keep_states(model, made, state)
    model.__class__ = parallel_class(original, PipelineModule)
    model._autopar = state  # type: ignore[assignment]
    model._autopar_sums = Sums(options.accumulation_steps)  # type: ignore[assignment]
    watch_steps(model)
    wrap_frameworks()
    norms_over_pipelines(model)
    return model


def check_belongs(plan: PipelinePlan, capture: Capture) -> None:
    """Raise a PlanError unless ``plan`` was made for this capture."""
    graph = capture.graph
    if plan.graph_digest != graph.digest:
        raise PlanError(
            "The plan belongs to another model or other inputs.",
            found=f"a plan of {plan.model} for graph {plan.graph_digest}; this is {graph.name}, graph {graph.digest}",
            hint="plan again for this model and batch: autopar.plan(model, meta_inputs, ...).",
        )


def _device_meshes(made: PipelinePlan, mesh: MeshLike) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the DeviceMesh of all ranks, and that of this rank's stage, which has at least one axis."""
    whole = device_mesh_for(made.mesh, mesh)
    names = [n for n in whole.mesh_dim_names or made.mesh.names if n != AXIS]
    if whole.mesh_dim_names is None or not names:
        ranks = whole.mesh.reshape(*made.mesh.shape, *([] if names else [1]))
        names = names or [ALONE]
        whole = DeviceMesh(
            whole.device_type, ranks, mesh_dim_names=(*made.mesh.names, *([ALONE] if ALONE in names else []))
        )
    return whole, whole[tuple(names)]


ALONE = "stage"
"""Name of the axis of a stage's mesh of one rank."""


def _keep_states(model: nn.Module, made: PipelinePlan, state: PipelineState) -> None:
    for s in made.stages_of(state.position):
        keep_states(model, made.stages[s], state)


def _compile(
    model: nn.Module, state: PipelineState, call: Call, cluster: Cluster, options: Options, *, every: bool = False
) -> Variant:
    """Plan the model for another batch or mode, cut as it is, with the parameters placed as they are."""

    def captured() -> Capture:
        with restored_attributes(model, state.attributes_before), absent.whole(model):
            return capture_one_batch(model, call, options, state.mesh.size, every=every, trains=False)

    capture = on_all_ranks(captured, lambda c: c.graph.digest)
    first: PipelinePlan = state.plan
    made = first
    if capture.graph.digest != first.graph_digest:
        fixed = dataclasses.replace(
            options,
            constraints=_placed(model, capture, state),
            pipeline=Pipeline(
                stages=first.ranks,
                micro_batches=_micro_batches(first, call, trains=state.trains),
                schedule=first.schedule.name.lower(),
                chunks=len(first.stages) // first.ranks,
                split=tuple(first.blocks[b] for b in first.starts[1:]),
                two_phase=bool(options.pipeline and options.pipeline.two_phase),
                like=(tuple(first.blocks), tuple(first.starts)),
            ),
        )
        text = decided_on_rank_0(lambda: pipeline_plan(capture, first.mesh, cluster, fixed).to_json())
        read = plan_from_json(text)
        assert isinstance(read, PipelinePlan)
        made = read
    _keep_states(model, made, state)
    return _variant(model, capture, made, options, state, call, cluster)


def _micro_batches(first: PipelinePlan, call: Call, *, trains: bool) -> int:
    """Return the micro-batches of another batch: as many as before; without gradients fewer where they do not divide.

    Raises:
        InputError: later, if they do not divide and there are gradients.
    """
    m = first.micro_batches
    if trains:
        return m
    rows = batch_of(call)
    return next(n for n in range(min(m, max(rows, 1)), 0, -1) if rows % n == 0)


def _placed(model: nn.Module, capture: Capture, state: PipelineState) -> dict[str, str]:
    """Return constraints that leave every parameter of the program where it is, on this rank or on others."""
    used = {i.name for i in capture.graph.inputs if i.kind == "parameter"}
    found = {
        name: str(from_placements(p.placements, p.ndim, state.mesh))
        for name, parameter in model.named_parameters()
        if name in used and (p := existing_dtensor(parameter)) is not None
    }
    for name, each in absent.absent_tensors(model).items():
        if name in used and each.placements is not None:
            found[name] = str(from_placements(each.placements, each.tensor.ndim, state.mesh))
    return found


def _variant(
    model: nn.Module,
    capture: Capture,
    made: PipelinePlan,
    options: Options,
    state: PipelineState,
    call: Call,
    cluster: Cluster,
) -> Variant:
    parts = on_all_ranks(lambda: staged(capture.graph, made.micro_batches, made.starts, options))
    _learn_holders(state, parts)
    program = on_all_ranks(lambda: _program(capture, made, parts, options, state))
    outputs = tuple(o.name for o in capture.graph.outputs if o.kind == "output")
    metas = {i.name: capture.graph.meta(Value(i.node)) for i in capture.graph.inputs if i.kind == "parameter"}
    specs = {n: spec for plan in made.stages for n, spec in plan.specs.items() if n in plan.parameters}
    state.compiled += 1
    record_attributes(state.attributes_before, model, [each.place for each in capture.attribute_outputs])

    call = call_on_meta(call)
    whole_outputs = dataclasses.replace(options, outputs="whole") if options.outputs == "auto" else options

    @functools.cache
    def every_tangent() -> Variant:
        """Compile the same call with a backward from every output."""
        return _compile(model, state, call, cluster, whole_outputs, every=True)

    return Variant(
        program,  # type: ignore[arg-type]
        builder(capture.returned, outputs),
        outputs,
        every_tangent,
        capture.constants,
        capture.guards,
        {n: (spec, metas[n].shape) for n, spec in specs.items() if n in metas},
        state.compiled,
        capture.attribute_outputs,
        list(capture.lost),
    )


def _learn_holders(state: PipelineState, parts: Staged) -> None:
    """Record which stages hold which parameters and buffers."""
    found: dict[str, list[int]] = {}
    for s, stage in enumerate(parts.stages):
        names = [i.name for i in stage.graph.inputs if i.kind in ("parameter", "buffer")]
        for name in dict.fromkeys([*names, *(o.name for o in stage.graph.outputs if o.kind == "mutation")]):
            found.setdefault(name, []).append(s)
    state.held |= {n: tuple(sorted({*state.held.get(n, ()), *stages})) for n, stages in found.items()}


def _program(
    capture: Capture, made: PipelinePlan, parts: Staged, options: Options, state: PipelineState
) -> PipelineProgram:
    graph = capture.graph
    _check_seams(made, parts)
    makers = {o.name: s for s, stage in enumerate(parts.stages) for o in stage.graph.outputs if o.kind == "output"}
    tangents = frozenset(i.name for i in graph.inputs if i.kind == "tangent")
    loss = graph.lone_scalar if capture.loss is not None else None
    given = options
    if options.outputs == "auto":
        given = dataclasses.replace(options, outputs="whole" if capture.loss is None else "dtensor")
    plain = {
        o.name
        for o in graph.outputs
        if o.kind == "output" and planner.is_plain_output(graph, graph.meta(o.value), options)
    }
    dtypes = {t.meta.dtype for plan in made.stages for t in plan.program.tensors.values()}
    asked = options.pipeline
    prologue, prologue_metas = _prologue(capture, made, parts, options, state)
    return PipelineProgram(
        {s: _stage(capture, made, parts.stages[s], s, options, state) for s in made.stages_of(state.position)},
        made.schedule,
        dict(parts.micro.outputs),
        makers,
        {o.name: graph.meta(o.value) for o in graph.outputs if o.kind == "output"},
        frozenset(plain),
        capture.requires_grad,
        tangents,
        loss,
        dict(parts.micro.buffers),
        prologue,
        prologue_metas,
        random=_is_random(parts),
        compiled=options.backend == "inductor",
        two_phase=bool(asked is not None and asked.two_phase),
        everywhere=given.outputs == "whole" or capture.loss is None,
        half="float16" in dtypes,
    )


def _is_random(parts: Staged) -> bool:
    graphs = [stage.graph for stage in parts.stages]
    return any(g.consumers.get(Value(i.node)) for g in graphs for i in g.inputs if i.kind == "seed")


def _check_seams(made: PipelinePlan, parts: Staged) -> None:
    """Raise unless what a stage sends arrives in the spec in which the next one takes it."""
    for s, (plan, following) in enumerate(zip(made.stages, made.stages[1:], strict=False)):
        for kinds in (("sent", "received"), ("gradient", "tangent")):
            before, after = (plan, following) if kinds[0] == "sent" else (following, plan)
            sent = {o.name.removeprefix("input:"): t for o, t in before.program.results if o.kind == kinds[0]}
            graph = parts.stages[s + 1 if kinds[0] == "sent" else s].graph
            taken = {i.name: i.node for i in graph.inputs if i.kind == kinds[1]}
            written = {op.node: op.writes[0] for op in after.program.ops if op.kind == "input"}
            for name, node in taken.items():
                if name in sent and before.program.tensors[sent[name]].spec != written[node].spec:
                    raise PlanError(
                        f"Stages {s} and {s + 1} do not agree on how {name} is cut.",
                        found=f"{before.program.tensors[sent[name]].spec} sent, {written[node].spec} taken",
                        hint="plan again.",
                    )


def _prologue(
    capture: Capture, made: PipelinePlan, parts: Staged, options: Options, state: PipelineState
) -> tuple[Executable | None, dict[str, Any]]:
    """Return the program of what this rank's stages take of the whole batch, if they do."""
    graph = parts.micro.prologue
    mine = [parts.stages[s].graph for s in made.stages_of(state.position)]
    taken = {i.name for g in mine for i in g.inputs if i.name in parts.micro.ahead}
    if graph is None or made.prologue is None or not taken:
        return None, {}
    own = dataclasses.replace(capture, graph=graph)
    plan, local = with_emitted_source(made.prologue, own, dataclasses.replace(options, accumulation_steps=1))
    metas = {o.name: graph.meta(o.value) for o in graph.outputs}
    return executable_of(own, plan, local, options, state.rank, None), metas


def _stage(
    capture: Capture, made: PipelinePlan, stage: Stage, s: int, options: Options, state: PipelineState
) -> StagePrograms:
    own, plan, local, each = _lowered(capture, made, stage, s, options)
    split = any(a.kind == "I" and a.stage == s for a in made.schedule.order[state.position])
    program = executable_of(own, plan, local, each, state.rank, None)
    return _described(program, own, stage, s, _parts(own, plan, local, each) if split else None)


def _described(program: Executable, own: Capture, stage: Stage, s: int, parts: Parts | None) -> StagePrograms:
    metas = {i.node: own.graph.meta(Value(i.node)) for i in own.graph.inputs}
    return StagePrograms(s, program, metas, stage.receives, stage.sends, stage.returns, stage.takes, parts)


def _lowered(
    capture: Capture, made: PipelinePlan, stage: Stage, s: int, options: Options
) -> tuple[Capture, Plan, Lowered, Options]:
    """Return the capture of a stage in the form that was planned, its plan, its program and its options."""
    plan: Plan = made.stages[s]
    own = as_planned(dataclasses.replace(capture, graph=stage.graph), plan)
    if own.graph.digest != plan.graph_digest:
        raise PlanError(
            "The plan belongs to another model or other inputs.",
            found=f"stage {s} planned for graph {plan.graph_digest}; this is graph {own.graph.digest}",
            hint="plan again for this model and batch.",
        )
    steps = made.micro_batches * options.accumulation_steps
    each = dataclasses.replace(options, accumulation_steps=steps)
    plan, local = with_emitted_source(plan, own, each)
    return own, plan, local, each


def _parts(own: Capture, plan: Plan, local: Lowered, options: Options) -> Parts | None:
    """Return the backward of a stage in two parts."""
    halves = passes.split_backward(local, plan.program)
    if halves is None:
        return None
    text = codegen.emit(halves, plan.mesh, [SPLIT_TITLE])
    functions = codegen.load(text, f"autopar_{plan.digest}_parts", own.graph)
    if options.backend == "inductor":
        functions |= {
            n: codegen.compiled(functions[n]) for n in {"forward", "backward", "accumulate"} & functions.keys()
        }
    return _as_parts(functions, halves)


def _as_parts(functions: Mapping[str, Any], halves: Lowered) -> Parts:
    return Parts(
        functions["forward"],
        functions["backward"],
        functions.get("accumulate"),
        tuple(o for o, _ in halves.gradients),
        tuple(o for o, _ in halves.accumulated),
    )


def simulate_plan(
    capture: Capture, made: PipelinePlan, named: Mapping[tuple[str, str], Tensor], options: Options, seed: int
) -> PipelineSimulation:
    """Run one step of a pipeline in this process; outputs are by name.

    Args:
        capture: of the whole batch, without sums of gradients.
        named: whole parameters, buffers, constants and inputs.
    """
    parts = staged(capture.graph, made.micro_batches, made.starts, options)
    stages = []
    for s, stage in enumerate(parts.stages):
        own, plan, local, each = _lowered(capture, made, stage, s, options)
        halves = passes.split_backward(local, plan.program) if made.schedule.split else None
        stages.append(_described(described(_in_one(local), own, local, each), own, stage, s, _halves(halves)))
    prologue = None
    if parts.micro.prologue is not None and made.prologue is not None:
        own = dataclasses.replace(capture, graph=parts.micro.prologue)
        _, local = with_emitted_source(made.prologue, own, dataclasses.replace(options, accumulation_steps=1))
        prologue = local, {o.name: own.graph.meta(o.value) for o in own.graph.outputs}
    return simulate_pipeline(
        stages, made.schedule, made.stage_mesh, named, prologue, parts.micro.outputs, parts.micro.buffers, seed
    )


def _in_one(local: Lowered) -> dict[str, Any]:
    """Return the functions of a program that run all ranks in one process."""
    functions = {"forward": local.forward, "backward": local.backward, "inference": local.forward}
    functions |= {"accumulate": local.accumulate} if local.accumulate is not None else {}
    functions |= {"once": local.once} if local.once is not None else {}
    return {name: simulated(module) for name, module in functions.items()}


def _halves(halves: Lowered | None) -> Parts | None:
    return None if halves is None else _as_parts(_in_one(halves), halves)
