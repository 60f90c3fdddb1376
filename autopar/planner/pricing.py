"""Decisions as numbers: seconds of every option and of every handover, bytes of every tensor while it lives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.cost_models import CollectiveCosts, ComputeCosts, ComputeKind, optimizer_state_bytes, optimizer_step_bytes
from autopar.ir import Graph, Node, TensorMeta, Value
from autopar.mesh import Cluster, Mesh
from autopar.planner.decisions import Decisions, Handover, Variable, spec_read
from autopar.planner.options import Options
from autopar.sharding import ShardingSpec, Strategy
from autopar.sharding.paths import all_pairs
from autopar.solver import Edge, Problem, Usage
from autopar.strategies import flops

Array = npt.NDArray[np.float64]

VIEWS = frozenset(
    f"aten.{n}"
    for n in (
        "view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand", "slice",
        "select", "split", "split_with_sizes", "unbind", "alias", "detach", "diagonal", "as_strided", "movedim",
    )
)  # fmt: skip
"""Ops whose result shares the memory of their operand."""


@dataclass
class Prices:
    """Cost models bound to a mesh, with what has been priced."""

    mesh: Mesh
    cluster: Cluster
    collectives: CollectiveCosts = field(init=False)
    compute: ComputeCosts = field(init=False)
    _pairs: dict[tuple[object, ...], Array] = field(default_factory=dict)
    _edges: dict[tuple[object, ...], Array] = field(default_factory=dict)
    _nodes: dict[tuple[object, ...], Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.collectives = CollectiveCosts(self.mesh, self.cluster)
        self.compute = ComputeCosts(self.cluster)

    def node_seconds(self, graph: Graph, node: Node, options: Sequence[Strategy]) -> Array:
        """Seconds of each option of an op, by roofline."""
        metas = tuple(graph.meta(v) for v in node.inputs)
        key = (node.op, node.args if not node.inputs else _shape_args(node), metas, node.outputs, id(options))
        if key not in self._nodes:
            self._nodes[key] = self._node_seconds(node, metas, options)
        return self._nodes[key]

    def _node_seconds(self, node: Node, metas: Sequence[TensorMeta], options: Sequence[Strategy]) -> Array:
        total = flops(node, tuple(metas))
        kind: ComputeKind = "view" if node.packet in VIEWS else "matmul" if total else "memory"
        outs = [m for m in node.outputs if m is not None]
        dtype = outs[0].dtype if outs else "float32"
        ops = np.array([total * o.work for o in options])
        moved = np.array([_bytes_moved(o, metas, node.outputs, self.mesh) for o in options])
        return np.asarray(self.compute.seconds_array(ops, moved, dtype, kind), dtype=np.float64)

    def pairs(self, meta: TensorMeta, sources: tuple[ShardingSpec, ...], targets: tuple[ShardingSpec, ...]) -> Array:
        """Seconds of the cheapest redistribution between each pair of specs of a tensor."""
        key = (meta, sources, targets)
        if key not in self._pairs:
            self._pairs[key] = all_pairs(sources, targets, meta.shape, meta.itemsize, self.mesh, self.collectives)
        return self._pairs[key]

    def edge(self, source: Variable, target: Variable, h: Handover) -> Array:
        """Cost matrix of one handover, shared between handovers of equal kind."""
        key = (id(source.options), h.out, id(target.options), h.position, h.meta, h.kept, target.kept)
        if key not in self._edges:
            self._edges[key] = self._edge(source, target, h)
        return self._edges[key]

    def _edge(self, source: Variable, target: Variable, h: Handover) -> Array:
        given = [spec_read(o, h.out) if h.kept else _made(o, h.out) for o in source.options]
        taken = [spec_read(o, h.position) for o in target.options]
        if h.kept:
            same = np.array([[a == b for b in taken] for a in given])
            return np.where(same | ~np.array(target.kept), 0.0, math.inf)
        sources, at_source = _distinct(given)
        targets, at_target = _distinct(taken)
        cost = self.pairs(h.meta, sources, targets)[np.ix_(at_source, at_target)]
        if any(target.kept):
            cost = np.where(np.array(target.kept), 0.0, cost)
        return np.ascontiguousarray(cost)


def _made(option: Strategy, out: int) -> ShardingSpec:
    spec = option.outputs[out]
    assert spec is not None
    return spec


def _distinct(specs: Sequence[ShardingSpec]) -> tuple[tuple[ShardingSpec, ...], list[int]]:
    order: dict[ShardingSpec, int] = {}
    at = [order.setdefault(s, len(order)) for s in specs]
    return tuple(order), at


def _shape_args(node: Node) -> tuple[object, ...]:
    return tuple(a for a in node.args if not isinstance(a, (Value, tuple)))


def local_bytes(meta: TensorMeta, spec: ShardingSpec, mesh: Mesh) -> int:
    """Bytes of the largest shard."""
    return math.prod(spec.local_shape(meta.shape, mesh)) * meta.itemsize


def _bytes_moved(
    option: Strategy, metas: Sequence[TensorMeta], outputs: Sequence[TensorMeta | None], mesh: Mesh
) -> float:
    read = sum(local_bytes(m, s, mesh) for m, s in zip(metas, option.inputs, strict=True))
    written = sum(local_bytes(m, s, mesh) for m, s in zip(outputs, option.outputs, strict=True) if m and s)
    return float(read + written)


def costs(d: Decisions, prices: Prices) -> tuple[Array, ...]:
    """Seconds of every option of every variable."""
    return tuple(
        prices.node_seconds(d.graph, v.node, v.options) if v.kind == "op" and v.node else np.zeros(len(v.options))
        for v in d.variables
    )


def edges(d: Decisions, prices: Prices) -> tuple[Edge, ...]:
    """One edge for each handover. An op that takes one tensor twice has two edges."""
    return tuple(
        Edge(h.source, h.target, prices.edge(d.variables[h.source], d.variables[h.target], h))
        for h in d.handovers
        if h.source != h.target
    )


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one parameter takes on a device, by kind, for a stored spec."""

    parameter: int
    optimizer: int
    gradient: int
    step: int

    @property
    def total(self) -> int:
        """While the optimizer steps."""
        return self.parameter + self.optimizer + self.gradient + self.step


