"""Redistribution and DTensor placements on real gloo processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autopar import spmd
from autopar.errors import MeshError, SpecError
from autopar.mesh import Mesh
from autopar.sharding import ShardingSpec, cheapest_path, steps_from
from autopar.spmd.placements import to_placements
from autopar.spmd.ranks import ProcessRank
from tests.alpha_beta import uniform
from tests.cpu.test_spmd_redistribution import reachable
from tests.multiprocess.pool import RankPool
from tests.steps import apply_step

pytestmark = pytest.mark.multiprocess

parse = ShardingSpec.parse
DTYPES = (torch.float64, torch.bfloat16, torch.bool, torch.int16, torch.complex64)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


def _takes_every_step(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Every step from every spec, in every dtype, against slices of the whole; how many were taken."""
    rank = ProcessRank(init_device_mesh("cpu", mesh_shape))
    steps = [
        (spec, step, after)
        for spec in reachable(ShardingSpec.replicated(len(shape)), rank.mesh)
        for step, after in steps_from(spec, len(shape), rank.mesh)
        if step.fits(spec, shape, rank.mesh)
    ]
    for spec, step, after in steps:
        for dtype in DTYPES:
            whole = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
            shard = whole[spec.local_slices(shape, rank.mesh, rank.coordinate)]
            result = apply_step(rank, shard, step, spec, shape)
            expected = whole[after.local_slices(shape, rank.mesh, rank.coordinate)]
            assert result.is_contiguous()
            assert _equal(result, expected), f"{spec} {step} {dtype}: {result} is not {expected}"
    return len(steps)


def _reduces() -> None:
    rank = ProcessRank(init_device_mesh("cpu", (2, 2)))
    shape = (5, 4)
    for kind, combine in (("sum", torch.sum), ("max", torch.amax), ("min", torch.amin), ("avg", torch.mean)):
        for dtype in (torch.float64, torch.float32):
            src = ShardingSpec(((), ()), ((0, kind), (1, kind)))
            addends = torch.stack([torch.arange(20).reshape(shape) * (r + 1) % 7 for r in range(4)]).to(dtype)
            whole = combine(addends, dim=0)
            for target in ("RR", "S0S1", "S10R", "RS01"):
                dst = parse(target)
                path = cheapest_path(src, dst, shape, dtype.itemsize, rank.mesh, uniform(rank.mesh))
                x = addends[dist.get_rank()]
                for spec, step in zip(path.specs, path.steps, strict=False):
                    x = apply_step(rank, x, step, spec, shape)
                assert _equal(x, whole[dst.local_slices(shape, rank.mesh, rank.coordinate)]), f"{kind} {path}"


def _launches_many_before_it_waits() -> None:
    rank = ProcessRank(init_device_mesh("cpu", (4,)))
    addends = [torch.full((4,), float(i + dist.get_rank())) for i in range(8)]
    pending = [spmd.all_reduce(rank, x, 0) for x in addends]
    gathered = spmd.all_gather(rank, addends[0][:1], 0, 0, 4)
    for i in reversed(range(8)):
        assert spmd.wait(pending[i]).tolist() == [4.0 * i + 6.0] * 4
    assert spmd.wait(gathered).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert addends[0].tolist() == [float(dist.get_rank())] * 4


def _holds_what_dtensor_means() -> int:
    device_mesh = init_device_mesh("cpu", (2, 2))
    rank = ProcessRank(device_mesh)
    said = 0
    for shape in ((4, 8), (5, 7)):
        whole = torch.arange(math.prod(shape)).reshape(shape).double()
        for spec in reachable(ShardingSpec.replicated(2), rank.mesh):
            try:
                placements = to_placements(spec, rank.mesh, shape)
            except SpecError:
                continue
            local = whole[spec.local_slices(shape, rank.mesh, rank.coordinate)].contiguous()
            tensor = DTensor.from_local(local, device_mesh, placements, shape=whole.shape, stride=whole.stride())
            assert torch.equal(tensor.full_tensor(), whole), str(spec)
            said += 1
    return said


