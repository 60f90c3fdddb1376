"""Memory as the solver sees it: the bytes that every option holds at chosen program points.

These usages leave out redistributed operands, which ``redistributed_operands`` adds, and the scratch of contractions
and collectives. The exact liveness of the scheduled program decides whether a plan fits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.holding import Action, Event, Stored
from autopar.ir import ITEMSIZE, Node, TensorMeta, Value
from autopar.planner.footprint.contraction import CONTRACTION
from autopar.planner.footprint.layouts import Layout, of_shard, reshaped, whole_layouts
from autopar.planner.footprint.op_work import local_bytes
from autopar.planner.footprint.overwriting import may_overwrite
from autopar.planner.footprint.state import state_bytes
from autopar.planner.footprint.transients import min_transients
from autopar.planner.footprint.transients_of_products import BLOCKS
from autopar.planner.graphs.shared import fixed_nodes
from autopar.planner.memory.in_parts import InParts, MayDecompose, no_product
from autopar.planner.memory.lifetimes import of_input, of_output
from autopar.planner.memory.live_ranges import (
    PHASES,
    LiveRanges,
    copy_range,
    held_points,
    inherited_memory,
    is_reshape,
    last_in_made_spec,
    last_read,
    live_ranges,
    may_be_view,
    own_share,
)
from autopar.planner.memory.pair_nodes import PairNode, fits
from autopar.planner.memory.points import ProgramPoint, after, before, before_operands, end, replaced
from autopar.planner.options import Options
from autopar.planner.problem.variables import Decisions, Use, Variable, copy_key, spec_made, spec_read
from autopar.sharding import ShardingSpec, Strategy
from autopar.solver import Usage
from autopar.solver.clock import tick

Array = npt.NDArray[np.float64]


class _Condition(NamedTuple):
    """Another variable, and which of its options let something be held.

    Args:
        classes: of the options of that variable and of the one that holds; it holds something if they are equal. Under
            options of class -1 nothing is held.
    """

    variable: int
    classes: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]

    @classmethod
    def where(cls, variable: int, holds: npt.NDArray[np.bool_], options: int) -> _Condition:
        """The condition under which all ``options`` of what holds something do so."""
        return cls(variable, (np.where(holds, 0, -1), np.zeros(options, dtype=np.int64)))

    def holds(self, option: int, held: int) -> bool:
        """Whether something is held under an option of the other variable and one of the variable that holds it."""
        other, own = self.classes
        return bool(other[option] >= 0 and other[option] == own[held])

    def states(self, sizes: Array) -> tuple[Array, Array, Array]:
        """Return which states the options allow of the variable that holds something and of the other, and the bytes of
        each state: nothing is held; under each class nothing, since that is not the holder's; then each size."""
        other, own = self.classes
        classes = np.unique(other[other >= 0])
        absent = [c for c in classes if (own != c).any()]
        held = [(c, size) for c in classes for size in np.unique(sizes[own == c])]
        owner = [np.ones(len(own), bool), *(own != c for c in absent), *((own == c) & (sizes == z) for c, z in held)]
        reader = [other < 0, *(other == c for c in absent), *(other == c for c, _ in held)]
        nothing = np.zeros(1 + len(absent))
        return fits(np.stack(owner, 1)), fits(np.stack(reader, 1)), np.array([*nothing, *(z for _, z in held)])


class _Usage(NamedTuple):
    """Bytes by option, and the points between which they are held, under a condition if there is one."""

    sizes: Array
    first: ProgramPoint
    last: ProgramPoint
    under: _Condition | None = None


