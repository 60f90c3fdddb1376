"""Turns a plan into a module that trains: places parameters on the mesh, and compiles programs for its calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import codegen, passes, planner
from autopar.attributes import record_attributes, restored_attributes
from autopar.emission import with_emitted_source
from autopar.ir import Value
from autopar.mesh import Cluster
from autopar.planner import Options
from autopar.planning import MeshLike, as_planned, as_shared, capture_model, placed_specs, planned_on
from autopar.plans import Plan
from autopar.precision import policy_of, stored_dtype
from autopar.ranged import carried_to, fitted, same_but_for_sizes
from autopar.runtime.accumulation import Sums, watch_steps
from autopar.runtime.agreement import decided_on_rank_0, on_all_ranks
from autopar.runtime.execution import Executable
from autopar.runtime.frameworks import wrap_frameworks
from autopar.runtime.gathering import check_callers_of_full_tensor
from autopar.runtime.handing_over import refuse_unfit_state
from autopar.runtime.host_state import keep_state_on_host
from autopar.runtime.launch import device_mesh_for
from autopar.runtime.loading import accept_whole_tensors
from autopar.runtime.materialize import existing_dtensor, install, prepare
from autopar.runtime.module import parallel_class
from autopar.runtime.requests import variant_key
from autopar.runtime.variants import Call as BoundCall
from autopar.runtime.variants import State, Variant
from autopar.sharding import ShardingSpec
from autopar.spmd import Lowered, Rank
from autopar.structure import Structure
from autopar.tracer import Capture
from autopar.tracer.calls import Call, bind
from autopar.tracer.tracer import as_call

Edited = tuple[str, str]
"""The text of an edited program, and its path."""


def assemble(
    model: nn.Module,
    meta_inputs: Any,
    capture: Capture,
    made: Plan,
    local: Lowered,
    cluster: Cluster,
    options: Options,
    mesh: MeshLike,
    *,
    initialize: bool = True,
    edited: Edited | None = None,
) -> nn.Module:
    """Shard the parameters and swap the model's class; this cannot be undone."""
    device_mesh: DeviceMesh = device_mesh_for(made.mesh, mesh)
    planned = call_on_meta(bind(model, *as_call(meta_inputs)))
    original = type(model)

    def compile_variant(module: nn.Module, call: Call) -> Variant:
        return _compile(module, state, call, cluster, options)

    seed = decided_on_rank_0(torch.initial_seed)
    stored = functools.partial(stored_dtype, precision=options.mixed_precision)

    def place(module: nn.Module, names: Sequence[str] | None, specs: Mapping[str, ShardingSpec]) -> None:
        meant = ((n, p) for n, p in module.named_parameters() if names is None or n in names)
        optimizers = refuse_unfit_state({n: p for n, p in meant if existing_dtensor(p) is None})
        replacements = on_all_ranks(
            lambda: prepare(
                module,
                specs,
                made.mesh,
                device_mesh,
                state.rank.coordinate,
                state.device,
                seed,
                stored,
                initialize=initialize,
                only=names,
            )
        )
        install(replacements, optimizers, cast=policy_of(options.mixed_precision).master is None)
        accept_whole_tensors(module)

    state = State(
        made.mesh,
        device_mesh,
        bind_to(original),
        compile_variant,
        place,
        made,
        planned,
        options.batch == "local",
        options.mixed_precision,
        capture.graph,
        plain_evaluation=options.outputs == "auto",
    )
    variant = _variant(model, capture, made, options, state, planned, cluster, local, edited)
    place(model, None, {n: made.specs[n] for n in made.parameters})
    with state.precision():
        state.add(variant_key(model, planned), variant)
    keep_states(model, made, state)
    model.__class__ = parallel_class(original)
    model._autopar = state  # type: ignore[assignment]
    model._autopar_sums = Sums(made.options.get("accumulation_steps", 1))  # type: ignore[assignment]
    watch_steps(model)
    wrap_frameworks()
    check_callers_of_full_tensor(device_mesh)
    return model


