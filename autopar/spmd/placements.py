"""Convert sharding specs to DTensor placements, one for each mesh axis, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from autopar import _torch
from autopar.errors import SpecError
from autopar.mesh import Mesh
from autopar.sharding.spec import REDUCTIONS, Reduction, ShardingSpec


def to_placements(spec: ShardingSpec, mesh: Mesh, shape: Sequence[int] | None = None) -> tuple[Placement, ...]:
    """Return the placements that give every rank exactly the shard that ``spec`` gives it.

    DTensor cuts a dim by mesh axes in increasing order. Any other order needs a strided shard, which is equivalent only
    for even shards.

    Args:
        shape: global shape, needed only if the axes of a dim do not increase.

    Raises:
        SpecError: if no placements express the spec.
    """
    out: list[Placement] = [Replicate() for _ in mesh.shape]
    for axis, reduction in spec.partial:
        out[axis] = Partial(reduction)
    for dim, axes in enumerate(spec.dims):
        if list(axes) != sorted(axes):
            _require_even(spec, dim, mesh, shape)
        for position, axis in enumerate(axes):
            factor = _ways([a for a in axes[:position] if a > axis], mesh)
            out[axis] = Shard(dim) if factor == 1 else _torch.strided_shard(dim, factor)
    return tuple(out)


def from_placements(placements: Sequence[Placement], ndim: int, mesh: Mesh) -> ShardingSpec:
    """Return the spec of a tensor of ``ndim`` dims on ``mesh`` with these ``placements``.

    Raises:
        SpecError: if no spec expresses them: another reduction, or a strided shard of another origin.
    """
    dims: list[tuple[int, ...]] = [()] * ndim
    partial: list[tuple[int, Reduction]] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if type(placement) is Shard or isinstance(placement, _torch.strided_shard_type()):
            dim = placement.dim % ndim
            dims[dim] = _inserted(dims[dim], axis, getattr(placement, "split_factor", 1), mesh, placements)
        elif type(placement) is Partial and placement.reduce_op in REDUCTIONS:
            partial.append((axis, next(r for r in REDUCTIONS if r == placement.reduce_op)))
        elif not isinstance(placement, Replicate):
            raise _inexpressible(placements)
    return ShardingSpec(tuple(dims), tuple(partial)).check(ndim, mesh)


def _inserted(
    axes: tuple[int, ...], axis: int, factor: int, mesh: Mesh, placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Insert ``axis`` after those leading ``axes`` that together cut into ``factor`` parts."""
    for position in range(len(axes) + 1):
        if _ways(axes[:position], mesh) == factor:
            return (*axes[:position], axis, *axes[position:])
    raise _inexpressible(placements)


def _ways(axes: Sequence[int], mesh: Mesh) -> int:
    return ShardingSpec((tuple(axes),)).ways(mesh)


def _require_even(spec: ShardingSpec, dim: int, mesh: Mesh, shape: Sequence[int] | None) -> None:
    if shape is None or shape[dim] % _ways(spec.dims[dim], mesh):
        size = "an unknown size" if shape is None else f"size {shape[dim]}"
        raise SpecError(
            "DTensor cuts a dim by mesh axes in increasing order; other orders need even shards.",
            found=f"{spec} on mesh {mesh}, dim {dim} of {size}",
            hint="use increasing axes, as in S01, or a size that the mesh divides.",
        )


def _inexpressible(placements: Sequence[Placement]) -> SpecError:
    return SpecError(
        "No sharding spec expresses these DTensor placements.",
        found=", ".join(map(str, placements)),
        hint="use Shard, Replicate and Partial with sum, avg, max or min.",
    )
