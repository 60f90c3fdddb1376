"""Memory as the solver sees it: the bytes that every option holds at chosen program points.

These usages leave out redistributed operands, which ``redistributed_operands`` adds, and the scratch of contractions
and collectives. The exact liveness of the scheduled program decides whether a plan fits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.holding import Event, Stored
from autopar.ir import ITEMSIZE, Node, TensorMeta, Value
from autopar.planner.footprint.contraction import CONTRACTION
from autopar.planner.footprint.layouts import MAYBE_VIEWS, Layout, of_shard, reshaped, whole_layouts
from autopar.planner.footprint.op_work import local_bytes
from autopar.planner.footprint.overwriting import may_overwrite
from autopar.planner.footprint.state import state_bytes
from autopar.planner.footprint.transients import min_transients
from autopar.planner.footprint.transients_of_products import BLOCKS, least_share
from autopar.planner.graphs.shared import fixed_nodes
from autopar.planner.memory.lifetimes import of_input, of_output
from autopar.planner.memory.live_ranges import (
    PHASES,
    LiveRanges,
    copy_range,
    first_product,
    held_points,
    inherited_memory,
    last_in_made_spec,
    last_read,
    live_ranges,
    own_share,
)
from autopar.planner.memory.points import ProgramPoint, after, before, end, replaced
from autopar.planner.options import Options
from autopar.planner.problem.variables import Decisions, Variable, copy_key, hold_key, spec_made, spec_read
from autopar.sharding import ShardingSpec, Strategy
from autopar.solver import Usage
from autopar.solver.clock import tick

Array = npt.NDArray[np.float64]


_Usage = tuple[Array, ProgramPoint, ProgramPoint]
"""Bytes by option, and the points between which they are held."""


@dataclass(frozen=True, eq=False)
class MemoryUsages:
    """What options hold for longer than one op: ``sizes[i]`` bytes by option of variable ``variables[i]``, between the
    points ``first[i]`` and ``last[i]``."""

    d: Decisions
    options: Options
    variables: Sequence[int]
    sizes: Sequence[Array]
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]

    @classmethod
    def of(cls, d: Decisions, options: Options) -> MemoryUsages:
        tick("held variable", len(d.variables))
        live, option_bytes = live_ranges(d), _OptionBytes(d, options)
        made = _gradient_points(d, live)
        found = [
            (i, size, first, last)
            for i, v in enumerate(d.variables)
            for size, first, last in _usages_of(option_bytes, v, live, made)
            if size.any()
        ]
        variables, sizes, first, last = zip(*found, strict=True) if found else ((), (), (), ())
        return cls(d, options, variables, sizes, _keys(first), _keys(last))

    def at_points(self, points: Sequence[ProgramPoint]) -> tuple[Usage, ...]:
        """Return what every option holds at each of ``points``, the i-th being time i of the result."""
        found: list[Usage] = []
        others = self.options.in_flight - 1
        kept = self._kept() if others else ()
        for t, point in enumerate(points):
            there = np.flatnonzero((self.first <= point.key) & (point.key <= self.last)).tolist()
            found += [Usage(self.variables[i], self.sizes[i], t, t + 1) for i in there]
            found += [Usage(self.variables[i], others * self.sizes[i], t, t + 1) for i in kept]
            found += _while_running(self.d, self.options, point, t)
        tick("usage", len(found))
        return tuple(found)

    def peak(self, choice: Sequence[int]) -> float:
        """Return the most bytes that a choice holds at one point, as far as its options say: no more than its program
        holds, unless that gathers the operand of a product in parts."""
        held = np.array([size[choice[i]] for i, size in zip(self.variables, self.sizes, strict=True)])
        for rows, made, copy in self._copies:
            if self._is_as_made(copy, choice):
                held[rows] = 0.0
            elif self.d.variables[copy].kept[choice[copy]]:
                held[made] = 0.0
        for at, whole, rows in self._reshapes:
            if self._may_be_view(self.d.variables[at], choice[at], whole):
                held[rows] = 0.0
        tick("mixed use", len(held))
        points, born, gone = self._events
        change = np.bincount(born, held, len(points) + 1) - np.bincount(gone, held, len(points) + 1)
        others = self.options.in_flight - 1
        more = others * held[self._kept()].sum() if others else 0.0
        return float(change.cumsum().max(initial=0.0) + more)

    @cached_property
    def _copies(self) -> list[tuple[list[int], list[int], int]]:
        """The copies that may be kept for the backward instead of what an op made: what holds a copy, what holds the
        original, and the variable of the copy."""
        rows: dict[int, list[int]] = {}
        for at, i in enumerate(self.variables):
            rows.setdefault(i, []).append(at)
        copies = [(i, v.value.node) for i, v in enumerate(self.d.variables) if any(v.kept) and v.value is not None]
        makers = ((i, self.d.index[node]) for i, node in copies)
        is_op = [v.kind == "op" for v in self.d.variables]
        return [(rows.get(i, []), rows.get(made, []) if is_op[made] else [], i) for i, made in makers]

    def _is_as_made(self, copy: int, choice: Sequence[int]) -> bool:
        """Whether the copy that a variable decides is the value as it was made, which takes nothing."""
        value = self.d.variables[copy].value
        assert value is not None
        made = self.d.index[value.node]
        specs = (spec_made(self.d.variables[i].options[choice[i]], out) for i, out in ((made, value.index), (copy, 0)))
        return len({*specs}) == 1

    @cached_property
    def _reshapes(self) -> list[tuple[int, Layout, list[int]]]:
        """The ops that copy where strides allow no view: the variable of each, how its operand lies in memory where it
        is not cut, and what holds its result and views of it."""
        d, (layouts, _) = self.d, whole_layouts(self.d.graph)
        root: dict[str, str] = {}
        for node in d.graph.nodes:
            if node.packet in MAYBE_VIEWS and node.name not in d.views:
                root[node.name] = node.name
            elif node.name in d.views and node.inputs[0].node in root:
                root[node.name] = root[node.inputs[0].node]
        rows: dict[str, list[int]] = {}
        for at, i in enumerate(self.variables):
            v = d.variables[i]
            if v.kind == "op" and v.about in root:
                rows.setdefault(root[v.about], []).append(at)
        return [(d.index[name], layouts[d.graph.by_name[name].inputs[0]], at) for name, at in rows.items()]

    def _may_be_view(self, v: Variable, choice: int, whole: Layout) -> bool:
        option, mesh = v.options[choice], self.d.mesh
        assert v.node is not None and v.node.outputs[0] is not None
        read, made = option.inputs[0], option.outputs[0]
        if read is None or made is None:
            return False
        shape = self.d.graph.meta(v.node.inputs[0]).local_shape(read, mesh)
        return reshaped(of_shard(whole, shape), v.node.outputs[0].local_shape(made, mesh)) is not None

    @cached_property
    def _events(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The points at which something begins to be held, and for each thing that is, the first of them at which it is
        and at which it is no more."""
        points = np.unique(self.first)
        return points, np.searchsorted(points, self.first), np.searchsorted(points, self.last, side="right")

    def _kept(self) -> list[int]:
        """Return the indices of what is kept from the forward for the backward of one micro-batch."""
        turn = before(self.d.graph.turn).key
        there = np.flatnonzero((self.first < turn) & (turn <= self.last)).tolist()
        fixed = fixed_nodes(self.d.graph)
        return [i for i in there if _is_per_micro_batch(self.d.variables[self.variables[i]], fixed)]


