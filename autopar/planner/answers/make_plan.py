"""Makes a ``Plan`` from what the planner found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autopar.holding import KEEP, RECOMPUTE
from autopar.ir import Graph, Value
from autopar.mesh import Cluster, Mesh
from autopar.planner.answers.explain import exchanged_specs, explain
from autopar.planner.answers.facts import gather_facts
from autopar.planner.footprint.state import moved_state_bytes
from autopar.planner.options import Options
from autopar.planner.problem.constraints import module_outputs
from autopar.planner.problem.variables import forced_key
from autopar.planner.search.search import Planned
from autopar.plans import Activation, Plan
from autopar.program import AGAIN, Program
from autopar.sharding import ShardingSpec


def make_plan(
    planned: Planned,
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    source: str,
    notices: tuple[str, ...],
) -> Plan:
    """Gather decisions and predictions under the names that users know."""
    program = planned.program
    made: dict[str, ShardingSpec] = {name: t.spec for name, t in program.tensors.items()}
    for op in program.ops:
        if op.kind == "decomposed" and op.strategy is not None and op.strategy.outputs[0] is not None:
            made.setdefault(str(Value(op.node)), op.strategy.outputs[0])  # scattered as it is made
    specs: dict[str, ShardingSpec] = {}
    parameters: dict[str, int] = {}
    for meaning in graph.inputs:
        spec = made[meaning.node]
        if meaning.kind == "input":
            specs[f"input:{meaning.name}"] = spec
            specs.setdefault(meaning.name, spec)
        elif meaning.kind in ("parameter", "buffer"):
            specs[meaning.name] = spec
        elif meaning.kind == "accumulator":
            specs[f"accumulated:{meaning.name}"] = spec
        if meaning.kind == "parameter":
            parameters[meaning.name] = program.tensors[meaning.node].bytes
    for output, name in program.results:
        if output.kind == "output":
            specs[f"output:{output.name}"] = made[name]
            specs.setdefault(output.name, made[name])
    specs |= exchanged_specs(program, graph)
    for alias, name in options.aliases.items():
        if name in specs:
            specs[alias] = specs[name]
    reduced, forced = _reduced(made), _forced(planned)
    for module, node in module_outputs(graph).items():
        name = str(Value(node.name))
        own = reduced.get(name, made[name]) if made[name].partial else made[name]
        specs.setdefault(module, forced.get(Value(node.name), own))
    for node in graph.nodes:
        if node.op != "placeholder" and str(Value(node.name)) in made:
            specs.setdefault(node.name, made[node.name])
    s = planned.solution
    return Plan(
        model=graph.name,
        graph_digest=graph.digest,
        mesh=mesh,
        cluster=cluster.name,
        program=program,
        specs=specs,
        parameters=parameters,
        activations=_activations(planned),
        objective=s.objective,
        lower_bound=min(s.lower_bound, s.objective),
        step_time=planned.timeline.seconds,
        peak_memory=planned.memory.peak_bytes,
        memory=planned.memory.by_kind,
        source=source,
        timings=planned.timings,
        options=_options(options),
        solver={"method": s.method, "proven": s.proven, "seconds": s.seconds, **s.size},
        notices=(*notices, *planned.notices),
        baselines=planned.baselines,
        trace=planned.trace,
        host_memory=program.host_bytes + _state_on_host(program, graph, mesh, options),
        facts=gather_facts(planned, graph, mesh, cluster, replace(options, device=cluster.device.kernels)),
        _explain=_explainer(planned, graph, mesh, cluster, options),
    )


def _state_on_host(program: Program, graph: Graph, mesh: Mesh, options: Options) -> int:
    """Return the bytes of optimizer state that the host keeps."""
    stored = {graph.input_of[op.node].name: op.writes[0] for op in program.ops if op.kind == "input"}
    away = (stored[name] for name in program.offloaded_optimizer)
    return sum(moved_state_bytes(t.meta, t.spec, mesh, options) for t in away)


def _forced(planned: Planned) -> dict[Value, ShardingSpec]:
    """Return the specs that constraints on modules give to their outputs."""
    chosen = zip(planned.decisions.variables, planned.solution.choice, strict=False)
    return {
        v.value: v.options[option].inputs[0]
        for v, option in chosen
        if v.value is not None and v.key == forced_key(v.value)
    }


def _reduced(made: Mapping[str, ShardingSpec]) -> dict[str, ShardingSpec]:
    """Return the first spec without partial sums to which each value is redistributed, in which a module's output is
    read."""
    first: dict[str, ShardingSpec] = {}
    for name, spec in made.items():
        value, redistributed, _ = name.partition("|")
        if redistributed and not spec.partial:
            first.setdefault(value, spec)
    return first


def _activations(planned: Planned) -> dict[str, Activation]:
    """Return what the backward reads of the forward: tensors kept here or by the host, and ops that it runs again."""
    program = planned.program
    inputs = {op.writes[0].name for op in program.ops if op.kind == "input"}
    forward = {t.name: t for op in program.ops if op.phase == "forward" for t in op.writes}
    stored = {t.name: op.form for op in program.ops if op.stores for t in op.writes}
    read = {name for op in program.ops if op.phase == "backward" for name in op.reads}
    found = {
        name.split("|")[0]: Activation(stored.get(name, KEEP.name), t.spec, t.bytes)
        for name, t in forward.items()
        if name in read and name not in inputs
    }
    for op in program.ops:
        if op.name.endswith(AGAIN):
            for t in op.writes:
                found.setdefault(t.name.removesuffix(AGAIN), Activation(RECOMPUTE.name, t.spec, t.bytes))
    return found


def _options(options: Options) -> dict[str, Any]:
    return {
        "memory_budget_bytes": options.memory_budget_bytes,
        "optimizer": options.optimizer,
        "batch": options.batch,
        "outputs": options.outputs,
        "constraints": dict(options.constraints),
        "time_limit_s": options.time_limit_s,
        "solver": options.solver,
        "gap": options.gap,
        "mixed_precision": options.mixed_precision,
        "async_tensor_parallel": options.async_tensor_parallel,
        "expert_room": options.expert_room,
        "accumulation_steps": options.accumulation_steps,
    }


def _explainer(planned: Planned, graph: Graph, mesh: Mesh, cluster: Cluster, options: Options) -> Callable[[str], str]:
    return lambda name: explain(planned, graph, mesh, cluster, options, name)
