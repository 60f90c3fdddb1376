"""What a pipelined module knows on this rank beyond its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar import _torch
from autopar.ir import TensorMeta
from autopar.pipelines.actions import Action, Joined, Schedule
from autopar.pipelines.messages import Traffic
from autopar.runtime.execution import Executable
from autopar.runtime.pipeline.absent import positions_of
from autopar.runtime.variants import State
from autopar.sharding import ShardingSpec
from autopar.spmd.pipeline.links import Links, groups_of
from autopar.spmd.pipeline.stage import StagePrograms

Phase = Literal["all", "forwards", "backwards"]


@dataclass(frozen=True)
class PipelineProgram:
    """A pipeline compiled for this rank.

    Args:
        stages: those of this rank, by number.
        schedule: what every rank runs.
        outputs: how each output is put together over micro-batches.
        makers: the stage that makes each output.
        metas: whole shape and dtype of each output for the whole batch.
        whole: outputs that the caller gets as plain tensors.
        differentiable: outputs that have a gradient on one device.
        tangents: outputs from which the backward starts.
        loss: the output from whose gradient alone the backward starts, if it is the scalar loss.
        buffers: how new values of buffers are put together; None where each micro-batch reads the one before.
        prologue: the program of what is computed of the whole batch before the first forward, and its results' specs.
        two_phase: whether backwards run in ``backward()`` even where the loss is known before.
        everywhere: whether all ranks get the outputs, or those of the stage that makes them.
        half: whether gradients may overflow, so that ranks agree on whether they have.
        inputs_kept: inputs that any stage keeps for its backward; filled by the first call that needs them.
    """

    stages: dict[int, StagePrograms]
    schedule: Schedule
    outputs: Mapping[str, Joined]
    makers: Mapping[str, int]
    metas: Mapping[str, TensorMeta]
    whole: frozenset[str]
    differentiable: frozenset[str]
    tangents: frozenset[str]
    loss: str | None
    buffers: Mapping[str, Joined | None]
    prologue: Executable | None
    prologue_metas: Mapping[str, TensorMeta]
    random: bool
    compiled: bool
    two_phase: bool
    everywhere: bool
    half: bool
    inputs_kept: list[tuple[str, ...]] = field(default_factory=list, compare=False)

    @cached_property
    def read(self) -> frozenset[str]:
        """The buffers that this rank's stages, or what they take from the prologue, are computed from."""
        programs: list[Any] = [stage.program for stage in self.stages.values()]
        programs += [] if self.prologue is None else [self.prologue]
        return frozenset[str]().union(*(program.read for program in programs))

    @cached_property
    def accumulators(self) -> tuple[Any, ...]:
        """Meaning, spec and meta of every accumulator on this rank."""
        return tuple(a for stage in self.stages.values() for a in stage.program.accumulators)

    @cached_property
    def parameters(self) -> dict[str, ShardingSpec]:
        """The parameters of this rank that get a gradient, with its spec."""
        return {
            o.name: spec
            for stage in self.stages.values()
            for o, spec, _ in stage.program.gradients
            if not o.name.startswith("input:")
        }

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of each of these gradients."""
        ends = (end for stage in self.stages.values() for end in stage.program.gradients)
        return {o.name: meta.shape for o, _, meta in ends}

    def order(self, phase: Phase) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of a phase by position along the pipeline."""
        return self._orders[phase]

    @cached_property
    def _orders(self) -> dict[Phase, tuple[tuple[Action, ...], ...]]:
        order = self.schedule.order
        return {
            "all": order,
            "forwards": tuple(tuple(a for a in row if a.kind == "F") for row in order),
            "backwards": tuple(tuple(a for a in row if a.kind != "F") for row in order),
        }

    @cached_property
    def _traffic(self) -> dict[tuple[Phase, int], Traffic]:
        return {}

    def traffic(self, phase: Phase, here: int) -> Traffic:
        """Return what the rank at a position exchanges in a phase."""
        if (phase, here) not in self._traffic:
            self._traffic[phase, here] = Traffic.of(self.order(phase), self.schedule.rank_of, here)
        return self._traffic[phase, here]


@dataclass
class PipelineState(State):
    """``State`` of a pipeline; ``mesh`` and ``device_mesh`` are those of a stage.

    Args:
        whole_mesh: the DeviceMesh of all ranks.
        position: this rank's place along the pipeline, and ``along`` the global ranks of all places beside it.
        rank_of: position of each stage.
        tied: stages that hold each parameter of several.
        held: stages that hold each parameter and buffer; those of none are everywhere.
        scale: the gradient of the loss with which the schedule runs before ``backward`` tells it.
        trains: whether the present call has gradients.
        failed: the error that has stopped the pipeline.
        delivered: number of its last backward among those of all pipelines; 0 if there was none.
    """

    whole_mesh: DeviceMesh | None = None
    position: int = 0
    along: tuple[int, ...] = ()
    rank_of: tuple[int, ...] = ()
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    held: dict[str, tuple[int, ...]] = field(default_factory=dict)
    scale: float = 1.0
    failed: str = ""
    trains: bool = True
    delivered: int = 0
    links: Links = field(init=False)
    group: Any = field(init=False)
    tied_groups: dict[tuple[int, ...], Any] = field(init=False)

    def connect(self, group: dist.ProcessGroup) -> None:
        """Create the links; all ranks must call this at once."""
        self.group = group
        pairs = {(a, b) for a, b in zip(self.rank_of, self.rank_of[1:], strict=False) if a != b}
        self.links = Links.between(pairs, self.position, self.along)
        sets = {positions_of(stages, self.rank_of) for stages in self.tied.values()}
        self.tied_groups = groups_of((s for s in sets if len(s) > 1), self.position, self.along)

    def disconnect(self) -> None:
        """Close all connections of a step, so that ranks that wait for this one stop waiting."""
        self.links.close()
        groups, self.tied_groups = list(self.tied_groups.values()), {}
        names = {name for name, n in zip(self.rank.groups, self.mesh.shape, strict=True) if n > 1}
        names |= {self.rank.whole} if self.mesh.size > 1 else set()
        _torch.close_groups([*groups, *map(_torch.group_called, sorted(names))])

    def positions(self, name: str) -> tuple[int, ...]:
        """Return the positions that hold a parameter that several stages have."""
        return positions_of(self.tied[name], self.rank_of)

    def counts(self, name: str) -> bool:
        """Whether a parameter counts here in norms and sizes: of the ranks that hold it, this is the first."""
        return name not in self.tied or self.positions(name)[0] == self.position
