"""Operands for samples: small integers in float64, so that results are exact where possible.

Sizes 4 and 6 divide evenly by two ranks; 5 and 7 are cut unevenly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def x(*shape: int) -> Tensor:
    """Return small integers."""
    return torch.randint(-4, 5, shape).to(torch.float64)


def positive(*shape: int) -> Tensor:
    return torch.randint(1, 6, shape).to(torch.float64)


def unit(*shape: int) -> Tensor:
    """Return numbers strictly between 0 and 1."""
    return torch.rand(shape, dtype=torch.float64) * 0.9 + 0.05


def index(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape)


def mask(*shape: int) -> Tensor:
    """Return a mask that is true at half of the places, at random."""
    n = torch.Size(shape).numel()
    return (torch.randperm(n) < n // 2).reshape(shape)


def distinct(*shape: int) -> Tensor:
    """Return numbers without ties, so that the position of a maximum is defined."""
    n = torch.Size(shape).numel()
    return torch.randperm(n).to(torch.float64).reshape(shape)


def overload(name: str, *preferred: str) -> Any:
    packet = getattr(torch.ops.aten, name)
    there = packet.overloads()
    return getattr(packet, next(o for o in (*preferred, "default", "Tensor", *there) if o in there))
