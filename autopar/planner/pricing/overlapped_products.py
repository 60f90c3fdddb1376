"""Products decomposed to overlap with the gather of an operand or the scatter of their sum: which pairs, at what price.

A product that reads a gathered tensor waits for its collective, and one whose partial sum is then scattered makes its
collective wait; nothing else can run meanwhile. This is what tensor parallelism leaves exposed. A decomposed product
(see ``spmd.products``) runs as k parts of m seconds, beside k - 1 messages of h seconds:

    T = m + (k - 1) ((1 - o) (m + h) + o max(m, h))

with o the share of a message's time that overlapping computation does not pay for. The pair costs T instead of the
product and the collective one after the other. In the problem the difference is on the edge between the two specs and
the product; in the program one op does both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from autopar.cost_models import CollectiveCosts, ComputeCosts
from autopar.ir import Graph, Node, TensorMeta
from autopar.mesh import Cluster, Mesh
from autopar.planner.footprint.contraction import equation, terms
from autopar.planner.footprint.op_work import kernel_kind, local_bytes
from autopar.planner.problem.variables import Decisions, Use, Variable, spec_made, spec_read
from autopar.program import LocalTensor, Op, Program
from autopar.sharding import ShardingSpec, Step, Strategy
from autopar.strategies import flops

Array = npt.NDArray[np.float64]

ROUNDING = 1e-9
"""Relative difference up to which prices count as equal that were summed in different orders."""


def seconds_of_parts(parts: int, part_s: float, message_s: float, overlap: float) -> float:
    """Return T: the seconds of equal parts of an op, each but the first beside a message."""
    beside_s = (1 - overlap) * (part_s + message_s) + overlap * max(part_s, message_s)
    return part_s + (parts - 1) * beside_s


class OpPrices(Protocol):
    """The prices of single ops and collectives that a decomposition needs. ``Prices`` implements it."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def collectives(self) -> CollectiveCosts: ...
    @property
    def compute(self) -> ComputeCosts: ...
    @property
    def overlap(self) -> float: ...
    def node_seconds(self, graph: Graph, node: Node, options: Sequence[Strategy]) -> Array: ...
    def step_seconds(self, step: Step, before: ShardingSpec, meta: TensorMeta) -> tuple[float, float]: ...


@dataclass(frozen=True)
class Pair:
    """A contraction and the collective beside it.

    Args:
        operand: the operand that is gathered, or whose dim becomes the one along which the result is scattered.
        before, meta: spec, shape and dtype of the tensor that the collective redistributes.
    """

    node: Node
    metas: tuple[TensorMeta, ...]
    option: Strategy
    step: Step
    operand: int
    before: ShardingSpec
    meta: TensorMeta


