"""The custom ops ``torch.ops.autopar.*`` that replace torch's own in a captured graph.

Each is the same function of its (local) operands on every device and mesh. Importing this package registers all ops.
"""

from __future__ import annotations

from autopar.ops import (
    along,
    attention,
    batch_norm,
    contract,
    convolution,
    cross_entropy,
    ctc,
    embedding,
    experts,
    grouped,
    indexing,
    interpolation,
    lengths,
    linear_algebra,
    linear_nll,
    norms,
    pooling,
    random,
    routing,
    statistics,
)

__all__ = [
    "along",
    "attention",
    "batch_norm",
    "contract",
    "convolution",
    "cross_entropy",
    "ctc",
    "embedding",
    "experts",
    "grouped",
    "indexing",
    "interpolation",
    "lengths",
    "linear_algebra",
    "linear_nll",
    "norms",
    "pooling",
    "random",
    "routing",
    "statistics",
]
