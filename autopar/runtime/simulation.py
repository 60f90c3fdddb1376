"""Runs every rank of a local program in one process, node by node, and exchanges collectives between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar import spmd
from autopar.ir import Graph, Input, Output, Value
from autopar.mesh import Mesh
from autopar.runtime.meter import MemoryMeter
from autopar.sharding import ShardingSpec
from autopar.spmd import Ends, LocalRank, Lowered, Results, at_micro_batch, local_ranks


@dataclass(frozen=True)
class Simulation:
    """The results of one simulated training step.

    Args:
        outputs: what the model returns, with whole tensors.
        grads: whole gradients by FQN; gradients of inputs are named ``input:NAME``.
        buffers: new values of buffers that the step changed.
        peak_memory: peak bytes on the fullest rank: parameters, inputs, activations and gradients.
    """

    outputs: Any
    grads: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    peak_memory: int


def simulate_program(
    lowered: Lowered,
    graph: Graph,
    mesh: Mesh,
    named: Mapping[tuple[str, str], Tensor],
    seed: int,
    micro_batch: int = 0,
) -> tuple[dict[str, Tensor], Simulation]:
    """Run forward and backward of every rank. Return whole outputs by name, and the whole result.

    Args:
        micro_batch: its number, if ``graph`` is that of one of several.
    """
    ranks = tuple(at_micro_batch(rank, micro_batch) for rank in local_ranks(mesh))
    meters = [MemoryMeter() for _ in ranks]
    accumulators: list[list[Tensor]] = [_zeros(lowered.accumulators, graph, mesh, r) for r in ranks]
    inputs: dict[Output, Tensor] = {}
    if lowered.accumulate is not None:
        # The program of all micro-batches but the last adds this batch up; that of the last adds nothing and delivers.
        before = replace(lowered, backward=lowered.accumulate, gradients=lowered.accumulated)
        _, made = _step(before, graph, mesh, named, seed, ranks, meters, accumulators)
        n = len(lowered.accumulators)
        accumulators = [list(own[-n:]) for own in made]
        rest = [own[:-n] for own in made]
        inputs = _whole(lowered.accumulated[:-n], rest, graph, mesh)
    results, gradients = _step(
        lowered, graph, mesh, named, seed, ranks, meters, accumulators, counts=lowered.accumulate is None
    )
    found = _whole(lowered.results, results, graph, mesh)
    made_last = _whole(lowered.gradients, gradients, graph, mesh) | inputs
    grads = {o.name: _as_stored(t, named.get(("parameter", o.name))) for o, t in made_last.items()}
    outputs = {o.name: t for o, t in found.items() if o.kind == "output"}
    buffers = {o.name: t for o, t in found.items() if o.kind == "mutation"}
    return outputs, Simulation(outputs, grads, buffers, max(m.peak for m in meters))


def _as_stored(gradient: Tensor, parameter: Tensor | None) -> Tensor:
    """Return the gradient in the dtype of its parameter, as autograd hands it on."""
    return gradient if parameter is None else gradient.to(parameter.dtype)


def _step(
    lowered: Lowered,
    graph: Graph,
    mesh: Mesh,
    named: Mapping[tuple[str, str], Tensor],
    seed: int,
    ranks: Sequence[LocalRank],
    meters: Sequence[MemoryMeter],
    accumulators: list[list[Tensor]],
    *,
    counts: bool = True,
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Run one forward and backward of every rank, and return the results of both.

    Args:
        accumulators: those of each rank; the list is emptied.
        counts: whether the gradient of the loss is one, or zero.
    """
    feeds = [_feed(lowered.inputs, named, mesh, r.coordinate, seed) for r in ranks]
    whole = [named[m.kind, m.name] for m, _ in lowered.inputs if m.kind == "input"]
    kept = [_kept(lowered.inputs, feed) for feed in feeds]
    for meter, feed, sums in zip(meters, feeds, accumulators, strict=True):
        # Every rank holds the whole batch besides its own part of it.
        meter.hold([*feed, *whole, *sums])
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        made = run(lowered.forward, ranks, feeds, meters)
        n = len(lowered.results)
        # Results stay with the caller; saved tensors are handed to the backward, which frees them.
        tangents = [_tangents(lowered.tangents, graph, mesh, r, counts) for r in ranks]
        for meter, own in zip(meters, tangents, strict=True):
            meter.hold(own)
        back = [[*v[n:], *own, *sums] for v, own, sums in zip(made, tangents, accumulators, strict=True)]
        accumulators.clear()
        del sums, own
        # New values of buffers are written back after the forward, so the copies in the result do not count as held.
        wrote = [output.kind == "mutation" for output, _ in lowered.results]
        results = [tuple(v.clone() if m else v for v, m in zip(values[:n], wrote, strict=True)) for values in made]
        del made
        gradients = run(lowered.backward, ranks, back, meters)
    del kept, tangents  # autograd holds the caller's gradients to the end
    return results, gradients


