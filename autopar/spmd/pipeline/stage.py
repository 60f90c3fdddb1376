"""The programs of a stage on this rank, and what they take and give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch

from autopar.ir import Input, Output, TensorMeta
from autopar.mesh import Mesh
from autopar.sharding import ShardingSpec
from autopar.spmd.pipeline.links import Shape

Local: TypeAlias = Callable[[Any, list[Any]], tuple[Any, ...]]
"""A program's function of a rank and a list of inputs, which it empties."""


class Programs(Protocol):
    """What the loop runs of a stage: see ``autopar.runtime.execution.Executable``."""

    @property
    def forward(self) -> Local: ...
    @property
    def backward(self) -> Local: ...
    @property
    def inference(self) -> Local: ...
    @property
    def accumulate(self) -> Local | None: ...
    @property
    def inputs(self) -> Sequence[tuple[Input, ShardingSpec]]: ...
    @property
    def results(self) -> Sequence[tuple[Output, ShardingSpec, TensorMeta]]: ...
    @property
    def tangents(self) -> Sequence[tuple[Input, ShardingSpec]]: ...
    @property
    def gradients(self) -> Sequence[tuple[Output, ShardingSpec, TensorMeta]]: ...
    @property
    def accumulators(self) -> Sequence[tuple[Input, ShardingSpec, TensorMeta]]: ...
    @property
    def accumulated(self) -> Sequence[Output]: ...
    @property
    def once(self) -> Local | None: ...
    @property
    def once_inputs(self) -> Sequence[tuple[Input, ShardingSpec]]: ...


@dataclass(frozen=True)
class Parts:
    """The backward in two parts; see ``passes.split_backward``.

    Args:
        first: ``first(rank, saved_and_tangents) -> (*gradients of inputs, *kept)``.
        second: ``second(rank, kept_and_accumulators) -> gradients`` of parameters.
        accumulate: the same for all micro-batches but the last, which returns the sums.
        gradients, accumulated: meaning of each of these results.
    """

    first: Local
    second: Local
    accumulate: Local | None
    gradients: Sequence[Output]
    accumulated: Sequence[Output]


@dataclass(frozen=True)
class StagePrograms:
    """A stage of the pipeline, compiled for this rank.

    Args:
        program: the programs for one micro-batch.
        metas: whole shape and dtype of each input and tangent, for one micro-batch, by node.
        receives, sends: names of the activations from the stage before and to the next.
        returns, takes: names of those whose gradients go back and come back.
        parts: the backward in two parts, if the schedule splits it.
    """

    number: int
    program: Programs
    metas: Mapping[str, TensorMeta]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    returns: tuple[str, ...]
    takes: tuple[str, ...]
    parts: Parts | None = None

    @cached_property
    def sent_at(self) -> tuple[int, ...]:
        """Positions among the forward's results of what is sent."""
        at = {o.name: i for i, (o, _, _) in enumerate(self.program.results) if o.kind == "sent"}
        return tuple(at[name] for name in self.sends)

    @cached_property
    def outputs_at(self) -> tuple[int, ...]:
        """Positions among the forward's results of what the model returns."""
        return tuple(i for i, (o, _, _) in enumerate(self.program.results) if o.kind == "output")

    @cached_property
    def mutations_at(self) -> tuple[int, ...]:
        """Positions among the forward's results of new values of buffers."""
        return tuple(i for i, (o, _, _) in enumerate(self.program.results) if o.kind == "mutation")

    def received_shapes(self, mesh: Mesh, coordinate: Sequence[int]) -> tuple[Shape, ...]:
        """Return the local shapes of the activations that it receives."""
        found = {i.name: (i, s) for i, s in self.program.inputs if i.kind == "received"}
        return tuple(self._shape(*found[name], mesh, coordinate) for name in self.receives)

    def taken_shapes(self, mesh: Mesh, coordinate: Sequence[int]) -> tuple[Shape, ...]:
        """Return the local shapes of the gradients that come back."""
        found = {i.name: (i, s) for i, s in self.program.tangents}
        return tuple(self._shape(*found[name], mesh, coordinate) for name in self.takes)

    def _shape(self, meaning: Input, spec: ShardingSpec, mesh: Mesh, coordinate: Sequence[int]) -> Shape:
        meta = self.metas[meaning.node]
        return Shape(spec.local_shape(meta.shape, mesh, coordinate), getattr(torch, meta.dtype))
