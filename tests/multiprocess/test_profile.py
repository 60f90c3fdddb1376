"""Two gloo processes measure each other; all ranks repeat equally often, or this would hang."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist

from autopar.cost_models import CollectiveCosts
from autopar.mesh import Cluster, Mesh
from autopar.profiling import Effort, profile_cluster
from tests.multiprocess.pool import RankPool

KINDS = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"}


def _profiled(shape: tuple[int, ...]) -> str:
    dist.barrier()
    return profile_cluster(Mesh(shape), effort=Effort(2**10, 2**9, 0.0)).to_toml()


def test_two_ranks_measure_every_collective_and_agree(pool: RankPool):
    one, two = (Cluster.from_toml(text) for text in pool.run(_profiled, (2,)))
    assert one.measured.collectives == two.measured.collectives
    assert [k.curve for k in one.measured.kernels] == [k.curve for k in two.measured.kernels]
    assert {(c.kind, c.ranks_per_node, c.nodes) for c in one.measured.collectives} == {(k, 2, 1) for k in KINDS}
    costs = CollectiveCosts(Mesh((2,)), one)
    for c in one.measured.collectives:
        assert c.curve.amounts[-1] == 2**10
        assert costs.seconds(c.kind, c.curve.amounts[-1], 0) == pytest.approx(c.curve.seconds[-1])
    assert one.intra_node.sources != Cluster.load("cpu-2").intra_node.sources
    assert 0 <= one.measured.overlap <= 1


def test_an_axis_of_one_rank_is_not_measured_and_axes_that_lie_alike_share_a_curve(pool: RankPool):
    one, _ = (Cluster.from_toml(text) for text in pool.run(_profiled, (1, 2)))
    assert {(c.ranks_per_node, c.nodes) for c in one.measured.collectives} == {(2, 1)}


@pytest.mark.slow
def test_the_command_launches_its_processes_and_writes_a_file(tmp_path):
    file = tmp_path / "two.toml"
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "profile", str(file), "--nproc", "2", "--backend", "gloo", "--quick"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "all_reduce" in done.stdout
    assert Cluster.load(file).name == "two"
    assert {c.kind for c in Cluster.load(file).measured.collectives} == KINDS
