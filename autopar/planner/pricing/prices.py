"""Prices of decisions: seconds of every option and of every use."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.cost_models import (
    DEARER,
    CollectiveCosts,
    ComputeCosts,
)
from autopar.holding import Rates
from autopar.ir import Graph, Node, TensorMeta, Value
from autopar.mesh import Cluster, Mesh
from autopar.planner.footprint.implementations import extra_passes, implementation, sent_rows
from autopar.planner.footprint.op_work import bytes_moved, executed_share, kernel_kind, local_bytes
from autopar.planner.graphs.fused_chains import FusedTraffic, fused_traffic
from autopar.planner.memo import Memo
from autopar.planner.pricing.fused import Fused
from autopar.planner.pricing.overlapped_products import Decomposition, reachable, seconds_of_parts
from autopar.planner.pricing.ring_attention import ring_traffic
from autopar.planner.pricing.transfers import hold_seconds, state_seconds
from autopar.planner.problem.variables import (
    Decisions,
    InternedOptions,
    Use,
    Variable,
    output_key,
    spec_made,
    spec_read,
)
from autopar.program import Sent
from autopar.sharding import ShardingSpec, Step, Strategy
from autopar.sharding.paths import Path, all_pairs, cheapest_path
from autopar.sharding.spec import length
from autopar.sharding.strategy import moved_axes
from autopar.solver import Edge
from autopar.solver.clock import tick
from autopar.strategies import combine, find_rule, flops, halos, lent
from autopar.strategies.registry import find_combining, find_lending, find_windows

Array = npt.NDArray[np.float64]
Ends: TypeAlias = Sequence[ShardingSpec | None]
"""The spec at one end of a use, by option; None where the option makes or reads nothing."""

MAX_OVERLAP = 0.98
"""The largest overlap that is assumed. None is quite free: a hidden collective takes memory bandwidth, so of two plans
the one that communicates less is better."""


@dataclass
class Prices:
    """Cost models bound to a mesh, with caches of what has been priced.

    Args:
        memo: what was priced, and what the scheduler knows about ops.
        interned: options of all decisions that are priced here: what equal parts have in common is priced once.
    """

    mesh: Mesh
    cluster: Cluster
    backend: str = "eager"
    decomposed: str = "never"
    collectives: CollectiveCosts = field(init=False)
    compute: ComputeCosts = field(init=False)
    memo: Memo = field(default_factory=Memo)
    interned: InternedOptions = field(default_factory=InternedOptions)

    def __post_init__(self) -> None:
        self.collectives = CollectiveCosts(self.mesh, self.cluster)
        self.compute = ComputeCosts(self.cluster)

    @cached_property
    def decomposition(self) -> Decomposition:
        """Prices of products that are decomposed to overlap with a collective."""
        near = frozenset(reachable(self.cluster, self.collectives))
        axes = near if self.decomposed == "near" else frozenset(range(self.mesh.ndim))
        return Decomposition(self, self.decomposed, frozenset(a for a in axes if self.mesh.shape[a] > 1))

    @property
    def overlap(self) -> float:
        """Share of a collective's time that overlapping computation does not pay for."""
        return min(self.cluster.measured.overlap, MAX_OVERLAP)

    def weighted(self, seconds: Array, weight: float) -> Array:
        """Return ``seconds`` times ``weight``: one array for all that share ``seconds``, since the solver shares work
        by identity."""
        if weight == 1.0:
            return seconds
        return self.memo.of("weighted", (seconds,), lambda: seconds * weight, weight)

    def hideable(self, source: Variable, target: Variable, use: Use) -> tuple[Array, tuple[Array, ...]]:
        """Return the seconds of a use that computation can hide: those of its launches, and for each axis those that
        hide.

        Small tensors share launches.
        """
        alone = self.edge(source, target, use)

        def split() -> tuple[Array, tuple[Array, ...]]:
            made = [spec_made(o, use.out) for o in source.options]
            taken = [spec_read(o, use.position) for o in target.options]
            costs = self.collectives.of(use.meta.dtype).bucketed
            least, *dearer = (self._redistribution_seconds(made, taken, use.meta, c) for c in (costs, *costs.by_axis))
            total = np.minimum(least, alone)
            launches = np.minimum(self._redistribution_seconds(made, taken, use.meta, costs.launches), total)
            there = np.isfinite(least) & (least > 0)
            ends = [np.where(there, c, 0.0) for c in (least, *dearer)]
            shares = [(b - a) / DEARER for a, b in itertools.pairwise(ends)]
            hidden = np.subtract(total, launches, where=there, out=np.zeros_like(least))
            hidden = np.divide(hidden, least, where=there, out=hidden)
            return launches, tuple(hidden * s for s in (*shares, ends[0] - sum(shares)))

        return self.memo.of("hideable", (alone,), split)

    def blocking_seconds(self, d: Decisions, use: Use) -> Array:
        """Return the seconds for which the program waits for a use."""
        return self.memo.of("blocking", (use,), lambda: self._blocking_seconds(d, use))

    def _blocking_seconds(self, d: Decisions, use: Use) -> Array:
        source, target = d.variables[use.source], d.variables[use.target]
        cost = self.edge(source, target, use)
        if source.node is not None and Value(source.node.name, use.out) in d.widened:
            return self._unreduced_cost(source, target, use, cost)
        return self.with_split_cost(d, use, self.decomposition.with_gains(d, use, cost))

    def _unreduced_cost(self, source: Variable, target: Variable, use: Use, cost: Array) -> Array:
        """Return ``cost`` with every change of partial sums forbidden."""

        def forbidden() -> Array:
            made = [spec_made(o, use.out) for o in source.options]
            taken = [spec_read(o, use.position) for o in target.options]
            same = [[a is None or b is None or a.partial == b.partial for b in taken] for a in made]
            return np.where(same, cost, math.inf)

        return self.memo.of("unreduced", (cost,), forbidden)

    def blocking_seconds_by_axis(self, d: Decisions, use: Use) -> tuple[Array, ...]:
        """Return for each mesh axis the seconds for which the program waits for it; what is no collective of a use is
        the first one's."""
        total = self.blocking_seconds(d, use)

        def by_axis() -> tuple[Array, ...]:
            if self.mesh.ndim == 1 or self._is_free(total):
                return (total,)
            source, target = d.variables[use.source], d.variables[use.target]
            made = [spec_made(o, use.out) for o in source.options]
            taken = [spec_read(o, use.position) for o in target.options]
            costs = self.collectives.of(use.meta.dtype)
            ends = [self._redistribution_seconds(made, taken, use.meta, c) for c in (costs, *costs.by_axis)]
            sent = np.isfinite(ends[0]) & (ends[0] > 0) & np.isfinite(total)
            of_axes = [
                np.divide(b - a, DEARER * ends[0], where=sent, out=np.zeros_like(total)).clip(0.0, 1.0)
                for a, b in itertools.pairwise(np.where(sent, end, 1.0) for end in ends)
            ]
            last = np.where(sent, 1.0 - sum(of_axes), 0.0).clip(0.0)
            others = [np.where(sent, share * np.where(sent, total, 0.0), 0.0) for share in (*of_axes[1:], last)]
            return (np.where(sent, total - sum(others), total), *others)

        return self.memo.of("blocking by axis", (total,), by_axis)

    def _is_free(self, seconds: Array) -> bool:
        return self.memo.of("free", (seconds,), lambda: not (np.isfinite(seconds) & (seconds > 0)).any())

    def blocking_edge(self, d: Decisions, use: Use, weights: tuple[float, ...]) -> Array:
        """Return the cost of a use that the program waits for; seconds count by the weight of their axis.

        What is free stays one array, by which the solver finds repeated blocks.
        """
        seconds = self.blocking_seconds(d, use)
        if self._is_free(seconds):
            return seconds
        if len(set(weights)) == 1:
            return self.weighted(seconds, weights[0])

        def weighted() -> Array:
            parts = self.blocking_seconds_by_axis(d, use)
            return np.asarray(sum(w * part for w, part in zip(weights, parts, strict=True)))

        return self.memo.of("weighted by axis", (seconds,), weighted, *weights)

    def hideable_edge(
        self, source: Variable, target: Variable, use: Use, weights: tuple[float, ...], share: float
    ) -> Array:
        """Return the cost of a use that can hide, in a ``share`` of all micro-batches; seconds count by the weight of
        their axis."""
        launches, of_axes = self.hideable(source, target, use)

        def weighted() -> Array:
            return sum((w * s for w, s in zip(weights, of_axes, strict=True)), share * launches)

        return self.memo.of("weighted hideable", (launches,), weighted, *weights, share)

    def node_seconds(self, graph: Graph, node: Node, options: Sequence[Strategy]) -> Array:
        """Return the seconds of each option of an op, by measured curves or roofline; for a fused op, its share of the
        kernel."""
        return self.memo.of("node", (node, options), lambda: self._shared_seconds(graph, node, options))

    def _shared_seconds(self, graph: Graph, node: Node, options: Sequence[Strategy]) -> Array:
        """Return one array for all nodes of equal ops."""
        metas = tuple(graph.meta(v) for v in node.inputs)
        traffic = self.traffic(graph, node)
        args = node.args if not node.inputs else _shape_args(node)
        kind = node.op, args, node.kwarg("is_causal"), metas, node.outputs, traffic
        return self.memo.of(
            "kind of node", (options,), lambda: self._node_seconds(node, metas, options, traffic), *kind
        )

    def traffic(self, graph: Graph, node: Node) -> FusedTraffic | None:
        """Return what the op moves to and from memory inside its fused kernel, if the back end or one of our kernels
        fuses it."""
        if self.backend != "inductor":
            return self.fused(graph).fused_traffic.get(node.name)  # Inductor's own groups are larger
        return self.memo.of("traffic", (graph,), lambda: fused_traffic(graph)).get(node.name)

    def fused(self, graph: Graph) -> Fused:
        """Return the fusions by our own kernels; none where the device runs none. With Inductor, only those that it
        cannot make."""
        here, alone = self.cluster.device.kind == "cuda", self.backend != "inductor"
        return self.memo.of("fused", (graph,), lambda: Fused.of(graph, across=not alone) if here else Fused())

    def with_split_cost(self, d: Decisions, use: Use, cost: Array) -> Array:
        """Return ``cost`` of a use, with what two ops of one kernel pay for being two kernels: the tensor is written
        and read."""
        if d.variables[use.target].kind == "rerun":
            return self._with_rerun_cost(d, use, cost)
        if use.kept or use.rerun or use.position < 0 or not self.fused(d.graph).inside(d, use):
            return cost
        source, target = d.variables[use.source], d.variables[use.target]

        def split() -> Array:
            launch_s, s_per_byte = self.compute.copy_line()
            ends = [spec_made(o, use.out) for o in source.options], [spec_read(o, use.position) for o in target.options]
            made, taken = _spec_numbers(*ends)
            written, read = (self._bytes(use.meta, specs) for specs in ends)
            with_split_cost = (made[:, None] != taken) & (made >= 0)[:, None] & (taken >= 0)
            between = np.where(with_split_cost, launch_s + s_per_byte * (written[:, None] + read), 0.0)
            return cost + between

        return self.memo.of("split", (cost, source.options, target.options), split, use.out, use.position)

    def _with_rerun_cost(self, d: Decisions, use: Use, cost: Array) -> Array:
        """Return ``cost`` with what ops of a kernel pay that run again without the ops before them.

        This is so where the use hands them a value that is held and not made again.
        """
        alone = self.fused(d.graph).rerun_alone(d, use)
        source, target = d.variables[use.source], d.variables[use.target]
        if alone is None or target.node is None:
            return cost
        node = target.node

        def paid() -> Array:
            each = self._paid_by_each(d, node, alone) if alone else self._paid_leading(d, node, use)
            held = [not action.remakes for action in source.actions]
            return cost + np.outer(held, [0.0, *each])

        return self.memo.of("run again alone", (cost, source.options, target.options), paid, alone)

    def _paid_leading(self, d: Decisions, node: Node, use: Use) -> Array:
        """Return what each option of a kernel's first op pays for what the ops before it would make: a launch, and
        reading it."""
        launch_s, s_per_byte = self.compute.copy_line()
        options = d.variables[d.index[node.name]].options
        return launch_s + s_per_byte * self._bytes(use.meta, [spec_read(o, use.position) for o in options])

    def _paid_by_each(self, d: Decisions, node: Node, count: int) -> Array:
        """Return what ``count`` ops of a kernel, each like ``node``, pay for being separate kernels, beyond its
        options' cost."""
        traffic, options = self.traffic(d.graph, node), d.variables[d.index[node.name]].options
        assert traffic is not None
        metas = tuple(map(d.graph.meta, node.inputs))
        alone = self._node_seconds(node, metas, options, None)
        inside = self._node_seconds(node, metas, options, replace(traffic, dim=0))
        return count * (alone - inside) - (self.node_seconds(d.graph, node, options) - inside)

    def _bytes(self, meta: TensorMeta, specs: Ends) -> Array:
        """Return the bytes of a shard in each spec; 0 where there is none."""
        known = {s: 0.0 if s is None else float(local_bytes(meta, s, self.mesh)) for s in set(specs)}
        return np.array([known[s] for s in specs])

    def seconds_alone(self, graph: Graph, node: Node, option: Strategy) -> float:
        """Return the seconds of an op that is in no fused kernel."""
        return float(self._node_seconds(node, tuple(graph.meta(v) for v in node.inputs), (option,), None)[0])

    def seconds_leading(self, graph: Graph, node: Node, option: Strategy) -> float:
        """Return the seconds of an op whose fused kernel runs without the ops before it: it pays the launch, and reads
        what they would make."""
        traffic = self.traffic(graph, node)
        assert traffic is not None
        first = replace(traffic, reads=traffic.reads | {0}, leads=True)
        return float(self._node_seconds(node, tuple(graph.meta(v) for v in node.inputs), (option,), first)[0])

    def _node_seconds(
        self, node: Node, metas: Sequence[TensorMeta], options: Sequence[Strategy], traffic: FusedTraffic | None
    ) -> Array:
        if traffic is not None:
            moved = np.array([bytes_moved(node, o, metas, self.mesh, traffic.reads, traffic.writes) for o in options])
            launch_s, s_per_byte = self.compute.copy_line()
            fused = np.asarray(moved * s_per_byte + (launch_s if traffic.leads else 0.0), dtype=np.float64)
            if not traffic.dim:
                return fused
            fits = [traffic.fits(node, o, metas) for o in options]
            return np.where(fits, fused, self._node_seconds(node, metas, options, None))
        seconds = self._kernel_seconds(node, metas, options)
        exchanging = (find(node) for find in (find_windows, find_combining, find_lending))
        if all(found is None for found in exchanging) and not _moves(node):
            return seconds
        inside: Array = np.array([self._exchange_seconds(node, metas, o) for o in options])
        return seconds + inside

    def _kernel_seconds(self, node: Node, metas: Sequence[TensorMeta], options: Sequence[Strategy]) -> Array:
        """Return the seconds of an op's own work, without what ranks exchange."""
        total = flops(node, tuple(metas))
        outs = [m for m in node.outputs if m is not None]
        dtype = outs[0].dtype if outs else "float32"
        if node.packet == "autopar.linear_nll":
            dtype = metas[0].dtype  # its results are in the wide dtype, its product is not
        ops = np.array([total * executed_share(node) * o.work for o in options])
        moved = np.array([implementation(node, o, metas, self.mesh, self.cluster.device.kind)[1] for o in options])
        kind = kernel_kind(node, total)
        seconds = np.asarray(self.compute.seconds_array(ops, moved, dtype, kind, node.packet), dtype=np.float64)
        passes = np.array([extra_passes(node, o, metas, self.mesh) for o in options])
        if passes.size:
            seconds = seconds + self.compute.seconds_array(0.0, passes, dtype, "memory").sum(axis=1)
        return seconds

    def sent(self, node: Node, metas: Sequence[TensorMeta], option: Strategy) -> tuple[Sent, ...]:
        """Return the collectives inside an op: rows that neighbours or mirrors send each other, and summaries of the
        ranks' shards."""
        found = []
        for h in halos(node, option, tuple(metas), self.mesh) or ():
            of_row = local_bytes(metas[h.operand], option.inputs[h.operand], self.mesh) // h.own
            costs = self.collectives.of(metas[h.operand].dtype)
            for rows in (h.before, h.after):
                if rows:
                    seconds = costs.seconds("permute", rows * of_row, h.axis)
                    found.append(Sent("permute", h.operand, h.axis, rows * of_row, seconds))
        summary = combine(node, option, tuple(metas), self.mesh)
        for meta in summary.summaries if summary else ():
            nbytes, costs = meta.numel * meta.itemsize, self.collectives.of(meta.dtype)
            for axis in reversed(summary.axes if summary else ()):
                nbytes *= self.mesh.shape[axis]
                found.append(Sent("all_gather", 0, axis, nbytes, costs.seconds("all_gather", nbytes, axis)))
        for axis in moved_axes(option):
            nbytes = sent_rows(node, option, metas, self.mesh)
            seconds = self.collectives.seconds("all_to_all", nbytes, axis)
            found.append(Sent("all_to_all", 0, axis, nbytes, seconds))
        return (*found, *self._lent(node, metas, option), *self._passed_round(node, metas, option))

    def _lent(self, node: Node, metas: Sequence[TensorMeta], option: Strategy) -> Iterator[Sent]:
        """Yield the permutes of a loan: rows of operands go to the mirrors, and rows of results come back."""
        made = lent(node, option, tuple(metas), self.mesh)
        if made is None:
            return
        own = length(made.n, made.axes, self.mesh)
        for rows in (zip(metas, option.inputs, strict=True), zip(node.outputs, option.outputs, strict=True)):
            nbytes = self._cut_bytes(rows, made.axes) // own * made.most
            yield self._permuted(made.axes, nbytes)

    def _passed_round(self, node: Node, metas: Sequence[TensorMeta], option: Strategy) -> Iterator[Sent]:
        """Yield the permutes of attention on a ring: rows into zigzag order, blocks beside the work, and results back.

        The seconds of the blocks are those that the work does not hide.
        """
        ring = ring_traffic(node, metas, option, self.mesh)
        if ring is None:
            return

        part_s = float(self._kernel_seconds(node, metas, (option,))[0]) / ring.ways
        block_s = self._permuted(ring.axes, ring.block).seconds
        exposed_s = seconds_of_parts(ring.ways, part_s, block_s, self.overlap) - ring.ways * part_s
        if ring.there:
            yield self._permuted(ring.axes, ring.there)
        blocks = self._permuted(ring.axes, (ring.ways - 1) * ring.block)
        yield replace(blocks, operand=ring.keys, seconds=exposed_s)
        if ring.back:
            yield self._permuted(ring.axes, ring.back)

    def _permuted(self, axes: Sequence[int], nbytes: int) -> Sent:
        """Return the permute of a message between ranks along ``axes``, by the slowest of them."""
        axis = max(axes, key=lambda a: self.collectives.seconds("permute", nbytes, a))
        return Sent("permute", 0, axis, nbytes, self.collectives.seconds("permute", nbytes, axis))

    def _cut_bytes(self, tensors: Iterable[tuple[TensorMeta | None, ShardingSpec | None]], axes: Sequence[int]) -> int:
        """Return the bytes of the shards of those tensors that ``axes`` cut."""
        cut = [(m, s) for m, s in tensors if m and s and any(a in dim for dim in s.dims for a in axes)]
        return sum(local_bytes(m, s, self.mesh) for m, s in cut)

    def _exchange_seconds(self, node: Node, metas: Sequence[TensorMeta], option: Strategy) -> float:
        """Return the seconds of the collectives inside an op, which nothing hides, and of the work that they cause.

        That work joins rows to a window, reads the operands once more for a summary, or copies rows before they are
        lent and results that come back to the others.
        """
        sent = self.sent(node, metas, option)
        if not sent or _moves(node):
            return sum(s.seconds for s in sent)
        launch_s, s_per_byte = self.compute.copy_line()
        made = lent(node, option, tuple(metas), self.mesh)
        windows = {h.operand: 2 for h in halos(node, option, tuple(metas), self.mesh) or () if h.copies}
        if (ring := ring_traffic(node, metas, option, self.mesh)) is not None:
            copies, moved = 2 * len(sent) + 5 * ring.ways, ring.passes
        elif made is not None:
            whole = self._cut_bytes(zip(node.outputs, option.outputs, strict=True), made.axes)
            copies, moved = len(sent), 2 * (sent[0].bytes + whole)
        else:
            sizes = windows or dict.fromkeys(range(len(metas)), 1)
            copies = len(sizes)
            moved = sum(n * local_bytes(metas[i], option.inputs[i], self.mesh) for i, n in sizes.items())
        return sum(s.seconds for s in sent) + copies * launch_s + moved * s_per_byte

    def pairs(
        self,
        meta: TensorMeta,
        sources: tuple[ShardingSpec, ...],
        targets: tuple[ShardingSpec, ...],
        costs: CollectiveCosts | None = None,
    ) -> Array:
        """Return the seconds of the cheapest redistribution between each pair of specs of a tensor.

        Args:
            costs: prices of collectives; by default with a launch for each.
        """
        costs = costs or self.collectives.of(meta.dtype)

        def between() -> Array:
            found = all_pairs(sources, targets, meta.shape, meta.itemsize, self.mesh, costs)
            if meta.routed:  # other cuts are other rows
                same = [[a.dims[: meta.routed] == b.dims[: meta.routed] for b in targets] for a in sources]
                found = np.where(same, found, math.inf)
            return found

        return self.memo.of("pairs", (costs,), between, meta, sources, targets)

    def path(self, source: ShardingSpec, target: ShardingSpec, meta: TensorMeta, *, hiding: bool = False) -> Path:
        """Return the cheapest redistribution between two specs of a tensor; if ``hiding``, with shared launches."""
        costs = self.collectives.of(meta.dtype)
        key = meta.shape, meta.itemsize, costs.reduced_bytes, hiding, source, target
        costs = costs.bucketed if hiding else costs
        return self.memo.of(
            "path", (), lambda: cheapest_path(source, target, meta.shape, meta.itemsize, self.mesh, costs), *key
        )

    def step_seconds(self, step: Step, before: ShardingSpec, meta: TensorMeta) -> tuple[float, float]:
        """Return the seconds of one step, and the part of them that its launch takes, which nothing hides."""
        key = step, before, meta.shape, meta.dtype
        return self.memo.of("step", (), lambda: self._step_seconds(step, before, meta), *key)

    def _step_seconds(self, step: Step, before: ShardingSpec, meta: TensorMeta) -> tuple[float, float]:
        priced = local_bytes(meta, step.apply(before) if step.kind == "all_gather" else before, self.mesh)
        costs = self.collectives.of(meta.dtype)
        seconds, launch_s = (
            max(c.seconds(step.kind, priced, a) for a in step.moved_axes(before)) for c in (costs, costs.launches)
        )
        return seconds, min(launch_s, seconds)

    @cached_property
    def rates(self) -> Rates:
        """What storing a value costs."""
        return Rates(self.cluster.host, *self.compute.copy_line())

    def edge(self, source: Variable, target: Variable, use: Use) -> Array:
        """Return the cost matrix of one use. Equal uses share one matrix."""
        return self.memo.of("use", (use,), lambda: self._shared_edge(source, target, use))

    def _shared_edge(self, source: Variable, target: Variable, use: Use) -> Array:
        ends = source.options, target.options, target.actions
        key = use.out, use.position, use.meta, use.kept, target.kept, use.rerun
        return self.memo.of("edge", ends, lambda: self._edge(source, target, use), *key)

    def _edge(self, source: Variable, target: Variable, use: Use) -> Array:
        if use.kept:
            given = [spec_read(o, use.out) for o in source.options]
            numbers = _spec_numbers(given, [spec_read(o, use.position) for o in target.options])
            return np.where((numbers[0][:, None] == numbers[1]) | ~np.array(target.kept), 0.0, math.inf)
        made = [spec_made(o, use.out) for o in source.options]
        if target.kind == "hold":
            return self._hold_edge(made, target, use)
        if source.kind == "accumulator":
            # The next micro-batch finds the accumulator in the spec in which this one leaves it.
            taken = [spec_read(o, use.position) for o in target.options]
            return np.array([[0.0 if a == b else math.inf for b in taken] for a in made])
        cost = self._redistribution_seconds(made, [spec_read(o, use.position) for o in target.options], use.meta)
        if any(target.kept):
            # A spec that cannot be reached from the source cannot be kept either.
            cost = np.where(np.array(target.kept) & np.isfinite(cost), 0.0, cost)
        return np.ascontiguousarray(cost)

    def _redistribution_seconds(
        self, made: Ends, taken: Ends, meta: TensorMeta, costs: CollectiveCosts | None = None
    ) -> Array:
        """Return the seconds between each pair of specs: 0 if nothing is read, infinite if nothing is made."""
        tick("kind of use", 1)
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

    def _hold_edge(self, made: Ends, target: Variable, use: Use) -> Array:
        """Return which options of a hold variable fit: kept and stored values come from the forward, others from the
        rerun op, in the spec in which it makes them."""
        options = zip(target.options, target.actions, strict=True)
        taken = [spec_read(o, 0) if (a.remakes if use.rerun else a.of_forward) else None for o, a in options]
        if not use.rerun:
            return self._redistribution_seconds(made, taken, use.meta)
        return np.array([[0.0 if t is None or s == t else math.inf for t in taken] for s in made])