def _keys(points: Sequence[ProgramPoint]) -> npt.NDArray[np.int64]:
    return np.array([point.key for point in points], dtype=np.int64)


PER_MICRO_BATCH = frozenset({"op", "copy", "hold", "received"})
"""Kinds of variables whose memory each micro-batch in flight takes for itself, unless all share the value."""


def _is_per_micro_batch(v: Variable, fixed: Collection[str]) -> bool:
    node = v.value.node if v.value is not None else v.node.name if v.node is not None else ""
    return v.kind in PER_MICRO_BATCH and node not in fixed


def memory_usages(d: Decisions, options: Options, points: Sequence[ProgramPoint]) -> tuple[Usage, ...]:
    """Return ``MemoryUsages.at_points`` for a caller that asks only once."""
    return MemoryUsages.of(d, options).at_points(points)


def _while_running(d: Decisions, options: Options, point: ProgramPoint, time: int) -> list[Usage]:
    """Return what the node at ``point`` holds besides its operands and results while it runs."""
    if not point.running or point >= end(d.graph):
        return []
    node = d.graph.nodes[point.node]
    at = d.index.get(node.name)
    if at is None or d.variables[at].kind != "op":
        return []
    metas = tuple(d.graph.meta(v) for v in node.inputs)
    held = [min_transients(node, o, metas, d.mesh, options.device) for o in d.variables[at].options]
    return [Usage(at, np.array(held, dtype=np.float64), time, time + 1)] if any(held) else []


