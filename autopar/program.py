"""The local program as data: the ops that every rank runs, in order, with operands, results, bytes and costs.

Step time, peak memory, the emitted source and the executed graph all come from this one list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autopar.ir import Output, Phase, TensorMeta
from autopar.sharding import Halo, Loan, ShardingSpec, Strategy
from autopar.sharding.redistribution import Step

OpKind = Literal[
    "input", "compute", "redistribute", "offload", "fetch", "encode", "decode", "wait", "decomposed", "copy"
]


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor of the program. ``meta`` is global, ``bytes`` is what the fullest rank holds.

    Args:
        host: whether it lies in host memory and takes no device memory.
    """

    name: str
    meta: TensorMeta
    spec: ShardingSpec
    bytes: int
    host: bool = False


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective inside a compute op: it sends rows of halos or lent rows, or gathers summaries of shards.

    Args:
        kind: ``permute``, ``all_gather``, or ``all_to_all`` for rows that go to the ranks of their experts.
        operand: position of the operand that it serves.
        bytes: message size that it is priced by, like ``Op.wire_bytes``.
        seconds: predicted time, included in the op's seconds.
    """

    kind: Literal["permute", "all_gather", "all_to_all"]
    operand: int
    axis: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the local program.

    Args:
        name: unique name in the program.
        kind: ``input``; ``compute`` (an op of the captured graph); ``redistribute`` (one step); ``offload`` and
            ``fetch``, which start a copy to or from the host; ``encode`` and ``decode``, which store a value in another
            form and restore it; ``wait``, which waits for an offload or a collective;
            ``decomposed``, a contraction split to overlap with the gather of an operand or the scatter of its result;
            or ``copy``, of a part of a larger result, which the backward reads in its stead. A wait for an offload
            reads the device tensor and then the host tensor, so that the device tensor stays alive until then; a wait
            for a collective reads the collective's result.
        node: the captured node that it runs or whose value it redistributes.
        reads: names of the tensors that it reads, in the order of the node's operands.
        writes: its results.
        phase: forward or backward.
        strategy: strategy of a compute op.
        step: step of a redistribution.
        seconds: predicted time.
        launch_s: the part of a collective's ``seconds`` for its launch, and for packing and unpacking a bucket;
            computation cannot hide it.
        wire_bytes: message size that the collective is priced by; 0 for local ops.
        step_s: for a decomposed op, the seconds that its collective would take alone.
        operand: for a decomposed op, the operand that is gathered or that has the scattered dim; for an in-place sum,
            the operand that it overwrites.
        kernels: names of the kernels of ``autopar.kernels`` that run it on the plan's devices.
        alias: whether the result shares the memory of the first operand.
        bucket: for a collective that carries several tensors, the step of each, in the order of ``reads`` and
            ``writes``; all have the kind, axis and reduction of ``step``.
        in_place: whether an all-reduce overwrites its operand, which nothing else reads, or a sum overwrites one of
            its operands, which nothing reads afterwards.
        halos: rows of the neighbours' shards that a compute op reads.
        loan: rows that the ranks of a compute op lend to each other.
        sent: collectives inside a compute op; their time is included in ``seconds``.
        form: for an op that stores or restores a value, the name of the action that has it so.
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
    loan: Loan | None = None
    form: str = ""

    @property
    def is_collective(self) -> bool:
        """Whether it starts a collective."""
        return self.kind == "redistribute" and self.step is not None and self.step.kind != "slice"

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange data in it: it starts a collective, or is a decomposed product."""
        return self.is_collective or self.kind == "decomposed"

    @property
    def is_transfer(self) -> bool:
        """Whether it starts a copy between device and host."""
        return self.kind in ("offload", "fetch")

    @property
    def stores(self) -> bool:
        """Whether it puts a value of the forward into the place or form in which it is held."""
        return self.kind in ("offload", "encode")

    @property
    def restores(self) -> bool:
        """Whether it brings a stored value back."""
        return self.kind in ("fetch", "decode")

    @property
    def computing_s(self) -> float:
        """Predicted seconds for which the device computes, beside which copies hide."""
        return self.seconds if self.kind in ("compute", "decomposed", "encode", "decode") else 0.0


@dataclass(frozen=True)
class Arrangement:
    """How the collectives of a program were moved and bucketed; a summary of what its ops say one by one.

    Args:
        reduced_bytes: a bucket of gradient reductions is launched once it has this size; 0 launches each by itself.
        gathered_bytes: the same for all-gathers of what is needed later.
        prefetch: number of launches by which an all-gather runs ahead of its first reader; 0 is just before it.
        before_s: predicted seconds of the step before the arrangement.
    """

    reduced_bytes: int = 0
    gathered_bytes: int = 0
    prefetch: int = 0
    before_s: float = 0.0


@dataclass(frozen=True)
class Program:
    """Ordered ops, and the tensor that holds each result of the captured graph.

    Args:
        arrangement: how collectives were moved and bucketed; None if they stand where they were first placed.
        offloaded_optimizer: FQNs of parameters whose optimizer state lies on the host between optimizer steps.
        state_transfer_s: predicted seconds to fetch that state for a step and to return it.
        once: names of the ops of the forward that run once for all micro-batches of a call, before everything else.
    """

    ops: tuple[Op, ...]
    results: tuple[tuple[Output, str], ...]
    offloaded_optimizer: tuple[str, ...] = ()
    state_transfer_s: float = 0.0
    arrangement: Arrangement | None = None
    once: tuple[str, ...] = ()

    @cached_property
    def turn(self) -> int:
        """Position of the backward's first op; the number of ops where there is none."""
        return turn_of(self.ops)

    @cached_property
    def tensors(self) -> Mapping[str, LocalTensor]:
        return {t.name: t for op in self.ops for t in op.writes}

    @cached_property
    def held_once(self) -> frozenset[str]:
        """The tensors that ops of ``once`` make and others read, which are held throughout the step."""
        once = frozenset(self.once)
        made = {t.name for op in self.ops if op.name in once for t in op.writes}
        read = {name for op in self.ops if op.name not in once for name in op.reads}
        return frozenset(made & (read | {name for _, name in self.results}))

    @cached_property
    def writer(self) -> Mapping[str, int]:
        """Position of the op that writes each tensor."""
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
        """Position of the last op that reads each tensor; for results, the number of ops."""
        last: dict[str, int] = {}
        for i, op in enumerate(self.ops):
            for name in op.reads:
                last[name] = i
        for _, name in self.results:
            last[name] = len(self.ops)
        return last

    @cached_property
    def root(self) -> Mapping[str, str]:
        """The tensor whose memory each tensor occupies: itself, or the tensor that it is a view of."""
        roots: dict[str, str] = {}
        for op in self.ops:
            for t in op.writes:
                roots[t.name] = roots[op.reads[0]] if op.alias and op.reads else t.name
        return roots

    @cached_property
    def host_bytes(self) -> int:
        """Peak bytes of offloaded tensors of a rank on the host. Each is freed after its last fetch."""
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
"""Suffix in names of ops and tensors that the backward recomputes."""


def turn_of(ops: Sequence[Op]) -> int:
    """Return the position of the backward's first op, inputs aside; the number of ops where there is none."""
    return next((i for i, op in enumerate(ops) if op.phase == "backward" and op.kind != "input"), len(ops))
