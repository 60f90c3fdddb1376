"""The rules that come with autopar, by kind of op."""

from autopar.strategies.rules import (
    attention,
    autopar_ops,
    combined,
    contraction,
    convolution,
    creation,
    indexing,
    interpolation,
    linear_algebra,
    losses,
    normalization,
    pointwise,
    pooling,
    reductions,
    resampling,
    views,
)

__all__ = [
    "attention",
    "autopar_ops",
    "combined",
    "contraction",
    "convolution",
    "creation",
    "indexing",
    "interpolation",
    "linear_algebra",
    "losses",
    "normalization",
    "pointwise",
    "pooling",
    "reductions",
    "resampling",
    "views",
]
