"""The compiler on one page: capture, plan, lower, emit, run."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from autopar import codegen, kernels, passes, planner
from autopar.arguments import as_bytes, as_cluster, as_constraints, as_mesh, as_optimizer, canonical_names
from autopar.attributes import as_before, remember
from autopar.emission import emitted, lowered, ready
from autopar.errors import ConstraintError, InputError, MeshError, PlanError
from autopar.ir import Value
from autopar.mesh import Cluster, Mesh, candidate_meshes
from autopar.planner import Options
from autopar.planner.predictions import make_plan
from autopar.planner.ranges import Sizes, as_ranges
from autopar.plans import Plan
from autopar.precision import as_precision, computing_in, policy_of, stored_dtype
from autopar.ranged import alike, carried_to, fitted, largest, over_range, resized, shapes_of
from autopar.runtime.accumulation import Sums, watch_steps
from autopar.runtime.agreement import decided_by_first, together, world_size
from autopar.runtime.execution import Executable
from autopar.runtime.frameworks import wrap_frameworks
from autopar.runtime.gathering import ask_before_full_tensor
from autopar.runtime.handing_over import refuse_unfit_state
from autopar.runtime.host_state import keep_state_on_host
from autopar.runtime.launch import device_mesh_for, ensure_process_group
from autopar.runtime.loading import accept_whole_tensors
from autopar.runtime.materialize import install, placed, prepare
from autopar.runtime.module import Call as BoundCall
from autopar.runtime.module import ParallelModule, State, Variant, parallel_class, variant_key
from autopar.runtime.simulation import Simulation, simulate_program
from autopar.runtime.waiting import roll_call
from autopar.sharding import ShardingSpec
from autopar.solver import solver_name
from autopar.spmd import Lowered, Rank
from autopar.spmd.placements import from_placements
from autopar.structure import Structure, is_dense
from autopar.tracer import Capture, ColoTracer
from autopar.tracer.export import Call, bind
from autopar.tracer.hooks import lost_parameter_hooks
from autopar.tracer.tracer import as_call

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MeshLike = Any
Edited = tuple[str, str]
"""The text of a program that someone edited, and its path."""

MESHES_TRIED = 4
"""With mesh=None so many of the candidate meshes are planned."""


def plan(
    model: nn.Module,
    meta_inputs: Any,
    mesh: MeshLike = None,
    cluster: str | Path | Cluster | None = None,
    memory_budget: int | str | None = None,
    optimizer: Any = "adamw",
    mixed_precision: Any = None,
    batch: Literal["global", "local"] = "global",
    outputs: Literal["auto", "whole", "dtensor"] = "auto",
    constraints: Mapping[str, str] | None = None,
    backend: str = "eager",
    time_limit: float = 60.0,
    *,
    accumulation_steps: int = 1,
    dynamic_shapes: Any = None,
    async_tensor_parallel: bool | Literal["auto", "always"] = "auto",
    solver: str = "auto",
    gap: float = 1e-3,
    search: str = "joint",
    compare: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Plan how ``model`` trains on a cluster; needs no process group and no GPU, and allocates nothing.

    Args: as ``autoparallelize``; ``solver`` is ``"cbc"``, ``"highs"`` or another that PuLP knows, ``gap`` the
        relative gap at which it may stop, ``compare`` measures all baselines, also those that cannot be better,
        ``progress`` is told each stage.

    Raises:
        CaptureError, MeshError, ConstraintError, InfeasibleError: see there.
    """
    _check_module(model)
    _check_backend(backend)
    hardware = as_cluster(cluster)
    size = _world(mesh, hardware)
    options = Options(
        as_bytes(memory_budget), as_optimizer(optimizer), batch, outputs, as_constraints(constraints),
        canonical_names(model), time_limit, solver_name(solver), gap, search, backend=backend, compare=compare,
        mixed_precision=as_precision(mixed_precision), accumulation_steps=accumulation_steps,
        async_tensor_parallel=async_tensor_parallel,
    )  # fmt: skip
    started = time.perf_counter()
    if progress is not None:
        progress("capture")
    call = bind(model, *as_call(meta_inputs))
    options = dataclasses.replace(options, ranges=as_ranges(dynamic_shapes, shapes_of(call)))
    capture = _capture(model, call, options, size)
    mesh = _mesh_of_shared(model, mesh)
    options = _with_shared(model, capture, mesh, options, None)
    found = functools.partial(
        _plan, mesh=mesh, cluster=hardware, size=size, options=options, captured_s=time.perf_counter() - started,
        progress=progress,
    )  # fmt: skip
    return _over_range(found, model, call, capture, options, size)


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        hint = "pass a torch.nn.Module whose forward returns the loss or the outputs."
        raise InputError("The model is no module.", found=f"{type(model).__name__} {model!r:.80}", hint=hint)