def static_usages(
    d: Decisions, options: Options, point: ProgramPoint, time: int, *, holds: bool, views_tied: bool
) -> list[Usage]:
    """Return what every option holds at one point, as time ``time``.

    Args:
        holds: include what hold variables keep for the backward.
        views_tied: leave out hold variables of views, which share the memory of their base.
    """
    live = live_ranges(d, holds=holds)
    made, sizes = _gradient_points(d, live), _OptionBytes(d, options)
    found: list[Usage] = []
    for i, v in enumerate(d.variables):
        view = v.kind == "hold" and v.value is not None and v.value.node in d.views
        if v.kind == "hold" and (not holds or (view and views_tied)):
            continue
        for size, first, last in _usages_of(sizes, v, live, made):
            if first <= point <= last and size.any():
                found.append(Usage(i, size, time, time + 1))
    return found + _while_running(d, options, point, time)


@dataclass(frozen=True, eq=False)
class _OptionBytes:
    """Bytes of the largest shard by option. Equal options and tensors share one array, which must not be changed."""

    d: Decisions
    options: Options
    cache: dict[object, Array] = field(default_factory=dict)

    def made(self, meta: TensorMeta, options: tuple[Strategy, ...], out: int) -> Array:
        """Return the bytes of result ``out``, a tensor of ``meta``."""
        return self._of(meta, options, out, spec_made)

    def read(self, meta: TensorMeta, options: tuple[Strategy, ...], position: int) -> Array:
        """Return the bytes of operand ``position``."""
        return self._of(meta, options, position, spec_read)

    def _of(
        self,
        meta: TensorMeta,
        options: tuple[Strategy, ...],
        at: int,
        spec_of: Callable[[Strategy, int], ShardingSpec | None],
    ) -> Array:
        options = self.d.interned.of(options)
        key = id(options), at, meta, spec_of
        if key not in self.cache:
            specs = (spec_of(o, at) for o in options)
            self.cache[key] = np.array([float(local_bytes(meta, s, self.d.mesh)) if s else 0.0 for s in specs])
        return self.cache[key]

    def in_parts(
        self, node: Node, options: tuple[Strategy, ...], position: int = 0, *, made: bool = False, blocks: int = BLOCKS
    ) -> Array | float:
        """Return the least share of what ``node`` reads, or with ``made`` of what it makes, that is there at once.

        Most operands are read as they are made. Unless products are decomposed on demand, they count whole: with a
        share of them the search of Llama 3 8B within half of its peak took 6 seconds more to find the same plan.
        """
        if node.packet != CONTRACTION or self.options.decomposed in (("never",) if made else ("never", "near")):
            return 1.0
        options = self.d.interned.of(options)
        key = id(options), position, made, blocks
        if key not in self.cache:
            specs = ((spec_made if made else spec_read)(o, position) for o in options)
            shares = (least_share(s, self.d.mesh, made=made, blocks=blocks) if s else 1.0 for s in specs)
            self.cache[key] = np.array([*shares])
        return self.cache[key]

    def state(self, meta: TensorMeta, options: tuple[Strategy, ...], trainable: bool) -> Array:
        """Return a parameter's bytes by option, in four rows: itself, its optimizer state, its gradient and the
        step."""
        options = self.d.interned.of(options)
        key = id(options), meta, trainable
        if key not in self.cache:
            specs = (s for o in options if (s := spec_made(o, 0)) is not None)
            found = [state_bytes(meta, s, self.d.mesh, trainable, self.options) for s in specs]
            self.cache[key] = np.array([(s.parameter, s.optimizer, s.gradient, s.step) for s in found], dtype=float).T
        return self.cache[key]


