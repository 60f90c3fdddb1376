"""A local program as torch.fx graphs, which lowering builds and the runtime and the simulation run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import fx

from autopar.ir import Input, Output, TensorMeta
from autopar.sharding import ShardingSpec

Ends: TypeAlias = Sequence[tuple[Input, ShardingSpec]]
Results: TypeAlias = Sequence[tuple[Output, ShardingSpec]]


class Key(NamedTuple):
    """A parameter, and the spec and dtype in which a program accumulates its gradient; programs may differ."""

    name: str
    spec: ShardingSpec
    dtype: str


def key_of(meaning: Input, spec: ShardingSpec, meta: TensorMeta) -> Key:
    """Return the key of an accumulator."""
    return Key(meaning.name, spec, meta.dtype)


@dataclass(frozen=True)
class Lowered:
    """The local program as two torch.fx graphs.

    ``forward(rank, *inputs, *held) -> (*results, *saved)`` and ``backward(rank, *saved, *tangents) -> gradients``.

    Args:
        inputs: meaning and spec of each forward input after ``rank``.
        results: meaning and spec of each result of the forward: outputs and mutations.
        saved: names of the tensors that the forward saves for the backward.
        tangents: meaning and spec of each tangent, in order.
        gradients: meaning and spec of each result of the backward.
        accumulators: with gradient accumulation, meaning and spec of each accumulator, which the backward takes after
            the tangents.
        accumulate: the backward of all micro-batches but the last, which returns ``accumulated``.
        accumulated: meaning and spec of each result of ``accumulate``: gradients of inputs, then the new values of the
            accumulators, in order.
        once: ``once(rank, *once_inputs) -> held``: what all micro-batches of a call share.
        once_inputs: meaning and spec of each of its inputs.
        held: names of its results, which the forward takes after its inputs.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    inputs: Ends
    results: Results
    saved: tuple[str, ...]
    tangents: Ends
    gradients: Results
    accumulators: Ends = ()
    accumulate: fx.GraphModule | None = None
    accumulated: Results = ()
    once: fx.GraphModule | None = None
    once_inputs: Ends = ()
    held: tuple[str, ...] = ()