def _loaded(plan: Plan | str | Path) -> Plan:
    """A plan, or the saved one at a path."""
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, (str, Path)):
        raise PlanError("This is no plan.", found=f"{type(plan).__name__} {plan!r:.80}", hint="give a Plan, or a path.")
    return Plan.load(plan)


def _check_backend(backend: str) -> None:
    if backend not in ("eager", "inductor"):
        hint = 'use backend="eager" or backend="inductor".'
        raise PlanError(f"There is no backend {backend!r}.", found=repr(backend), hint=hint)


def _world(mesh: MeshLike, cluster: Cluster) -> int:
    """Ranks of the planned job: of the mesh, else of the process group, else of the cluster."""
    if mesh is not None:
        return as_mesh(mesh).size
    return world_size() if torch.distributed.is_initialized() else cluster.size


def _capture(
    model: nn.Module, call: Call, options: Options, world: int, *, every: bool = False, trains: bool = True
) -> Capture:
    whole = call if options.batch == "global" else _whole_batch(call, world)
    stored = functools.partial(stored_dtype, precision=options.mixed_precision)
    with computing_in(options.mixed_precision):
        tracer = ColoTracer(options.outputs, every_tangent=every, stored_dtype=stored, trains=trains)
        capture = tracer.capture(model, whole)
    unsaved = _unsaved_buffers(model)
    graph = planner.summing(capture.graph, options.accumulation_steps, options.dtype_of("reduce"))
    return dataclasses.replace(capture, graph=graph, unsaved=unsaved)


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are in no ``state_dict``, which an emitted file must bring along."""
    saved = set(model.state_dict(keep_vars=True))
    dense = ((n, b) for n, b in model.named_buffers() if type(b) is Tensor and is_dense(b))
    return {n: b.detach() for n, b in dense if n not in saved and not b.is_meta}


def _whole_batch(call: Call, world: int) -> Call:
    """The call with the batch of all ranks: dim 0 of every tensor that has it is ``world`` times as long."""
    batch = next((t.shape[0] for t in call.tensors if t.ndim), -1)

    def grown(t: Tensor) -> Tensor:
        if t.ndim and t.shape[0] == batch:
            shape = (batch * world, *t.shape[1:])
            return torch.empty(shape, dtype=t.dtype, device="meta", requires_grad=t.requires_grad)
        return t

    return Call(call.structure, tuple(map(grown, call.tensors)))


def _over_range(
    search: Callable[[Capture], Plan], model: nn.Module, call: Call, capture: Capture, options: Options, size: int
) -> Plan:
    """The plan for a call, or for a range of sizes: under a budget that of the largest, which must fit it too."""
    ranges = options.ranges
    if ranges is None:
        return search(capture)

    def at(sizes: Sizes) -> Capture:
        return _capture(model, resized(call, ranges, sizes), options, size)

    def ranged(made: Plan) -> Plan:
        return over_range(made, _as_planned(capture, made), ranges, lambda sizes: _as_planned(at(sizes), made))

    made = ranged(search(capture if options.memory_budget_bytes is None else at(largest(ranges))))
    return fitted(made, _as_planned(capture, made), call) or ranged(search(capture))


def _plan(
    capture: Capture, mesh: MeshLike, cluster: Cluster, size: int, options: Options, captured_s: float,
    progress: Callable[[str], None] | None,
) -> Plan:  # fmt: skip
    meshes = (as_mesh(mesh),) if mesh is not None else candidate_meshes(size, cluster)[:MESHES_TRIED]
    if mesh is None and options.constraints:
        raise MeshError(
            "Constraints name mesh axes, so the mesh must be given.",
            found="mesh=None with constraints",
            hint='write mesh=(2, 4) or mesh={"dp": 2, "tp": 4}.',
        )
    each = dataclasses.replace(options, time_limit_s=options.time_limit_s / len(meshes))
    plans = [_plan_on(capture, m, cluster, each, captured_s, progress) for m in meshes]
    best = min(plans, key=lambda p: (p.step_time, p.peak_memory))
    tried = tuple((str(p.mesh), p.step_time) for p in plans) if len(plans) > 1 else ()
    return dataclasses.replace(best, candidates=tried)


def _plan_on(
    capture: Capture, mesh: Mesh, cluster: Cluster, options: Options, captured_s: float,
    progress: Callable[[str], None] | None,
) -> Plan:  # fmt: skip
    sized = cluster.sized(mesh.size)
    planned = planner.plan_forms(capture.graph, mesh, sized, options, progress)
    started, graph = time.perf_counter(), planned.decisions.graph
    made = make_plan(planned, graph, mesh, sized, options, "", capture.notices)
    source = emitted(made, lowered(made, graph), capture)
    planned.timings["capture"] = captured_s
    planned.timings["lower"] = planned.timings.get("lower", 0.0) + time.perf_counter() - started
    named = sorted({name for op in planned.program.ops for name in op.kernels})
    return dataclasses.replace(made, source=source, kernels={name: kernels.source(name) for name in named})


def autoparallelize(
    model: nn.Module,
    meta_inputs: Any,
    mesh: MeshLike = None,
    cluster: str | Path | Cluster | None = None,
    memory_budget: int | str | None = None,
    optimizer: Any = "adamw",
    mixed_precision: Any = None,
    batch: Literal["global", "local"] = "global",
    outputs: Literal["auto", "whole", "dtensor"] = "auto",
    constraints: Mapping[str, str] | None = None,
    plan: Plan | str | Path | None = None,
    backend: str = "eager",
    time_limit: float = 60.0,
    *,
    source: str | Path | None = None,
    accumulation_steps: int = 1,
    dynamic_shapes: Any = None,
    async_tensor_parallel: bool | Literal["auto", "always"] = "auto",
    solver: str = "auto",
    gap: float = 1e-3,
    search: str = "joint",
    initialize: bool = True,
    progress: Callable[[str], None] | None = None,
) -> nn.Module:
    """Make ``model`` train on the cluster: the same object, with DTensor parameters and the planned program as forward.

    Args:
        meta_inputs: a tensor, a tuple (positional) or a dict (by keyword) of tensors; values do not matter.
        mesh: None (chosen), ``(2, 4)``, ``{"dp": 2, "tp": 4}`` or a torch DeviceMesh; its size is the world's.
        cluster: None (what this process sees), a name such as ``"dgx-h100"``, a file, or a ``Cluster``.
        memory_budget: bytes, or text such as ``"60GiB"``, for everything on one device; None is its memory.
        optimizer: whose state the budget must hold: a name, a ``torch.optim`` class, or bytes per element.
        mixed_precision: ``"bf16"`` or ``"fp16"``: every call runs as under autocast, and the parameters are the master
            weights. An ``autopar.MixedPrecision`` also says in what parameters are stored and gradients reduced.
        batch: ``"global"`` when every rank passes the whole batch, ``"local"`` when it passes its slice of dim 0.
        outputs: ``"whole"`` tensors, ``"dtensor"``, or ``"auto"``: beside a scalar loss, others are DTensors, but
            under ``torch.no_grad()`` plain tensors as metrics take them: whole, or with local batches this rank's. A
            scalar is the loss that is called so, stands first in a tuple or dataclass, or is the only output.
        constraints: specs by glob over parameters, ``input:`` and ``output:`` names, modules and nodes.
        plan: a Plan or the path of a saved one, to run without a search.
        source: with a plan, the path of its program as someone has edited it: what ``plan.emit`` or ``plan.source``
            gave. It runs instead, and can be stepped through in its file.
        backend: ``"eager"``, or ``"inductor"``: forward and backward are compiled at their first call, collectives
            included.
        accumulation_steps: backwards that make one step of the optimizer. Their gradients add up, and appear with the
            last of them; the plan decides whether each is reduced at once or all are in the end.
        dynamic_shapes: dims of inputs that vary, as for ``torch.export``: ``{"input_ids": {0: Dim("batch", min=2,
            max=64)}}``. One plan serves the whole range, without another search; ``plan.symbolic`` has its formulas.
        async_tensor_parallel: products may run in parts, each beside a message of the gather that feeds them or of the
            scatter that follows: ``"auto"`` where that is predicted to be shorter, between GPUs that NVLink joins;
            True also over other links, by a ring of messages; False nowhere; ``"always"`` wherever they can.
        time_limit: seconds for the search, kept to within two. Where a budget binds and a deep model's first plan would
            come later, an error says how much time to give.
        initialize: whether parameters on the meta device get values as their modules set them; False leaves their
            shards empty, for a checkpoint or ``autopar.load_safetensors`` to fill.

    Optimizers of ``model`` that are there step its DTensors from now on, with the state that they have.

    Returns:
        ``model``, whose class is now a subclass of what it was.

    Raises:
        AutoparError: on every rank at once, and the model is as it was.
    """
    ensure_process_group(model)
    roll_call("autoparallelize", "call it on every rank, outside of `if rank == 0`: each gets a part of the model.")

    def asked() -> tuple[Cluster, Plan | None, str | None, Options]:
        _check_backend(backend)
        _check_module(model)
        _check_model(model)
        hardware = as_cluster(cluster)
        given = None if plan is None else _loaded(plan)
        edited = None if source is None else _edited_text(given, source, backend)
        _check_world(given.mesh if given is not None else as_mesh(mesh) if mesh is not None else None)
        options = Options(
            as_bytes(memory_budget), as_optimizer(optimizer), batch, outputs, as_constraints(constraints),
            canonical_names(model), time_limit, solver_name(solver), gap, search, backend=backend,
            mixed_precision=as_precision(mixed_precision), accumulation_steps=accumulation_steps,
            async_tensor_parallel=async_tensor_parallel,
            ranges=as_ranges(dynamic_shapes, shapes_of(bind(model, *as_call(meta_inputs)))),
        )  # fmt: skip
        if given is not None:
            kept = ("batch", "outputs", "mixed_precision", "accumulation_steps")
            planned_with = {k: given.options[k] for k in kept if k in given.options}
            options = dataclasses.replace(options, **planned_with)
        return hardware, given, edited, options

    hardware, given, edited, options = together(
        asked, lambda a: _wanted(*a, mesh), "request", "give every rank the same arguments."
    )
    started = time.perf_counter()
    call = bind(model, *as_call(meta_inputs))
    capture = together(lambda: _capture(model, call, options, world_size()), lambda c: c.graph.digest)
    if given is not None:
        made = together(lambda: _belonging(given, _as_planned(capture, given), call))
        mesh = _mesh_of_shared(model, mesh if mesh is not None else made.mesh)
        _with_shared(model, capture, mesh, options, made)
    else:
        mesh = _mesh_of_shared(model, mesh)
        options = _with_shared(model, capture, mesh, options, None)
        found = functools.partial(
            _plan, mesh=mesh, cluster=hardware, size=world_size(), options=options,
            captured_s=time.perf_counter() - started, progress=progress,
        )  # fmt: skip
        text = decided_by_first(
            lambda: _shared(_over_range(found, model, call, capture, options, world_size()))
        )
        made = text if isinstance(text, Plan) else Plan.from_json(text)
    capture = _as_planned(capture, made)
    made, local = together(lambda: ready(made, capture, options))
    return _parallelize(
        model, meta_inputs, capture, made, local, hardware, options, mesh, initialize=initialize,
        edited=None if edited is None else (edited, str(source)),
    )  # fmt: skip


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


def _edited_text(plan: Plan | None, source: str | Path, backend: str) -> str:
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
    cluster: Cluster, plan: Plan | None, edited: str | None, options: Options, mesh: MeshLike
) -> dict[str, str]:  # fmt: skip
    """What every rank must ask for alike, by the name of the argument."""
    said = {f.name: repr(getattr(options, f.name)) for f in dataclasses.fields(options)}
    said |= {"cluster": cluster.name, "mesh": str(as_mesh(mesh)) if mesh is not None else "None"}
    source = hashlib.sha256(edited.encode()).hexdigest()[:16] if edited is not None else "None"
    return said | {"plan": f"{plan.digest} on mesh {plan.mesh}" if plan is not None else "None", "source": source}


def _shared(plan: Plan) -> Any:
    """What rank 0 tells the others; alone it keeps its plan, which can be asked why."""
    return plan if world_size() == 1 else plan.to_json()


def _check_world(mesh: Mesh | None) -> None:
    if mesh is not None and mesh.size != world_size():
        raise MeshError(
            f"The mesh has {mesh.size} ranks, and the job has {world_size()}.",
            found=f"mesh {mesh}, world size {world_size()}",
            hint=f"start {mesh.size} processes (torchrun --nproc-per-node {mesh.size}), "
            f"or give a mesh of {world_size()}.",
        )


def _as_planned(capture: Capture, made: Plan) -> Capture:
    """The capture in the form that was planned: losses may be in chunks."""
    return dataclasses.replace(capture, graph=planner.as_planned(capture.graph, made.graph_digest, made.program))


def _belonging(plan: Plan, capture: Capture, call: Call) -> Plan:
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


def _parallelize(
    model: nn.Module, meta_inputs: Any, capture: Capture, made: Plan, local: Lowered, cluster: Cluster,
    options: Options, mesh: MeshLike, *, initialize: bool = True, edited: Edited | None = None,
) -> nn.Module:  # fmt: skip
    """The point of no return: shard the parameters and swap the class."""
    device_mesh: DeviceMesh = device_mesh_for(made.mesh, mesh, model)
    planned = _shapes(bind(model, *as_call(meta_inputs)))
    original = type(model)

    def compile_variant(module: nn.Module, call: Call) -> Variant:
        return _compile(module, state, call, cluster, options)

    seed = decided_by_first(torch.initial_seed)
    stored = functools.partial(stored_dtype, precision=options.mixed_precision)

    def place(module: nn.Module, names: Sequence[str] | None, specs: Mapping[str, ShardingSpec]) -> None:
        meant = ((n, p) for n, p in module.named_parameters() if names is None or n in names)
        optimizers = refuse_unfit_state({n: p for n, p in meant if placed(p) is None})
        replacements = together(
            lambda: prepare(
                module, specs, made.mesh, device_mesh, state.rank.coordinate, state.device, seed, stored,
                initialize=initialize, only=names,
            )
        )
        install(replacements, optimizers, cast=policy_of(options.mixed_precision).master is None)
        accept_whole_tensors(module)

    state = State(
        made.mesh, device_mesh, _bound_as(original), compile_variant, place, made, planned, options.batch == "local",
        options.mixed_precision, capture.graph, plain_evaluation=options.outputs == "auto",
    )  # fmt: skip
    variant = _variant(model, capture, made, options, state, planned, cluster, local, edited)
    place(model, None, {n: made.specs[n] for n in made.parameters})
    with state.precision():
        state.add(variant_key(model, planned), variant)
    _keep_states(model, made, state)
    model.__class__ = parallel_class(original)
    model._autopar = state  # type: ignore[assignment]
    model._autopar_sums = Sums(made.options.get("accumulation_steps", 1))  # type: ignore[assignment]
    watch_steps(model)
    wrap_frameworks()
    ask_before_full_tensor(device_mesh)
    return model


def _keep_states(model: nn.Module, made: Plan, state: State) -> None:
    """The host keeps the optimizer state that the plan says, also where only a later batch's plan does."""
    for name in made.offloaded_optimizer:
        keep_state_on_host(model.get_parameter(name), state.rank)


