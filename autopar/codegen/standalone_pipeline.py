"""The main program of an emitted pipeline: a training step on every process of a job."""

from __future__ import annotations

import runpy
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar import _torch
from autopar.codegen.standalone import (
    Row,
    join,
    name_module,
    read_arguments,
    read_files,
    shard,
    take_steps,
    value_of,
    whole,
)
from autopar.ir import Input, Output, TensorMeta, Value
from autopar.pipelines.actions import Schedule
from autopar.pipelines.messages import Traffic
from autopar.pipelines.request import AXIS
from autopar.sharding.spec import ShardingSpec
from autopar.spmd.lowered import Key
from autopar.spmd.pipeline.links import Links, Mailbox
from autopar.spmd.pipeline.loop import Loop, joined
from autopar.spmd.pipeline.stage import Parts, StagePrograms
from autopar.spmd.ranks import ProcessRank

Named = dict[str, Tensor]


def main(program: Mapping[str, Any]) -> None:
    """Join the job that torchrun started, take steps, and print the outputs.

    Args:
        program: the namespace of an emitted pipeline.
    """
    arguments = read_arguments(program["__doc__"], "the batch of a step")
    for name in (*program["STAGES"], *program["SPLIT"].values(), *filter(None, [program["PROLOGUE"]])):
        if not (Path(program["__file__"]).parent / name).exists():
            raise SystemExit(f"{name} is missing. The programs of the stages must lie beside the one that runs them.")
    pipeline = Pipeline(program)
    given = read_files(arguments)
    take_steps(lambda: pipeline.step(given, arguments.seed), arguments)


@dataclass
class StageProgram:
    """What the loop runs of a stage, from the tables of its file; see ``StagePrograms``."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    accumulate: Callable[..., Any] | None
    inputs: list[tuple[Input, ShardingSpec]]
    results: list[tuple[Output, ShardingSpec, TensorMeta]]
    tangents: list[tuple[Input, ShardingSpec]]
    gradients: list[tuple[Output, ShardingSpec, TensorMeta]]
    accumulators: list[tuple[Input, ShardingSpec, TensorMeta]]
    accumulated: list[Output]
    once: Callable[..., Any] | None
    once_inputs: list[tuple[Input, ShardingSpec]]

    @property
    def inference(self) -> Callable[..., Any]:
        return self.forward


@dataclass(frozen=True)
class StageFile:
    """A stage, and the rows of the inputs of its file by node."""

    programs: StagePrograms
    rows: Mapping[str, Row]
    constants: Named


class Pipeline:
    """This process's place in an emitted pipeline."""

    def __init__(self, program: Mapping[str, Any]) -> None:
        self.program = program
        shape, names = map(tuple, program["MESH"])
        axis = names.index(AXIS)
        if len(names) == 1:
            shape, names = (*shape, 1), (*names, "stage")
        mesh = join(shape, names)
        at = mesh.get_coordinate()
        assert at is not None
        self.schedule = Schedule.from_text(program["SCHEDULE"])
        self.position = at[axis]
        device_mesh = mesh[tuple(n for i, n in enumerate(names) if i != axis)]
        self.rank = ProcessRank(device_mesh)
        self.group = _torch.whole_group(device_mesh)
        index = tuple(slice(None) if i == axis else place for i, place in enumerate(at))
        rank_of = self.schedule.rank_of
        pairs = {(a, b) for a, b in zip(rank_of, rank_of[1:], strict=False) if a != b}
        self.links = Links.between(pairs, self.position, tuple(mesh.mesh[index].tolist()))
        folder, outputs = Path(program["__file__"]).parent, program["OUTPUTS"]
        self.stages = {
            s: read_stage(folder / name, folder / program["SPLIT"][s] if s in program["SPLIT"] else None, s, outputs)
            for s, name in enumerate(program["STAGES"])
            if rank_of[s] == self.position
        }
        self.prologue = read_program(folder / program["PROLOGUE"]) if program["PROLOGUE"] else None

    def step(self, given: Mapping[str, Tensor], seed: int) -> dict[str, Named]:
        """Run all micro-batches of a step. Gradients are those of the sum of their losses.

        Returns:
            On rank 0 global gradients, and global outputs and new buffers of the last call, by name.
        """
        calls = self.program["CALLS"]
        values = Values(dict(given), seed)
        sums: dict[Key, Tensor] = {}
        with torch.no_grad():
            for number in range(calls):
                feed = Call(self, values, number, seed + number)
                loop = Loop(
                    {s: each.programs for s, each in self.stages.items()},
                    self.schedule.stages,
                    self.rank,
                    self.schedule.micro_batches,
                    feed,
                    sums,
                    delivers=number == calls - 1,
                )
                try:
                    loop.run(self.schedule.order[self.position], self._mailbox(), lambda _: None)
                except Exception as error:
                    for name in (*self.program["STAGES"], *self.program["SPLIT"].values()):
                        name_module(error, str(Path(self.program["__file__"]).parent / name))
                    raise
                sums = loop.sums
                buffers = feed.joined_buffers()
                values.given |= buffers
            ends = {o.name: (s, m) for each in self.stages.values() for o, s, m in each.programs.program.gradients}
            gradients = {
                name: whole(tensor, ends[name][1].shape, str(ends[name][0]), self.rank, self.group)
                for name, tensor in loop.gradients.items()
            }
        return self._on_rank_0({"outputs": feed.joined_outputs(), "grads": gradients, "buffers": buffers})

    def _mailbox(self) -> Mailbox:
        shapes = {}
        for s, each in self.stages.items():
            shapes["F", s] = each.programs.received_shapes(self.rank.mesh, self.rank.coordinate)
            shapes["B", s] = each.programs.taken_shapes(self.rank.mesh, self.rank.coordinate)
        traffic = Traffic.of(self.schedule.order, self.schedule.rank_of, self.position)
        return Mailbox(self.links, self.schedule.rank_of, shapes, self.rank.device, traffic)

    def _on_rank_0(self, made: dict[str, Named]) -> dict[str, Named]:
        """Return on rank 0 the results of all stages. Parts of the gradient of a shared parameter add up."""
        first = not any(self.rank.coordinate)
        every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(made if first else None, every)
        result: dict[str, Named] = {"outputs": {}, "grads": {}, "buffers": {}}
        for found in filter(None, every or []):
            for kind, tensors in found.items():
                for name, tensor in tensors.items():
                    known = result[kind].get(name) if kind == "grads" else None
                    result[kind][name] = tensor if known is None else known + tensor
        return result