def _usages_of(
    sizes: _OptionBytes, v: Variable, live: LiveRanges, made: Mapping[str, _GradientPoints]
) -> Iterator[_Usage]:
    """Yield what a variable holds: (bytes of each option, first point, last point)."""
    d = sizes.d
    if v.kind == "parameter" and v.node is not None:
        yield from _parameter_usages(sizes, v, made)
    elif v.node is not None and v.node.op == "placeholder" and v.node.outputs[0] is not None:
        yield from _input_usages(sizes, v, Value(v.node.name), live)
    elif v.kind == "copy" and v.value is not None:
        yield from _copy_usages(sizes, v, v.value, live)
    elif v.kind == "output" and v.value is not None:
        row, first = of_output(d.graph, d.output_of[v.key]), after(last_read(d, v.value, live))
        yield sizes.made(d.graph.meta(v.value), v.options, 0), first, _event_point(d, live, row.dies, first)
    elif v.kind == "hold" and v.value is not None:
        yield from _held_usages(sizes, v, v.value, live)
    elif v.kind == "op" and v.node is not None:
        yield from _op_usages(sizes, v, v.node, live)


def _input_usages(sizes: _OptionBytes, v: Variable, value: Value, live: LiveRanges) -> Iterator[_Usage]:
    """Yield what an input holds that is no parameter, by its lifetimes under each option."""
    d, meta = sizes.d, sizes.d.graph.meta(value)
    specs = [spec_made(o, 0) for o in v.options]
    cut = np.array([spec is not None and not spec.is_replicated for spec in specs])
    shards, meaning = sizes.made(meta, v.options, 0), d.graph.input_of[value.node]
    read = _certainly_read(d, value, live)
    for is_cut in dict.fromkeys(cut.tolist()):
        for row in of_input(d.graph, meaning, meta, sizes.options, cut=is_cut):
            size = shards if row.size == "shard" else np.full(len(v.options), float(meta.bytes))
            first, last = (_event_point(d, live, when, read) for when in (row.born, row.dies))
            yield size * (cut == is_cut) * row.times, first, last


def _event_point(d: Decisions, live: LiveRanges, when: Event, read: ProgramPoint) -> ProgramPoint:
    """Return the point of an event; ``read`` is the last one at which a value is certainly read."""
    over = end(d.graph)
    return {
        Event.START: ProgramPoint(0),
        Event.FORWARD_DONE: ProgramPoint(live.turn - 1),
        Event.TURN: ProgramPoint(live.turn),
        Event.READ: read,
        Event.BACKWARD_DONE: ProgramPoint(over.node - 1),
        Event.END: over,
    }[when]


def _certainly_read(d: Decisions, value: Value, live: LiveRanges) -> ProgramPoint:
    """Return the last point at which an input is certainly held to be read.

    The first reader of a phase may read a copy of it that all others share, also those of the backward.
    """
    if d.graph.input_of[value.node].kind == "accumulator":  # which is read as it is
        return ProgramPoint(live.reads["backward"][1][value])
    forward, backward = (live.reads[phase][0].get(value) for phase in PHASES)
    if backward is not None and (forward is None or copy_key(value, "backward") not in d.index):
        return before(backward)
    return ProgramPoint(0) if forward is None else before(forward)


def _held_usages(sizes: _OptionBytes, v: Variable, value: Value, live: LiveRanges) -> Iterator[_Usage]:
    """Yield what a value takes that is held for the backward, by the lifetimes of each action."""
    d, meta = sizes.d, sizes.d.graph.meta(value)
    at = held_points(d, value, live)
    for action in dict.fromkeys(v.actions):
        chosen = np.array([a == action for a in v.actions])
        for row in action.lifetimes:
            if row.born in at and row.dies in at:
                form = action.form(meta) if row.size == "stored" and isinstance(action, Stored) else meta
                yield sizes.made(form, v.options, 0) * chosen, at[row.born], at[row.dies]


