"""The local program as data: what every rank runs, in order, with what each op reads, writes, takes and costs.

Step time, peak memory, the emitted source and the executed graph all come from this one list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autopar.ir import Output, Phase, TensorMeta
from autopar.sharding import Halo, ShardingSpec, Strategy
from autopar.sharding.redistribution import Step

OpKind = Literal["input", "compute", "redistribute", "offload", "fetch", "wait", "decomposed"]
TensorRole = Literal["parameter", "buffer", "input", "activation", "gradient", "temporary"]


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor of the program: ``meta`` is global, ``bytes`` what the fullest rank holds of it.

    Args:
        host: it lies in the host's memory and takes none of the device's.
    """

    name: str
    meta: TensorMeta
    spec: ShardingSpec
    bytes: int
    host: bool = False


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective inside a compute op: rows of halos, or a summary that ranks gather.

    Args:
        kind: ``permute`` or ``all_gather``.
        operand: position of the operand that it is about.
        bytes: by which it is priced, as ``Op.wire_bytes``.
        seconds: predicted; the op's have them.
    """

    kind: Literal["permute", "all_gather"]
    operand: int
    axis: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the local program.

    Args:
        name: unique in the program.
        kind: an input, an op of the captured graph, one step of a redistribution, or a transfer: ``offload`` starts
            to copy a tensor to the host, ``fetch`` to copy one back, and ``wait`` stands still until an offload is
            done, or a collective. That for an offload reads the device's tensor and then the host's, so that the
            device's lives until it; that for a collective reads what the collective makes. ``decomposed`` is a
            contraction taken apart beside the gather of an operand or the scatter of its result.
        node: the captured node that it runs or whose value it redistributes.
        reads: names of the tensors read, as the node's operands are ordered.
        writes: the results.
        phase: forward or backward.
        strategy: of a compute op.
        step: of a redistribution.
        seconds: predicted.
        launch_s: of ``seconds`` of a collective, those in which it is launched, and those in which a bucket is
            packed and unpacked: no computation hides them.
        wire_bytes: the bytes by which the collective is priced; 0 for local ops.
        step_s: of a decomposed op, seconds that its collective would take by itself.
        operand: of a decomposed op, the one that is gathered, or whose dim the scattered one is; of a sum in place, the
            one that it overwrites.
        kernels: of ours that run it on the plan's devices, as ``autopar.kernels`` names them.
        alias: the result shares the memory of the first operand.
        bucket: of a collective that carries several tensors, the step of each, in the order of ``reads`` and
            ``writes``; they have kind, axis and reduction in common with ``step``.
        in_place: of an all-reduce that overwrites its operand, which nothing else reads, or of a sum that overwrites
            one of its operands, which nothing reads afterwards.
        halos: of a compute op, rows that it reads of its neighbours' shards.
        sent: of a compute op, the collectives inside it: ``seconds`` has theirs.
    """

    name: str
    kind: OpKind
    node: str
    reads: tuple[str, ...]
    writes: tuple[LocalTensor, ...]
    phase: Phase
    strategy: Strategy | None = None
    step: Step | None = None
    seconds: float = 0.0
    wire_bytes: int = 0
    alias: bool = False
    launch_s: float = 0.0
    bucket: tuple[Step, ...] = ()
    step_s: float = 0.0
    operand: int = -1
    kernels: tuple[str, ...] = ()
    in_place: bool = False
    halos: tuple[Halo, ...] = ()
    sent: tuple[Sent, ...] = ()

    @property
    def is_collective(self) -> bool:
        """Whether it starts a collective."""
        return self.kind == "redistribute" and self.step is not None and self.step.kind != "slice"

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange data in it: it starts a collective, or is a product decomposed beside one."""
        return self.is_collective or self.kind == "decomposed"

    @property
    def is_transfer(self) -> bool:
        """Whether it starts a copy between device and host."""
        return self.kind in ("offload", "fetch")


@dataclass(frozen=True)
class Arrangement:
    """How the collectives of a program were moved and put together; the program's ops say the same one by one.

    Args:
        reduced_bytes: reductions of gradients are launched together from so many bytes on; 0 is each by itself.
        gathered_bytes: the same for what is gathered before it is needed.
        prefetch: launches by which a gather runs ahead of its first reader; 0 is just before it.
        before_s: predicted seconds of the step as it was.
    """

    reduced_bytes: int = 0
    gathered_bytes: int = 0
    prefetch: int = 0
    before_s: float = 0.0


@dataclass(frozen=True)
class Program:
    """Ordered ops, and for each result of the captured graph the tensor that holds it.

    Args:
        arrangement: of the collectives; None where they stand as they were first placed.
        offloaded_optimizer: FQNs of parameters whose optimizer state the host keeps between the optimizer's steps.
        state_transfer_s: predicted seconds in which it comes for a step and goes after it.
    """

    ops: tuple[Op, ...]
    results: tuple[tuple[Output, str], ...]
    offloaded_optimizer: tuple[str, ...] = ()
    state_transfer_s: float = 0.0
    arrangement: Arrangement | None = None

    @cached_property
    def tensors(self) -> Mapping[str, LocalTensor]:
        return {t.name: t for op in self.ops for t in op.writes}

    @cached_property
    def writer(self) -> Mapping[str, int]:
        """Position of the op that makes each tensor."""
        return {t.name: i for i, op in enumerate(self.ops) for t in op.writes}

    @cached_property
    def first_read(self) -> Mapping[str, int]:
        """Position of the first op that reads each tensor."""
        first: dict[str, int] = {}
        for i, op in enumerate(self.ops):
            for name in op.reads:
                first.setdefault(name, i)
        return first

    @cached_property
    def last_read(self) -> Mapping[str, int]:
        """Position of the last op that reads each tensor; results are read after the end."""
        last: dict[str, int] = {}
        for i, op in enumerate(self.ops):
            for name in op.reads:
                last[name] = i
        for _, name in self.results:
            last[name] = len(self.ops)
        return last

    @cached_property
    def root(self) -> Mapping[str, str]:
        """The tensor whose memory each tensor occupies: itself, or what it is a view of."""
        roots: dict[str, str] = {}
        for op in self.ops:
            for t in op.writes:
                roots[t.name] = roots[op.reads[0]] if op.alias and op.reads else t.name
        return roots

    @cached_property
    def host_bytes(self) -> int:
        """The most that the host holds at once of what a rank offloads, until it was last fetched."""
        held = most = 0
        for at, op in enumerate(self.ops):
            held += sum(t.bytes for t in op.writes if t.host)
            most = max(most, held)
            if op.kind == "fetch" and self.last_read[op.reads[0]] == at:
                held -= self.tensors[op.reads[0]].bytes
        return most

    @property
    def collectives(self) -> tuple[Op, ...]:
        return tuple(op for op in self.ops if op.is_collective)


AGAIN = "|again"
"""Marks the ops and tensors of a second run in the backward."""
