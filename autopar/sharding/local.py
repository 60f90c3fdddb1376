"""Integer arguments of an op that differ between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir import LocalOffset
from autopar.mesh import Mesh
from autopar.sharding.spec import ShardingSpec

__all__ = ["LocalChoice", "LocalLength", "LocalOffset", "local_length"]


@dataclass(frozen=True)
class LocalLength:
    """The number of elements that a rank holds of a dim of ``n`` that mesh ``axes`` cut."""

    n: int
    axes: tuple[int, ...]


@dataclass(frozen=True)
class LocalChoice:
    """One of ``values``, chosen by the rank's coordinate along mesh ``axis``."""

    values: tuple[int, ...]
    axis: int


def local_length(n: int, axes: Sequence[int], mesh: Mesh) -> int | LocalLength:
    """Return how many elements a rank holds of a dim of ``n`` cut by ``axes``: an integer if equal on all ranks."""
    ways = ShardingSpec((tuple(axes),)).ways(mesh)
    return n // ways if n % ways == 0 else LocalLength(n, tuple(axes))