def _feed(
    ends: Ends, named: Mapping[tuple[str, str], Tensor], mesh: Mesh, at: Sequence[int], seed: int
) -> list[Tensor]:
    def of(meaning: Input, spec: ShardingSpec) -> Tensor:
        if meaning.kind == "seed":
            return torch.tensor(seed, dtype=torch.int64)
        return shard(named[meaning.kind, meaning.name].detach(), spec, mesh, at)

    return [of(meaning, spec) for meaning, spec in ends]


def _kept(ends: Ends, feed: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs that outlive the step. Parts cut out of the batch end with their last reader."""
    return [t for (meaning, _), t in zip(ends, feed, strict=True) if meaning.kind != "input"]


def _zeros(ends: Ends, graph: Graph, mesh: Mesh, rank: LocalRank) -> list[Tensor]:
    metas = [(graph.meta(Value(i.node)), spec) for i, spec in ends]
    shapes = [(spec.local_shape(m.shape, mesh, rank.coordinate), m.dtype) for m, spec in metas]
    return [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in shapes]


def _tangents(ends: Ends, graph: Graph, mesh: Mesh, rank: LocalRank, counts: bool) -> list[Tensor]:
    """Return tangents: ones, the gradient of the loss or of the sum of outputs, or zeros if the step does not count."""
    metas = [(graph.by_name[i.node].outputs[0], spec) for i, spec in ends]
    shapes = [(spec.local_shape(m.shape, mesh, rank.coordinate), m.dtype) for m, spec in metas if m]
    return [torch.full(shape, float(counts), dtype=getattr(torch, dtype)) for shape, dtype in shapes]


def _whole(ends: Results, values: Sequence[Sequence[Tensor]], graph: Graph, mesh: Mesh) -> dict[Output, Tensor]:
    return {
        output: assemble([own[i] for own in values], spec, graph.meta(output.value).shape, mesh)
        for i, (output, spec) in enumerate(ends)
    }


def run(
    module: fx.GraphModule,
    ranks: Sequence[LocalRank],
    inputs: list[list[Any]],
    meters: Sequence[MemoryMeter],
    watch: Callable[[fx.Node], None] = lambda _: None,
) -> list[tuple[Any, ...]]:
    """Run ``module(rank, *inputs)`` on every rank and return the results; the lists of ``inputs`` are emptied.

    Args:
        meters: count the bytes that each rank holds.
        watch: called after each node.
    """
    values: dict[fx.Node, list[Any]] = {}
    last = _last_uses(module.graph)
    for own in inputs:
        own.reverse()
    for node in module.graph.nodes:
        if node.op == "output":
            return [tuple(values[a][r] for a in node.args[0]) for r in range(len(ranks))]
        if node.op == "placeholder":
            values[node] = list(ranks) if node.target == "rank" else [own.pop() for own in inputs]
        else:
            values[node] = _call(node, values, ranks, meters)
        for dead in last.get(node, ()):
            del values[dead]
        watch(node)
    raise AssertionError("a graph without results")


def _call(
    node: fx.Node, values: Mapping[fx.Node, list[Any]], ranks: Sequence[LocalRank], meters: Sequence[MemoryMeter]
) -> list[Any]:
    def of(rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = fx.node.map_arg(node.args, lambda n: values[n][rank])
        return args, fx.node.map_arg(node.kwargs, lambda n: values[n][rank])

    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    if function in spmd.COLLECTIVES:
        calls = [(a[1:], k) for a, k in map(of, range(len(ranks)))]
        return list(spmd.simulate(function, ranks, calls, meters))
    if function in spmd.RINGS:
        calls = [(a[1:], k) for a, k in map(of, range(len(ranks)))]
        return spmd.simulate_ring(spmd.RINGS[function], ranks, calls, meters)
    made = []
    for rank, meter in enumerate(meters):
        args, kwargs = of(rank)
        with meter:
            made.append(function(*args, **kwargs))
    return made


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            last[source] = node
        last.setdefault(node, node)
    dead: dict[fx.Node, list[fx.Node]] = {}
    for node, end in last.items():
        if end.op != "output" and node.target != "rank" and node.op != "output":
            dead.setdefault(end, []).append(node)
    return dead


def shard(whole: Tensor, spec: ShardingSpec, mesh: Mesh, coordinate: Sequence[int]) -> Tensor:
    """Return the part of ``whole`` that a rank holds: a copy if it is cut, so as not to keep the whole alive."""
    part = whole[spec.local_slices(tuple(whole.shape), mesh, coordinate)]
    return part if spec.is_replicated else part.clone()


def assemble(shards: Sequence[Tensor], spec: ShardingSpec, shape: Sequence[int], mesh: Mesh) -> Tensor:
    """Assemble the whole tensor from every rank's shard; replicas are taken from the first rank that has them."""
    if not spec.axes:
        return shards[0]
    whole = shards[0].new_zeros(tuple(shape))
    for rank in reversed(range(mesh.size)):
        coordinate = mesh.coordinate(rank)
        whole[spec.local_slices(tuple(shape), mesh, coordinate)] = shards[rank]
    return whole
