"""Exact liveness of a local program: the bytes that are held at each moment of the step, by kind.

A tensor's memory lives from the op that makes it to the last op that reads it or a view of it. Parameters, buffers,
optimizer state and the caller's batch live throughout the step. Gradients live from their making to the end, where the
optimizer steps, and so do outputs, which the caller holds; new values of buffers live until the forward is over. What
an op holds besides, while it runs, comes from ``footprint.transients``; what a collective packs and receives comes from
``footprint.collective_buffers``. A collective is waited for before its first reader or where the program says so, else
when its phase ends.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.holding import Event
from autopar.ir import Graph, Node, TensorMeta
from autopar.mesh import Mesh
from autopar.planner.footprint.collective_buffers import bucket_packing, packing
from autopar.planner.footprint.layouts import Layout, contiguous, results
from autopar.planner.footprint.local_op import local_op, windowed
from autopar.planner.footprint.ranks import unequal_ranks
from autopar.planner.footprint.state import chunk_bytes, step_bytes
from autopar.planner.footprint.transients import transients
from autopar.planner.footprint.transients_of_indexing import excess_bytes
from autopar.planner.footprint.transients_of_norms import summary_bytes
from autopar.planner.footprint.transients_of_products import ring_bytes
from autopar.planner.graphs.accumulation import accumulation_program, is_gradient
from autopar.planner.graphs.shared import WAITED, shared
from autopar.planner.memory.lifetimes import HeldThroughout, held_throughout, of_input, of_output
from autopar.planner.options import Options
from autopar.program import LocalTensor, Op, Program
from autopar.sharding import ShardingSpec, Strategy
from autopar.solver.clock import tick

KINDS = ("parameters", "optimizer", "gradients", "buffers", "inputs", "activations", "temporaries", "outputs", "step")


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes on the fullest device.

    Args:
        timeline: the most that is held while each op runs or waits for what it reads, its operands and results
            included. The last entry is for what is waited for at the end, and the optimizer's step.
        peak_at: index of the largest entry.
        by_kind: bytes of each kind at the peak.
    """

    timeline: tuple[int, ...]
    peak_at: int
    by_kind: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        return self.timeline[self.peak_at]


def profile(program: Program, graph: Graph, mesh: Mesh, options: Options) -> MemoryProfile:
    """Compute the bytes held during every op of ``program``, and the peak by kind, over all micro-batches of a step."""
    as_run = _as_run(program, graph, options)
    if as_run is not program:
        return _at_ops_of(program, as_run, profile(as_run, graph, mesh, options))
    last = _fullest(program, graph, mesh, options)
    if options.accumulation_steps == 1:
        return last
    other = accumulation_program(program, graph)
    return _combined(last, program, _fullest(other, graph, mesh, options, steps=False), other)


def _as_run(program: Program, graph: Graph, options: Options) -> Program:
    """Return ``program`` as the micro-batches of a call run it."""
    return shared(program, graph) if options.held_batches > 1 else program


def _at_ops_of(program: Program, as_run: Program, found: MemoryProfile) -> MemoryProfile:
    """Return the profile of a program whose ops run in another order, with waits between them."""
    at = {op.name: i for i, op in enumerate(program.ops)}
    places = [at.get(op.name.removesuffix(WAITED), at.get(op.name, 0)) for op in as_run.ops] + [len(program.ops)]
    timeline = [0] * (len(program.ops) + 1)
    for place, size in zip(places, found.timeline, strict=True):
        timeline[place] = max(timeline[place], size)
    return replace(found, timeline=tuple(timeline), peak_at=places[found.peak_at])


def _fullest(program: Program, graph: Graph, mesh: Mesh, options: Options, *, steps: bool = True) -> MemoryProfile:
    """Return the most that any rank holds during each op, and the kinds at the peak of the rank with the highest
    peak."""
    found = [
        _Sweep(program, graph, mesh, options, steps, at=coordinate).run() for coordinate in unequal_ranks(program, mesh)
    ]
    fullest = max(found, key=lambda p: p.peak_bytes)
    return replace(fullest, timeline=tuple(map(max, zip(*(p.timeline for p in found), strict=True))))


