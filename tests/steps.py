"""Take steps of redistributions, on one rank or on all ranks of a simulated mesh."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autopar import spmd
from autopar.sharding import ShardingSpec, Step


def apply_step(rank: spmd.Rank, x: Tensor, step: Step, spec: ShardingSpec, global_shape: Sequence[int]) -> Tensor:
    """Apply ``step`` to the shard ``x`` with spec ``spec``, and wait for the result."""
    function, kwargs = spmd.step_call(step, spec, global_shape, rank.mesh)
    result = function(rank, x, **{k: spmd.resolve(rank, v) for k, v in kwargs.items()})
    taken: Tensor = spmd.wait(result) if isinstance(result, spmd.Pending) else result
    return taken


def simulate_step(
    ranks: Sequence[spmd.Rank], shards: Sequence[Tensor], step: Step, spec: ShardingSpec, global_shape: Sequence[int]
) -> list[Tensor]:
    """Run ``apply_step`` on all simulated ranks of a mesh at once."""
    function, kwargs = spmd.step_call(step, spec, global_shape, ranks[0].mesh)
    calls = [
        ((x,), {k: spmd.resolve(rank, v) for k, v in kwargs.items()}) for rank, x in zip(ranks, shards, strict=True)
    ]
    if step.kind == "slice":
        return [function(rank, *args, **kw) for rank, (args, kw) in zip(ranks, calls, strict=True)]
    return [spmd.wait(p) for p in spmd.simulate(function, ranks, calls)]
