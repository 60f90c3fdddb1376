"""Ops that need data of other ranks: each rank summarizes its shard, the summaries are gathered, then the op runs.

If a factor that the notation writes as ``{d}`` is cut, each rank runs ``summary`` on its shards, the ranks along the
axes that cut ``d`` gather the summaries, and ``finish`` computes the op's results from the shards and the summaries.
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
    """A placeholder in a call: the shard of the operand at ``position`` in ``Node.inputs``."""

    position: int


@dataclass(frozen=True)
class Gathered:
    """A placeholder in a call: result ``index`` of the summaries, stacked over the ranks in dim 0."""

    index: int = 0


Call: TypeAlias = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""Op, args and kwargs, with ``Operand`` and ``Gathered`` for tensors."""


@dataclass(frozen=True)
class Combine:
    """How to run one strategy of an op with summaries.

    Args:
        summary: the call that summarizes a rank's shards.
        summaries: shape and dtype of each result of ``summary`` on the fullest rank.
        axes: mesh axes along which summaries are gathered; ranks are stacked in row-major order.
        finish: the call that computes the op's results from the gathered summaries.
    """

    summary: Call
    summaries: tuple[TensorMeta, ...]
    axes: tuple[int, ...]
    finish: Call


def ways(axes: Sequence[int], mesh: Mesh) -> int:
    return math.prod(mesh.shape[a] for a in axes)


def counts(cuts: Sequence[tuple[int, tuple[int, ...]]], axes: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """Return how many elements of dims with these lengths and cuts each rank along ``axes`` holds, row-major."""
    found = []
    for place in itertools.product(*(range(mesh.shape[a]) for a in axes)):
        at = dict(zip(axes, place, strict=True))
        coordinate = tuple(at.get(a, 0) for a in range(mesh.ndim))
        found.append(math.prod(length(n, cut, mesh, coordinate) for n, cut in cuts))
    return tuple(found)