def _moves(node: Node) -> bool:
    """Whether some strategies of an op send rows to other ranks."""
    rule = find_rule(node)
    return rule is not None and bool(rule.moves)


def _distinct(specs: Sequence[ShardingSpec]) -> tuple[tuple[ShardingSpec, ...], list[int]]:
    order: dict[ShardingSpec, int] = {}
    at = [order.setdefault(s, len(order)) for s in specs]
    return tuple(order), at


def _spec_numbers(*ends: Ends) -> list[npt.NDArray[np.int64]]:
    """Number the specs such that equal ones have equal numbers; -1 where there is none."""
    numbers: dict[ShardingSpec | None, int] = {None: -1}
    return [np.array([numbers.setdefault(s, len(numbers)) for s in specs], dtype=np.int64) for specs in ends]


def _shape_args(node: Node) -> tuple[object, ...]:
    return tuple(a for a in node.args if not isinstance(a, (Value, tuple)))


def costs(d: Decisions, prices: Prices, weights: Sequence[float] | None = None) -> tuple[Array, ...]:
    """Return the seconds of every option of every variable, those of ops times the variable's weight."""

    def of(v: Variable, weight: float) -> Array:
        if v.kind == "op" and v.node:
            return prices.weighted(prices.node_seconds(d.graph, v.node, v.options), weight)
        if v.kind == "rerun" and v.node:
            options = d.variables[d.index[v.node.name]].options
            return np.concatenate([[0.0], prices.node_seconds(d.graph, v.node, options) * weight])
        if v.kind == "hold" and v.value is not None:
            return prices.memo.of(
                "hold", (v.options, v.actions), partial(hold_seconds, d, v, prices.rates), d.graph.meta(v.value)
            )
        if v.host_state_bytes:
            return state_seconds(v.host_state_bytes, prices.cluster.host) / d.accumulation_steps
        crossing = crosses.get(v.key)
        if crossing is not None:
            return np.array([d.seam_s * local_bytes(crossing, option.outputs[0], d.mesh) for option in v.options])
        return np.zeros(len(v.options))

    crosses = crossing_stages(d) if d.seam_s else {}
    return tuple(map(of, d.variables, weights or [1.0] * len(d.variables)))


