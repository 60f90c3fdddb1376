"""What a collective of one tensor holds beside it, against what is measured; along axes of length one as well."""

from __future__ import annotations

import pytest
import torch

from autopar.ir import TensorMeta
from autopar.mesh import Mesh
from autopar.planner.footprint.collective_buffers import packing
from autopar.planner.footprint.layouts import Layout
from autopar.runtime.meter import MemoryMeter
from autopar.sharding import ShardingSpec, Step
from autopar.spmd.collectives import resolve, simulate, step_call, wait
from autopar.spmd.ranks import local_ranks

SHAPE = (12, 24, 36)
STEPS = [
    (Step("all_gather", 0, dim=0), "S0RR"),
    (Step("all_gather", 0, dim=1), "RS0R"),
    (Step("all_to_all", 0, dim=0, to_dim=1), "S0RR"),
    (Step("all_to_all", 0, dim=2, to_dim=0), "RRS0"),
    (Step("all_reduce", 0), "RRR P0"),
    (Step("reduce_scatter", 0, dim=0), "RRR P0"),
    (Step("reduce_scatter", 0, dim=2), "RRR P0"),
]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ways", [1, 2, 3])
@pytest.mark.parametrize(("step", "spec"), STEPS, ids=lambda x: str(x) if isinstance(x, str) else x.kind)
def test_a_collective_holds_what_is_predicted(step, spec, ways, transposed) -> None:
    mesh, before = Mesh((ways,)), ShardingSpec.parse(spec)
    ranks = local_ranks(mesh)
    shape = before.local_shape(SHAPE, mesh)
    shards = [torch.zeros(shape[::-1]).permute(2, 1, 0) if transposed else torch.zeros(shape) for _ in ranks]
    function, options = step_call(step, before, SHAPE, mesh)
    meters = [MemoryMeter() for _ in ranks]
    for meter, shard in zip(meters, shards, strict=True):
        meter.hold([shard])
    calls = [((x,), {k: resolve(r, v) for k, v in options.items()}) for r, x in zip(ranks, shards, strict=True)]
    pending = simulate(function, ranks, calls, meters)
    with meters[0]:
        made = wait(pending[0])
    after = step.apply(before).local_shape(SHAPE, mesh)
    assert made.shape == after
    x = Layout(tuple(shards[0].shape), shards[0].stride())
    held = packing(step, TensorMeta(SHAPE, "float32"), mesh, x, after)
    most = max(held.sent + held.launch + held.received, held.received + held.unpacked)
    assert meters[0].peak - x.numel * 4 == most
