"""The custom ops ``torch.ops.autopar.*`` that a captured graph holds in place of torch's own.

Each is the same function of its (local) operands on every device and every mesh; importing this package registers all.
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
    "statistics",
]
