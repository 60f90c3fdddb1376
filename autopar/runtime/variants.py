"""The compiled programs of a parallel module, and the state that its calls share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.attributes import AttributeOutput, Held, Place
from autopar.guards import Guards
from autopar.mesh import Mesh
from autopar.precision import computing_in
from autopar.runtime.accumulation import Sums
from autopar.runtime.execution import Executable
from autopar.runtime.measured_steps import StepClock
from autopar.sharding import ShardingSpec
from autopar.spmd.ranks import ProcessRank
from autopar.structure import Structure

MAX_VARIANTS = 16
"""Number of programs kept for other batch shapes and modes; beyond it a warning says that each costs a compilation."""


class Call(Protocol):
    """A bound call: its tensors and their names."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def structure(self) -> Structure: ...
    @property
    def tensors(self) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, eq=False)
class Variant:
    """A compiled program with how its inputs are named and how its outputs are assembled.

    Args:
        build: turns the list of output tensors into what the model returns.
        outputs: names of the outputs, in order.
        every_tangent: compiles the same program with a backward from every output.
        constants: tensors that the program holds as literals.
        guards: what the program was captured from.
        parameters: spec and global shape of each parameter that the program takes.
        number: index of the program in the order of compilation, the same on every rank.
        attribute_outputs: what a call stores in attributes of modules.
        lost: names of other places in which the forward stores tensors; cleared once the user is warned.
        without_room: compiles the same call so that tokens stay with their ranks, for a router that sends one too many.
    """

    executable: Executable
    build: Callable[[Sequence[Any]], Any]
    outputs: tuple[str, ...]
    every_tangent: Callable[[], Variant]
    constants: Mapping[str, Tensor]
    guards: Guards
    parameters: Mapping[str, tuple[ShardingSpec, tuple[int, ...]]]
    number: int
    attribute_outputs: tuple[AttributeOutput, ...] = ()
    lost: list[str] = field(default_factory=list)
    without_room: Callable[[], Variant] | None = None


@dataclass
class State:
    """What a parallel module knows beyond its parameters. Copies of the module share it.

    Args:
        bind: binds a call to the signature of the model's own forward.
        compile: compiles the variant for a call with other shapes, another mode, or a model that has changed.
        plan: the plan of the first variant.
        planned: the call that the plan was made for.
        place: places the named parameters and buffers on the mesh at these specs.
        mixed_precision: the precision of every call's autocast, if any.
        attributes_before: values that attributes had before any call, for those in which calls store tensors.
        graph: the graph that the plan was made for.
        variants: compiled programs by key, the most recently used first.
        compiled: number of programs compiled so far.
        plain_evaluation: whether a call without gradients returns plain tensors even beside a loss.
        compared: kinds of calls whose inputs were compared between the ranks, which should pass the same batch.
        execute: runs a call's program in another way than step by step: as a pipeline.
    """

    mesh: Mesh
    device_mesh: DeviceMesh
    bind: Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], Call]
    compile: Callable[[nn.Module, Any], Variant]
    place: Callable[[nn.Module, Sequence[str], Mapping[str, ShardingSpec]], None]
    plan: Any
    planned: Call
    local_batch: bool
    mixed_precision: str | None = None
    graph: Any = None
    variants: dict[Any, list[Variant]] = field(default_factory=dict)
    compiled: int = 0
    numbers: dict[Any, int] = field(default_factory=dict)
    attributes_before: dict[Place, Held] = field(default_factory=dict)
    plain_evaluation: bool = True
    compared: set[Any] = field(default_factory=set)
    execute: Callable[[Any, Any, Any, Any], Any] | None = None
    rank: ProcessRank = field(init=False)
    clock: StepClock = field(default_factory=StepClock)

    def __post_init__(self) -> None:
        self.rank = ProcessRank(self.device_mesh)

    @property
    def device(self) -> torch.device:
        """The device of this rank's shards."""
        return self.rank.device

    def number_of(self, key: Any) -> int:
        """Return a number that identifies a program and whether gradients are enabled, the same on every rank."""
        program = key, torch.is_grad_enabled()
        if program not in self.numbers:
            digest = hashlib.blake2b(repr(program).encode(), digest_size=8).digest()
            self.numbers[program] = int.from_bytes(digest, "big") >> 2
        return self.numbers[program]

    @property
    def programs(self) -> list[Variant]:
        """All programs, in the order in which they were compiled."""
        return sorted((v for known in self.variants.values() for v in known), key=lambda v: v.number)

    @property
    def is_full(self) -> bool:
        """Whether another program would replace the least recently used one."""
        return len(self.programs) >= MAX_VARIANTS

    def add(self, key: Any, variant: Variant) -> None:
        """Keep a program; if there are too many, drop the least recently used."""
        if self.is_full:
            oldest = next(iter(self.variants))
            self.variants[oldest].pop()
            if not self.variants[oldest]:
                del self.variants[oldest]
        self.variants.setdefault(key, []).insert(0, variant)

    def precision(self) -> AbstractContextManager[Any]:
        """Return the autocast context under which every call runs."""
        return computing_in(self.mixed_precision, self.device.type)

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        """Return the same object: a copy of the model has its own parameters but runs the same programs."""
        return self


class ParallelBase(nn.Module):
    """What the runtime needs to know of a parallel module."""

    _autopar: State
    _autopar_sums: Sums