def saved_bytes(program: Program, graph: Graph, mesh: Mesh, options: Options) -> tuple[int, int]:
    """Return the bytes that the fullest rank keeps for the backward of one micro-batch after its forward, and those
    that it holds for all of them."""
    program = _as_run(program, graph, options)
    sweeps = [_Sweep(program, graph, mesh, options, at=coordinate) for coordinate in unequal_ranks(program, mesh)]
    for sweep in sweeps:
        sweep.run()
    return max(sweep.saved_bytes for sweep in sweeps), max(sweep.once_bytes for sweep in sweeps)


@dataclass(frozen=True)
class Peak:
    """What is held at the peak of a program.

    Args:
        bytes: of the peak.
        at: the op that runs then; None at the end of the step.
        by_kind: bytes of each kind.
        by_node: bytes of each kind by the node of the graph whose tensors they are, empty for what belongs to none.
    """

    bytes: int
    at: Op | None
    by_kind: Mapping[str, int]
    by_node: Mapping[tuple[str, str], int]


def peak(program: Program, graph: Graph, mesh: Mesh, options: Options) -> Peak:
    """Return what is held at the peak of ``program``, over all micro-batches of a step and all ranks."""
    program = _as_run(program, graph, options)
    programs = [(program, True)]
    if options.accumulation_steps > 1:
        programs.append((accumulation_program(program, graph), False))
    walked: list[tuple[MemoryProfile, _Sweep]] = []
    for each, steps in programs:
        for coordinate in unequal_ranks(each, mesh):
            sweep = _Sweep(each, graph, mesh, options, steps, at=coordinate)
            walked.append((sweep.run(), sweep))
    fullest, sweep = max(walked, key=lambda pair: pair[0].peak_bytes)
    ops = sweep.program.ops
    at = ops[fullest.peak_at] if fullest.peak_at < len(ops) else None
    return Peak(fullest.peak_bytes, at, fullest.by_kind, sweep.by_node())


def _combined(last: MemoryProfile, program: Program, before: MemoryProfile, other: Program) -> MemoryProfile:
    """Combine the profiles of the last micro-batch, which runs ``program``, and of those before, which run ``other``.

    The ops of ``other`` are some of those of ``program``.
    """
    at = {op.name: i for i, op in enumerate(program.ops)}
    places = [*(at[op.name] for op in other.ops), len(program.ops)]
    timeline = list(last.timeline)
    for place, size in zip(places, before.timeline, strict=True):
        timeline[place] = max(timeline[place], size)
    if before.peak_bytes <= last.peak_bytes:
        return MemoryProfile(tuple(timeline), last.peak_at, last.by_kind)
    return MemoryProfile(tuple(timeline), places[before.peak_at], before.by_kind)


