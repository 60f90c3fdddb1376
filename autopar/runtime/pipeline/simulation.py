"""Runs every rank of a pipeline in one process, in an order that the schedule allows.

The loop and the mailbox of a real rank run here for all ranks of a stage at once: what is a tensor there is here one of
each rank. So what waits to be received, or may not have arrived yet, is held here as it is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir import Input, TensorMeta
from autopar.mesh import Mesh
from autopar.pipelines.actions import Joined, Schedule
from autopar.pipelines.messages import Message, Traffic
from autopar.runtime.meter import MemoryMeter
from autopar.runtime.simulation import Simulation, assemble, run, shard
from autopar.sharding import ShardingSpec
from autopar.spmd import Lowered, local_ranks
from autopar.spmd.pipeline.links import Mailbox, Shape
from autopar.spmd.pipeline.loop import Loop, joined
from autopar.spmd.pipeline.stage import StagePrograms
from autopar.spmd.ranks import at_micro_batch

Named = Mapping[tuple[str, str], Tensor]


@dataclass(frozen=True)
class PipelineSimulation(Simulation):
    """The results of one simulated step of a pipeline.

    Args:
        peaks: peak bytes on the fullest rank of each place along the pipeline.
    """

    peaks: tuple[int, ...] = ()


class OfRanks(tuple[Any, ...]):
    """A value of each rank of a stage."""

    __slots__ = ()

    def __add__(self, other: Any) -> OfRanks:
        return OfRanks(a + b for a, b in zip(self, other, strict=True))

    def numel(self) -> int:
        return sum(t.numel() for t in self)

    def contiguous(self) -> OfRanks:
        return OfRanks(t.contiguous() for t in self)


@dataclass
class Place:
    """The ranks at a place along the pipeline; the rank that the loop runs on.

    Args:
        meters: count the bytes that each of them holds.
    """

    mesh: Mesh
    micro_batch: int = 0
    meters: list[MemoryMeter] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.meters = [MemoryMeter() for _ in range(self.mesh.size)]

    def run(self, module: fx.GraphModule, inputs: list[Any]) -> list[Any]:
        """Run a program on each rank. ``inputs`` are of all ranks, and so are the results."""
        ranks = [at_micro_batch(r, self.micro_batch) for r in local_ranks(self.mesh)]
        feeds = [[value[r] for value in inputs] for r in range(len(ranks))]
        inputs.clear()
        made = run(module, ranks, feeds, self.meters)
        return [OfRanks(values) for values in zip(*made, strict=True)]


def simulated(module: fx.GraphModule) -> Callable[[Any, list[Any]], Any]:
    """Return a program as the loop calls it, on all ranks of a place."""
    return lambda place, inputs: place.run(module, inputs)


@dataclass
class _Feed:
    """What the loops ask for, and what they give.

    Args:
        values: constants, inputs, parameters and buffers, whole.
        ahead: what the prologue made, whole.
        outputs: what the model returns, of each micro-batch so far.
    """

    place: Place
    values: dict[tuple[str, str], Tensor]
    held: dict[Any, OfRanks]
    ahead: Mapping[str, Tensor]
    seed: int
    buffers: Mapping[str, Joined | None]
    made: dict[str, dict[int, Tensor]]
    changed: dict[str, dict[int, Tensor]]
    outputs: dict[str, list[OfRanks]] = field(default_factory=dict)

    def operand(self, stage: StagePrograms, meaning: Input, spec: ShardingSpec, micro_batch: int) -> Any:
        mesh = self.place.mesh
        if meaning.kind == "seed":
            return OfRanks(torch.tensor(self.seed, dtype=torch.int64) for _ in range(mesh.size))
        if meaning.kind in ("parameter", "constant"):
            return self.held[meaning.kind, meaning.name, spec]
        if meaning.name in self.ahead:
            return self._shards(self.ahead[meaning.name], spec)
        value, meta = self.values[meaning.kind, meaning.name], stage.metas[meaning.node]
        if meaning.kind == "input" and meta.shape and value.shape[0] != meta.shape[0]:
            value = value[micro_batch * meta.shape[0] : (micro_batch + 1) * meta.shape[0]]
        return self._shards(value, spec)

    def _shards(self, whole: Tensor, spec: ShardingSpec) -> OfRanks:
        mesh, meters = self.place.mesh, self.place.meters
        parts = []
        for r, meter in enumerate(meters):
            with meter:
                parts.append(shard(whole, spec, mesh, mesh.coordinate(r)))
        return OfRanks(parts)

    def _full(self, spec: ShardingSpec, meta: TensorMeta, value: float) -> Any:
        mesh, found = self.place.mesh, []
        for r, meter in enumerate(self.place.meters):
            with meter:
                shape = spec.local_shape(meta.shape, mesh, mesh.coordinate(r))
                found.append(torch.full(shape, value, dtype=getattr(torch, meta.dtype)))
        return OfRanks(found)

    def tangent(self, stage: StagePrograms, meaning: Input, spec: ShardingSpec, micro_batch: int) -> Any:
        return self._full(spec, stage.metas[meaning.node], 1.0)

    def zeros(self, stage: StagePrograms, at: int) -> Any:
        _, spec, meta = stage.program.accumulators[at]
        return self._full(spec, meta, 0.0)

    def keep(self, stage: StagePrograms, micro_batch: int, results: Sequence[Any]) -> None:
        for at in (*stage.outputs_at, *stage.mutations_at):
            output, spec, meta = stage.program.results[at]
            whole = assemble(results[at], spec, meta.shape, self.place.mesh).clone()
            if output.kind == "output":
                self.outputs.setdefault(output.name, []).append(results[at])
                self.made.setdefault(output.name, {})[micro_batch] = whole
            elif self.buffers.get(output.name, "same") is None:
                self.values["buffer", output.name] = whole
                self.changed[output.name] = {0: whole}
            else:
                self.changed.setdefault(output.name, {})[micro_batch] = whole

    def join_outputs(self) -> None:
        """Count what joining the micro-batches' outputs holds, one after the other."""
        for name in list(self.outputs):
            for r, parts in enumerate(zip(*self.outputs.pop(name), strict=True)):
                if len(parts) > 1:
                    with self.place.meters[r]:
                        torch.cat([part.flatten() for part in parts])


