"""From a plan to a module that trains: parameters on the mesh, and the programs of its calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import codegen, passes, planner
from autopar.attributes import as_before, remember
from autopar.emission import ready
from autopar.ir import Value
from autopar.mesh import Cluster
from autopar.planner import Options
from autopar.planning import MeshLike, as_planned, as_shared, capture_model, placed_specs, planned_on
from autopar.plans import Plan
from autopar.precision import policy_of, stored_dtype
from autopar.ranged import carried_to, fitted, same_but_for_sizes
from autopar.runtime.accumulation import Sums, watch_steps
from autopar.runtime.agreement import decided_by_first, together
from autopar.runtime.execution import Executable
from autopar.runtime.frameworks import wrap_frameworks
from autopar.runtime.gathering import ask_before_full_tensor
from autopar.runtime.handing_over import refuse_unfit_state
from autopar.runtime.host_state import keep_state_on_host
from autopar.runtime.launch import device_mesh_for
from autopar.runtime.loading import accept_whole_tensors
from autopar.runtime.materialize import install, placed, prepare
from autopar.runtime.module import Call as BoundCall
from autopar.runtime.module import State, Variant, parallel_class, variant_key
from autopar.sharding import ShardingSpec
from autopar.spmd import Lowered, Rank
from autopar.structure import Structure
from autopar.tracer import Capture
from autopar.tracer.calls import Call, bind
from autopar.tracer.tracer import as_call

Edited = tuple[str, str]
"""The text of a program that someone edited, and its path."""


def assembled(
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
        _bound_as(original),
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
) -> Variant:
    """Plan and lower the model for another batch or mode, with the parameters where they are."""

    def captured() -> Capture:
        with as_before(model, state.before):
            return capture_model(model, call, options, state.mesh.size, every=every, trains=False)

    capture = together(captured, lambda c: c.graph.digest)
    there = placed_specs(model, capture, state.mesh)
    fixed = dataclasses.replace(options, constraints=there, accumulators=_accumulators(state))
    reusable = not every and all(str(state.plan.specs.get(name)) == spec for name, spec in there.items())
    plan = _still_fitting(state, as_planned(capture, state.plan), call) if reusable else None
    if plan is None:
        made = decided_by_first(lambda: as_shared(planned_on(capture, state.mesh, cluster, fixed, 0.0, None)))
        plan = made if isinstance(made, Plan) else Plan.from_json(made)
    _keep_states(model, plan, state)
    return _variant(model, as_planned(capture, plan), plan, fixed, state, call, cluster)


def _still_fitting(state: State, capture: Capture, call: Call) -> Plan | None:
    """The plan of the first program, where the one that is asked for is like it but for sizes in the planned range, or
    for numbers that it computes with."""
    plan: Plan = state.plan
    if _same_shapes(state.planned, call) and same_but_for_sizes(state.graph, capture.graph):
        return carried_to(plan, capture)
    return fitted(plan, capture, call)


def _same_shapes(planned: BoundCall, call: Call) -> bool:
    return planned.names == call.names and [t.shape for t in planned.tensors] == [t.shape for t in call.tensors]


def _shapes(call: Call) -> Call:
    """The call on the meta device: what is kept of it holds no batch alive."""
    with torch.no_grad():
        tensors = (torch.empty_like(t, device="meta", requires_grad=t.requires_grad) for t in call.tensors)
        return Call(call.structure, tuple(tensors))


def _accumulators(state: State) -> dict[str, str]:
    """The specs in which gradients add up: the same for every program of a step."""
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
        executable,
        _builder(capture.returned, outputs),
        outputs,
        every_tangent,
        capture.constants,
        capture.guards,
        {m.name: (spec, shapes[m.name]) for m, spec in executable.inputs if m.name in shapes},
        state.compiled,
        capture.left,
        list(capture.lost),
    )


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
        compiled=options.backend == "inductor",
    )


def _functions(made: Plan, lowered: Lowered, capture: Capture) -> dict[str, Any]:
    """The functions of the plan's program, whose text was emitted from it just now."""
    functions = codegen.load(made.source, f"autopar_{made.digest}", capture.graph)
    inference = codegen.emit(passes.forward_only(lowered), made.mesh, ["Forward without gradients."])
    name = f"autopar_{made.digest}_inference"
    return functions | {"inference": codegen.load(inference, name, capture.graph)["forward"]}


def _edited(made: Plan, lowered: Lowered, capture: Capture, rank: Rank, text: str, path: str) -> dict[str, Any]:
    """The functions of a program that someone edited, on this rank."""
    functions = together(lambda: codegen.load(text, path, capture.graph))
    for name, module in (("forward", lowered.forward), ("backward", lowered.backward)):
        functions[name] = codegen.checked(functions[name], name, codegen.results_of(module, made.mesh, rank.coordinate))
    forward, count = functions["forward"], len(lowered.results)
    return functions | {"inference": lambda at, inputs: forward(at, inputs)[:count]}
