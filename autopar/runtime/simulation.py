"""Every rank of a local program in one process, node by node, with collectives exchanged between the ranks' values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten

from autopar import spmd
from autopar.ir import Graph, Input, Output
from autopar.mesh import Mesh
from autopar.sharding import ShardingSpec
from autopar.spmd import Ends, LocalRank, Lowered, Results, local_ranks


@dataclass(frozen=True)
class Simulation:
    """What one training step gave.

    Args:
        outputs: as the model returns them, whole.
        grads: whole gradients by FQN, and of inputs that need one as ``input:NAME``.
        buffers: new values of buffers that the step changed.
        peak_memory: bytes on the fullest rank at the worst moment: parameters, inputs, activations and gradients.
    """

    outputs: Any
    grads: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    peak_memory: int


def simulate_program(
    lowered: Lowered, graph: Graph, mesh: Mesh, named: Mapping[tuple[str, str], Tensor], seed: int
) -> tuple[dict[str, Tensor], Simulation]:
    """Run forward and backward of every rank. Returns whole outputs by name, and the rest of the result."""
    ranks = local_ranks(mesh)
    meters = [Meter() for _ in ranks]
    feeds = [_feed(lowered.inputs, named, mesh, r.coordinate, seed) for r in ranks]
    held = [list(feed) for feed in feeds]
    for meter, own in zip(meters, held, strict=True):
        meter.take(own)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        made = run(lowered.forward, ranks, feeds, meters)
        n = len(lowered.results)
        # Results stay with the caller, saved tensors are handed to the backward, which frees them.
        for meter, values in zip(meters, made, strict=True):
            meter.take(values)
        tangents = [_tangents(lowered.tangents, graph, mesh, r) for r in ranks]
        back = [[*values[n:], *own] for values, own in zip(made, tangents, strict=True)]
        del tangents
        for meter, values in zip(meters, made, strict=True):
            meter.drop(list(values[n:]))
        results = [values[:n] for values in made]
        del made
        gradients = run(lowered.backward, ranks, back, meters)
    whole = _whole(lowered.results, results, graph, mesh)
    grads = {o.name: t for o, t in _whole(lowered.gradients, gradients, graph, mesh).items()}
    outputs = {o.name: t for o, t in whole.items() if o.kind == "output"}
    buffers = {o.name: t for o, t in whole.items() if o.kind == "mutation"}
    return outputs, Simulation(outputs, grads, buffers, max(m.peak for m in meters))


def _feed(
    ends: Ends, named: Mapping[tuple[str, str], Tensor], mesh: Mesh, at: Sequence[int], seed: int
) -> list[Tensor]:
    def of(meaning: Input, spec: ShardingSpec) -> Tensor:
        if meaning.kind == "seed":
            return torch.tensor(seed, dtype=torch.int64)
        return shard(named[meaning.kind, meaning.name].detach(), spec, mesh, at)

    return [of(meaning, spec) for meaning, spec in ends]


def _tangents(ends: Ends, graph: Graph, mesh: Mesh, rank: LocalRank) -> list[Tensor]:
    """Ones: the gradient of the loss, or of the sum of the outputs."""
    metas = [(graph.by_name[i.node].outputs[0], spec) for i, spec in ends]
    shapes = [(spec.local_shape(m.shape, mesh, rank.coordinate), m.dtype) for m, spec in metas if m]
    return [torch.ones(shape, dtype=getattr(torch, dtype)) for shape, dtype in shapes]


def _whole(ends: Results, values: Sequence[Sequence[Tensor]], graph: Graph, mesh: Mesh) -> dict[Output, Tensor]:
    return {
        output: assemble([own[i] for own in values], spec, graph.meta(output.value).shape, mesh)
        for i, (output, spec) in enumerate(ends)
    }


@dataclass
class Meter:
    """Bytes of the tensors that one rank holds, by storage; views count once."""

    held: int = 0
    peak: int = 0
    _counts: dict[int, int] = field(default_factory=dict)

    def take(self, value: Any) -> None:
        for key, size in _storages(value):
            self._counts[key] = self._counts.get(key, 0) + 1
            if self._counts[key] == 1:
                self.held += size
        self.peak = max(self.peak, self.held)

    def drop(self, value: Any) -> None:
        for key, size in _storages(value):
            if key in self._counts:
                self._counts[key] -= 1
                if not self._counts[key]:
                    del self._counts[key]
                    self.held -= size


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _storages(value: Any) -> list[tuple[int, int]]:
    if isinstance(value, spmd.Pending):
        value = value.buffer
    leaves, _ = tree_flatten(value)
    return [(_storage(t), t.untyped_storage().nbytes()) for t in leaves if isinstance(t, Tensor)]


def run(
    module: fx.GraphModule, ranks: Sequence[LocalRank], inputs: list[list[Any]], meters: Sequence[Meter]
) -> list[tuple[Any, ...]]:
    """Run ``module(rank, *inputs)`` on every rank and return the results; the lists of ``inputs`` are emptied."""
    values: dict[fx.Node, list[Any]] = {}
    last = _last_uses(module.graph)
    feeds = [iter(own) for own in inputs]
    for node in module.graph.nodes:
        if node.op == "output":
            for held in values.values():
                for meter, value in zip(meters, held, strict=True):
                    meter.drop(value)
            return [tuple(values[a][r] for a in node.args[0]) for r in range(len(ranks))]
        if node.op == "placeholder":
            made = list(ranks) if node.target == "rank" else [next(feed) for feed in feeds]
        else:
            made = _call(node, values, ranks)
        values[node] = made
        if node.target != "rank":
            for meter, value in zip(meters, made, strict=True):
                meter.take(value)
        for dead in last.get(node, ()):
            for meter, value in zip(meters, values.pop(dead), strict=True):
                meter.drop(value)
    raise AssertionError("a graph without results")


def _call(node: fx.Node, values: Mapping[fx.Node, list[Any]], ranks: Sequence[LocalRank]) -> list[Any]:
    def of(rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = fx.node.map_arg(node.args, lambda n: values[n][rank])
        return args, fx.node.map_arg(node.kwargs, lambda n: values[n][rank])

    calls = [of(r) for r in range(len(ranks))]
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    if function in spmd.COLLECTIVES:
        return list(spmd.simulate(function, ranks, [(a[1:], k) for a, k in calls]))
    return [function(*a, **k) for a, k in calls]


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
    """The part of ``whole`` that a rank holds. A copy where it is cut, so that it does not hold the whole."""
    part = whole[spec.local_slices(tuple(whole.shape), mesh, coordinate)]
    return part if part.shape == whole.shape else part.clone()


def assemble(shards: Sequence[Tensor], spec: ShardingSpec, shape: Sequence[int], mesh: Mesh) -> Tensor:
    """The whole tensor from every rank's shard; replicas are taken from the first rank that has them."""
    if not spec.axes:
        return shards[0]
    whole = shards[0].new_zeros(tuple(shape))
    for rank in reversed(range(mesh.size)):
        coordinate = mesh.coordinate(rank)
        whole[spec.local_slices(tuple(shape), mesh, coordinate)] = shards[rank]
    return whole