def state_bytes(meta: TensorMeta, spec: ShardingSpec, mesh: Mesh, trainable: bool, options: Options) -> StateBytes:
    """What a parameter, its optimizer state, its gradient and the optimizer's step take on the fullest rank."""
    numel = math.prod(spec.local_shape(meta.shape, mesh))
    held = numel * meta.itemsize
    if not trainable:
        return StateBytes(held, 0, 0, 0)
    state = optimizer_state_bytes(options.optimizer, numel, meta.dtype)
    return StateBytes(held, state, held, optimizer_step_bytes(options.optimizer, numel, meta.dtype))


def usages(d: Decisions, options: Options, positions: Sequence[int]) -> tuple[Usage, ...]:
    """What every option holds at each of ``positions`` (indices of graph nodes; the graph's length is the end).

    Time ``t`` of the result is ``positions[t]``.
    """
    graph = d.graph
    at = {n.name: i for i, n in enumerate(graph.nodes)}
    found: list[Usage] = []
    last = _last_reads(graph, at)
    for i, v in enumerate(d.variables):
        if v.kind == "parameter" and v.node is not None and v.node.outputs[0] is not None:
            trainable = graph.input_of[v.node.name].trainable
            meta = v.node.outputs[0]
            held = [state_bytes(meta, o.outputs[0], d.mesh, trainable, options) for o in v.options if o.outputs[0]]
            steady = np.array([float(s.parameter + s.optimizer) for s in held])
            with_gradient = np.array([float(s.total) for s in held])
            for t, p in enumerate(positions):
                found.append(Usage(i, with_gradient if p >= len(graph.nodes) else steady, t, t + 1))
        elif v.kind == "copy" and any(v.kept) and v.value is not None:
            meta = graph.meta(v.value)
            size = np.array([local_bytes(meta, o.inputs[0], d.mesh) * k for o, k in zip(v.options, v.kept, strict=True)], dtype=float)
            start = min((at[n.name] for n, _ in graph.consumers[v.value] if n.phase == "forward"), default=0)
            found += _live(i, size, start, last.get(v.value, 0), positions)
        elif v.kind == "op" and v.node is not None and v.node.packet not in VIEWS:
            for out, value_meta in enumerate(v.node.outputs):
                if value_meta is None:
                    continue
                end = last.get(Value(v.node.name, out), -1)
                size = np.array([float(local_bytes(value_meta, _made(o, out), d.mesh)) for o in v.options])
                found += _live(i, size, at[v.node.name], end, positions)
    return tuple(found)


def _live(node: int, size: Array, start: int, end: int, positions: Sequence[int]) -> list[Usage]:
    return [Usage(node, size, t, t + 1) for t, p in enumerate(positions) if start <= p <= end and size.any()]


def _last_reads(graph: Graph, at: Mapping[str, int]) -> dict[Value, int]:
    """Position of the last reader of each value's memory, through views of it; results live to the end."""
    last: dict[Value, int] = {v: max(at[n.name] for n, _ in readers) for v, readers in graph.consumers.items()}
    for output in graph.outputs:
        last[output.value] = len(graph.nodes) if output.kind == "output" else last.get(output.value, -1)
    for node in reversed(graph.nodes):
        if node.packet in VIEWS and node.inputs:
            ends = [last.get(Value(node.name, i), -1) for i in range(len(node.outputs))]
            last[node.inputs[0]] = max([last.get(node.inputs[0], -1), *ends])
    return last


def problem(d: Decisions, prices: Prices, options: Options, positions: Sequence[int], limit: float) -> Problem:
    """The whole problem as the solver takes it."""
    rows = usages(d, options, positions) if math.isfinite(limit) else ()
    return Problem(costs(d, prices), edges(d, prices), rows, limit)