@dataclass
class Values:
    """Global values of parameters, buffers and inputs, the same on all ranks.

    Args:
        given: those of the user's files, and new values of buffers.
    """

    given: dict[str, Tensor]
    seed: int

    def __call__(self, row: Row) -> Tensor:
        torch.manual_seed(self.seed + zlib.crc32(row[1].encode()))
        return value_of(row, self.given)


@dataclass
class Call:
    """What the loop of this rank asks of a call, and what it makes; see ``Feed``."""

    pipeline: Pipeline
    values: Values
    number: int
    seed: int
    held: dict[Any, Tensor] = field(default_factory=dict)
    outputs: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    buffers: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ahead = self._run_prologue()

    def operand(self, stage: StagePrograms, meaning: Input, spec: ShardingSpec, micro_batch: int) -> Tensor:
        rank, file = self.pipeline.rank, self.pipeline.stages[stage.number]
        row = file.rows[meaning.node]
        if meaning.kind == "seed":
            return torch.tensor(self.seed, device=rank.device)
        if meaning.kind == "buffer":
            return shard(self.values(row), row, rank)
        if meaning.kind == "input":
            ahead = self.ahead.get(meaning.name)
            at = self.number * self.pipeline.schedule.micro_batches + micro_batch
            return shard(rows_of(self.values(row), row, at) if ahead is None else ahead, row, rank)
        key = meaning.kind, meaning.name, spec
        if key not in self.held:
            constant = file.constants.get(meaning.name) if meaning.kind == "constant" else None
            self.held[key] = shard(self.values(row) if constant is None else constant, row, rank)
        return self.held[key]

    def tangent(self, stage: StagePrograms, meaning: Input, spec: ShardingSpec, micro_batch: int) -> Tensor:
        return self._full(spec, stage.metas[meaning.node], 1.0)

    def zeros(self, stage: StagePrograms, at: int) -> Tensor:
        _, spec, meta = stage.program.accumulators[at]
        return self._full(spec, meta, 0.0)

    def _full(self, spec: ShardingSpec, meta: TensorMeta, value: float) -> Tensor:
        rank = self.pipeline.rank
        local = spec.local_shape(meta.shape, rank.mesh, rank.coordinate)
        return torch.full(local, value, dtype=getattr(torch, meta.dtype), device=rank.device)

    def keep(self, stage: StagePrograms, micro_batch: int, results: Sequence[Any]) -> None:
        for at in (*stage.outputs_at, *stage.mutations_at):
            output, spec, meta = stage.program.results[at]
            value = whole(results[at], meta.shape, str(spec), self.pipeline.rank, self.pipeline.group).clone()
            if output.kind == "output":
                self.outputs.setdefault(output.name, {})[micro_batch] = value
                continue
            self.buffers.setdefault(output.name, {})[micro_batch] = value
            if self.pipeline.program["BUFFERS"].get(output.name, "same") is None:
                self.values.given[output.name] = value  # the next micro-batch reads it

    def joined_outputs(self) -> Named:
        """Return the outputs of the call that this rank's stages make."""
        how = self.pipeline.program["OUTPUTS"]
        return {name: joined([made[i] for i in sorted(made)], how[name]) for name, made in self.outputs.items()}

    def joined_buffers(self) -> Named:
        """Return the new values of the buffers of this rank's stages."""
        how = self.pipeline.program["BUFFERS"]
        return {n: joined([made[i] for i in sorted(made)], how.get(n) or "same") for n, made in self.buffers.items()}

    def _run_prologue(self) -> Named:
        """Return what is computed of the whole batch of the call before the first forward."""
        prologue, rank = self.pipeline.prologue, self.pipeline.rank
        if prologue is None:
            return {}
        fed = []
        for row in prologue["INPUTS"]:
            if row[0] == "seed":
                fed.append(torch.tensor(self.seed, device=rank.device))
                continue
            value = prologue["CONSTANTS"].get(row[1]) if row[0] == "constant" else None
            fed.append(shard(rows_of(self.values(row), row, self.number) if value is None else value, row, rank))
        made = prologue["forward"](rank, fed)
        return {
            name: whole(value, shape, spec, rank, self.pipeline.group)
            for value, (_, name, _, shape, spec) in zip(made, prologue["OUTPUTS"], strict=False)
        }