def history(program: Program, graph: Graph, mesh: Mesh, options: Options) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return for each kind of memory how its bytes change: (position of the op from which on they are held, bytes).

    At each position this is what is held at the fullest moment there.
    """
    fullest: dict[int, dict[str, int]] = {}
    for coordinate in unequal_ranks(program, mesh):
        _Sweep(program, graph, mesh, options, at=coordinate, fullest=fullest).run()
    points: dict[str, list[tuple[int, int]]] = {kind: [] for kind in KINDS}
    now = dict.fromkeys(KINDS, 0)
    for at, held in sorted(fullest.items()):
        for kind, size in held.items():
            if size != now[kind]:
                now[kind] = size
                points[kind].append((at, size))
    return {kind: tuple(found) for kind, found in points.items() if found}


@dataclass(frozen=True)
class _Moment:
    """A moment of the program: op ``at``, or a wait before it.

    Args:
        at: the position of the op, under which the moment counts in the timeline.
        waited: the tensor, the rows of neighbours or the window made of them that is waited for; empty for the op
            itself.
    """

    at: int
    waited: str = ""


def _window_names(op: Op, i: int) -> tuple[str, str]:
    """Name the rows that arrive for halo ``i``, and the window made of them."""
    return f"{op.name}|rows{i}", f"{op.name}|window{i}"


@dataclass
class _Allocation:
    """One allocation: its bytes, the events between which it lives, and its kind."""

    nbytes: int
    first: int
    last: int
    kind: str = ""


@dataclass
class _Sweep:
    """One walk over the program, on the rank at coordinate ``at``.

    Args:
        steps: whether the optimizer steps at the end.
        storage: the allocation in which each tensor lies.
        transient_bytes: bytes that are held during one event only.
        fullest: if given, is filled with the bytes of each kind at the fullest event of each position.
        peak_event: the event of the peak, once the sweep has run.
    """

    program: Program
    graph: Graph
    mesh: Mesh
    options: Options
    steps: bool = True
    at: tuple[int, ...] = ()
    layouts: dict[str, Layout] = field(default_factory=dict)
    allocations: dict[str, _Allocation] = field(default_factory=dict)
    storage: dict[str, str] = field(default_factory=dict)
    transient_bytes: dict[int, int] = field(default_factory=dict)
    known: dict[tuple[object, ...], tuple[tuple[Layout, ...], bool, int, int]] = field(default_factory=dict)
    fullest: dict[int, dict[str, int]] | None = None
    peak_event: int = 0

    def run(self) -> MemoryProfile:
        tick("profiled op", len(self.program.ops))
        for at, op in enumerate(self.program.ops):
            self._extend_operands(at, op)
            self._op(at, op)
        self._assign_kinds()
        return self._profile()

    @cached_property
    def events(self) -> list[_Moment]:
        """Every wait and op in the order in which they run."""
        order: list[_Moment] = []
        pending: dict[str, int] = {}
        for at, op in enumerate(self.program.ops):
            if at == self.program.turn:
                order += [_Moment(at, name) for name in self._waited_at_end(pending)]
                pending.clear()
            if op.kind != "input":
                for name, is_window in self._waited_before(op):
                    if is_window or pending.pop(name, None) is not None:
                        order.append(_Moment(at, name))
            order.append(_Moment(at))
            if op.is_collective:
                pending[op.writes[0].name] = at
        end = len(self.program.ops)
        return [*order, *(_Moment(end, name) for name in self._waited_at_end(pending)), _Moment(end)]

    def _waited_before(self, op: Op) -> Iterator[tuple[str, bool]]:
        """Yield what is waited for before ``op``, and whether it is rows of neighbours or their window, in order."""
        for i, h in enumerate(op.halos):
            yield self.launch_of.get(op.reads[h.operand], op.reads[h.operand]), False
            yield from ((name, True) for name in _window_names(op, i))
        yield from ((self.launch_of.get(name, name), False) for name in op.reads)

    def _waited_at_end(self, pending: Mapping[str, int]) -> list[str]:
        """Return what is still under way when a phase ends, in the order in which it is returned: results first."""
        results = (self.launch_of.get(name, name) for _, name in self.program.results)
        return list(dict.fromkeys([*(name for name in results if name in pending), *pending]))

    @cached_property
    def launch_of(self) -> dict[str, str]:
        """For each tensor of a bucket the bucket's first tensor, by whose name it is waited for."""
        return {t.name: op.writes[0].name for op in self.program.ops if op.bucket for t in op.writes}

    @cached_property
    def op_at(self) -> dict[int, int]:
        return {m.at: i for i, m in enumerate(self.events) if not m.waited}

    @cached_property
    def wait_at(self) -> dict[str, int]:
        return {m.waited: i for i, m in enumerate(self.events) if m.waited}

    def _extend_operands(self, at: int, op: Op) -> None:
        for name in () if op.halos else op.reads:
            self._extend_lifetime(name, self.op_at[at])

    def _extend_lifetime(self, name: str, event: int) -> None:
        held = self.allocations.get(self.storage.get(name, ""))
        if held is not None:
            held.last = max(held.last, event)

    def _allocate(self, name: str, nbytes: int, first: int, last: int | None = None) -> None:
        self.allocations[name] = _Allocation(nbytes, first, first if last is None else last)
        self.storage[name] = name

    def _op(self, at: int, op: Op) -> None:
        if op.kind == "input":
            self._input(op)
        elif op.is_collective:
            self._collective(at, op)
        elif op.kind == "compute":
            self._compute(at, op)
        elif op.kind == "decomposed":
            self._decomposed(at, op)
        else:
            for tensor in op.writes:
                self.layouts[tensor.name] = (
                    self._stored_layout(op, tensor) if op.stores or op.restores else self._local(tensor)
                )
                if not tensor.host:
                    self._allocate(tensor.name, self._bytes(tensor), self.op_at[at])

    def _shape(self, tensor: LocalTensor) -> tuple[int, ...]:
        return tensor.meta.local_shape(tensor.spec, self.mesh, self.at if any(self.at) else None)

    def _bytes(self, tensor: LocalTensor) -> int:
        return math.prod(self._shape(tensor)) * tensor.meta.itemsize if any(self.at) else tensor.bytes

    def _local(self, tensor: LocalTensor) -> Layout:
        return contiguous(self._shape(tensor))

    def _stored_layout(self, op: Op, tensor: LocalTensor) -> Layout:
        """Return the layout of what is stored or restored: both keep strides."""
        return self.layouts.get(op.reads[0], self._local(tensor))

    def _input(self, op: Op) -> None:
        """Allocate what an input holds for a part of the step. What lives throughout is counted by
        ``held_throughout``."""
        tensor, meaning = op.writes[0], self.graph.input_of[op.node]
        self.layouts[tensor.name] = self._local(tensor)
        cut = not tensor.spec.is_replicated
        for row in of_input(self.graph, meaning, tensor.meta, self.options, cut=cut):
            if row.throughout:
                continue
            name = tensor.name if row.size == "shard" else f"{tensor.name}|given"
            first = self._event(row.born, 0)
            size = self._bytes(tensor) if row.size == "shard" else tensor.meta.bytes
            self._allocate(name, size, first, self._event(row.dies, first))
            self.allocations[name].kind = row.kind
        written = (o.name for o in self.graph.outputs if o.kind == "mutation")
        if meaning.kind == "buffer" and meaning.name in written:
            self._keep_apart(tensor.name)

    def _keep_apart(self, buffer: str) -> None:
        """Allocate copies of what the backward reads of a buffer, which gets a new value before it."""
        program, turn = self.program, self.program.turn
        for at, op in enumerate(program.ops[:turn] if turn in self.op_at else ()):
            for tensor in op.writes:
                last = min(program.last_read.get(tensor.name, at), len(program.ops) - 1)
                if program.root[tensor.name] == buffer and last >= turn:
                    name = f"{tensor.name}|kept"
                    self._allocate(name, self._bytes(tensor), self.op_at[turn] - 1, self.op_at[last])
                    self.allocations[name].kind = "activations"

    def _event(self, when: Event, read: int) -> int:
        """Return the event at which something happens; ``read`` is known for what happens when a tensor is read."""
        turn = self.op_at.get(self.program.turn)
        if when == Event.TURN:
            return turn or 0
        last = len(self.events)
        return {
            Event.START: 0,
            Event.READ: read,
            Event.FORWARD_DONE: (last if turn is None else turn) - 1,
            Event.BACKWARD_DONE: self.last_event,
            Event.END: last - 1,
        }[when]

    @cached_property
    def last_event(self) -> int:
        """The last event of the backward."""
        return max(len(self.events) - 2, 0)

    def _collective(self, at: int, op: Op) -> None:
        if op.bucket:
            self._bucket(at, op)
            return
        source, tensor, step = op.reads[0], op.writes[0], op.step
        assert step is not None
        if op.in_place and self.layouts[source].is_contiguous:
            self.layouts[tensor.name], self.storage[tensor.name] = self._local(tensor), self.storage[source]
            self._extend_lifetime(tensor.name, self.wait_at[tensor.name])
            return
        p = packing(step, tensor.meta, self.mesh, self.layouts[source], self._shape(tensor))
        launch, wait = self.op_at[at], self.wait_at[tensor.name]
        self.layouts[tensor.name] = self._local(tensor)
        self.transient_bytes[launch] = p.launch
        if p.keeps_source:
            self._extend_lifetime(source, wait - 1)
        self._allocate(f"{tensor.name}|sent", p.sent, launch, wait - 1)
        if p.unpacked:
            self._allocate(f"{tensor.name}|received", p.received, launch, wait)
        self._allocate(tensor.name, p.unpacked or p.received, wait if p.unpacked else launch, wait)

    def _bucket(self, at: int, op: Op) -> None:
        shards = [self.layouts[name] for name in op.reads]
        p = bucket_packing(op.bucket, [t.meta for t in op.writes], self.mesh, shards, [*map(self._shape, op.writes)])
        launch, wait = self.op_at[at], self.wait_at[op.writes[0].name]
        self.transient_bytes[launch] = p.launch
        self._allocate(f"{op.name}|sent", p.sent, launch, wait - 1)
        self._allocate(f"{op.name}|received", p.received, launch, wait)
        for tensor, unpacked in zip(op.writes, p.unpacked, strict=True):
            self.layouts[tensor.name] = self._local(tensor)
            if unpacked:
                self._allocate(tensor.name, unpacked, wait)
            else:
                self.storage[tensor.name] = f"{op.name}|received"

    def _decomposed(self, at: int, op: Op) -> None:
        node, strategy, step, now = self.graph.by_name[op.node], op.strategy, op.step, self.op_at[at]
        assert strategy is not None and step is not None
        metas = tuple(self.graph.meta(v) for v in node.inputs)
        whole = local_op(
            node, strategy, metas, self.mesh, self.options.device, [self.layouts[name] for name in op.reads], self.at
        )
        self.transient_bytes[now] = ring_bytes(whole, step, op.operand, self.mesh.shape[step.axis])
        for tensor in op.writes:
            self.layouts[tensor.name] = self._local(tensor)
            self._allocate(tensor.name, self._bytes(tensor), now)

    def _compute(self, at: int, op: Op) -> None:
        node, strategy = self.graph.by_name[op.node], op.strategy
        assert strategy is not None
        operands = tuple(self.layouts[name] for name in self._windowed(at, op))
        now = self.op_at[at]
        if op.in_place:
            name, overwritten = op.writes[0].name, op.reads[op.operand]
            self.layouts[name], self.storage[name] = self.layouts[overwritten], self.storage[overwritten]
            return
        made, aliased, self.transient_bytes[now], more = self._run(op, node, strategy, operands)
        for tensor, layout in zip(op.writes, made, strict=True):
            self.layouts[tensor.name] = layout
            if aliased:
                if op.reads[0] in self.storage:
                    self.storage[tensor.name] = self.storage[op.reads[0]]
                    self._extend_lifetime(tensor.name, now)
            else:
                self._allocate(tensor.name, self._bytes(tensor) + more, now)

    def _windowed(self, at: int, op: Op) -> list[str]:
        """Return the names of the op's operands. Operands with halos become windows, which are made one after the
        other."""
        operands = list(op.reads)
        for i, h in enumerate(op.halos):
            source, size = operands[h.operand], self.program.tensors[op.reads[h.operand]].meta.itemsize
            (rows, window), w = _window_names(op, i), windowed(self.layouts[source], h, self.at)
            exchanged, made = self.wait_at[rows], self.wait_at[window]
            self._extend_lifetime(source, made)
            self._allocate(f"{rows}|sent", w.sent * size, exchanged)
            self._allocate(rows, w.received * size, exchanged, made)
            self.transient_bytes[made] = w.padding * size
            self.layouts[window], operands[h.operand] = w.layout, window
            if w.made:
                self._allocate(window, w.made * size, made)
            elif source in self.storage:
                self.storage[window] = self.storage[source]
        for name in operands:
            self._extend_lifetime(name, self.op_at[at])
        return operands

    def _run(
        self, op: Op, node: Node, strategy: Strategy, operands: tuple[Layout, ...]
    ) -> tuple[tuple[Layout, ...], bool, int, int]:
        """Return what an op makes and holds; equal ops share one result.

        Returns:
            The layouts of the results, whether they are views, the bytes of transients, and the bytes by which the
            memory of a result is larger than the result.
        """
        key = (self.graph.kinds[node.name], id(strategy), *map(id, operands))  # all three live as long as this
        if key not in self.known:
            metas = tuple(self.graph.meta(v) for v in node.inputs)
            made, aliased = results(node, operands, [*map(self._shape, op.writes)])
            one = local_op(node, strategy, metas, self.mesh, self.options.device, operands, self.at)
            gathered = sum(s.bytes for s in op.sent if s.kind == "all_gather")
            self.known[key] = made, aliased, transients(one) + summary_bytes(one, gathered), excess_bytes(one)
        return self.known[key]

    def _assign_kinds(self) -> None:
        start, end = self.op_at.get(self.program.turn, len(self.events)), len(self.events) - 1
        for shared_by_all in self._stored(self.program.held_once):
            shared_by_all.last = max(shared_by_all.last, self.last_event)
        for output, name in self.program.results:
            held = self.allocations.get(self.storage.get(name, ""))
            if held is None:
                continue
            row = of_output(self.graph, output)
            held.last = max(held.last, self._event(row.dies, held.last))
            held.kind = held.kind or row.kind
            if is_gradient(output):
                self._cast_back(output.name, name, held, end)
        for held in self.allocations.values():
            held.kind = held.kind or ("activations" if held.first < start <= held.last else "temporaries")

    @cached_property
    def parameters(self) -> dict[str, TensorMeta]:
        """Parameters by name; where several share a name, the first."""
        named = [(i, self.graph.by_name[i.node].outputs[0]) for i in reversed(self.graph.inputs)]
        return {i.name: meta for i, meta in named if i.kind == "parameter" and meta is not None}

    def _cast_back(self, parameter: str, name: str, held: _Allocation, end: int) -> None:
        """Count the cast of a gradient that was reduced in another dtype than its parameter's.

        Gradients are cast one after the other when the backward is over.
        """
        stored = self.parameters[parameter]
        made = self.program.tensors[name]
        if stored.dtype != made.meta.dtype:
            size = self._bytes(made) // made.meta.itemsize * stored.itemsize
            held.last = end - 1
            self.transient_bytes[end - 1] = max(self.transient_bytes.get(end - 1, 0), size)
            self._allocate(f"{name}|cast", size, end)
            self.allocations[f"{name}|cast"].kind = "gradients"

    def _profile(self) -> MemoryProfile:
        made: dict[int, list[_Allocation]] = {}
        freed: dict[int, list[_Allocation]] = {}
        for allocation in self.allocations.values():
            made.setdefault(allocation.first, []).append(allocation)
            freed.setdefault(max(allocation.last, allocation.first), []).append(allocation)
        held = dict.fromkeys(KINDS, 0)
        for kind, _, size in self._held_throughout():
            held[kind] += size
        held["activations"] += (self.options.in_flight - 1) * self.saved_bytes
        running = sum(held.values())
        timeline = [0] * (len(self.program.ops) + 1)
        best: tuple[int, int, dict[str, int]] = (-1, 0, held)
        for i, event in enumerate(self.events):
            for allocation in made.get(i, ()):
                held[allocation.kind] += allocation.nbytes
                running += allocation.nbytes
            transient_bytes = self.transient_bytes.get(i, 0)
            step = self._step() if self.steps and i == len(self.events) - 1 else 0
            total = running + transient_bytes + step
            if total > timeline[event.at]:
                timeline[event.at] = total
                if self.fullest is not None or total > best[0]:
                    now = held | {"temporaries": held["temporaries"] + transient_bytes, "step": held["step"] + step}
                    if total > best[0]:
                        best, self.peak_event = (total, event.at, now), i
                    if self.fullest is not None and total > sum(self.fullest.get(event.at, {}).values()):
                        self.fullest[event.at] = now
            for allocation in freed.get(i, ()):
                held[allocation.kind] -= allocation.nbytes
                running -= allocation.nbytes
        return MemoryProfile(tuple(timeline), best[1], {k: v for k, v in best[2].items() if v})

    @property
    def saved_bytes(self) -> int:
        """Bytes that the forward keeps for the backward of one micro-batch, once the sweep has run."""
        turn = self.op_at.get(self.program.turn, len(self.events))
        once = set(map(id, self._stored(self.program.held_once)))
        kept = (a for a in self.allocations.values() if a.kind in ("activations", "inputs") and id(a) not in once)
        return sum(a.nbytes for a in kept if a.first < turn <= a.last)

    @property
    def once_bytes(self) -> int:
        """Bytes that all micro-batches of a call share, once the sweep has run."""
        return sum(a.nbytes for a in self._stored(self.program.held_once))

    def _stored(self, names: Collection[str]) -> list[_Allocation]:
        """Return the allocations in which tensors lie."""
        stored = sorted({self.storage[name] for name in names if name in self.storage})
        return [self.allocations[name] for name in stored]

    def by_node(self) -> dict[tuple[str, str], int]:
        """Return the bytes that are held at the peak, by kind and node."""
        found: dict[tuple[str, str], int] = {}

        def add(kind: str, node: str, size: int) -> None:
            if size:
                found[kind, node] = found.get((kind, node), 0) + size

        ops = self.program.ops
        nodes = {name: op.node for op in ops for name in (op.name, *(t.name for t in op.writes))}
        for kind, node, size in self._held_throughout():
            add(kind, node, size)
        for name, held in self.allocations.items():
            if held.first <= self.peak_event <= max(held.first, held.last):
                while name not in nodes and "|" in name:  # a buffer is named after its op or tensor: ``mm|sent``
                    name = name.rpartition("|")[0]
                add(held.kind, nodes.get(name, ""), held.nbytes)
        at = self.events[self.peak_event].at
        add("temporaries", ops[at].node if at < len(ops) else "", self.transient_bytes.get(self.peak_event, 0))
        if self.steps and self.peak_event == len(self.events) - 1:
            add("step", "", self._step())
        return found

    def _held_throughout(self) -> Iterator[HeldThroughout]:
        return held_throughout(self.program, self.graph, self.mesh, self.options, self.at)

    def _step(self) -> int:
        """Return what the optimizer's step needs besides parameters, gradients and state.

        Parameters whose state the host keeps step first, a few at a time, and then the others.
        """
        on_host: list[tuple[TensorMeta, ShardingSpec]] = []
        on_device: list[tuple[TensorMeta, ShardingSpec]] = []
        for op, t in self._inputs():
            meaning = self.graph.input_of[op.node]
            if meaning.trainable:
                (on_host if meaning.name in self.program.offloaded_optimizer else on_device).append((t.meta, t.spec))
        return max(
            step_bytes(on_device, self.mesh, self.options, self.at),
            chunk_bytes(on_host, self.mesh, self.options, self.at),
        )

    def _inputs(self) -> Iterator[tuple[Op, LocalTensor]]:
        return ((op, op.writes[0]) for op in self.program.ops if op.kind == "input")
