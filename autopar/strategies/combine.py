"""Ops that need a word of the other ranks: a summary of each rank's shard, gathered, and then the op itself.

Where a factor that the notation writes ``{d}`` is cut, a rank runs ``summary`` on its shards, all ranks along the axes
that cut ``d`` gather what it gives, and ``finish`` makes the op's results of the shards and what was gathered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from autopar.ir import TensorMeta
from autopar.mesh import Mesh
from autopar.sharding.spec import length


@dataclass(frozen=True)
class Operand:
    """Stands in a call for the shard of the operand at ``position`` in ``Node.inputs``."""

    position: int


@dataclass(frozen=True)
class Gathered:
    """Stands in a call for a result of the summaries, those of all ranks stacked in dim 0."""

    index: int = 0


Call: TypeAlias = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""Op, args and kwargs, in which operands are ``Operand`` and ``Gathered``."""


@dataclass(frozen=True)
class Combine:
    """How one strategy of an op is run.

    Args:
        summary: what a rank tells of its shards.
        told: shape and dtype of each result of ``summary`` on the fullest rank.
        axes: the ranks along which hear it; stacked in row-major order.
        finish: the op, given what was gathered.
    """

    summary: Call
    told: tuple[TensorMeta, ...]
    axes: tuple[int, ...]
    finish: Call

    @property
    def told_bytes(self) -> int:
        return sum(t.numel * t.itemsize for t in self.told)


def ways(axes: Sequence[int], mesh: Mesh) -> int:
    return math.prod(mesh.shape[a] for a in axes)


def counts(cuts: Sequence[tuple[int, tuple[int, ...]]], axes: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """Elements that each rank along ``axes`` has of dims with these lengths and cuts, in row-major order."""
    found = []
    for place in itertools.product(*(range(mesh.shape[a]) for a in axes)):
        at = dict(zip(axes, place, strict=True))
        coordinate = tuple(at.get(a, 0) for a in range(mesh.ndim))
        found.append(math.prod(length(n, cut, mesh, coordinate) for n, cut in cuts))
    return tuple(found)