def simulate_pipeline(
    stages: Sequence[StagePrograms],
    schedule: Schedule,
    mesh: Mesh,
    named: Named,
    prologue: tuple[Lowered, Mapping[str, TensorMeta]] | None,
    outputs: Mapping[str, Joined],
    buffers: Mapping[str, Joined | None],
    seed: int,
) -> PipelineSimulation:
    """Run one step of a pipeline; outputs are whole and by name.

    Args:
        stages: with programs from ``simulated``.
        mesh: of a stage.
        named: whole parameters, buffers, constants and inputs.
        prologue: what is computed of the whole batch first, and the shape and dtype of its results.
    """
    values = dict(named)
    made: dict[str, dict[int, Tensor]] = {}
    changed: dict[str, dict[int, Tensor]] = {}
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        ahead = _prologue(prologue, mesh, values, seed)
        places = [Place(mesh) for _ in schedule.order]
        loops, feeds = [], []
        for position, place in enumerate(places):
            own = {s.number: s for s in stages if schedule.rank_of[s.number] == position}
            held = _held(own.values(), place, values)
            feed = _Feed(place, values, held, ahead, seed, buffers, made, changed)
            feeds.append(feed)
            loops.append(Loop(own, len(stages), place, schedule.micro_batches, feed))  # type: ignore[arg-type]
        _run(schedule, stages, places, loops)
        for feed in feeds:
            feed.join_outputs()
    grads: dict[str, Tensor] = {}
    for loop in loops:
        specs = {o.name: (spec, meta) for s in loop.stages.values() for o, spec, meta in s.program.gradients}
        for name, parts in loop.gradients.items():
            spec, meta = specs[name]
            whole = assemble(parts, spec, meta.shape, mesh)  # type: ignore[arg-type]
            grads[name] = grads[name] + whole if name in grads else whole
    found = {name: joined([each[i] for i in sorted(each)], outputs[name]) for name, each in made.items()}
    news = {n: joined([each[i] for i in sorted(each)], buffers.get(n) or "same") for n, each in changed.items()}
    peaks = tuple(max(m.peak for m in place.meters) for place in places)
    return PipelineSimulation(found, grads, news, max(peaks), peaks)


@dataclass
class _Wire:
    """What one place sends another: the receive that is posted n-th gets what is sent n-th.

    Args:
        going: what was sent and not received yet, by number.
        sent, posted: how many tensors were sent, and how many receives posted.
    """

    going: dict[int, OfRanks] = field(default_factory=dict)
    sent: int = 0
    posted: int = 0


