"""Decisions as numbers: seconds of every option and of every handover, bytes of every tensor while it lives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.cost_models import (
    DEARER,
    CollectiveCosts,
    ComputeCosts,
)
from autopar.ir import Graph, Node, TensorMeta, Value
from autopar.mesh import Cluster, Mesh
from autopar.planner.footprint.implementations import implementation, passes_beside
from autopar.planner.footprint.op_work import bytes_moved, executed_share, kernel_kind, local_bytes
from autopar.planner.graphs.fused_chains import Border, borders
from autopar.planner.pricing.fused import Fused
from autopar.planner.pricing.overlapped_products import Decomposition, reachable
from autopar.planner.pricing.transfers import EXPOSED_SHARE, hold_seconds, state_seconds
from autopar.planner.problem.variables import Decisions, Use, Variable, spec_made, spec_read
from autopar.program import Sent
from autopar.sharding import ShardingSpec, Step, Strategy
from autopar.sharding.paths import Path, all_pairs, cheapest_path
from autopar.solver import Edge
from autopar.strategies import combine, flops, halos
from autopar.strategies.registry import find_combining, find_windows

Array = npt.NDArray[np.float64]
Ends: TypeAlias = Sequence[ShardingSpec | None]
"""The spec at one end of a handover, for each option; None where that option makes or takes nothing."""

MOST_OVERLAP = 0.98
"""No overlap is quite free: a hidden collective takes memory bandwidth, so of two the one that moves less is better."""


@dataclass
class Prices:
    """Cost models bound to a mesh, with what has been priced.

    Args:
        ways: what an op with a strategy is in every program of its graph, by who schedules it.
    """

    mesh: Mesh
    cluster: Cluster
    backend: str = "eager"
    decomposed: str = "never"
    ways: dict[tuple[object, ...], tuple[Any, Graph, Strategy]] = field(default_factory=dict)
    collectives: CollectiveCosts = field(init=False)
    compute: ComputeCosts = field(init=False)
    _paths: dict[tuple[object, ...], Path] = field(default_factory=dict)
    _steps: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)
    _pairs: dict[tuple[object, ...], Array] = field(default_factory=dict)
    _edges: dict[tuple[object, ...], tuple[Array, object, object]] = field(default_factory=dict)
    _handed: dict[int, tuple[Use, Array]] = field(default_factory=dict)
    _waited: dict[int, tuple[Use, Array]] = field(default_factory=dict)
    _nodes: dict[tuple[object, ...], Array] = field(default_factory=dict)
    _named: dict[tuple[int, int], tuple[Node, Sequence[Strategy], Array]] = field(default_factory=dict)
    _borders: dict[int, tuple[Graph, Mapping[str, Border]]] = field(default_factory=dict)
    _fused: dict[int, tuple[Graph, Fused]] = field(default_factory=dict)
    _apart: dict[tuple[object, ...], tuple[Array, object]] = field(default_factory=dict)
    _weighted: dict[tuple[float, ...], tuple[Array, Array]] = field(default_factory=dict)
    _whole: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    _free: dict[int, tuple[Array, bool]] = field(default_factory=dict)
    _hideable: dict[int, tuple[Array, tuple[Array, ...]]] = field(default_factory=dict)

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

    def hideable(self, source: Variable, target: Variable, h: Use) -> tuple[Array, tuple[Array, ...]]:
        """Of a handover beside which the program computes, seconds of the launches, and for each axis those that
        computation hides. Small tensors share launches."""
        alone = self.edge(source, target, h)
        key = id(alone)
        if key not in self._hideable:
            made = [spec_made(o, h.out) for o in source.options]
            taken = [spec_read(o, h.position) for o in target.options]
            costs = self.collectives.of(h.meta.dtype).bucketed
            least, *dearer = (self._moves(made, taken, h.meta, c) for c in (costs, *costs.by_axis))
            total = np.minimum(least, alone)
            launches = np.minimum(self._moves(made, taken, h.meta, costs.launches), total)
            there = np.isfinite(least) & (least > 0)
            ends = [np.where(there, c, 0.0) for c in (least, *dearer)]
            shares = [(b - a) / DEARER for a, b in itertools.pairwise(ends)]
            hidden = np.subtract(total, launches, where=there, out=np.zeros_like(least))
            hidden = np.divide(hidden, least, where=there, out=hidden)
            self._hideable[key] = launches, tuple(hidden * s for s in (*shares, ends[0] - sum(shares)))
        return self._hideable[key]

    def waiting(self, d: Decisions, h: Use) -> Array:
        """Seconds for which the program waits for a handover."""
        known = self._waited.get(id(h))
        if known is None or known[0] is not h:
            known = self._waited[id(h)] = h, self._waiting(d, h)
        return known[1]

    def _waiting(self, d: Decisions, h: Use) -> Array:
        source, target = d.variables[h.source], d.variables[h.target]
        cost = self.edge(source, target, h)
        if source.node is not None and Value(source.node.name, h.out) in d.widened:
            return self._unreduced(source, target, h, cost)
        return self.apart(d, h, self.decomposition.with_gains(d, h, cost))

    def _unreduced(self, source: Variable, target: Variable, h: Use, cost: Array) -> Array:
        """``cost`` where partial sums stay what they are."""
        if id(cost) not in self._whole:
            made = [spec_made(o, h.out) for o in source.options]
            taken = [spec_read(o, h.position) for o in target.options]
            same = [[a is None or b is None or a.partial == b.partial for b in taken] for a in made]
            self._whole[id(cost)] = cost, np.where(same, cost, math.inf)
        return self._whole[id(cost)][1]

    def waiting_edge(self, d: Decisions, h: Use, weight: float) -> Array:
        """Such a handover, a second counted as ``weight``. What is free stays one array, by which blocks are found."""
        seconds = self.waiting(d, h)
        if id(seconds) not in self._free:
            self._free[id(seconds)] = seconds, not (np.isfinite(seconds) & (seconds > 0)).any()
        return seconds if self._free[id(seconds)][1] else self.weighted(seconds, weight)

    def hiding_edge(
        self, source: Variable, target: Variable, h: Use, weights: tuple[float, ...], share: float
    ) -> Array:
        """Such a handover in a ``share`` of all micro-batches, a second that can hide counted by its axis's weight."""
        launches, of_axes = self.hideable(source, target, h)
        key = (id(launches), *weights, share)
        if key not in self._weighted:
            counted = sum((w * s for w, s in zip(weights, of_axes, strict=True)), share * launches)
            self._weighted[key] = launches, counted
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
        border = self.border(graph, node)
        args = node.args if not node.inputs else _shape_args(node)
        key = (node.op, args, node.kwarg("is_causal"), metas, node.outputs, id(options), border)
        if key not in self._nodes:
            self._nodes[key] = self._node_seconds(node, metas, options, border)
        return self._nodes[key]

    def border(self, graph: Graph, node: Node) -> Border | None:
        """What the op moves inside its fused kernel, where the back end, or a kernel of ours, fuses it."""
        if self.backend != "inductor":
            return self.fused(graph).borders.get(node.name)  # Inductor's own groups are wider
        if id(graph) not in self._borders:
            self._borders[id(graph)] = graph, borders(graph)
        return self._borders[id(graph)][1].get(node.name)

    def fused(self, graph: Graph) -> Fused:
        """The fusions by kernels of ours, none where the device runs none; with Inductor those that it cannot make."""
        if id(graph) not in self._fused:
            here, alone = self.cluster.device.kind == "cuda", self.backend != "inductor"
            self._fused[id(graph)] = graph, Fused.of(graph, across=not alone) if here else Fused()
        return self._fused[id(graph)][1]

    def apart(self, d: Decisions, h: Use, cost: Array) -> Array:
        """``cost`` of a handover; where it leads from op to op of one kernel, also what they pay for being two: the
        tensor is written and read."""
        if d.variables[h.target].kind == "rerun":
            return self._left_alone(d, h, cost)
        if h.kept or h.rerun or h.position < 0 or not self.fused(d.graph).inside(d, h):
            return cost
        source, target = d.variables[h.source], d.variables[h.target]
        key = id(cost), id(source.options), id(target.options), h.out, h.position
        if key not in self._apart:
            launch_s, s_per_byte = self.compute.copy_line()
            ends = [spec_made(o, h.out) for o in source.options], [spec_read(o, h.position) for o in target.options]
            made, taken = _numbered(*ends)
            written, read = (self._bytes(h.meta, specs) for specs in ends)
            apart = (made[:, None] != taken) & (made >= 0)[:, None] & (taken >= 0)
            between = np.where(apart, launch_s + s_per_byte * (written[:, None] + read), 0.0)
            self._apart[key] = cost + between, cost
        return self._apart[key][0]

    def _left_alone(self, d: Decisions, h: Use, cost: Array) -> Array:
        """``cost`` with what ops of a kernel pay that run again without those before them, where ``h`` hands a value
        that is held and not made again."""
        alone = self.fused(d.graph).left_alone(d, h)
        source, target = d.variables[h.source], d.variables[h.target]
        if alone is None or target.node is None:
            return cost
        key = id(cost), id(source.options), id(target.options), alone
        if key not in self._apart:
            paid = self._paid_alone(d, target.node, alone) if alone else self._paid_leading(d, target.node, h)
            held = np.array(source.actions) != "recompute"
            self._apart[key] = cost + np.outer(held, [0.0, *paid]), cost
        return self._apart[key][0]

    def _paid_leading(self, d: Decisions, node: Node, h: Use) -> Array:
        """What each option of the first op of a kernel pays for what those before it would make: a launch, and reading
        it."""
        launch_s, s_per_byte = self.compute.copy_line()
        options = d.variables[d.index[node.name]].options
        return launch_s + s_per_byte * self._bytes(h.meta, [spec_read(o, h.position) for o in options])

    def _paid_alone(self, d: Decisions, node: Node, count: int) -> Array:
        """What ``count`` ops of a kernel, each like ``node``, pay for being by themselves, beyond what its options
        cost."""
        border, options = self.border(d.graph, node), d.variables[d.index[node.name]].options
        assert border is not None
        metas = tuple(map(d.graph.meta, node.inputs))
        alone = self._node_seconds(node, metas, options, None)
        inside = self._node_seconds(node, metas, options, replace(border, dim=0))
        return count * (alone - inside) - (self.node_seconds(d.graph, node, options) - inside)

    def _bytes(self, meta: TensorMeta, specs: Ends) -> Array:
        """Of a shard in each spec; 0 where there is none."""
        known = {s: 0.0 if s is None else float(local_bytes(meta, s, self.mesh)) for s in set(specs)}
        return np.array([known[s] for s in specs])

    def seconds_alone(self, graph: Graph, node: Node, option: Strategy) -> float:
        """Of an op that is in no fused kernel."""
        return float(self._node_seconds(node, tuple(graph.meta(v) for v in node.inputs), (option,), None)[0])

    def seconds_leading(self, graph: Graph, node: Node, option: Strategy) -> float:
        """Of an op whose fused kernel runs without those before it: it launches it, and reads what they would make."""
        border = self.border(graph, node)
        assert border is not None
        first = replace(border, reads=border.reads | {0}, leads=True)
        return float(self._node_seconds(node, tuple(graph.meta(v) for v in node.inputs), (option,), first)[0])

    def _node_seconds(
        self, node: Node, metas: Sequence[TensorMeta], options: Sequence[Strategy], border: Border | None
    ) -> Array:
        if border is not None:
            moved = np.array([bytes_moved(node, o, metas, self.mesh, border.reads, border.writes) for o in options])
            launch_s, s_per_byte = self.compute.copy_line()
            fused = np.asarray(moved * s_per_byte + (launch_s if border.leads else 0.0), dtype=np.float64)
            if not border.dim:
                return fused
            fits = [border.fits(node, o, metas) for o in options]
            return np.where(fits, fused, self._node_seconds(node, metas, options, None))
        total = flops(node, tuple(metas))
        outs = [m for m in node.outputs if m is not None]
        dtype = outs[0].dtype if outs else "float32"
        if node.packet == "autopar.linear_nll":
            dtype = metas[0].dtype  # its results are in the wide dtype, its product is not
        ops = np.array([total * executed_share(node) * o.work for o in options])
        moved = np.array([implementation(node, o, metas, self.mesh, self.cluster.device.kind)[1] for o in options])
        kind = kernel_kind(node, total)
        seconds = np.asarray(self.compute.seconds_array(ops, moved, dtype, kind, node.packet), dtype=np.float64)
        passes = np.array([passes_beside(node, o, metas, self.mesh) for o in options])
        if passes.size:
            seconds = seconds + self.compute.seconds_array(0.0, passes, dtype, "memory").sum(axis=1)
        if find_windows(node) is None and find_combining(node) is None:
            return seconds
        inside: Array = np.array([self._exchanging(node, metas, o) for o in options])
        return seconds + inside

    def sent(self, node: Node, metas: Sequence[TensorMeta], option: Strategy) -> tuple[Sent, ...]:
        """The collectives inside an op: rows that neighbours send each other, and what ranks tell of their shards."""
        found = []
        for h in halos(node, option, tuple(metas), self.mesh) or ():
            of_row = local_bytes(metas[h.operand], option.inputs[h.operand], self.mesh) // h.own
            costs = self.collectives.of(metas[h.operand].dtype)
            for rows in (h.before, h.after):
                if rows:
                    seconds = costs.seconds("permute", rows * of_row, h.axis)
                    found.append(Sent("permute", h.operand, h.axis, rows * of_row, seconds))
        told = combine(node, option, tuple(metas), self.mesh)
        for meta in told.summaries if told else ():
            nbytes, costs = meta.numel * meta.itemsize, self.collectives.of(meta.dtype)
            for axis in reversed(told.axes if told else ()):
                nbytes *= self.mesh.shape[axis]
                found.append(Sent("all_gather", 0, axis, nbytes, costs.seconds("all_gather", nbytes, axis)))
        return tuple(found)

    def _exchanging(self, node: Node, metas: Sequence[TensorMeta], option: Strategy) -> float:
        """Seconds of the collectives inside an op, which nothing hides, and of what they make it do besides: join rows
        to a window, or read the operands once more for a summary."""
        sent = self.sent(node, metas, option)
        if not sent:
            return 0.0
        launch_s, s_per_byte = self.compute.copy_line()
        windows = {h.operand: 2 for h in halos(node, option, tuple(metas), self.mesh) or () if h.copies}
        sizes = windows or dict.fromkeys(range(len(metas)), 1)
        moved = sum(n * local_bytes(metas[i], option.inputs[i], self.mesh) for i, n in sizes.items())
        return sum(s.seconds for s in sent) + len(sizes) * launch_s + moved * s_per_byte

    def pairs(
        self,
        meta: TensorMeta,
        sources: tuple[ShardingSpec, ...],
        targets: tuple[ShardingSpec, ...],
        costs: CollectiveCosts | None = None,
    ) -> Array:
        """Seconds of the cheapest redistribution between each pair of specs of a tensor.

        Args:
            costs: of collectives, others than those of a launch for each.
        """
        costs = costs or self.collectives.of(meta.dtype)
        key = (meta.shape, meta.itemsize, id(costs), sources, targets)
        if key not in self._pairs:
            self._pairs[key] = all_pairs(sources, targets, meta.shape, meta.itemsize, self.mesh, costs)
        return self._pairs[key]

    def path(self, source: ShardingSpec, target: ShardingSpec, meta: TensorMeta, *, hiding: bool = False) -> Path:
        """The cheapest redistribution between two specs of a tensor; with ``hiding``, where launches may be shared."""
        costs = self.collectives.of(meta.dtype)
        key = (meta.shape, meta.itemsize, costs.reduced_bytes, hiding, source, target)
        if key not in self._paths:
            costs = costs.bucketed if hiding else costs
            self._paths[key] = cheapest_path(source, target, meta.shape, meta.itemsize, self.mesh, costs)
        return self._paths[key]

    def step_seconds(self, step: Step, before: ShardingSpec, meta: TensorMeta) -> tuple[float, float]:
        """Seconds of one step, and those of them that its launch takes, which nothing hides."""
        key = step, before, meta.shape, meta.dtype
        if key not in self._steps:
            self._steps[key] = self._step_seconds(step, before, meta)
        return self._steps[key]

    def _step_seconds(self, step: Step, before: ShardingSpec, meta: TensorMeta) -> tuple[float, float]:
        priced = local_bytes(meta, step.apply(before) if step.kind == "all_gather" else before, self.mesh)
        costs = self.collectives.of(meta.dtype)
        seconds, launch_s = (
            max(c.seconds(step.kind, priced, a) for a in step.moved_axes(before)) for c in (costs, costs.launches)
        )
        return seconds, min(launch_s, seconds)

    def edge(self, source: Variable, target: Variable, h: Use) -> Array:
        """Cost matrix of one handover, shared between handovers of equal kind."""
        known = self._handed.get(id(h))
        if known is None or known[0] is not h:
            known = self._handed[id(h)] = h, self._shared_edge(source, target, h)
        return known[1]

    def _shared_edge(self, source: Variable, target: Variable, h: Use) -> Array:
        key = (
            id(source.options),
            h.out,
            id(target.options),
            h.position,
            h.meta,
            h.kept,
            target.kept,
            h.rerun,
            target.actions,
        )
        if key not in self._edges:
            # The options are held too: an identity in a key is never another's.
            self._edges[key] = self._edge(source, target, h), source.options, target.options
        return self._edges[key][0]

    def _edge(self, source: Variable, target: Variable, h: Use) -> Array:
        if h.kept:
            given = [spec_read(o, h.out) for o in source.options]
            places = _numbered(given, [spec_read(o, h.position) for o in target.options])
            return np.where((places[0][:, None] == places[1]) | ~np.array(target.kept), 0.0, math.inf)
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

    def _moves(self, made: Ends, taken: Ends, meta: TensorMeta, costs: CollectiveCosts | None = None) -> Array:
        """Seconds from each spec to each: what nobody takes is free, what nobody makes cannot be taken."""
        sources, at_source = _distinct([s for s in made if s is not None])
        targets, at_target = _distinct([t for t in taken if t is not None])
        cost = np.full((len(made), len(taken)), math.inf)
        rows = [i for i, s in enumerate(made) if s is not None]
        columns = [j for j, t in enumerate(taken) if t is not None]
        if rows and columns:
            found = self.pairs(meta, sources, targets, costs)
            cost[np.ix_(rows, columns)] = found[np.ix_(at_source, at_target)]
        cost[:, [j for j, t in enumerate(taken) if t is None]] = 0.0
        return cost

    def _hold_edge(self, made: Ends, target: Variable, h: Use) -> Array:
        """What is kept or offloaded comes from the forward, the rest from the op that is run again, as it makes it."""
        actions = ("recompute",) if h.rerun else ("keep", "offload")
        taken = [spec_read(o, 0) if a in actions else None for o, a in zip(target.options, target.actions, strict=True)]
        if not h.rerun:
            return self._moves(made, taken, h.meta)
        return np.array([[0.0 if t is None or s == t else math.inf for t in taken] for s in made])


