"""Seconds of collectives and of kernels, and bytes of optimizer state, from the figures of a cluster."""

from autopar.cost_models.communication import KINDS, CollectiveCosts
from autopar.cost_models.compute import ComputeCosts, ComputeKind
from autopar.cost_models.memory import optimizer_state_bytes, optimizer_step_bytes

__all__ = [
    "KINDS", "CollectiveCosts", "ComputeCosts", "ComputeKind", "optimizer_state_bytes", "optimizer_step_bytes",
]  # fmt: skip
