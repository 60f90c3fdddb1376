"""Decisions as numbers: seconds of every option and of every handover, bytes of every tensor while it lives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.cost_models import (
    CollectiveCosts,
    ComputeCosts,
    largest_chunk_bytes,
    optimizer_mode,
    optimizer_scalar_bytes,
    optimizer_state_bytes,
    optimizer_step_bytes,
)
from autopar.ir import ITEMSIZE, Graph, Node, TensorMeta, Value
from autopar.mesh import Cluster, Mesh
from autopar.planner.accumulation import FLOATS
from autopar.planner.decomposition import Decomposition, reachable
from autopar.planner.fusion import Border, borders
from autopar.planner.implementations import implementation
from autopar.planner.kernels import bytes_moved, executed_share, kernel_kind, local_bytes
from autopar.planner.options import Options
from autopar.planner.transfers import EXPOSED_SHARE, hold_seconds, state_seconds
from autopar.planner.variables import Decisions, Handover, Variable, spec_made, spec_read
from autopar.sharding import ShardingSpec, Step, Strategy
from autopar.sharding.paths import Path, all_pairs, cheapest_path
from autopar.solver import Edge
from autopar.strategies import flops, halos
from autopar.strategies.registry import find_windows

Array = npt.NDArray[np.float64]
Ends: TypeAlias = Sequence[ShardingSpec | None]
"""The spec at one end of a handover, for each option; None where that option makes or takes nothing."""

MOST_OVERLAP = 0.98
"""No overlap is quite free: a hidden collective takes memory bandwidth, so of two the one that moves less is better."""


@dataclass
class Prices:
    """Cost models bound to a mesh, with what has been priced."""

    mesh: Mesh
    cluster: Cluster
    backend: str = "eager"
    decomposed: str = "never"
    collectives: CollectiveCosts = field(init=False)
    compute: ComputeCosts = field(init=False)
    _paths: dict[tuple[object, ...], Path] = field(default_factory=dict)
    _pairs: dict[tuple[object, ...], Array] = field(default_factory=dict)
    _edges: dict[tuple[object, ...], tuple[Array, object, object]] = field(default_factory=dict)
    _handed: dict[int, tuple[Handover, Array]] = field(default_factory=dict)
    _nodes: dict[tuple[object, ...], Array] = field(default_factory=dict)
    _named: dict[tuple[int, int], tuple[Node, Sequence[Strategy], Array]] = field(default_factory=dict)
    _borders: dict[int, tuple[Graph, Mapping[str, Border]]] = field(default_factory=dict)
    _weighted: dict[tuple[float, ...], tuple[Array, Array]] = field(default_factory=dict)
    _reductions: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.collectives = CollectiveCosts(self.mesh, self.cluster)
        self.compute = ComputeCosts(self.cluster)

    @cached_property
    def decomposition(self) -> Decomposition:
        """Prices of products that are taken apart beside a collective."""
        near = frozenset(reachable(self.cluster, self.collectives))
        axes = near if self.decomposed == "near" else frozenset(range(self.mesh.ndim))
        return Decomposition(self, self.decomposed, frozenset(a for a in axes if self.mesh.shape[a] > 1))

    @property
    def overlap(self) -> float:
        """Share of a collective's time that computation beside it is spared."""
        return min(self.cluster.measured.overlap, MOST_OVERLAP)

    def weighted(self, seconds: Array, weight: float) -> Array:
        """``seconds`` times ``weight``: one array for all that share ``seconds``, as the solver shares work by it."""
        if weight == 1.0:
            return seconds
        key = (id(seconds), weight)
        if key not in self._weighted:
            self._weighted[key] = seconds, seconds * weight
        return self._weighted[key][1]

    def reduction(self, source: Variable, target: Variable, h: Handover) -> tuple[Array, Array]:
        """Of a gradient's handover to its parameter, seconds of the launches, and those that computation can hide."""
        total = self.edge(source, target, h)
        key = id(total)
        if key not in self._reductions:
            made = [spec_made(o, h.out) for o in source.options]
            taken = [spec_read(o, h.position) for o in target.options]
            launches = np.minimum(self._moves(made, taken, h.meta, itemsize=0), total)
            bytes_s = np.where(np.isfinite(total), total, 0.0) - np.where(np.isfinite(total), launches, 0.0)
            self._reductions[key] = launches, bytes_s
        return self._reductions[key]

    def reduction_edge(
        self, source: Variable, target: Variable, h: Handover, weight: float, share: float = 1.0
    ) -> Array:
        """A gradient's handover in a ``share`` of all backwards, a second that can be hidden counted as ``weight``."""
        launches, bytes_s = self.reduction(source, target, h)
        key = (id(bytes_s), weight, share)
        if key not in self._weighted:
            self._weighted[key] = bytes_s, share * (launches + weight * bytes_s)
        return self._weighted[key][1]

    def node_seconds(self, graph: Graph, node: Node, options: Sequence[Strategy]) -> Array:
        """Seconds of each option of an op, by measured curves or roofline; of a fused op, its share of the kernel."""
        name = (id(node), id(options))
        known = self._named.get(name)
        if known is None:
            known = self._named[name] = node, options, self._shared_seconds(graph, node, options)
        return known[2]

    def _shared_seconds(self, graph: Graph, node: Node, options: Sequence[Strategy]) -> Array:
        """One array for all nodes of equal ops."""
        metas = tuple(graph.meta(v) for v in node.inputs)
        border = self._border(graph, node)
        args = node.args if not node.inputs else _shape_args(node)
        key = (node.op, args, node.kwarg("is_causal"), metas, node.outputs, id(options), border)
        if key not in self._nodes:
            self._nodes[key] = self._node_seconds(node, metas, options, border)
        return self._nodes[key]

    def _border(self, graph: Graph, node: Node) -> Border | None:
        """What the op moves inside its fused kernel, where the back end fuses and it is in one."""
        if self.backend != "inductor":
            return None
        if id(graph) not in self._borders:
            self._borders[id(graph)] = graph, borders(graph)
        return self._borders[id(graph)][1].get(node.name)

    def _node_seconds(
        self, node: Node, metas: Sequence[TensorMeta], options: Sequence[Strategy], border: Border | None
    ) -> Array:
        if border is not None:
            moved = np.array([bytes_moved(node, o, metas, self.mesh, border.reads, border.writes) for o in options])
            launch_s, s_per_byte = self.compute.copy_line()
            return np.asarray(moved * s_per_byte + (launch_s if border.leads else 0.0), dtype=np.float64)
        total = flops(node, tuple(metas))
        outs = [m for m in node.outputs if m is not None]
        dtype = outs[0].dtype if outs else "float32"
        ops = np.array([total * executed_share(node) * o.work for o in options])
        moved = np.array([implementation(node, o, metas, self.mesh, self.cluster.device.kind)[1] for o in options])
        kind = kernel_kind(node, total)
        seconds = np.asarray(self.compute.seconds_array(ops, moved, dtype, kind, node.packet), dtype=np.float64)
        return seconds if find_windows(node) is None else seconds + self._exchanging(node, metas, options)

    def _exchanging(self, node: Node, metas: Sequence[TensorMeta], options: Sequence[Strategy]) -> Array:
        """Seconds in which neighbours send each other the rows of halos: nothing hides them."""
        found = np.zeros(len(options))
        for at, option in enumerate(options):
            for h in halos(node, option, tuple(metas), self.mesh) or ():
                meta, rows = metas[h.operand], -(-h.n // self.mesh.shape[h.axis])
                costs = self.collectives.of(meta.dtype)
                shard = math.prod(option.inputs[h.operand].local_shape(meta.shape, self.mesh)) * meta.itemsize
                of_row = shard / rows
                found[at] += sum(costs.seconds("permute", n * of_row, h.axis) for n in (h.before, h.after) if n)
        return found

    def pairs(
        self, meta: TensorMeta, sources: tuple[ShardingSpec, ...], targets: tuple[ShardingSpec, ...],
        itemsize: int | None = None,
    ) -> Array:  # fmt: skip
        """Seconds of the cheapest redistribution between each pair of specs of a tensor.

        Args:
            itemsize: bytes of an element instead of the dtype's; 0 for the launches alone.
        """
        size = meta.itemsize if itemsize is None else itemsize
        costs = self.collectives.of(meta.dtype)
        key = (meta.shape, size, costs.reduced_bytes, sources, targets)
        if key not in self._pairs:
            self._pairs[key] = all_pairs(sources, targets, meta.shape, size, self.mesh, costs)
        return self._pairs[key]

    def path(self, source: ShardingSpec, target: ShardingSpec, meta: TensorMeta) -> Path:
        """The cheapest redistribution between two specs of a tensor."""
        costs = self.collectives.of(meta.dtype)
        key = (meta.shape, meta.itemsize, costs.reduced_bytes, source, target)
        if key not in self._paths:
            self._paths[key] = cheapest_path(source, target, meta.shape, meta.itemsize, self.mesh, costs)
        return self._paths[key]

    def step_seconds(self, step: Step, before: ShardingSpec, meta: TensorMeta) -> tuple[float, float]:
        """Seconds of one step, and those of them that it takes whatever its size."""
        priced = local_bytes(meta, step.apply(before) if step.kind == "all_gather" else before, self.mesh)
        costs = self.collectives.of(meta.dtype)
        seconds, launch_s = (
            max(costs.seconds(step.kind, size, a) for a in step.moved_axes(before)) for size in (priced, 0)
        )
        return seconds, min(launch_s, seconds)

    def edge(self, source: Variable, target: Variable, h: Handover) -> Array:
        """Cost matrix of one handover, shared between handovers of equal kind."""
        known = self._handed.get(id(h))
        if known is None or known[0] is not h:
            known = self._handed[id(h)] = h, self._shared_edge(source, target, h)
        return known[1]

    def _shared_edge(self, source: Variable, target: Variable, h: Handover) -> Array:
        key = (
            id(source.options), h.out, id(target.options), h.position, h.meta, h.kept, target.kept, h.rerun,
            target.actions,
        )  # fmt: skip
        if key not in self._edges:
            # The options are held too: an identity in a key is never another's.
            self._edges[key] = self._edge(source, target, h), source.options, target.options
        return self._edges[key][0]

    def _edge(self, source: Variable, target: Variable, h: Handover) -> Array:
        if h.kept:
            given = [spec_read(o, h.out) for o in source.options]
            same = np.array([[a == spec_read(b, h.position) for b in target.options] for a in given])
            return np.where(same | ~np.array(target.kept), 0.0, math.inf)
        made = [spec_made(o, h.out) for o in source.options]
        if target.kind == "hold":
            return self._hold_edge(made, target, h)
        if source.kind == "accumulator":
            # What one micro-batch leaves is what the next one finds.
            taken = [spec_read(o, h.position) for o in target.options]
            return np.array([[0.0 if a == b else math.inf for b in taken] for a in made])
        cost = self._moves(made, [spec_read(o, h.position) for o in target.options], h.meta)
        if any(target.kept):
            # What cannot be reached from the source is not there to be kept either.
            cost = np.where(np.array(target.kept) & np.isfinite(cost), 0.0, cost)
        return np.ascontiguousarray(cost)

    def _moves(self, made: Ends, taken: Ends, meta: TensorMeta, itemsize: int | None = None) -> Array:
        """Seconds from each spec to each: what nobody takes is free, what nobody makes cannot be taken."""
        sources, at_source = _distinct([s for s in made if s is not None])
        targets, at_target = _distinct([t for t in taken if t is not None])
        cost = np.full((len(made), len(taken)), math.inf)
        rows = [i for i, s in enumerate(made) if s is not None]
        columns = [j for j, t in enumerate(taken) if t is not None]
        if rows and columns:
            cost[np.ix_(rows, columns)] = self.pairs(meta, sources, targets, itemsize)[np.ix_(at_source, at_target)]
        cost[:, [j for j, t in enumerate(taken) if t is None]] = 0.0
        return cost

    def _hold_edge(self, made: Ends, target: Variable, h: Handover) -> Array:
        """What is kept or offloaded comes from the forward, the rest from the op that is run again, as it makes it."""
        actions = ("recompute",) if h.rerun else ("keep", "offload")
        taken = [spec_read(o, 0) if a in actions else None for o, a in zip(target.options, target.actions, strict=True)]
        if not h.rerun:
            return self._moves(made, taken, h.meta)
        return np.array([[0.0 if t is None or s == t else math.inf for t in taken] for s in made])


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


@dataclass(frozen=True)
class Weights:
    """Of a second of the backward's computation, and of a second of the reductions of gradients beside it."""

    computing: float = 1.0
    reducing: float = 1.0


def costs(d: Decisions, prices: Prices, weights: Weights = Weights()) -> tuple[Array, ...]:
    """Seconds of every option of every variable."""
    def of(v: Variable) -> Array:
        if v.kind == "op" and v.node:
            seconds = prices.node_seconds(d.graph, v.node, v.options)
            return prices.weighted(seconds, weights.computing) if v.phase == "backward" else seconds
        if v.kind == "rerun" and v.node:
            options = d.variables[d.index[v.node.name]].options
            return np.concatenate([[0.0], prices.node_seconds(d.graph, v.node, options) * weights.computing])
        if v.kind == "hold" and "offload" in v.actions:
            return hold_seconds(d, v, prices.cluster.host) * EXPOSED_SHARE
        if v.away:
            return state_seconds(v.away, prices.cluster.host) / d.accumulation_steps
        return np.zeros(len(v.options))

    return tuple(map(of, d.variables))


def edges(d: Decisions, prices: Prices, weights: Weights = Weights()) -> tuple[Edge, ...]:
    """One edge for each handover. An op that takes one tensor twice has two edges."""

    def of(h: Handover) -> Edge:
        ends = d.variables[h.source], d.variables[h.target]
        if reduces(d, h):
            cost = prices.reduction_edge(*ends, h, weights.reducing, 1 / d.accumulation_steps)
        else:
            cost = prices.decomposition.with_gains(d, h, prices.edge(*ends, h))
        return Edge(h.source, h.target, cost)

    return tuple(of(h) for h in d.handovers if h.source != h.target)


def reduces(d: Decisions, h: Handover) -> bool:
    """Whether the handover takes a gradient to its parameter: nothing in the program waits for that."""
    return h.position < 0 and d.variables[h.source].phase == "backward" and h.source != h.target


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


def master_of(dtype: str, options: Options) -> str | None:
    """The dtype of the master weights of parameters of ``dtype``; None where the optimizer steps on these. A step makes
    their gradients in it besides."""
    master = options.dtype_of("master")
    return master if dtype in FLOATS and dtype != master else None


def state_bytes(meta: TensorMeta, spec: ShardingSpec, mesh: Mesh, trainable: bool, options: Options) -> StateBytes:
    """What a parameter, its optimizer state, its gradient and the optimizer's step take on the fullest rank."""
    numel = math.prod(spec.local_shape(meta.shape, mesh))
    held = numel * meta.itemsize
    if not trainable:
        return StateBytes(held, 0, 0, 0)
    shape = tuple(spec.local_shape(meta.shape, mesh))
    master = master_of(meta.dtype, options)
    state = optimizer_state_bytes(options.optimizer, numel, meta.dtype, shape=shape, master_dtype=master)
    state += optimizer_scalar_bytes(options.optimizer)
    together = optimizer_mode(options.optimizer, options.device) == "foreach"
    step = (
        optimizer_step_bytes(options.optimizer, [numel], meta.dtype, master_dtype=master, shapes=[shape])
        if together else 0
    )  # fmt: skip
    step += numel * ITEMSIZE[master] if master else 0
    return StateBytes(held, state, held, step)


def step_bytes(parameters: Sequence[tuple[TensorMeta, ShardingSpec]], mesh: Mesh, options: Options) -> int:
    """What the optimizer's step makes on the fullest rank, for all trained parameters in their order."""
    by_dtype: dict[str, list[tuple[int, ...]]] = {}
    for meta, spec in parameters:
        by_dtype.setdefault(meta.dtype, []).append(tuple(spec.local_shape(meta.shape, mesh)))
    total = 0
    for dtype, shapes in by_dtype.items():
        numels, master = list(map(math.prod, shapes)), master_of(dtype, options)
        total += optimizer_step_bytes(
            options.optimizer, numels, dtype, master_dtype=master, device=options.device, shapes=shapes
        )
        total += sum(numels) * ITEMSIZE[master] if master else 0
    return total


def moved_state_bytes(meta: TensorMeta, spec: ShardingSpec, mesh: Mesh, options: Options) -> int:
    """Of a parameter's optimizer state what the host can keep: all but the counters."""
    held = state_bytes(meta, spec, mesh, True, options).optimizer
    return held - optimizer_scalar_bytes(options.optimizer)


def chunk_bytes(parameters: Sequence[tuple[TensorMeta, ShardingSpec]], mesh: Mesh, options: Options) -> int:
    """The most that parameters whose optimizer state the host keeps bring to the fullest rank while they step."""
    return largest_chunk_bytes([
        (
            math.prod(spec.local_shape(meta.shape, mesh)) * meta.itemsize,
            moved_state_bytes(meta, spec, mesh, options) + step_bytes([(meta, spec)], mesh, options),
        )
        for meta, spec in parameters
    ])  # fmt: skip