def _bound_as(original: type[nn.Module]) -> Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], Call]:
    """Bind calls to the forward that the user wrote."""

    def bind_original(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        return bind(model, args, kwargs, original.forward)

    return bind_original


def _compile(
    model: nn.Module, state: State, call: Call, cluster: Cluster, options: Options, *, every: bool = False
) -> Variant:  # fmt: skip
    """Plan and lower the model for another batch or mode, with the parameters where they are."""

    def captured() -> Capture:
        with as_before(model, state.before):
            return _capture(model, call, options, state.mesh.size, every=every, trains=False)

    capture = together(captured, lambda c: c.graph.digest)
    fixed = dataclasses.replace(
        options, constraints=_placed(model, capture, state.mesh), accumulators=_accumulators(state)
    )
    plan = None if every else _still_fitting(state, _as_planned(capture, state.plan), call)
    if plan is None:
        made = decided_by_first(lambda: _shared(_plan_on(capture, state.mesh, cluster, fixed, 0.0, None)))
        plan = made if isinstance(made, Plan) else Plan.from_json(made)
    _keep_states(model, plan, state)
    return _variant(model, _as_planned(capture, plan), plan, fixed, state, call, cluster)


def _still_fitting(state: State, capture: Capture, call: Call) -> Plan | None:
    """The plan of the first program, where the one that is asked for is like it but for sizes in the planned range, or
    for numbers that it computes with."""
    plan: Plan = state.plan
    if _same_shapes(state.planned, call) and alike(state.graph, capture.graph):
        return carried_to(plan, capture)
    return fitted(plan, capture, call)


def _same_shapes(planned: BoundCall, call: Call) -> bool:
    return planned.names == call.names and [t.shape for t in planned.tensors] == [t.shape for t in call.tensors]


def _shapes(call: Call) -> Call:
    """The call on the meta device: what is kept of it holds no batch alive."""
    with torch.no_grad():
        tensors = (torch.empty_like(t, device="meta", requires_grad=t.requires_grad) for t in call.tensors)
        return Call(call.structure, tuple(tensors))


def _placed(model: nn.Module, capture: Capture, mesh: Mesh) -> dict[str, str]:
    """Constraints that leave every parameter of the program where it is."""
    used = {i.name for i in capture.graph.inputs if i.kind == "parameter"}
    return {
        name: str(from_placements(p.placements, p.ndim, mesh))
        for name, parameter in model.named_parameters() if name in used and (p := placed(parameter)) is not None
    }  # fmt: skip


def _accumulators(state: State) -> dict[str, str]:
    """The specs in which gradients add up: the same for every program of a step."""
    newest_first = reversed(state.programs)
    return {meaning.name: str(spec) for v in newest_first for meaning, spec, _ in v.executable.accumulators}


def _mesh_of_shared(model: nn.Module, mesh: MeshLike) -> MeshLike:
    """The mesh of parameters that another parallel model has already; without such, the given one."""
    there = {n: p.device_mesh for n, parameter in model.named_parameters() if (p := placed(parameter)) is not None}
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


def _with_shared(model: nn.Module, capture: Capture, mesh: MeshLike, options: Options, plan: Plan | None) -> Options:
    """The options with constraints that leave parameters of other parallel models as they are there.

    Raises:
        ConstraintError, PlanError: constraints, precision or the given plan want them otherwise.
    """
    there = _placed(model, capture, as_mesh(mesh)) if mesh is not None else {}
    for name, spec in there.items():
        wanted = options.constraints.get(name, spec) if plan is None else str(plan.specs[name])
        if wanted != spec:
            raise ConstraintError(
                f"The parameter {name} belongs to another parallel model too, which has it otherwise.",
                found=f"{spec} there, {wanted} in the {'constraints' if plan is None else 'plan'}",
                hint="leave it out of the constraints, and plan this model after the other was made parallel.",
            )
        dtype = stored_dtype(model.get_parameter(name), precision=options.mixed_precision)
        if (kept := placed(model.get_parameter(name))) is not None and kept.dtype != dtype:
            raise PlanError(
                f"The parameter {name} belongs to another parallel model too, which stores it in another dtype.",
                found=f"{kept.dtype} there, {dtype} here",
                hint="give both models the same mixed_precision.",
            )
    return dataclasses.replace(options, constraints={**options.constraints, **there})


def _variant(
    model: nn.Module, capture: Capture, made: Plan, options: Options, state: State, call: Call, cluster: Cluster,
    local: Lowered | None = None, edited: Edited | None = None,
) -> Variant:  # fmt: skip
    if local is None:
        made, local = together(lambda: ready(made, capture, options))
    executable = _executable(capture, made, local, options, state.rank, edited)
    call = _shapes(call)
    given: Literal["dtensor", "whole"] = "whole" if capture.loss is None else "dtensor"
    as_they_are = dataclasses.replace(options, outputs=given) if options.outputs == "auto" else options

    @functools.cache
    def every_tangent() -> Variant:
        """The same call with a backward from every output."""
        return _compile(model, state, call, cluster, as_they_are, every=True)

    outputs = tuple(o.name for o, _, _ in executable.results if o.kind == "output")
    shapes = {i.name: capture.graph.meta(Value(i.node)).shape for i in capture.graph.inputs if i.kind == "parameter"}
    state.compiled += 1
    remember(state.before, model, [each.place for each in capture.left])
    return Variant(
        executable, _builder(capture.returned, outputs), outputs, every_tangent, capture.constants, capture.guards,
        {m.name: (spec, shapes[m.name]) for m, spec in executable.inputs if m.name in shapes}, state.compiled,
        capture.left, list(capture.lost),
    )  # fmt: skip


def _builder(returned: Structure, outputs: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    order = {name: i for i, name in enumerate(outputs)}

    def build(values: Sequence[Any]) -> Any:
        return returned.build([values[order[p]] if p in order else None for p in returned.paths])

    return build


def _executable(
    capture: Capture, made: Plan, lowered: Lowered, options: Options, rank: Rank, edited: Edited | None
) -> Executable:
    run = functools.partial(_edited, rank=rank, text=edited[0], path=edited[1]) if edited is not None else _functions
    functions = run(made, lowered, capture)
    if options.backend == "inductor":
        for name in {"forward", "backward", "accumulate", "inference"} & functions.keys():
            functions[name] = codegen.compiled(functions[name])
    metas = {(o.kind, o.name): capture.graph.meta(o.value) for o in capture.graph.outputs}
    seeds = [i.node for i in capture.graph.inputs if i.kind == "seed"]
    whole = frozenset(
        o.name for o in capture.graph.outputs
        if o.kind == "output" and planner.given_whole(capture.graph, capture.graph.meta(o.value), options)
    )  # fmt: skip
    return Executable(
        functions["forward"], functions["backward"], tuple(lowered.inputs),
        tuple((o, s, metas[o.kind, o.name]) for o, s in lowered.results),
        tuple(lowered.tangents), tuple((o, s, metas[o.kind, o.name]) for o, s in lowered.gradients), whole,
        differentiable=capture.requires_grad,
        random=any(capture.graph.consumers.get(Value(seed)) for seed in seeds),
        inference=functions["inference"],
        accumulators=tuple((i, s, capture.graph.meta(Value(i.node))) for i, s in lowered.accumulators),
        accumulate=functions.get("accumulate"),
        accumulated=tuple(o for o, _ in lowered.accumulated), compiled=options.backend == "inductor",
    )  # fmt: skip


def _functions(made: Plan, lowered: Lowered, capture: Capture) -> dict[str, Any]:
    """The functions of the plan's program, whose text was emitted from it just now."""
    functions = codegen.load(made.source, f"autopar_{made.digest}", capture.graph)
    inference = codegen.emit(passes.forward_only(lowered), made.mesh, ["Forward without gradients."])
    name = f"autopar_{made.digest}_inference"
    return functions | {"inference": codegen.load(inference, name, capture.graph)["forward"]}


def _edited(
    made: Plan, lowered: Lowered, capture: Capture, rank: Rank, text: str, path: str
) -> dict[str, Any]:
    """The functions of a program that someone edited, on this rank."""
    functions = together(lambda: codegen.load(text, path, capture.graph))
    for name, module in (("forward", lowered.forward), ("backward", lowered.backward)):
        functions[name] = codegen.checked(functions[name], name, codegen.results_of(module, made.mesh, rank.coordinate))
    forward, count = functions["forward"], len(lowered.results)
    return functions | {"inference": lambda at, inputs: forward(at, inputs)[:count]}


def simulate(model: nn.Module, meta_inputs: Any, plan: Plan | str | Path, *, seed: int = 0) -> Simulation:
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
        outputs=plan.options.get("outputs", "auto"), mixed_precision=plan.options.get("mixed_precision"),
        accumulation_steps=plan.options.get("accumulation_steps", 1),
    )  # fmt: skip
    capture = _capture(model, call, options, plan.mesh.size)
    capture = _as_planned(capture, plan)
    plan = _belonging(plan, capture, call)
    plan, local = ready(plan, capture, options)
    outputs, rest = simulate_program(local, capture.graph, plan.mesh, _named(model, call, capture, options), seed)
    built = capture.returned.build([outputs.get(p) for p in capture.returned.paths])
    return dataclasses.replace(rest, outputs=built)


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
