"""The backward of a redistribution: it maps the cotangent of the result to that of the source.

A cotangent has the spec of its tensor, except that it is replicated where the tensor is a partial sum. Let <x, y> be
the sum of the products of all elements on all ranks, with replicas counted once. Then a redistribution R and its
adjoint R* satisfy <R x, y> = <x, R* y>.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.mesh import Mesh
from autopar.sharding.paths import Path
from autopar.sharding.redistribution import Step
from autopar.sharding.spec import ShardingSpec


@dataclass(frozen=True)
class Adjoint:
    """A redistribution of a cotangent.

    Args:
        steps: the steps in order.
        specs: specs of the cotangent before the first step and after each.
        divisor: the cotangent is divided by this, the number of ranks over which the path averages.
    """

    steps: tuple[Step, ...]
    specs: tuple[ShardingSpec, ...]
    divisor: int


def adjoint_path(path: Path, mesh: Mesh) -> Adjoint:
    """Return the adjoint of ``path``: the adjoints of its steps from last to first.

    Raises:
        SpecError: if the path reduces by maximum or minimum.
    """
    steps: list[Step] = []
    specs = [path.specs[-1].without_partial()]
    divisor = 1
    for step, spec in reversed(list(zip(path.steps, path.specs, strict=False))):
        back = step.adjoint(spec)
        if back is not None:
            steps.append(back)
            specs.append(spec.without_partial())
        if step.kind in ("all_reduce", "reduce_scatter") and step.reduction == "avg":
            divisor *= mesh.shape[step.axis]
    return Adjoint(tuple(steps), tuple(specs), divisor)
