"""The most bytes that the ranks of a pipeline hold, from what each of their stages does and the schedule."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from autopar.mesh import Mesh
from autopar.pipelines.actions import Kind, Schedule
from autopar.pipelines.messages import waiting
from autopar.planner.footprint.state import state_bytes
from autopar.planner.memory.exact import profile
from autopar.planner.memory.lifetimes import held_throughout
from autopar.planner.options import Options
from autopar.planner.pipeline.parts import Parts, weight_ops
from autopar.planner.search.search import Planned
from autopar.program import LocalTensor


class Alone(NamedTuple):
    """The most bytes that a stage holds with one micro-batch: during each kind of action, and in the optimizer's
    step."""

    during: Mapping[Kind, int]
    step: int


@dataclass(frozen=True)
class StageBytes:
    """What a stage holds and sends. Bytes.

    Args:
        takes: names of the sent activations whose gradients come back.
        options: with one micro-batch in flight.
        known: what was found out about the stage by itself, which equal stages share.
    """

    planned: Planned
    takes: Collection[str]
    parts: Parts
    mesh: Mesh
    options: Options
    known: dict[str, Alone] = field(default_factory=dict, compare=False)

    def alone(self, kinds: Collection[Kind]) -> Alone:
        """Return what the stage holds by itself in a schedule that has it run these kinds of actions."""
        if "I" not in kinds:
            return self._alone("one")
        if "B" not in kinds:
            return self._alone("two")
        one, two = self._alone("one"), self._alone("two")
        return Alone({**two.during, "B": one.during["B"]}, max(one.step, two.step))

    def _alone(self, parts: str) -> Alone:
        """Return the same for a backward in one part or two."""
        if parts not in self.known:
            weights = weight_ops(self.planned.program) if parts == "two" else frozenset[str]()
            self.known[parts] = _alone(self.planned, self.mesh, self.options, weights)
        return self.known[parts]

    @cached_property
    def static(self) -> int:
        """Parameters with the optimizer state on the device, gradients or their sums, and what all micro-batches
        share."""
        return static_bytes(self.planned, self.mesh, self.options) + self.parts.held_once

    @cached_property
    def given(self) -> Mapping[tuple[str, str], int]:
        """The batch, buffers and constants that the stage reads, by kind and name."""
        graph = self.planned.decisions.graph
        held = held_throughout(self.planned.program, graph, self.mesh, self.options)
        rows = ((graph.input_of[row.node], row.nbytes) for row in held if row.kind in ("inputs", "buffers"))
        return {(meaning.kind, meaning.name): nbytes for meaning, nbytes in rows}

    @cached_property
    def outputs(self) -> Mapping[str, int]:
        return output_bytes(self.planned)

    @cached_property
    def received(self) -> int:
        """The activations of a micro-batch from the stage before."""
        return sum(t.bytes for _, t in inputs_of(self.planned, "received"))

    @cached_property
    def returned(self) -> int:
        """The gradients of a micro-batch from the next stage."""
        return sum(t.bytes for name, t in inputs_of(self.planned, "tangent") if name in self.takes)

    @cached_property
    def sent(self) -> int:
        """What goes to the next stage that the backward does not hold anyway."""
        program = self.planned.program
        read = {program.root[name] for op in program.ops if op.phase == "backward" for name in op.reads}
        names = (name for output, name in program.results if output.kind == "sent")
        return sum(program.tensors[name].bytes for name in names if program.root[name] not in read)

    @cached_property
    def message(self) -> int:
        """A rank's part of what goes to the next stage, or of the gradients that come back."""
        tensors = self.planned.program.tensors
        sizes = {o.name: tensors[name].bytes for o, name in self.planned.program.results if o.kind == "sent"}
        return max(sum(sizes.values()), self.returned)


