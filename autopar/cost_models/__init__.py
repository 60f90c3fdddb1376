"""Seconds of collectives and kernels, and bytes of optimizer state, from the figures of a cluster."""

from autopar.cost_models.chunks import largest_chunk_bytes, optimizer_chunk_bytes
from autopar.cost_models.communication import BUCKETED, DEARER, KINDS, CollectiveCosts
from autopar.cost_models.compute import ComputeCosts, ComputeKind
from autopar.cost_models.memory import (
    optimizer_mode,
    optimizer_scalar_bytes,
    optimizer_state_bytes,
    optimizer_step_bytes,
    optimizer_steps_alone,
    optimizer_table_bytes,
    optimizer_takes_whole,
)

__all__ = [
    "BUCKETED",
    "DEARER",
    "KINDS",
    "CollectiveCosts",
    "ComputeCosts",
    "ComputeKind",
    "largest_chunk_bytes",
    "optimizer_chunk_bytes",
    "optimizer_mode",
    "optimizer_scalar_bytes",
    "optimizer_state_bytes",
    "optimizer_step_bytes",
    "optimizer_steps_alone",
    "optimizer_table_bytes",
    "optimizer_takes_whole",
]