@dataclass
class Decomposition:
    """Prices of decomposed pairs.

    Args:
        wanted: "near" decomposes where it is predicted to be faster, among devices that reach each other's memory;
            "gains" where it is, along any axis; "always" and "never" do as they say.
        axes: the mesh axes along which products may be decomposed.
    """

    prices: OpPrices
    wanted: str
    axes: frozenset[int]
    _gains: dict[tuple[object, ...], tuple[Array | None, tuple[object, ...]]] = field(default_factory=dict)
    _may_gain: dict[tuple[object, ...], tuple[npt.NDArray[np.bool_], object]] = field(default_factory=dict)
    _sums: dict[tuple[int, int], tuple[Array, Array, Array]] = field(default_factory=dict)

    def seconds(self, pair: Pair) -> float:
        """Return T of a pair."""
        prices, step, meta = self.prices, pair.step, pair.meta
        group_size, part_s = prices.mesh.shape[step.axis], self._part_seconds(pair)
        block = local_bytes(meta, pair.before if step.kind == "all_gather" else step.apply(pair.before), prices.mesh)
        hop_s = prices.collectives.of(meta.dtype).seconds("permute", block, step.axis)
        if step.kind == "reduce_scatter":  # what comes is added
            launch_s, s_per_byte = prices.compute.copy_line()
            part_s += launch_s + 3 * block * s_per_byte
        return seconds_of_parts(group_size, part_s, hop_s, prices.overlap)

    def _part_seconds(self, pair: Pair) -> float:
        """Return the seconds of one part of the product: one operand and the result are cut, the other operand is read
        each time."""
        mesh, node, option = self.prices.mesh, pair.node, pair.option
        result, spec = node.outputs[0], option.outputs[0]
        assert result is not None and spec is not None
        read = [local_bytes(m, s, mesh) for m, s in zip(pair.metas, option.inputs, strict=True)]
        group_size = mesh.shape[pair.step.axis]
        moved = (read[pair.operand] + local_bytes(result, spec, mesh)) / group_size + read[1 - pair.operand]
        total = flops(node, pair.metas)
        kind = kernel_kind(node, total)
        return self.prices.compute.seconds(total * option.work / group_size, moved, result.dtype, kind, node.packet)

    def gain_seconds(self, pair: Pair, own_s: float, step_s: float) -> float:
        """Return the seconds that the pair takes beyond its two halves, usually negative; 0 where these stay apart."""
        beyond = self.seconds(pair) - own_s - step_s
        return beyond if self.wanted == "always" else min(beyond, 0.0)

    # In the problem.

    def with_gains(self, d: Decisions, use: Use, cost: Array) -> Array:
        """Return ``cost`` of a use with its pairs decomposed; equal uses share one array."""
        if self.wanted == "never" or use.kept or use.rerun or use.position < 0:
            return cost
        source, target = d.variables[use.source], d.variables[use.target]
        if target.kind not in ("op", "copy") or any(target.kept) or source.kind not in ("op", "copy"):
            return cost
        if source.value is not None and d.graph.by_name[source.value.node].op == "placeholder":
            return cost  # parameters are gathered ahead of need instead
        gains = self._scatters(d.graph, source, target, use, cost)
        reader = self._reader(d, use) if gains is None else None
        if reader is not None:
            gains = self._gathers(d.graph, source, target, use, cost, *reader)
        if gains is None:
            return cost
        key = id(cost), id(gains)
        if key not in self._sums:
            self._sums[key] = np.where(np.isfinite(cost), np.maximum(cost + gains, 0.0), cost), cost, gains
        return self._sums[key][0]

    def _reader(self, d: Decisions, use: Use) -> tuple[Variable, int] | None:
        """Return the contraction that reads what a use brings; for a copy variable its first reader, if that is one."""
        if d.variables[use.target].kind == "copy":
            use = next(iter(d.readers.get(use.target, ())), use)
        reader = d.variables[use.target]
        return (reader, use.position) if reader.kind == "op" and reader.node and terms(reader.node) else None

    def _gathers(
        self,
        graph: Graph,
        source: Variable,
        target: Variable,
        use: Use,
        cost: Array,
        reader: Variable,
        position: int,
    ) -> Array | None:
        """Return what each pair of options gains; for a copy variable what its first reader gains under any of its
        options."""
        node = reader.node
        assert node is not None
        key = (
            id(source.options),
            use.out,
            id(target.options),
            use.position,
            use.meta,
            id(reader.options),
            position,
            equation(node),
            node.outputs,
        )
        if key in self._gains:
            return self._gains[key][0]
        rows = _options_by_spec([spec_made(o, use.out) for o in source.options])
        columns = _options_by_spec([spec_read(o, use.position) for o in target.options])
        readers = _options_by_spec([spec_read(o, position) for o in reader.options])
        own = self.prices.node_seconds(graph, node, reader.options)
        metas = tuple(graph.meta(v) for v in node.inputs)
        gains = np.zeros((len(source.options), len(target.options)))
        for after, at in columns.items():
            for before, step in self._gathered_from(after, node, position):
                if before not in rows or after not in readers:
                    continue
                step_s = self.prices.step_seconds(step, before, use.meta)[0]
                if not _is_cheapest(step_s, cost[rows[before][0], at[0]]):
                    continue
                found = {
                    j: self.gain_seconds(
                        Pair(node, metas, reader.options[j], step, position, before, use.meta), own[j], step_s
                    )
                    for j in readers[after]
                }
                for column in at:
                    gained = found[column] if target is reader else max(found.values())
                    gains[rows[before], column] = gained
        return self._keep(key, gains, source.options, target.options, reader.options)

    def _scatters(self, graph: Graph, source: Variable, target: Variable, use: Use, cost: Array) -> Array | None:
        """Return what each pair of options gains where ``source`` is a contraction whose sum is scattered."""
        node = source.node
        if node is None or source.kind != "op" or terms(node) is None:
            return None
        key = (id(source.options), id(target.options), use.position, use.meta, equation(node))
        if key in self._gains:
            return self._gains[key][0]
        columns = _options_by_spec([spec_read(o, use.position) for o in target.options])
        own = self.prices.node_seconds(graph, node, source.options)
        metas = tuple(graph.meta(v) for v in node.inputs)
        gains = np.zeros((len(source.options), len(target.options)))
        for i, option in enumerate(source.options):
            before = spec_made(option, use.out)
            for step, operand in self._scattered(before, node):
                assert before is not None
                after = step.apply(before)
                if after not in columns:
                    continue
                step_s = self.prices.step_seconds(step, before, use.meta)[0]
                if _is_cheapest(step_s, cost[i, columns[after][0]]):
                    pair = Pair(node, metas, option, step, operand, before, use.meta)
                    gains[i, columns[after]] = self.gain_seconds(pair, own[i], step_s)
        return self._keep(key, gains, source.options, target.options)

    def _keep(self, key: tuple[object, ...], gains: Array, *held: object) -> Array | None:
        """Store and return gains; None if nothing is gained. ``held`` is kept alive so that an id in a key is never
        reused."""
        self._gains[key] = (gains if gains.any() else None), held
        return self._gains[key][0]

    def _gathered_from(self, after: ShardingSpec, node: Node, operand: int) -> Iterator[tuple[ShardingSpec, Step]]:
        """Yield the specs from which one gather along a dim of the result leads to ``after``."""
        names = terms(node)
        for dim in range(len(after.dims)):
            if names is not None and names.becomes(operand, dim) is not None:
                for axis in sorted(self.axes - after.axes):
                    dims = (*after.dims[:dim], (*after.dims[dim], axis), *after.dims[dim + 1 :])
                    yield ShardingSpec(dims, after.partial), Step("all_gather", axis, dim)

    def _scattered(self, before: ShardingSpec | None, node: Node) -> Iterator[tuple[Step, int]]:
        """Yield the scatters of a partial sum, each with the operand whose dim becomes the one that is cut."""
        names = terms(node)
        for axis, reduction in before.partial if before is not None else ():
            for dim in range(len(names.out)) if names is not None and reduction == "sum" and axis in self.axes else ():
                source = names.comes_from(dim) if names is not None else None
                if source is not None:
                    yield Step("reduce_scatter", axis, dim), source[0]

    def may_gain(self, graph: Graph, node: Node, options: tuple[Strategy, ...], operand: int) -> npt.NDArray[np.bool_]:
        """Return under which options a product may be decomposed beside the gather of an operand, from whatever spec it
        is, or with -1 beside the scatter of its result."""
        found = np.zeros(len(options), dtype=bool)
        if self.wanted == "never" or terms(node) is None:
            return found
        metas = tuple(graph.meta(v) for v in node.inputs)
        key = equation(node), metas, node.outputs, id(options), operand
        if key not in self._may_gain:
            own = self.prices.node_seconds(graph, node, options)
            for i, option in enumerate(options):
                for pair in self._pairs_of(node, metas, option, operand):
                    apart_s = own[i] + self.prices.step_seconds(pair.step, pair.before, pair.meta)[0]
                    found[i] |= self.wanted == "always" or self.seconds(pair) < (1 + ROUNDING) * apart_s
            self._may_gain[key] = found, options
        return self._may_gain[key][0]

    def _pairs_of(self, node: Node, metas: tuple[TensorMeta, ...], option: Strategy, operand: int) -> Iterator[Pair]:
        """Yield the pairs with the gather of an operand, or with -1 those with the scatter of the result."""
        if operand < 0:
            before, meta = spec_made(option, 0), node.outputs[0]
            for step, cut in self._scattered(before, node):
                assert before is not None and meta is not None
                yield Pair(node, metas, option, step, cut, before, meta)
        elif (after := spec_read(option, operand)) is not None:
            for gathered, step in self._gathered_from(after, node, operand):
                yield Pair(node, metas, option, step, operand, gathered, metas[operand])

    # In the program.

    def decompose(self, program: Program, graph: Graph) -> Program:
        """Return ``program`` with one op for each pair that is decomposed."""
        if self.wanted == "never":
            return program
        chosen: dict[int, tuple[float, int, Op]] = {}  # by the contraction's place: gain, the collective's place
        for at, position, made in _Pairs(program, graph, self).found():
            apart_s = program.ops[at].seconds + program.ops[position].seconds
            gained = self.wanted == "always" or made.seconds < apart_s
            if gained and (at not in chosen or made.seconds - apart_s < chosen[at][0]):
                chosen[at] = made.seconds - apart_s, position, made
        gone = {position for _, position, _ in chosen.values()}
        ops = (chosen[at][2] if at in chosen else op for at, op in enumerate(program.ops) if at not in gone)
        return replace(program, ops=tuple(ops)) if chosen else program


