"""Bytes of parameters, gradients and optimizer state on each device, and what an optimizer's step holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_models import (
    largest_chunk_bytes,
    optimizer_mode,
    optimizer_scalar_bytes,
    optimizer_state_bytes,
    optimizer_step_bytes,
)
from autopar.ir import FLOATS, ITEMSIZE, TensorMeta
from autopar.mesh import Mesh
from autopar.planner.options import Options
from autopar.sharding import ShardingSpec


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one parameter takes on a device in its stored spec, by kind."""

    parameter: int
    optimizer: int
    gradient: int
    step: int

    @property
    def total(self) -> int:
        """Bytes while the optimizer steps."""
        return self.parameter + self.optimizer + self.gradient + self.step


def master_dtype(dtype: str, options: Options) -> str | None:
    """Return the dtype of the master weights of parameters of ``dtype``; None if the optimizer steps on the parameters.

    With master weights, a step also makes their gradients in that dtype.
    """
    master = options.dtype_of("master")
    return master if dtype in FLOATS and dtype != master else None


def _shard(meta: TensorMeta, spec: ShardingSpec, mesh: Mesh, at: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the shard of the rank at coordinate ``at``, or of the largest."""
    return tuple(spec.local_shape(meta.shape, mesh, at if any(at) else None))


def state_bytes(
    meta: TensorMeta, spec: ShardingSpec, mesh: Mesh, trainable: bool, options: Options, at: Sequence[int] = ()
) -> StateBytes:
    """Return what a parameter, its optimizer state, its gradient and the optimizer's step take on the rank at ``at``,
    or on the fullest."""
    shape = _shard(meta, spec, mesh, at)
    numel = math.prod(shape)
    held = numel * meta.itemsize
    if not trainable:
        return StateBytes(held, 0, 0, 0)
    master = master_dtype(meta.dtype, options)
    state = optimizer_state_bytes(options.optimizer, numel, meta.dtype, shape=shape, master_dtype=master)
    state += optimizer_scalar_bytes(options.optimizer)
    together = optimizer_mode(options.optimizer, options.device) == "foreach"
    step = (
        optimizer_step_bytes(options.optimizer, [numel], meta.dtype, master_dtype=master, shapes=[shape])
        if together
        else 0
    )
    step += numel * ITEMSIZE[master] if master else 0
    return StateBytes(held, state, held, step)


def step_bytes(
    parameters: Sequence[tuple[TensorMeta, ShardingSpec]], mesh: Mesh, options: Options, at: Sequence[int] = ()
) -> int:
    """Return the bytes that the optimizer's step makes on the rank at ``at``, or on the fullest.

    Args:
        parameters: all trained parameters in their order.
    """
    by_dtype: dict[str, list[tuple[int, ...]]] = {}
    for meta, spec in parameters:
        by_dtype.setdefault(meta.dtype, []).append(_shard(meta, spec, mesh, at))
    total = 0
    for dtype, shapes in by_dtype.items():
        numels, master = list(map(math.prod, shapes)), master_dtype(dtype, options)
        total += optimizer_step_bytes(
            options.optimizer, numels, dtype, master_dtype=master, device=options.device, shapes=shapes
        )
        total += sum(numels) * ITEMSIZE[master] if master else 0
    return total


def moved_state_bytes(
    meta: TensorMeta, spec: ShardingSpec, mesh: Mesh, options: Options, at: Sequence[int] = ()
) -> int:
    """Return the bytes of a parameter's optimizer state that the host can keep: all but the counters."""
    held = state_bytes(meta, spec, mesh, True, options, at).optimizer
    return held - optimizer_scalar_bytes(options.optimizer)


def chunk_bytes(
    parameters: Sequence[tuple[TensorMeta, ShardingSpec]], mesh: Mesh, options: Options, at: Sequence[int] = ()
) -> int:
    """Return the most bytes that parameters with optimizer state on the host bring to the rank at ``at``, or to the
    fullest, while they step."""
    return largest_chunk_bytes(
        [
            (
                math.prod(_shard(meta, spec, mesh, at)) * meta.itemsize,
                moved_state_bytes(meta, spec, mesh, options, at) + step_bytes([(meta, spec)], mesh, options, at),
            )
            for meta, spec in parameters
        ]
    )