def keep_states(model: nn.Module, made: Plan, state: State) -> None:
    """Keep optimizer state on the host where the plan says so, even if only a later batch's plan does."""
    for name in made.offloaded_optimizer:
        keep_state_on_host(model.get_parameter(name), state.rank)


def bind_to(original: type[nn.Module]) -> Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], Call]:
    """Return a function that binds calls to the signature of the user's own forward."""

    def bind_original(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        return bind(model, args, kwargs, original.forward)

    return bind_original


def _compile(
    model: nn.Module,
    state: State,
    call: Call,
    cluster: Cluster,
    options: Options,
    *,
    every: bool = False,
    anew: bool = False,
) -> Variant:
    """Plan and lower the model for another batch or mode, with the parameters placed as they are.

    Args:
        every: with a backward from every output.
        anew: as no known plan does.
    """

    def captured() -> Capture:
        with restored_attributes(model, state.attributes_before):
            return capture_model(model, call, options, state.mesh.size, every=every, trains=False)

    capture = on_all_ranks(captured, lambda c: c.graph.digest)
    current_specs = placed_specs(model, capture, state.mesh)
    fixed = dataclasses.replace(options, constraints=current_specs, accumulators=_accumulators(state))
    reusable = (
        not every and not anew and all(str(state.plan.specs.get(name)) == spec for name, spec in current_specs.items())
    )
    plan = _reused_plan(state, as_planned(capture, state.plan), call) if reusable else None
    if plan is None:
        made = decided_on_rank_0(lambda: as_shared(planned_on(capture, state.mesh, cluster, fixed, 0.0, None)))
        plan = made if isinstance(made, Plan) else Plan.from_json(made)
    keep_states(model, plan, state)
    return _variant(model, as_planned(capture, plan), plan, fixed, state, call, cluster)


def _reused_plan(state: State, capture: Capture, call: Call) -> Plan | None:
    """Return the first program's plan if the requested program is like it but for sizes in the planned range or numbers
    that it computes with, else None."""
    plan: Plan = state.plan
    if _same_shapes(state.planned, call) and same_but_for_sizes(state.graph, capture.graph):
        return carried_to(plan, capture)
    return fitted(plan, capture, call)


def _same_shapes(planned: BoundCall, call: Call) -> bool:
    return planned.names == call.names and [t.shape for t in planned.tensors] == [t.shape for t in call.tensors]


def call_on_meta(call: Call) -> Call:
    """Return the call on the meta device, so that keeping it keeps no batch alive."""
    with torch.no_grad():
        tensors = (torch.empty_like(t, device="meta", requires_grad=t.requires_grad) for t in call.tensors)
        return Call(call.structure, tuple(tensors))


def _accumulators(state: State) -> dict[str, str]:
    """Return the specs in which gradients accumulate; every program of a step must use the same."""
    newest_first = reversed(state.programs)
    return {meaning.name: str(spec) for v in newest_first for meaning, spec, _ in v.executable.accumulators}


def _variant(
    model: nn.Module,
    capture: Capture,
    made: Plan,
    options: Options,
    state: State,
    call: Call,
    cluster: Cluster,
    local: Lowered | None = None,
    edited: Edited | None = None,
) -> Variant:
    if local is None:
        made, local = on_all_ranks(lambda: with_emitted_source(made, capture, options))
    executable = executable_of(capture, made, local, options, state.rank, edited)
    call = call_on_meta(call)
    given: Literal["dtensor", "whole"] = "whole" if capture.loss is None else "dtensor"
    whole_outputs = dataclasses.replace(options, outputs=given) if options.outputs == "auto" else options

    @functools.cache
    def every_tangent() -> Variant:
        """Compile the same call with a backward from every output."""
        return _compile(model, state, call, cluster, whole_outputs, every=True)

    @functools.cache
    def without_room() -> Variant:
        staying = dataclasses.replace(options, expert_room=None, search="joint")
        return _compile(model, state, call, cluster, staying, anew=True)

    outputs = tuple(o.name for o, _, _ in executable.results if o.kind == "output")
    shapes = {i.name: capture.graph.meta(Value(i.node)).shape for i in capture.graph.inputs if i.kind == "parameter"}
    state.compiled += 1
    record_attributes(state.attributes_before, model, [each.place for each in capture.attribute_outputs])
    return Variant(
        executable,
        builder(capture.returned, outputs),
        outputs,
        every_tangent,
        capture.constants,
        capture.guards,
        {m.name: (spec, shapes[m.name]) for m, spec in executable.inputs if m.name in shapes},
        state.compiled,
        capture.attribute_outputs,
        list(capture.lost),
        without_room,
    )


def builder(returned: Structure, outputs: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    order = {name: i for i, name in enumerate(outputs)}

    def build(values: Sequence[Any]) -> Any:
        return returned.build([values[order[p]] if p in order else None for p in returned.paths])

    return build


def executable_of(
    capture: Capture, made: Plan, lowered: Lowered, options: Options, rank: Rank, edited: Edited | None
) -> Executable:
    """Return the compiled program of a plan on this rank."""
    run = functools.partial(_edited, rank=rank, text=edited[0], path=edited[1]) if edited is not None else _functions
    functions = run(made, lowered, capture)
    if options.backend == "inductor":
        for name in {"forward", "backward", "accumulate", "inference"} & functions.keys():
            functions[name] = codegen.compiled(functions[name])
    return described(functions, capture, lowered, options)


def described(functions: Mapping[str, Any], capture: Capture, lowered: Lowered, options: Options) -> Executable:
    """Return functions with what they take and give."""
    metas = {(o.kind, o.name): capture.graph.meta(o.value) for o in capture.graph.outputs}
    seeds = [i.node for i in capture.graph.inputs if i.kind == "seed"]
    whole = frozenset(
        o.name
        for o in capture.graph.outputs
        if o.kind == "output" and planner.is_plain_output(capture.graph, capture.graph.meta(o.value), options)
    )
    return Executable(
        functions["forward"],
        functions["backward"],
        tuple(lowered.inputs),
        tuple((o, s, metas[o.kind, o.name]) for o, s in lowered.results),
        tuple(lowered.tangents),
        tuple((o, s, metas[o.kind, o.name]) for o, s in lowered.gradients),
        whole,
        differentiable=capture.requires_grad,
        random=any(capture.graph.consumers.get(Value(seed)) for seed in seeds),
        inference=functions["inference"],
        accumulators=tuple((i, s, capture.graph.meta(Value(i.node))) for i, s in lowered.accumulators),
        accumulate=functions.get("accumulate"),
        accumulated=tuple(o for o, _ in lowered.accumulated),
        once=functions.get("once"),
        once_inputs=tuple(lowered.once_inputs),
        compiled=options.backend == "inductor",
        read=capture.graph.buffers_read,
        tangents_of=capture.graph.tangents_of,
    )


def _functions(made: Plan, lowered: Lowered, capture: Capture) -> dict[str, Any]:
    """Load the functions of the plan's program, whose text was just emitted."""
    functions = codegen.load(made.source, f"autopar_{made.digest}", capture.graph)
    inference = codegen.emit(passes.forward_only(lowered), made.mesh, ["Forward without gradients."])
    name = f"autopar_{made.digest}_inference"
    return functions | {"inference": codegen.load(inference, name, capture.graph)["forward"]}


def _edited(made: Plan, lowered: Lowered, capture: Capture, rank: Rank, text: str, path: str) -> dict[str, Any]:
    """Load the functions of an edited program on this rank."""
    functions = on_all_ranks(lambda: codegen.load(text, path, capture.graph))
    for name, module in (("forward", lowered.forward), ("backward", lowered.backward)):
        functions[name] = codegen.checked(functions[name], name, codegen.results_of(module, made.mesh, rank.coordinate))
    forward, count = functions["forward"], len(lowered.results)
    return functions | {"inference": lambda at, inputs: forward(at, inputs)[:count]}