@dataclass
class _Pairs:
    """The pairs of a program that could be decomposed."""

    program: Program
    graph: Graph
    prices: Decomposition

    def found(self) -> Iterator[tuple[int, int, Op]]:
        """Yield the positions of the contraction and of the collective, and the op that does both."""
        readers: dict[str, list[int]] = {}
        for at, op in enumerate(self.program.ops):
            for name in op.reads:
                readers.setdefault(name, []).append(at)
        results = {name for _, name in self.program.results}
        delivered = self._delivered(results, readers)
        for position, op in enumerate(self.program.ops):
            step = op.step
            if op.kind != "redistribute" or step is None or step.axis not in self.prices.axes:
                continue
            name = op.writes[0].name
            read_at = readers.get(name, [])
            if not read_at:
                continue
            if step.kind == "all_gather" and self.graph.by_name[op.node].op != "placeholder":
                yield from self._gather(op, position, read_at, kept=len(read_at) > 1 or name in results)
            elif step.kind == "reduce_scatter" and step.reduction == "sum" and name not in delivered:
                yield from self._scatter(op, position) if readers[op.reads[0]] == [position] else ()

    def _delivered(self, results: set[str], readers: Mapping[str, Sequence[int]]) -> set[str]:
        """Return what is only redistributed until the program ends, as gradients are.

        This hides behind everything that follows, so the problem prices no pair for it.
        """
        found = set(results)
        for op in reversed(self.program.ops):
            if op.kind == "redistribute":
                then = [self.program.ops[at] for at in readers.get(op.writes[0].name, ())]
                if then and all(r.kind == "redistribute" and r.writes[0].name in found for r in then):
                    found.add(op.writes[0].name)
        return found

    def _gather(self, op: Op, position: int, readers: Sequence[int], *, kept: bool) -> Iterator[tuple[int, int, Op]]:
        product = self.program.ops[readers[0]]
        name, node = op.writes[0].name, self.graph.by_name[product.node]
        names = terms(node) if product.kind == "compute" and product.phase == op.phase else None
        if names is None or product.reads.count(name) != 1 or op.step is None:
            return
        operand = product.reads.index(name)
        if names.becomes(operand, op.step.dim) is None:
            return
        reads = tuple(op.reads[0] if r == name else r for r in product.reads)
        writes = (*product.writes, *(op.writes if kept else ()))
        yield readers[0], position, self._both(product, op, operand, reads, writes)

    def _scatter(self, op: Op, position: int) -> Iterator[tuple[int, int, Op]]:
        at = self.program.writer[op.reads[0]]
        product = self.program.ops[at]
        node = self.graph.by_name[product.node]
        names = terms(node) if product.kind == "compute" and product.phase == op.phase else None
        source = names.comes_from(op.step.dim) if names is not None and op.step is not None else None
        if source is not None:
            yield at, position, self._both(product, op, source[0], product.reads, op.writes)

    def _both(
        self, product: Op, collective: Op, operand: int, reads: tuple[str, ...], writes: tuple[LocalTensor, ...]
    ) -> Op:
        node, before = self.graph.by_name[product.node], self.program.tensors[collective.reads[0]]
        assert product.strategy is not None and collective.step is not None
        metas = tuple(self.graph.meta(v) for v in node.inputs)
        pair = Pair(node, metas, product.strategy, collective.step, operand, before.spec, before.meta)
        return replace(
            product,
            kind="decomposed",
            reads=reads,
            writes=writes,
            step=collective.step,
            operand=operand,
            seconds=self.prices.seconds(pair),
            wire_bytes=collective.wire_bytes,
            step_s=collective.seconds,
        )


def reachable(cluster: Cluster, collectives: CollectiveCosts) -> Iterator[int]:
    """Yield the mesh axes whose ranks reach each other's memory over NVLink."""
    if cluster.device.kind == "cuda" and "nvlink" in cluster.intra_node.kind.lower():
        yield from (axis for axis, link in enumerate(collectives.links) if link.level == "intra")


def _is_cheapest(step_s: float, cheapest_s: float) -> bool:
    """Whether a step is as cheap as the cheapest path to its target. Among equally cheap paths the one with the fewest
    steps is taken."""
    return step_s <= cheapest_s * (1 + ROUNDING)


def _options_by_spec(specs: Sequence[ShardingSpec | None]) -> dict[ShardingSpec, list[int]]:
    found: dict[ShardingSpec, list[int]] = {}
    for i, spec in enumerate(specs):
        if spec is not None:
            found.setdefault(spec, []).append(i)
    return found