def _parameter_usages(sizes: _OptionBytes, v: Variable, made: Mapping[str, _GradientPoints]) -> Iterator[_Usage]:
    assert v.node is not None and v.node.outputs[0] is not None
    d = sizes.d
    over, meaning, meta = end(d.graph), d.graph.input_of[v.node.name], v.node.outputs[0]
    parameters, optimizer, gradients, step = sizes.state(meta, v.options, meaning.trainable)
    on_host = np.array(v.host_state_bytes or (0,) * len(v.options), dtype=np.float64)
    yield parameters + optimizer - on_host, ProgramPoint(0), over
    unreduced = gradients * (ITEMSIZE[d.reduced_dtype.get(meaning.name, meta.dtype)] / meta.itemsize)
    first, reduced = made.get(meaning.name, (over, over.node))
    yield np.minimum(unreduced, unreduced.max(initial=0.0) / d.mesh.size), first, before(reduced)
    yield unreduced, ProgramPoint(reduced), over.preparing
    yield gradients, over, over
    yield step * (on_host == 0), over, over


def _copy_usages(sizes: _OptionBytes, v: Variable, value: Value, live: LiveRanges) -> Iterator[_Usage]:
    d = sizes.d
    size = sizes.made(d.graph.meta(value), v.options, 0)
    size = size * sizes.in_parts(d.graph.by_name[value.node], v.options, made=True, blocks=1)
    kept = np.array(v.kept or (False,) * len(v.options))
    if (found := copy_range(d, v, live)) is not None:
        product = first_product(d, d.index[v.key]) if sizes.options.decomposed != "never" else None
        first = found.first if product is None else max(found.first, ProgramPoint(product))
        yield found.share * size * ~kept, first, found.last
    # Until then the forward's own copy counts; where no variable says what is held, what the forward made does.
    held = hold_key(value) in d.index or d.graph.by_name[value.node].op == "placeholder"
    if kept.any() and held and value in live.backward:
        yield size * kept, after(live.forward.get(value, -1)), live.backward[value][1]


def _op_usages(sizes: _OptionBytes, v: Variable, node: Node, live: LiveRanges) -> Iterator[_Usage]:
    d = sizes.d
    at = live.at[node.name]
    for value in dict.fromkeys(node.inputs):
        if live.released_by[node.phase].get(value) == node.name:
            position = node.inputs.index(value)
            size = sizes.read(d.graph.meta(value), v.options, position) * sizes.in_parts(node, v.options, position)
            yield own_share(d, value, ProgramPoint(at), live) * size, ProgramPoint(at), ProgramPoint(at)
    # While it runs it may overwrite an operand, and constraints must not count more than is held.
    first, share = after(at) if may_overwrite(node, d.graph) else ProgramPoint(at), 1.0
    if node.name in d.views:
        first, share = inherited_memory(d, node, live)
    for out, result in enumerate(node.outputs if share else ()):
        if result is None:
            continue
        size, last = share * sizes.made(result, v.options, out), last_in_made_spec(d, Value(node.name, out), live)
        if node.packet == CONTRACTION:
            yield size * sizes.in_parts(node, v.options, made=True), first, first
            size, first = size * sizes.in_parts(node, v.options, made=True, blocks=1), first.next
        yield size, first, last


class _GradientPoints(NamedTuple):
    """The first point at which a gradient counts as its parameter's and no more as a value, and the node from which on
    it is certainly in the parameter's spec."""

    first: ProgramPoint
    reduced: int


def _gradient_points(d: Decisions, live: LiveRanges) -> dict[str, _GradientPoints]:
    """Return when each parameter's gradient is made and reduced. Each further step of its redistribution is taken when
    the next result is made."""
    points = sorted({d.graph.order[o.value.node] for o in d.graph.outputs})
    ends = [*points, *[len(d.graph.nodes)] * 2 * d.mesh.ndim]
    reduced = {point: ends[i + 2 * d.mesh.ndim - 1] for i, point in enumerate(points)}
    found = {}
    for o in d.graph.outputs:
        if o.kind == "gradient":
            at, last = d.graph.order[o.value.node], last_read(d, o.value, live)
            first = max(replaced(at, o.value.index), ProgramPoint(last)).next
            found[o.name] = _GradientPoints(first, max(reduced[at], last + 1))
    return found