@dataclass
class _Wires:
    """The links of a place.

    Args:
        between: the wires of each ordered pair of places, which all places share.
    """

    here: int
    between: defaultdict[tuple[int, int], _Wire]

    def send(self, to: int, tensor: OfRanks) -> _Sent:
        wire = self.between[self.here, to]
        wire.going[wire.sent] = tensor
        wire.sent += 1
        return _Sent()

    def receive(self, source: int, into: OfRanks) -> _Received:
        wire = self.between[source, self.here]
        wire.posted += 1
        return _Received(wire, wire.posted - 1, into)


class _Sent:
    def wait(self) -> None:
        """Nothing: the receiver copies."""


@dataclass
class _Received:
    wire: _Wire
    number: int
    into: OfRanks

    def wait(self) -> None:
        """Copy what was sent."""
        for target, source in zip(self.into, self.wire.going.pop(self.number), strict=True):
            target.copy_(source)


@dataclass
class _Mailbox(Mailbox):
    """The mailbox of a place, whose buffers are counted."""

    meters: Sequence[MemoryMeter] = ()

    def buffers(self, message: Message) -> list[Any]:
        made = []
        of_ranks: Sequence[Any] = self.shapes[message.kind, message.to]
        for shapes in of_ranks:
            found = []
            for shape, meter in zip(shapes, self.meters, strict=True):
                with meter:
                    found.append(torch.empty(shape.sizes, dtype=shape.dtype))
            made.append(OfRanks(found))
        return made


def _run(schedule: Schedule, stages: Sequence[StagePrograms], places: Sequence[Place], loops: Sequence[Loop]) -> None:
    between = defaultdict[tuple[int, int], _Wire](_Wire)
    mail, at = [], [0] * len(places)
    for here, place in enumerate(places):
        shapes: dict[tuple[str, int], Sequence[Any]] = {
            (kind, s.number): _shapes(shapes_of, place.mesh)
            for s in stages
            for kind, shapes_of in (("F", s.received_shapes), ("B", s.taken_shapes))
        }
        traffic = Traffic.of(schedule.order, schedule.rank_of, here)
        wires, device = _Wires(here, between), torch.device("cpu")
        mail.append(_Mailbox(wires, schedule.rank_of, shapes, device, traffic, meters=place.meters))  # type: ignore[arg-type]
    for action in schedule.topological:
        here = schedule.rank_of[action.stage]
        loops[here].step(schedule.order[here], at[here], mail[here])
        at[here] += 1
    for each in mail:
        each.finish()


def _shapes(shapes_of: Callable[[Mesh, Sequence[int]], Sequence[Shape]], mesh: Mesh) -> list[Any]:
    """Return the shapes of each tensor of a message on all ranks of a stage."""
    return list(zip(*(shapes_of(mesh, mesh.coordinate(r)) for r in range(mesh.size)), strict=True))


def _held(stages: Any, place: Place, values: Named) -> dict[Any, OfRanks]:
    """Return the shards that the ranks of a place hold throughout, with the whole batch, which each of them has."""
    found: dict[Any, OfRanks] = {}
    mesh = place.mesh
    for stage in stages:
        for meaning, spec in stage.program.inputs:
            key = meaning.kind, meaning.name, spec
            if meaning.kind in ("parameter", "constant") and key not in found:
                whole = values[meaning.kind, meaning.name].detach()
                found[key] = OfRanks(shard(whole, spec, mesh, mesh.coordinate(r)) for r in range(mesh.size))
            elif meaning.kind in ("input", "buffer") and (meaning.kind, meaning.name) in values:
                for meter in place.meters:
                    meter.hold([values[meaning.kind, meaning.name]])
    for r, meter in enumerate(place.meters):
        meter.hold(parts[r] for parts in found.values())
    return found


def _prologue(
    prologue: tuple[Lowered, Mapping[str, TensorMeta]] | None, mesh: Mesh, values: Named, seed: int
) -> dict[str, Tensor]:
    if prologue is None:
        return {}
    lowered, metas = prologue
    place = Place(mesh)

    def fed(meaning: Input, spec: ShardingSpec) -> Any:
        if meaning.kind == "seed":
            return OfRanks(torch.tensor(seed, dtype=torch.int64) for _ in range(mesh.size))
        whole = values[meaning.kind, meaning.name]
        return OfRanks(shard(whole, spec, mesh, mesh.coordinate(r)) for r in range(mesh.size))

    made = place.run(lowered.forward, [fed(m, s) for m, s in lowered.inputs])
    return {
        o.name: assemble(parts, spec, metas[o.name].shape, mesh)
        for (o, spec), parts in zip(lowered.results, made, strict=False)
    }