def least_seconds(d: Decisions, prices: Prices, like: Mapping[str, str]) -> float:
    """Return a bound on the seconds of a deep graph whose other layers are ``like`` those of ``d``: of ops alone.

    Args:
        like: for each node of a layer that is missing the one that stands for it.
    """
    times = Counter(like.values())
    least = (c.min() * (1 + times[v.key]) for v, c in zip(d.variables, costs(d, prices), strict=True) if v.kind == "op")
    return float(sum(least))


def crossing_stages(d: Decisions) -> Mapping[str, TensorMeta]:
    """Return what the stages of a pipeline send each other by the key of its variable."""
    ends = {i.node: d.graph.meta(Value(i.node)) for i in d.graph.inputs if d.graph.comes_from_stage(i)}
    sent = {output_key(o.name): d.graph.meta(o.value) for o in d.graph.outputs if d.graph.goes_to_stage(o)}
    return ends | sent


def edges(
    d: Decisions, prices: Prices, weights: Sequence[tuple[str, tuple[float, ...]] | None] | None = None
) -> tuple[Edge, ...]:
    """Return one edge for each use, in seconds times a weight. An op that reads one tensor twice has two edges.

    Args:
        weights: for each use ("wait", (weight,)) if the program waits for it, or "gather" or "reduce" with the weight
            on each axis if it may compute meanwhile.
    """
    weighted = zip(d.uses, weights or [None] * len(d.uses), strict=True)
    return tuple(
        Edge(use.source, use.target, use_seconds(d, prices, use, w)) for use, w in weighted if use.source != use.target
    )


def use_seconds(
    d: Decisions,
    prices: Prices,
    use: Use,
    weight: tuple[str, tuple[float, ...]] | None = None,
    launch_share: float = 1.0,
) -> Array:
    """Return the seconds of one use times its weight, as in ``edges``; of a reduction's launch only the share
    ``launch_share``."""
    work, counted = weight or ("wait", (1.0,))
    if work == "wait":
        return prices.blocking_edge(d, use, counted)
    ends = d.variables[use.source], d.variables[use.target]
    return prices.hideable_edge(*ends, use, counted, launch_share / d.accumulation_steps if work == "reduce" else 1.0)
