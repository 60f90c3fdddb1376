"""Integers of an op's arguments that differ from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.mesh import Mesh
from autopar.sharding.spec import ShardingSpec


@dataclass(frozen=True)
class LocalLength:
    """Elements that a rank holds of a dim of ``n`` cut by mesh ``axes``."""

    n: int
    axes: tuple[int, ...]


@dataclass(frozen=True)
class LocalOffset:
    """Global index of the first element that a rank holds of a dim of ``n`` cut by mesh ``axes``."""

    n: int
    axes: tuple[int, ...]


@dataclass(frozen=True)
class LocalChoice:
    """One of ``values``, by the rank's place along mesh ``axis``."""

    values: tuple[int, ...]
    axis: int


def local_length(n: int, axes: Sequence[int], mesh: Mesh) -> int | LocalLength:
    """Elements that each rank holds of a dim of ``n`` cut by ``axes``: a number where all ranks agree."""
    ways = ShardingSpec((tuple(axes),)).ways(mesh)
    return n // ways if n % ways == 0 else LocalLength(n, tuple(axes))
