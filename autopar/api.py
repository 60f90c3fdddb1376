"""The compiler on one page: capture, plan, lower, emit, run."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from autopar import codegen
from autopar.arguments import as_cluster, as_mesh
from autopar.assembly import assemble
from autopar.emission import with_emitted_source
from autopar.errors import InputError, MeshError, PlanError, RoomError
from autopar.mesh import Cluster, Mesh
from autopar.pipeline_assembly import assemble_pipeline, check_belongs, simulate_plan
from autopar.pipelines.request import AXIS
from autopar.pipelining import is_pipelined, pipeline_plan, planned_as_pipeline, with_pipelines
from autopar.plan_options import PlanOptions, lists_options, planner_options
from autopar.planner import Options
from autopar.planning import (
    MeshLike,
    as_planned,
    as_shared,
    belonging,
    capture_model,
    capture_one_batch,
    mesh_of_shared,
    planned_on_meshes,
    planned_over_range,
    summing,
    with_all_room,
    with_shared,
    world_of,
)
from autopar.plans import Plan
from autopar.plans.pipeline import PipelinePlan, load_plan, plan_from_json
from autopar.precision import stored_dtype
from autopar.remedies import Request, planned_or_remedied
from autopar.runtime.agreement import decided_on_rank_0, on_all_ranks, world_size
from autopar.runtime.launch import ensure_process_group
from autopar.runtime.module import ParallelModule
from autopar.runtime.simulation import Simulation, simulate_program
from autopar.runtime.waiting import roll_call
from autopar.structure import is_dense
from autopar.tracer import Capture
from autopar.tracer.calls import Call, bind
from autopar.tracer.hooks import lost_parameter_hooks
from autopar.tracer.tracer import as_call


@lists_options
def plan(
    model: nn.Module,
    meta_inputs: Any,
    mesh: MeshLike = None,
    cluster: str | Path | Cluster | None = None,
    *,
    compare: bool = False,
    progress: Callable[[str], None] | None = None,
    **options: Unpack[PlanOptions],
) -> Plan | PipelinePlan:
    """Plan how ``model`` trains on a cluster; needs no process group and no GPU, and allocates nothing.

    Args:
        meta_inputs, mesh, cluster: as for ``autoparallelize``. Without a mesh the job has as many ranks as the process
            group, or else as the cluster has devices.
        compare: schedule and measure every baseline, also those that cannot be better than the plan.
        progress: is called with the name of each stage of the search.
        options: see ``autopar.PlanOptions``.

    Returns:
        A ``PipelinePlan`` where the mesh has an axis ``pp``, or where a pipeline is the fastest that was found.

    Raises:
        CaptureError, MeshError, ConstraintError, InfeasibleError: see there.
    """
    _check_module(model)
    call = bind(model, *as_call(meta_inputs))
    wanted = dataclasses.replace(planner_options(model, call, options), compare=compare)
    hardware = as_cluster(cluster)
    if is_pipelined(mesh, wanted):
        return planned_as_pipeline(model, call, as_mesh(mesh), hardware, wanted, progress)[0]
    size = world_of(mesh, hardware)
    started = time.perf_counter()
    if progress is not None:
        progress("capture")
    capture = capture_one_batch(model, call, wanted, size)
    mesh = mesh_of_shared(model, mesh)
    wanted = with_shared(model, capture, mesh, wanted, None)
    captured_s = time.perf_counter() - started
    return _searched(Request(model, call, mesh, hardware, wanted, False, None, captured_s, progress), capture, size)


def _searched(request: Request, capture: Capture, size: int, *, pipelines: bool = True) -> Plan | PipelinePlan:
    """Return the fastest plan; without a mesh among all meshes that are worth a search, and pipelines that may pay.

    Args:
        capture: without sums of gradients.
    """
    r, options = request, request.options
    summed = summing(capture, options)

    def on_meshes(elsewhere: Callable[[Plan | None], float] = lambda _: 0.0) -> Plan:
        def search(captured: Capture) -> Plan:
            return planned_on_meshes(captured, r.mesh, r.cluster, size, options, r.captured_s, r.progress, elsewhere)

        return planned_over_range(search, r.model, r.call, summed, options, size)

    def search() -> Plan | PipelinePlan:
        if r.mesh is not None or options.batch == "local" or options.ranges is not None or not pipelines:
            return on_meshes()
        return with_pipelines(on_meshes, capture, size, r.cluster, options, r.progress)

    return planned_or_remedied(search, dataclasses.replace(request, graph=summed.graph))


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        hint = "pass a torch.nn.Module whose forward returns the loss or the outputs."
        raise InputError("The model is no module.", found=f"{type(model).__name__} {model!r:.80}", hint=hint)


def _loaded(plan: Plan | PipelinePlan | str | Path) -> Plan | PipelinePlan:
    """A plan, or the saved one at a path."""
    if isinstance(plan, (Plan, PipelinePlan)):
        return plan
    if not isinstance(plan, (str, Path)):
        raise PlanError("This is no plan.", found=f"{type(plan).__name__} {plan!r:.80}", hint="give a Plan, or a path.")
    return load_plan(plan)


@lists_options
def autoparallelize(
    model: nn.Module,
    meta_inputs: Any,
    mesh: MeshLike = None,
    cluster: str | Path | Cluster | None = None,
    *,
    plan: Plan | str | Path | None = None,
    source: str | Path | None = None,
    initialize: bool = True,
    progress: Callable[[str], None] | None = None,
    **options: Unpack[PlanOptions],
) -> nn.Module:
    """Make ``model`` train on the cluster: the same object, with DTensor parameters and the planned program as forward.

    Optimizers of ``model`` that exist already step its DTensors from now on, with the state that they have.

    Args:
        meta_inputs: a tensor, a tuple (positional) or a dict (by keyword) of tensors; their values do not matter.
        mesh: ``(2, 4)``, ``{"dp": 2, "tp": 4}`` or a torch DeviceMesh of as many ranks as the job has; None, the
            default, lets the search choose.
        cluster: a name such as ``"dgx-h100"``, a file of ``autopar profile``, or a ``Cluster``; None, the default, is
            what this process sees.
        plan: a Plan, or the path of a saved one, to run without a search.
        source: with a plan, the path of its program as someone has edited it: what ``plan.emit`` or ``plan.source``
            gave. The edited program runs instead and can be stepped through in its file.
        initialize: whether parameters on the meta device get the values that their modules' ``reset_parameters`` sets;
            False leaves their shards empty, for a checkpoint or ``autopar.load_safetensors`` to fill.
        progress: is called with the name of each stage of the search.
        options: see ``autopar.PlanOptions``. With a plan, those that the plan was made with hold.

    Returns:
        ``model``, whose class is now a subclass of what it was.

    Raises:
        AutoparError: on every rank at once, and the model is as it was.
    """
    ensure_process_group()
    roll_call("autoparallelize", "call it on every rank, outside of `if rank == 0`: each gets a part of the model.")

    def requested() -> tuple[Cluster, Plan | PipelinePlan | None, str | None, Options]:
        _check_module(model)
        _check_model(model)
        wanted = planner_options(model, bind(model, *as_call(meta_inputs)), options)
        given = None if plan is None else _loaded(plan)
        if source is not None and (isinstance(given, PipelinePlan) or (given is None and is_pipelined(mesh, wanted))):
            raise PlanError("The programs of a pipeline cannot be edited.", found="source", hint="leave source out.")
        edited = None if source is None else _edited_text(given, source, wanted.backend)
        _check_world(given.mesh if given is not None else as_mesh(mesh) if mesh is not None else None)
        if given is not None:
            kept = ("batch", "outputs", "mixed_precision", "accumulation_steps", "expert_room")
            wanted = dataclasses.replace(wanted, **{k: given.options[k] for k in kept if k in given.options})
        return as_cluster(cluster), given, edited, wanted

    hardware, given, edited, wanted = on_all_ranks(
        requested, lambda r: _wanted(*r, mesh), "request", "give every rank the same arguments."
    )
    if isinstance(given, PipelinePlan) or (given is None and is_pipelined(mesh, wanted)):
        return _pipelined(model, meta_inputs, mesh, hardware, given, wanted, progress, initialize=initialize)
    started = time.perf_counter()
    call = bind(model, *as_call(meta_inputs))
    batch = on_all_ranks(lambda: capture_one_batch(model, call, wanted, world_size()), lambda c: c.graph.digest)
    capture = summing(batch, wanted)
    if given is not None:
        made = on_all_ranks(lambda: belonging(given, as_planned(capture, given), call))
        mesh = mesh_of_shared(model, mesh if mesh is not None else made.mesh)
        with_shared(model, capture, mesh, wanted, made)
    else:
        mesh = mesh_of_shared(model, mesh)
        wanted = with_shared(model, capture, mesh, wanted, None)
        captured_s = time.perf_counter() - started
        asked = Request(model, call, mesh, hardware, wanted, True, None, captured_s, progress)
        # Ranks of a pipeline have other parameters and outputs, which a loop has to be ready for.
        wants = wanted.pipeline is not None and edited is None
        text = decided_on_rank_0(lambda: as_shared(_searched(asked, batch, world_size(), pipelines=wants)))
        found = plan_from_json(text) if isinstance(text, str) else text
        if isinstance(found, PipelinePlan):
            return _pipelined(model, meta_inputs, mesh, hardware, found, wanted, progress, initialize=initialize)
        made = found
    capture = as_planned(capture, made)
    made, local = on_all_ranks(lambda: with_emitted_source(made, capture, wanted))
    return assemble(
        model,
        meta_inputs,
        capture,
        made,
        local,
        hardware,
        wanted,
        mesh,
        initialize=initialize,
        edited=None if edited is None else (edited, str(source)),
    )


def _pipelined(
    model: nn.Module,
    meta_inputs: Any,
    mesh: MeshLike,
    cluster: Cluster,
    given: PipelinePlan | None,
    options: Options,
    progress: Callable[[str], None] | None,
    *,
    initialize: bool,
) -> nn.Module:
    """Make ``model`` train as a pipeline: by ``given``, or as planned for ``mesh``."""
    call = bind(model, *as_call(meta_inputs))
    shape = given.mesh if given is not None else as_mesh(mesh)
    size = shape.without(AXIS).size
    capture = on_all_ranks(lambda: capture_one_batch(model, call, options, size), lambda c: c.graph.digest)
    made = given
    if made is None:
        planned = functools.partial(pipeline_plan, capture, shape, cluster, options, progress=progress)
        text = decided_on_rank_0(lambda: planned().to_json())
        read = plan_from_json(text)
        assert isinstance(read, PipelinePlan)
        made = read
    on_all_ranks(lambda: check_belongs(made, capture))
    return assemble_pipeline(
        model,
        meta_inputs,
        capture,
        made,
        cluster,
        options,
        mesh if mesh is not None else made.mesh,
        initialize=initialize,
    )


def _check_model(model: nn.Module) -> None:
    if isinstance(model, ParallelModule):
        raise PlanError("The model is already parallel.", found=type(model).__name__, hint="parallelize a fresh model.")
    hooked = next(iter(lost_parameter_hooks(model)), None)
    if hooked is not None:
        raise PlanError(
            f"The parameter {hooked[0]} has a hook, which would not be that of the DTensor that it becomes.",
            found=hooked[1],
            hint="register hooks on parameters after autoparallelize; they see the sharded gradient.",
        )
    if "forward" in vars(model):
        raise PlanError(
            "The model's forward was replaced on the instance, where it would hide the parallel one.",
            found=f"{type(model).__name__} object with an attribute forward",
            hint="define forward in a class, or undo the wrapper before parallelizing.",
        )


def _edited_text(plan: Plan | PipelinePlan | None, source: str | Path, backend: str) -> str:
    if plan is None:
        raise PlanError(
            "An edited program belongs to a plan.",
            found="source without plan",
            hint="give both: autoparallelize(model, inputs, plan=plan, source=path).",
        )
    text = codegen.read_edited(source)
    if backend == "inductor":
        codegen.refuse_own_ops(text, source)
    return text


def _wanted(
    cluster: Cluster, plan: Plan | PipelinePlan | None, edited: str | None, options: Options, mesh: MeshLike
) -> dict[str, str]:
    """What every rank must ask for alike, by the name of the argument."""
    said = {f.name: repr(getattr(options, f.name)) for f in dataclasses.fields(options)}
    said |= {"cluster": cluster.name, "mesh": str(as_mesh(mesh)) if mesh is not None else "None"}
    source = hashlib.sha256(edited.encode()).hexdigest()[:16] if edited is not None else "None"
    return said | {"plan": f"{plan.digest} on mesh {plan.mesh}" if plan is not None else "None", "source": source}


def _check_world(mesh: Mesh | None) -> None:
    if mesh is not None and mesh.size != world_size():
        raise MeshError(
            f"The mesh has {mesh.size} ranks, and the job has {world_size()}.",
            found=f"mesh {mesh}, world size {world_size()}",
            hint=f"start {mesh.size} processes (torchrun --nproc-per-node {mesh.size}), "
            f"or give a mesh of {world_size()}.",
        )


def simulate(
    model: nn.Module, meta_inputs: Any, plan: Plan | PipelinePlan | str | Path, *, seed: int = 0
) -> Simulation:
    """Run every rank of ``plan`` in this one process, on values.

    Args:
        model: with real parameters; it is not changed.
        meta_inputs: with values; the whole batch.
        plan: made for this model and these inputs' shapes, or the path of a saved one.
        seed: of dropout, the same that ``autoparallelize`` would draw.

    Returns:
        Whole outputs, whole gradients by FQN (of the scalar loss, or of the sum of the outputs), and the measured peak.

    Raises:
        PlanError: the plan belongs to another model or other inputs.
        InputError: the model or the inputs have no values.
    """
    _check_module(model)
    _check_hooks(model)
    plan, call = _loaded(plan), bind(model, *as_call(meta_inputs))
    _check_values(model, call)
    options = Options(
        outputs=plan.options.get("outputs", "auto"),
        mixed_precision=plan.options.get("mixed_precision"),
        accumulation_steps=plan.options.get("accumulation_steps", 1),
    )
    if isinstance(plan, PipelinePlan):
        capture = capture_one_batch(model, call, options, plan.stage_mesh.size)
        check_belongs(plan, capture)
        run = simulate_plan(capture, plan, _named(model, call, capture, options), options, seed)
        return dataclasses.replace(run, outputs=_built(capture, run.outputs))
    capture = capture_model(model, call, options, plan.mesh.size)
    own = capture
    capture = as_planned(capture, plan)
    plan, named = belonging(plan, capture, call), _named(model, call, capture, options)
    plan, local = with_emitted_source(plan, capture, options)
    try:
        outputs, rest = simulate_program(local, capture.graph, plan.mesh, named, seed)
    except RoomError as error:
        more = with_all_room(own, plan)
        if more is None:
            raise
        warnings.warn(f"{error.what} So it is simulated with room for all ({error.found}; {error.hint})", stacklevel=2)
        capture, (_, local) = more[0], with_emitted_source(more[1], more[0], options)
        outputs, rest = simulate_program(local, capture.graph, plan.mesh, named, seed)
    return dataclasses.replace(rest, outputs=_built(capture, outputs))


def _built(capture: Capture, outputs: Mapping[str, Tensor]) -> Any:
    """What the model returns, of whole outputs by name."""
    return capture.returned.build([outputs.get(p) for p in capture.returned.paths])


def _check_values(model: nn.Module, call: Call) -> None:
    named = (*model.named_parameters(), *model.named_buffers(), *zip(call.names, call.tensors, strict=True))
    empty = [name for name, t in named if t.is_meta]
    if empty:
        raise InputError(
            "A simulation runs on values.",
            found=f"{', '.join(empty[:4])}{', ...' if len(empty) > 4 else ''} on the meta device",
            hint="give a model and inputs on a real device: model.to_empty(device='cpu'), torch.randn, torch.randint.",
        )


def _check_hooks(model: nn.Module) -> None:
    if model._forward_hooks or model._forward_pre_hooks:
        hooks = (*model._forward_hooks.values(), *model._forward_pre_hooks.values())
        raise PlanError(
            "Hooks of the model itself run around the program, and so not in a simulation.",
            found=", ".join(getattr(h, "__qualname__", type(h).__name__) for h in hooks),
            hint="remove them for the simulation; autoparallelize runs them at every call.",
        )


def _named(model: nn.Module, call: Call, capture: Capture, options: Options) -> dict[tuple[str, str], Tensor]:
    """Every tensor that a program can ask for, by kind and name."""
    found: dict[tuple[str, str], Tensor] = {("constant", k): t for k, t in capture.constants.items()}
    found |= {("input", n): t for n, t in zip(call.names, call.tensors, strict=True)}
    stored = functools.partial(stored_dtype, precision=options.mixed_precision)
    found |= {("parameter", n): p.detach().to(stored(p)) for n, p in model.named_parameters() if is_dense(p)}
    return found | {("buffer", n): b.detach() for n, b in model.named_buffers() if is_dense(b)}


__all__ = ["ParallelModule", "autoparallelize", "plan", "simulate"]