def _distinct(specs: Sequence[ShardingSpec]) -> tuple[tuple[ShardingSpec, ...], list[int]]:
    order: dict[ShardingSpec, int] = {}
    at = [order.setdefault(s, len(order)) for s in specs]
    return tuple(order), at


def _numbered(*ends: Ends) -> list[npt.NDArray[np.int64]]:
    """Of each spec a number, equal for equal ones; -1 where there is none."""
    numbers: dict[ShardingSpec | None, int] = {None: -1}
    return [np.array([numbers.setdefault(s, len(numbers)) for s in specs], dtype=np.int64) for specs in ends]


def _shape_args(node: Node) -> tuple[object, ...]:
    return tuple(a for a in node.args if not isinstance(a, (Value, tuple)))


def costs(d: Decisions, prices: Prices, weights: Sequence[float] | None = None) -> tuple[Array, ...]:
    """Seconds of every option of every variable, those of ops times the variable's weight."""

    def of(v: Variable, weight: float) -> Array:
        if v.kind == "op" and v.node:
            return prices.weighted(prices.node_seconds(d.graph, v.node, v.options), weight)
        if v.kind == "rerun" and v.node:
            options = d.variables[d.index[v.node.name]].options
            return np.concatenate([[0.0], prices.node_seconds(d.graph, v.node, options) * weight])
        if v.kind == "hold" and "offload" in v.actions:
            return hold_seconds(d, v, prices.cluster.host) * EXPOSED_SHARE
        if v.away:
            return state_seconds(v.away, prices.cluster.host) / d.accumulation_steps
        return np.zeros(len(v.options))

    return tuple(map(of, d.variables, weights or [1.0] * len(d.variables)))


def edges(
    d: Decisions, prices: Prices, weights: Sequence[tuple[str, tuple[float, ...]] | None] | None = None
) -> tuple[Edge, ...]:
    """One edge for each handover, in seconds times a weight. An op that takes one tensor twice has two.

    Args:
        weights: for each handover whether the program waits for it, and the weight, or may compute beside it
            ("gather", "reduce"), and the weight on each axis.
    """
    weighted = zip(d.handovers, weights or [None] * len(d.handovers), strict=True)
    return tuple(Edge(h.source, h.target, handed(d, prices, h, w)) for h, w in weighted if h.source != h.target)


def handed(
    d: Decisions,
    prices: Prices,
    h: Use,
    weight: tuple[str, tuple[float, ...]] | None = None,
    launched: float = 1.0,
) -> Array:
    """Seconds of one handover times its weight, as of ``edges``; of a reduction's launch the share ``launched``."""
    work, counted = weight or ("wait", (1.0,))
    if work == "wait":
        return prices.waiting_edge(d, h, *counted)
    ends = d.variables[h.source], d.variables[h.target]
    return prices.hiding_edge(*ends, h, counted, launched / d.accumulation_steps if work == "reduce" else 1.0)