def rank_peaks(made: Schedule, stages: Sequence[StageBytes]) -> tuple[int, ...]:
    """Return the most bytes that a device of each rank holds.

    While a stage runs its forward or backward, it holds the peak of that, what its other micro-batches in flight and
    the other stages of the rank keep, the outputs of all micro-batches so far, and messages: that of the next action,
    and those that it sent and that may not have arrived. In the end outputs are joined one by one.
    """
    kinds: dict[int, set[Kind]] = {s: set() for s in range(made.stages)}
    for action in chain.from_iterable(made.order):
        kinds[action.stage].add(action.kind)
    into = {("F", s): stage.received for s, stage in enumerate(stages)}
    into |= {("B", s): stage.returned for s, stage in enumerate(stages)}
    out = {("F", s + 1): stage.sent for s, stage in enumerate(stages)}
    m = made.micro_batches
    peaks = []
    for rank in range(made.ranks):
        mine = {s: stages[s] for s, r in enumerate(made.rank_of) if r == rank}
        alone = {s: stage.alone(kinds[s]) for s, stage in mine.items()}
        outputs = {s: sum(stage.outputs.values()) for s, stage in mine.items()}
        every, static = sum(outputs.values()), sum(stage.static for stage in mine.values())
        given = {name: size for stage in mine.values() for name, size in stage.given.items()}
        throughout = static + sum(given.values())
        beside = {s: throughout - stage.static - sum(stage.given.values()) for s, stage in mine.items()}
        largest = max((size for stage in mine.values() for size in stage.outputs.values()), default=0)
        most = max(alone[s].step + beside[s] + m * every - outputs[s] for s in mine)
        most = max(most, throughout + m * (every + largest * (m > 1)))
        held, done = dict.fromkeys(mine, 0), dict.fromkeys(mine, 0)
        for (kind, s, _), coming, going in waiting(made.order, made.rank_of, rank):
            parts = mine[s].parts
            before = held[s] - (parts.held if kind in ("B", "I") else parts.kept if kind == "W" else 0)
            others = beside[s] + sum(held[t] for t in mine if t != s)
            messages = sum(into[m.kind, m.to] for m in coming)
            messages += sum(out.get((m.kind, m.to), into[m.kind, m.to]) for m in going)
            returned = sum(done[t] * outputs[t] for t in mine) - (kind != "F") * outputs[s]
            most = max(most, alone[s].during[kind] + before + others + returned + messages)
            done[s] += kind == "F"
            held[s] = before + {"F": parts.held, "I": parts.kept}.get(kind, 0)
        peaks.append(most)
    return tuple(peaks)


def static_bytes(planned: Planned, mesh: Mesh, options: Options) -> int:
    """Return the bytes of a stage's parameters with the optimizer state on the device, and gradients or their sums."""
    sums = {name: tensor.bytes for name, tensor in inputs_of(planned, "accumulator")}
    gradients = (
        max(state_bytes(t.meta, t.spec, mesh, True, options).gradient, sums.get(name, 0))
        for name, t in inputs_of(planned, "parameter")
        if name in planned.decisions.reduced_dtype
    )
    held = held_throughout(planned.program, planned.decisions.graph, mesh, options)
    return sum(gradients) + sum(row.nbytes for row in held if row.node and row.kind in ("parameters", "optimizer"))


def output_bytes(planned: Planned) -> Mapping[str, int]:
    """Return the bytes of each tensor that a stage makes of the model's outputs, by the name of an output."""
    program = planned.program
    given = {op.writes[0].name for op in program.ops if op.kind == "input"}
    made = {program.root[name]: output.name for output, name in program.results if output.kind == "output"}
    return {output: program.tensors[name].bytes for name, output in made.items() if name not in given}


def inputs_of(planned: Planned, kind: str) -> Iterator[tuple[str, LocalTensor]]:
    """Yield the name and the tensor of every input of a kind."""
    graph = planned.decisions.graph
    for op in planned.program.ops:
        if op.kind == "input" and graph.input_of[op.node].kind == kind:
            yield graph.input_of[op.node].name, op.writes[0]


def _alone(planned: Planned, mesh: Mesh, options: Options, weights: Collection[str]) -> Alone:
    """Return the peaks of a stage whose backward runs the ops ``weights`` last; what they read is held until then."""
    program, turn = planned.program, planned.program.turn
    inputs = [op for op in program.ops[turn:] if op.name not in weights]
    rest = [op for op in program.ops[turn:] if op.name in weights]
    program = replace(program, ops=(*program.ops[:turn], *inputs, *rest))
    timeline = profile(program, planned.decisions.graph, mesh, options).timeline
    forward, first, second = (
        max(held, default=0)
        for held in (timeline[:turn], timeline[turn : turn + len(inputs)], timeline[turn + len(inputs) : -1])
    )
    return Alone({"F": forward, "B": first, "I": first, "W": second}, timeline[-1])
