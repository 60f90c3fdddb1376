"""The decision problem: a variable for each op, input and copy, and a use for each edge between maker and reader.

A tensor that several ops of one phase read gets a *copy* variable: the one spec to which it is redistributed once, and
from which they all read. Where both phases read it, the backward's copy either keeps what the forward gathered (for
parameters: ZeRO-1 and 2) or gathers again (ZeRO-3). Gradients go to the spec of their parameter: the parameter's own
variable is their reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from autopar.cost_models import optimizer_steps_alone, optimizer_takes_whole
from autopar.errors import ConstraintError
from autopar.ir import Graph, Node, Output, Phase, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.planner.footprint.state import moved_state_bytes
from autopar.planner.graphs.accumulation import widened
from autopar.planner.graphs.dataflow import batch_size
from autopar.planner.options import Options
from autopar.planner.problem import rematerialization as rematerialize
from autopar.planner.problem.constraints import Forced
from autopar.planner.problem.specs import stored_specs, without_short_rings
from autopar.planner.problem.variables import (
    Decisions,
    InternedOptions,
    Use,
    Variable,
    copy_key,
    forced_key,
    hold_key,
    is_handed_out,
    output_key,
    rerun_key,
    spec_made,
    spec_read,
)
from autopar.sharding import ShardingSpec, Strategy
from autopar.solver.clock import tick
from autopar.strategies import strategies


def decide(
    graph: Graph,
    mesh: Mesh,
    options: Options,
    forced: Forced,
    *,
    recompute: bool = False,
    interned: InternedOptions | None = None,
) -> Decisions:
    """List every decision of ``graph`` on ``mesh``; if ``recompute``, also how values are held for the backward.

    Args:
        interned: options of graphs that are priced with the same prices.
    """
    d = Decisions(
        graph,
        mesh,
        recomputes=recompute,
        accumulation_steps=options.accumulation_steps,
        seam_s=options.seam_s,
        widened=widened(graph, options.dtype_of("reduce")),
        interned=interned or InternedOptions(),
    )
    options_of_kind: dict[int, tuple[Strategy, ...]] = {}
    min_host_state_bytes = _min_host_state_bytes(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            variable = _placeholder(graph, node, mesh, options, forced)
            d.add(_with_host_state(variable, graph, mesh, options, min_host_state_bytes) if recompute else variable)
            continue
        kind = graph.kinds[node.name]
        if kind not in options_of_kind:
            metas = tuple(graph.meta(v) for v in node.inputs)
            options_of_kind[kind] = d.interned.of(without_short_rings(strategies(node, metas, mesh), metas, mesh))
            tick("strategy", len(options_of_kind[kind]))
        d.add(Variable(node.name, "op", options_of_kind[kind], node.phase, node))
    for output in graph.outputs:
        if is_handed_out(output):
            d.add(_output_variable(graph, output, mesh, options, forced))
    held = rematerialize.eligible(graph) if recompute else frozenset()
    if recompute:
        rematerialize.add_reruns(d, held)
        d.min_stored_bytes = rematerialize.min_stored_bytes(graph)
    targets_of = _result_targets(d)
    for value, meta in list(_values(graph)):
        _add_uses(d, value, meta, forced, targets_of, value.node in held)
    tick("decision", len(d.variables))
    return d


def _values(graph: Graph) -> Iterator[tuple[Value, TensorMeta]]:
    for node in graph.nodes:
        for i, meta in enumerate(node.outputs):
            if meta is not None:
                yield Value(node.name, i), meta


def _placeholder(graph: Graph, node: Node, mesh: Mesh, options: Options, forced: Forced) -> Variable:
    meaning = graph.input_of[node.name]
    meta = node.outputs[0]
    assert meta is not None
    if node.name in forced.placeholders:
        specs: tuple[ShardingSpec, ...] = (forced.placeholders[node.name],)
    elif meaning.trainable and optimizer_takes_whole(options.optimizer):
        specs = (ShardingSpec.replicated(len(meta.shape)),)
    elif meaning.kind == "parameter" or graph.comes_from_stage(meaning):
        specs = stored_specs(meta.shape, mesh)
    elif meaning.kind == "input":
        specs = _input_specs(meta, mesh, options, graph)
    elif meaning.kind == "accumulator":
        specs = _accumulator_specs(graph, node, mesh, options)
    elif meaning.kind == "tangent":
        specs = _output_specs(graph, meta, mesh, options)
    else:
        specs = (ShardingSpec.replicated(len(meta.shape)),)
    return Variable(node.name, meaning.kind, _source_strategies(specs), node.phase, node)


@lru_cache(maxsize=4096)
def _source_strategies(specs: tuple[ShardingSpec, ...]) -> tuple[Strategy, ...]:
    return tuple(Strategy((), (s,)) for s in specs)


def _accumulator_specs(graph: Graph, node: Node, mesh: Mesh, options: Options) -> tuple[ShardingSpec, ...]:
    """Return every spec in which the op that adds to an accumulator takes it, including partial sums."""
    name = graph.input_of[node.name].name
    if name in options.accumulators:
        return (ShardingSpec.parse(options.accumulators[name]),)
    reader, position = graph.consumers[Value(node.name)][0]
    options_of_kind = strategies(reader, tuple(graph.meta(v) for v in reader.inputs), mesh)
    found = (spec_read(o, position) for o in options_of_kind)
    return tuple(dict.fromkeys(s for s in found if s is not None))


def _with_host_state(v: Variable, graph: Graph, mesh: Mesh, options: Options, least_bytes: float) -> Variable:
    """Offer each spec of a trained parameter twice: with its optimizer state on the device, and kept by the host.

    Parameters of less than ``least_bytes`` stay as they are.
    """
    if v.kind != "parameter" or v.node is None or not graph.input_of[v.node.name].trainable:
        return v
    meta = v.node.outputs[0]
    elementwise = optimizer_steps_alone(options.optimizer) and not options.dtype_of("master")
    if meta is None or not elementwise or meta.bytes < least_bytes:
        return v
    specs = [s for o in v.options if (s := spec_made(o, 0)) is not None]
    held = tuple(moved_state_bytes(meta, s, mesh, options) for s in specs)
    return replace(v, options=(*v.options, *v.options), host_state_bytes=(0,) * len(held) + held) if any(held) else v


MIN_HOST_STATE_SHARE = 1e-3
"""Share of the largest parameter's bytes below which a parameter's optimizer state is not worth a transfer."""


def _min_host_state_bytes(graph: Graph) -> float:
    metas = (graph.by_name[i.node].outputs[0] for i in graph.inputs if i.trainable)
    return MIN_HOST_STATE_SHARE * max((m.bytes for m in metas if m is not None), default=0)


def _input_specs(meta: TensorMeta, mesh: Mesh, options: Options, graph: Graph) -> tuple[ShardingSpec, ...]:
    if options.batch == "local":
        return (batch_spec(meta, mesh, graph),)
    return stored_specs(meta.shape, mesh)


def batch_spec(meta: TensorMeta, mesh: Mesh, graph: Graph) -> ShardingSpec:
    """Return the spec of a local batch: dim 0 cut over all ranks in order if it is the batch, else replicated."""
    if meta.shape and meta.shape[0] == batch_size(graph):
        return ShardingSpec((tuple(range(mesh.ndim)), *((),) * (len(meta.shape) - 1)))
    return ShardingSpec.replicated(len(meta.shape))


def _output_specs(graph: Graph, meta: TensorMeta, mesh: Mesh, options: Options) -> tuple[ShardingSpec, ...]:
    """Return the specs in which an output may be returned to the caller, and in which its tangent comes back."""
    if not is_plain_output(graph, meta, options):
        return stored_specs(meta.shape, mesh)
    if options.batch == "local":
        return (batch_spec(meta, mesh, graph),)
    return (ShardingSpec.replicated(len(meta.shape)),)


def _output_variable(graph: Graph, output: Output, mesh: Mesh, options: Options, forced: Forced) -> Variable:
    value, name = output.value, output.name
    meta = graph.meta(value)
    if name in forced.outputs:
        specs: tuple[ShardingSpec, ...] = (forced.outputs[name],)
        if output.kind == "output" and is_plain_output(graph, meta, options):
            _require_plain(name, specs, _output_specs(graph, meta, mesh, options))
    elif graph.goes_to_stage(output):
        specs = stored_specs(meta.shape, mesh)
    elif output.kind == "gradient":
        # An input's gradient has the spec in which the caller gave the input.
        local = options.batch == "local"
        specs = (batch_spec(meta, mesh, graph) if local else ShardingSpec.replicated(len(meta.shape)),)
    else:
        specs = _output_specs(graph, meta, mesh, options)
    choices = tuple(Strategy((s,), (s,)) for s in specs)
    return Variable(output_key(name), "output", choices, graph.by_name[value.node].phase, value=value)


def _require_plain(name: str, asked: tuple[ShardingSpec, ...], allowed: tuple[ShardingSpec, ...]) -> None:
    if asked != allowed:
        raise ConstraintError(
            f"The constraint on output:{name} does not fit a plain tensor.",
            found=f"{asked[0]}, where the caller gets {allowed[0]}",
            hint='return outputs as DTensors, by outputs="dtensor", or drop the constraint.',
        )


def is_plain_output(graph: Graph, meta: TensorMeta, options: Options) -> bool:
    """Whether an output is returned to the caller as a plain tensor: whole, or with local batches this rank's slice.

    Scalars always are. With ``outputs="auto"`` other outputs are DTensors beside a scalar loss.
    """
    if not meta.shape or options.outputs == "whole":
        return True
    if options.outputs == "dtensor":
        return False
    return graph.lone_scalar is None or not graph.has_loss


def _add_uses(
    d: Decisions,
    value: Value,
    meta: TensorMeta,
    forced: Forced,
    targets_of: Mapping[Value, Sequence[tuple[int, int]]],
    held: bool,
) -> None:
    source, out = d.index[value.node], value.index
    if value in forced.values:
        spec = forced.values[value]
        only = (Strategy((spec,), (spec,)),)
        target = d.add(Variable(forced_key(value), "copy", only, d.graph.by_name[value.node].phase, value=value))
        d.uses.append(Use(source, out, target, 0, meta))
        source, out = target, 0
    readers: Mapping[Phase, list[tuple[int, int]]] = {"forward": [], "backward": []}
    for node, position in d.graph.consumers.get(value, ()):
        readers[node.phase].append((d.index[node.name], position))
    targets = targets_of.get(value, ())
    for target, position in targets:
        if position >= 0:
            readers[d.variables[target].phase].append((target, position))
    forward, backward = readers["forward"], readers["backward"]
    gathered = _connect_readers(d, value, "forward", source, out, forward, meta, always=held)
    if held:
        at, made = (source, out) if gathered is None else (gathered[0], 0)
        rematerialize.add_hold(d, value, at, made, backward)
        backward = []
    elif d.recomputes:
        backward += rematerialize.rerun_readers(d, value)
    keeps = bool(forward) and bool(backward)
    _connect_readers(d, value, "backward", source, out, backward, meta, gathered if keeps else None)
    for target, position in targets:
        if position < 0:
            d.uses.append(Use(source, out, target, position, meta))


def _result_targets(d: Decisions) -> Mapping[Value, Sequence[tuple[int, int]]]:
    """Return where each result of the program goes: (variable, operand position)."""
    owners = {i.name: i.node for i in reversed(d.graph.inputs) if i.kind in ("parameter", "buffer")}
    targets_of: dict[Value, list[tuple[int, int]]] = {}
    for output in d.graph.outputs:
        handed_out = is_handed_out(output)
        place = (d.index[output_key(output.name)], 0) if handed_out else (d.index[owners[output.name]], -1)
        targets_of.setdefault(output.value, []).append(place)
    return targets_of


def _connect_readers(
    d: Decisions,
    value: Value,
    phase: Phase,
    source: int,
    out: int,
    readers: list[tuple[int, int]],
    meta: TensorMeta,
    gathered: tuple[int, int] | None = None,
    always: bool = False,
) -> tuple[int, int] | None:
    """Connect ``value`` to its readers of one phase, through a copy variable if there are several.

    Returns:
        Where the value is then found: (variable, operand position, or -1 for a copy's result).
    """
    if not readers:
        return None
    if len(readers) == 1 and gathered is None and not always:
        target, position = readers[0]
        d.uses.append(Use(source, out, target, position, meta))
        return readers[0]
    options = d.reader_options(readers, twice=gathered is not None)
    keeping = len(options) // 2 if gathered is not None else 0
    kept = (False,) * (len(options) - keeping) + (True,) * keeping
    copy = d.add(Variable(copy_key(value, phase), "copy", options, phase, value=value, kept=kept))
    d.uses.append(Use(source, out, copy, 0, meta))
    if gathered is not None:
        d.uses.append(Use(gathered[0], gathered[1], copy, 0, meta, kept=True))
    d.uses.extend([Use(copy, 0, target, position, meta) for target, position in readers])
    return copy, -1


__all__ = [
    "Decisions",
    "Use",
    "Variable",
    "batch_size",
    "copy_key",
    "decide",
    "forced_key",
    "hold_key",
    "is_plain_output",
    "output_key",
    "rerun_key",
    "spec_made",
    "spec_read",
]