@dataclass(frozen=True, eq=False)
class MemoryUsages:
    """What options hold for longer than one op: each variable with its bytes by option, and when they are held."""

    d: Decisions
    options: Options
    rows: Sequence[tuple[int, _Usage]]

    @classmethod
    def of(
        cls,
        d: Decisions,
        options: Options,
        may_decompose: MayDecompose = no_product,
        *,
        holds: bool = True,
        views_tied: bool = False,
    ) -> MemoryUsages:
        """Return what the options of ``d`` hold.

        Args:
            may_decompose: which products may hold an operand or their result in parts.
            holds: include what hold variables keep for the backward.
            views_tied: leave out hold variables of views, which share the memory of their base.
        """
        tick("held variable", len(d.variables))
        live, option_bytes = live_ranges(d, holds=holds), _OptionBytes(d, options, InParts(d, may_decompose))
        made = _gradient_points(d, live)
        counted = (
            (i, v)
            for i, v in enumerate(d.variables)
            if v.kind != "hold" or (holds and not (views_tied and v.about in d.views))
        )
        found = ((i, row) for i, v in counted for row in _usages_of(option_bytes, v, live, made))
        return cls(d, options, [(i, row) for i, row in found if row.first <= row.last and row.sizes.any()])

    def at_points(self, points: Sequence[ProgramPoint], time: int = 0) -> tuple[Usage, ...]:
        """Return what every option holds by itself at each of ``points``, which are the times from ``time`` on."""
        found: list[Usage] = []
        others, (first, last) = self.options.in_flight - 1, self._range
        alone = np.array([row.under is None for _, row in self.rows], dtype=bool)
        kept = [self.rows[at] for at in np.flatnonzero(alone & self._kept).tolist()] if others else []
        for t, point in enumerate(points, time):
            there = np.flatnonzero(alone & (first <= point.key) & (point.key <= last)).tolist()
            found += [Usage(i, row.sizes, t, t + 1) for i, row in (self.rows[at] for at in there)]
            found += [Usage(i, others * row.sizes, t, t + 1) for i, row in kept]
            found += _while_running(self.d, self.options, point, t)
        tick("usage", len(found))
        return tuple(found)

    @cached_property
    def pair_nodes(self) -> tuple[PairNode, ...]:
        """What options hold only under options of another variable; ``_Condition.states`` says which states a node
        has."""
        others, kept, known = self.options.in_flight - 1, self._kept, dict[object, tuple[Array, Array, Array]]()
        arrays: dict[object, Array] = {}

        def shared(array: Array) -> Array:
            return arrays.setdefault((array.shape, array.tobytes()), array)

        found = []
        for at, (i, row) in enumerate(self.rows):
            if row.under is not None:
                key = tuple(array.tobytes() for array in (*row.under.classes, row.sizes))
                if key not in known:
                    fitting, holding, held = map(shared, row.under.states(row.sizes))
                    known[key] = fitting, holding, held
                fitting, holding, held = known[key]
                throughout = shared(others * held) if others and kept[at] else None
                pair = (i, row.under.variable), (fitting, holding)
                found.append(PairNode(*pair, row.first, row.last, held, throughout=throughout))
        return tuple(found)

    def peak(self, choice: Sequence[int]) -> float:
        """Return the most bytes that a choice holds at one point, as far as its options say: no more than its program
        holds."""
        held = np.array([row.sizes[choice[i]] for i, row in self.rows])
        for at, (i, row) in enumerate(self.rows):
            if row.under is not None and not row.under.holds(choice[row.under.variable], choice[i]):
                held[at] = 0.0
        for rows, copy in self._copies:
            if self._is_passed_over(copy, choice):
                held[rows] = 0.0
        tick("mixed use", len(held))
        points, born, gone = self._events
        change = np.bincount(born, held, len(points) + 1) - np.bincount(gone, held, len(points) + 1)
        others = self.options.in_flight - 1
        return float(change.cumsum().max(initial=0.0) + others * held[self._kept].sum())

    @cached_property
    def _copies(self) -> list[tuple[list[int], Use]]:
        """What holds each copy, and the use that makes it."""
        rows: dict[int, list[int]] = {}
        for at, (i, _) in enumerate(self.rows):
            rows.setdefault(i, []).append(at)
        makes = (use for use in self.d.uses if self.d.variables[use.target].kind == "copy" and not use.kept)
        return [(rows[use.target], use) for use in makes if use.target in rows]

    def _is_passed_over(self, copy: Use, choice: Sequence[int]) -> bool:
        """Whether some reader of a copy takes what was there before, in whose spec it reads."""
        variables = self.d.variables

        def chosen(variable: int) -> Strategy:
            return variables[variable].options[choice[variable]]

        made = spec_made(chosen(copy.source), copy.out)
        if made == spec_made(chosen(copy.target), 0):
            return False
        readers = self.d.readers.get(copy.target, ())
        return any(spec_read(chosen(r.target), r.position) == made for r in readers)

    @cached_property
    def _range(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The keys of the points between which each row is held."""
        return _keys([row.first for _, row in self.rows]), _keys([row.last for _, row in self.rows])

    @cached_property
    def _events(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The points at which something begins to be held, and for each thing that is, the first of them at which it is
        and at which it is no more."""
        first, last = self._range
        points = np.unique(first)
        return points, np.searchsorted(points, first), np.searchsorted(points, last, side="right")

    @cached_property
    def _kept(self) -> npt.NDArray[np.bool_]:
        """Which rows are kept from the forward for the backward of one micro-batch."""
        (first, last), turn = self._range, before(self.d.graph.turn).key
        fixed = fixed_nodes(self.d.graph)
        each = [_is_per_micro_batch(self.d.variables[i], fixed) for i, _ in self.rows]
        kept: npt.NDArray[np.bool_] = (first < turn) & (turn <= last) & np.array(each, dtype=bool)
        return kept


def _keys(points: Sequence[ProgramPoint]) -> npt.NDArray[np.int64]:
    return np.array([point.key for point in points], dtype=np.int64)


PER_MICRO_BATCH = frozenset({"op", "copy", "hold", "received"})
"""Kinds of variables whose memory each micro-batch in flight takes for itself, unless all share the value."""


def _is_per_micro_batch(v: Variable, fixed: Collection[str]) -> bool:
    node = v.value.node if v.value is not None else v.node.name if v.node is not None else ""
    return v.kind in PER_MICRO_BATCH and node not in fixed


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


@dataclass(frozen=True, eq=False)
class _OptionBytes:
    """Bytes of the largest shard by option. Equal options and tensors share one array, which must not be changed."""

    d: Decisions
    options: Options
    parts: InParts
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

    def in_parts(self, v: Variable, operand: int, blocks: int = BLOCKS) -> Array:
        """Return by option the least share of what an op reads, or with -1 of what it makes, that is there at once."""
        product = self.parts.of(self.d.index[v.key], operand)
        return self.of_specs(self.parts.shares(product, blocks), v.options, operand)

    def of_specs(self, shares: Mapping[ShardingSpec, float], options: tuple[Strategy, ...], position: int) -> Array:
        """Return the share of each option, by the spec in which it takes an operand, or with -1 makes a result; one
        number if it is 1 of all."""
        if not shares:
            return np.ones(1)
        specs = (spec_made(o, 0) if position < 0 else spec_read(o, position) for o in options)
        found = tuple(shares.get(s, 1.0) if s else 1.0 for s in specs)
        return self.cache.setdefault(found, np.array(found))

    def copies(self, node: Node) -> npt.NDArray[np.bool_]:
        """Return under which options a reshape copies what it reads as it is; where strides allow a view on a rank, it
        may be one."""
        d, v = self.d, self.d.variables[self.d.index[node.name]]
        value, made = node.inputs[0], node.outputs[0]
        assert made is not None
        if node.name in d.views or self.unless_view(d.graph.by_name[value.node], 0) is not None:
            return np.zeros(len(v.options), dtype=bool)
        whole, meta = self.whole_layouts[value], d.graph.meta(value)

        def is_view(option: Strategy) -> bool:
            read, result = spec_read(option, 0), spec_made(option, 0)
            if read is None or result is None:
                return False
            shard = of_shard(whole, meta.local_shape(read, d.mesh))
            return reshaped(shard, made.local_shape(result, d.mesh)) is not None

        def found() -> npt.NDArray[np.bool_]:
            return np.array([not is_view(o) for o in v.options], dtype=bool)

        return d.interned.memo.of("copies", (v.options,), found, whole, meta, made)

    def unless_view(self, node: Node, options: int) -> _Condition | None:
        """Return under which options memory of its own is held for a value that is a reshape, or a view of one.

        Args:
            options: how many the variable has that holds it.
        """
        while node.name in self.d.views:
            node = self.d.graph.by_name[node.inputs[0].node]
        if not may_be_view(self.d, node) or (copies := self.copies(node)).all():
            return None
        return _Condition.where(self.d.index[node.name], copies, options)

    def as_it_is(self, v: Variable, held: Array, use: Use) -> _Condition:
        """Return under which options a reader takes a copy in the spec in which it is held."""
        options, reader, kept = v.options, self.d.variables[use.target].options, held.tobytes()

        def found() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
            made = [spec_made(o, 0) if size else None for o, size in zip(options, held, strict=True)]
            number = {s: i for i, s in enumerate(dict.fromkeys(s for s in made if s is not None))}
            read = (spec_read(o, use.position) for o in reader)
            other, own = ([number.get(s, -1) if s is not None else -1 for s in specs] for specs in (read, made))
            return np.array(other, dtype=np.int64), np.array(own, dtype=np.int64)

        classes = self.d.interned.memo.of("as it is", (options, reader), found, use.position, kept)
        return _Condition(use.target, classes)

    @cached_property
    def whole_layouts(self) -> Mapping[Value, Layout]:
        return whole_layouts(self.d.graph)[0]

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
    """Yield what a variable holds."""
    d = sizes.d
    if v.kind == "parameter" and v.node is not None:
        yield from _parameter_usages(sizes, v, made)
    elif v.node is not None and v.node.op == "placeholder" and v.node.outputs[0] is not None:
        yield from _input_usages(sizes, v, Value(v.node.name), live)
    elif v.kind == "copy" and v.value is not None:
        yield from _copy_usages(sizes, v, v.value, live)
    elif v.kind == "output" and v.value is not None:
        row, first = of_output(d.graph, d.output_of[v.key]), after(last_read(d, v.value, live))
        yield _Usage(sizes.made(d.graph.meta(v.value), v.options, 0), first, _event_point(d, live, row.dies, first))
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
            yield _Usage(size * (cut == is_cut) * row.times, first, last)


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
    at, under = held_points(d, value, live), sizes.unless_view(d.graph.by_name[value.node], len(v.options))
    for action in dict.fromkeys(v.actions):
        chosen = d.interned.memo.of("chosen", (v.actions,), partial(_is_chosen, v.actions, action), action)
        for row in action.lifetimes:
            if row.born in at and row.dies in at:
                if row.size == "stored" and isinstance(action, Stored):  # which is no view
                    yield _Usage(sizes.made(action.form(meta), v.options, 0) * chosen, at[row.born], at[row.dies])
                else:
                    yield _Usage(sizes.made(meta, v.options, 0) * chosen, at[row.born], at[row.dies], under)


def _is_chosen(actions: Sequence[Action], action: Action) -> npt.NDArray[np.bool_]:
    return np.array([a == action for a in actions])


def _parameter_usages(sizes: _OptionBytes, v: Variable, made: Mapping[str, _GradientPoints]) -> Iterator[_Usage]:
    assert v.node is not None and v.node.outputs[0] is not None
    d = sizes.d
    over, meaning, meta = end(d.graph), d.graph.input_of[v.node.name], v.node.outputs[0]
    parameters, optimizer, gradients, step = sizes.state(meta, v.options, meaning.trainable)
    on_host = np.array(v.host_state_bytes or (0,) * len(v.options), dtype=np.float64)
    yield _Usage(parameters + optimizer - on_host, ProgramPoint(0), over)
    yield _Usage(step * (on_host == 0), over, over)
    if meaning.name in made:
        first, reduced = made[meaning.name]
        unreduced = gradients * (ITEMSIZE[d.reduced_dtype.get(meaning.name, meta.dtype)] / meta.itemsize)
        yield _Usage(np.minimum(unreduced, unreduced.max(initial=0.0) / d.mesh.size), first, before(reduced))
        yield _Usage(unreduced, ProgramPoint(reduced), over.preparing)
        yield _Usage(gradients, over, over)


def _copy_usages(sizes: _OptionBytes, v: Variable, value: Value, live: LiveRanges) -> Iterator[_Usage]:
    d, parts = sizes.d, sizes.parts
    size = sizes.made(d.graph.meta(value), v.options, 0)
    size = size * sizes.of_specs(parts.shares(parts.of(d.index[value.node], -1), blocks=1), v.options, -1)
    kept = np.array(v.kept or (False,) * len(v.options))
    if (found := copy_range(d, v, live)) is not None:
        product = parts.first_of_copy(d.index[v.key])
        gathered = sizes.of_specs(parts.shares(product), v.options, -1) < 1
        at = ProgramPoint(d.graph.order[product.node.name]) if product is not None else found.first
        for row in (
            _Usage(found.share * size * ~kept * ~gathered, found.first, found.last),
            _Usage(found.share * size * ~kept * gathered, max(found.first, at), found.last),
        ):
            yield from _until_read(sizes, v, row)
    # Until then the forward's own copy counts. A copy of a view in the view's spec may be the view.
    if kept.any() and value in live.backward and not may_be_view(d, d.graph.by_name[value.node]):
        last = live.backward[value][1]
        gone = last.preparing if value in live.released_by["backward"] else last
        yield _Usage(size * kept, after(live.forward.get(value, -1)), gone)


def _until_read(sizes: _OptionBytes, v: Variable, row: _Usage) -> Iterator[_Usage]:
    """Yield what a copy holds, in two parts if it has several readers: until the first of them, and until the last if
    that reads it as it is. What that takes in another spec an earlier reader may have taken too, and the copy be gone.
    """
    d = sizes.d
    copy = d.index[v.key]
    last = d.last_reader(copy)
    if last is None:
        yield row
        return
    readers = [d.variables[use.target] for use in d.readers[copy]]
    nodes = [r.node for r in readers if r.kind == "op" and r.node is not None]
    if len(nodes) == len(readers):  # else what is held or returned in another spec is made before the first of them
        certain = before(min(d.graph.order[node.name] for node in nodes))
        yield row._replace(last=min(row.last, certain))
        row = row._replace(first=max(row.first, certain.next))
    yield row._replace(under=sizes.as_it_is(v, row.sizes, last))


def _op_usages(sizes: _OptionBytes, v: Variable, node: Node, live: LiveRanges) -> Iterator[_Usage]:
    d = sizes.d
    at = live.at[node.name]
    for value in dict.fromkeys(node.inputs if not is_reshape(d, node) else ()):
        if live.released_by[node.phase].get(value) == node.name:
            position = node.inputs.index(value)
            size = sizes.read(d.graph.meta(value), v.options, position) * sizes.in_parts(v, position)
            yield _Usage(own_share(d, value, ProgramPoint(at), live) * size, ProgramPoint(at), ProgramPoint(at))
    for out, result in enumerate(node.outputs):
        for row in _result_usages(sizes, v, node, out, live) if result is not None else ():
            yield from _until_gathered(sizes, Value(node.name, out), row, live)


def _result_usages(sizes: _OptionBytes, v: Variable, node: Node, out: int, live: LiveRanges) -> Iterator[_Usage]:
    d, at, result = sizes.d, ProgramPoint(live.at[node.name]), node.outputs[out]
    assert result is not None
    size, last = sizes.made(result, v.options, out), last_in_made_spec(d, Value(node.name, out), live)
    if may_be_view(d, node):
        first, share = inherited_memory(d, node, live)
        copies = sizes.copies(node)
        yield _Usage(size * share * ~copies, first, last)
        yield _Usage(size * copies, at, last)
    elif node.packet == CONTRACTION:
        yield _Usage(size * sizes.in_parts(v, -1), at, at)
        yield _Usage(size * sizes.in_parts(v, -1, blocks=1), at.next, last)
    else:  # while it runs it may overwrite an operand, and constraints must not count more than is held
        yield _Usage(size, after(at.node) if may_overwrite(node, d.graph) else at, last)


def _until_gathered(sizes: _OptionBytes, value: Value, row: _Usage, live: LiveRanges) -> Iterator[_Usage]:
    """Yield what a result of the forward holds, in two parts if the backward may keep instead what the forward
    gathers."""
    d, first = sizes.d, live.reads["forward"][0].get(value)
    copy = d.index.get(copy_key(value, "backward"))
    kept = d.variables[copy].kept if copy is not None else ()
    if copy is None or first is None or not any(kept):
        yield row
        return
    gathered = before_operands(first)
    if value in d.returned:  # a result is made at once, from what the forward gathers
        gathered = min(gathered, replaced(live.at[value.node], value.index))
    yield row._replace(last=min(row.last, gathered))
    under = _Condition.where(copy, ~np.array(kept), len(row.sizes))
    yield row._replace(first=max(row.first, gathered.next), under=under)


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