def _reads_a_mesh_of_half_the_world() -> tuple[Mesh, tuple[int, ...], list[float]] | None:
    halves = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    rank = ProcessRank(halves[dist.get_rank() // 2])
    x = spmd.wait(spmd.all_reduce(rank, torch.tensor([float(dist.get_rank())]), 0))
    return rank.mesh, rank.coordinate, x.tolist()


def _refuses_a_mesh_out_of_order() -> str:
    with pytest.raises(MeshError, match="row-major") as caught:
        ProcessRank(DeviceMesh("cpu", [[1, 0], [2, 3]]))
    return str(caught.value)


def _on_four() -> dict[str, Any]:
    _reduces()
    _launches_many_before_it_waits()
    return {
        "steps on (2, 2)": _takes_every_step((2, 2), (7, 4)),
        "steps on (4,)": _takes_every_step((4,), (6, 8)),
        "dtensors": _holds_what_dtensor_means(),
        "half": _reads_a_mesh_of_half_the_world(),
        "refusal": _refuses_a_mesh_out_of_order(),
    }


def test_every_step_on_two_processes(pool: RankPool):
    assert pool.run(_takes_every_step, (2,), (5, 6)) == [6, 6]


@pytest.fixture(scope="module")
def on_four(four: RankPool) -> list[dict[str, Any]]:
    """What each of four processes returned, after it has compared every shard with a slice of the whole."""
    return four.run(_on_four)


def test_every_step_on_four_processes(on_four):
    from_RR, from_four_like_S0R, from_two_like_S0S1, from_four_like_S01R = 4, 4 * 5, 2 * 5, 4 * 3
    expected = from_RR + from_four_like_S0R + from_two_like_S0S1 + from_four_like_S01R
    assert [r["steps on (2, 2)"] for r in on_four] == [expected] * 4
    assert [r["steps on (4,)"] for r in on_four] == [6] * 4


def test_a_shard_with_its_placements_is_the_dtensor_of_the_whole(on_four):
    even, uneven = 11, 9  # of 11 specs
    assert [r["dtensors"] for r in on_four] == [even + uneven] * 4


def test_a_mesh_can_be_a_part_of_the_world(on_four):
    assert [r["half"] for r in on_four] == [
        (Mesh((2,)), (0,), [1.0]),
        (Mesh((2,)), (1,), [1.0]),
        (Mesh((2,)), (0,), [5.0]),
        (Mesh((2,)), (1,), [5.0]),
    ]


def test_a_mesh_out_of_order_is_refused(on_four):
    assert all("init_device_mesh" in r["refusal"] for r in on_four)


def _launches_many(folder: str) -> list[int]:
    """Threads of every group that a program launches on, also after the job's group was made anew."""
    said = []
    for attempt in range(2):
        for _ in range(2):
            rank = ProcessRank(init_device_mesh("cpu", (2, 2)))
        under_way = [spmd.all_reduce(rank, torch.full((3,), float(i)), i % 2) for i in range(40)]
        results = [spmd.wait(pending) for pending in under_way]
        assert all(_equal(r, torch.full((3,), 2.0 * i)) for i, r in enumerate(results))
        groups = [dist.distributed_c10d._resolve_process_group(name) for name in (*rank.groups, rank.whole)]
        options: list[Any] = [group._get_backend(torch.device("cpu")).options for group in groups]
        said += [o._threads for o in options]
        world, here = dist.get_world_size(), dist.get_rank()
        made = [name for name in dist.distributed_c10d._world.pg_names.values() if name in (*rank.groups, rank.whole)]
        assert len(made) == 3
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/{attempt}", rank=here, world_size=world)
    return said


def test_launches_go_to_groups_of_one_thread(four: RankPool, tmp_path):
    for said in four.run(_launches_many, str(tmp_path)):
        assert said == [1] * 6