def rows_of(value: Tensor, row: Row, number: int) -> Tensor:
    """Return the rows of a micro-batch of an input that has those of all."""
    shape = row[3]
    if row[0] == "input" and len(shape) and value.shape[0] != shape[0]:
        return value[number * shape[0] : (number + 1) * shape[0]]
    return value


def read_program(path: Path) -> dict[str, Any]:
    """Run a file that lies beside this one."""
    return runpy.run_path(str(path), run_name=path.stem)


def read_stage(path: Path, split: Path | None, number: int, outputs: Collection[str]) -> StageFile:
    """Read the program of a stage.

    Args:
        split: its backward in two parts, if the schedule has them.
        outputs: names of what the model returns. All other tangents are gradients that the next stage returns; one of
            no single activation has a name of its own.
    """
    made = read_program(path)
    inputs, tangents, once = made["INPUTS"], made["TANGENTS"], made.get("ONCE", [])
    tables = (("input", inputs), ("tangent", tangents), ("once", once))
    rows = {f"{kind} {at}": row for kind, table in tables for at, row in enumerate(table)}
    accumulators = [(at, row) for at, row in enumerate(tangents) if row[0] == "accumulator"]
    program = StageProgram(
        made["forward"],
        made["backward"],
        made.get("accumulate"),
        [(Input(f"input {at}", row[0], row[1]), ShardingSpec.parse(row[4])) for at, row in enumerate(inputs)],
        _outputs(made["OUTPUTS"]),
        [
            (Input(f"tangent {at}", row[0], row[1]), ShardingSpec.parse(row[4]))
            for at, row in enumerate(tangents)
            if row[0] != "accumulator"
        ],
        _outputs(made["GRADIENTS"]),
        [
            (
                Input(f"tangent {at}", "accumulator", row[1]),
                ShardingSpec.parse(row[4]),
                TensorMeta(tuple(row[3]), row[2]),
            )
            for at, row in accumulators
        ],
        [_output(*end) for end in made.get("SUMS", [])],
        made.get("once"),
        [(Input(f"once {at}", row[0], row[1]), ShardingSpec.parse(row[4])) for at, row in enumerate(once)],
    )
    received = sorted(row[1] for row in inputs if row[0] == "received")
    sent = sorted(row[1] for row in made["OUTPUTS"] if row[0] == "sent")
    gradients = {row[1] for row in made["GRADIENTS"] if row[0] == "gradient" and row[1].startswith("input:")}
    returned = sorted(name.removeprefix("input:") for name in gradients - set(outputs))
    taken = sorted({row[1] for row in tangents if row[0] == "tangent"} - set(outputs))
    programs = StagePrograms(
        number,
        program,
        {node: TensorMeta(tuple(row[3]), row[2]) for node, row in rows.items()},
        tuple(received),
        tuple(sent),
        tuple(returned),
        tuple(taken),
        _parts(read_program(split)) if split is not None else None,
    )
    return StageFile(programs, rows, made["CONSTANTS"])


def _parts(made: Mapping[str, Any]) -> Parts:
    return Parts(
        made["forward"],
        made["backward"],
        made.get("accumulate"),
        [_output(row[0], row[1]) for row in made["GRADIENTS"]],
        [_output(*end) for end in made.get("SUMS", [])],
    )


def _outputs(table: Sequence[Row]) -> list[tuple[Output, ShardingSpec, TensorMeta]]:
    return [(_output(r[0], r[1]), ShardingSpec.parse(r[4]), TensorMeta(tuple(r[3]), r[2])) for r in table]


def _output(kind: Any, name: str) -> Output:
    return Output(Value(name), kind, name)
