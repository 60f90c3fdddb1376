"""Collectives under torch.compile: one graph, no break."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autopar import spmd
from autopar.spmd.ranks import ProcessRank
from tests.ranks import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def _compiles(backend: str) -> None:
    rank = ProcessRank(init_device_mesh("cpu", (2,)))

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        whole = spmd.wait(spmd.all_gather(rank, x, dim=1, axis=0, length=7))
        added = spmd.all_reduce(rank, whole.sum(0, keepdim=True) * w, axis=0)
        scattered = spmd.reduce_scatter(rank, whole, dim=0, axis=0, reduction="avg")
        moved = spmd.all_to_all(rank, x, gather_dim=1, scatter_dim=0, axis=0, length=7)
        kept = spmd.slice_shard(rank, whole, dim=0, axis=0)
        return spmd.wait(added), spmd.wait(scattered), spmd.wait(moved), kept

    x = torch.arange(35.0).reshape(5, 7).chunk(2, 1)[dist.get_rank()].contiguous()
    w = torch.tensor([1.0 + dist.get_rank()])
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    for expected, result in zip(program(x, w), compiled(x, w), strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_uneven_collectives_compile_into_one_graph(backend):
    run_ranks(2, _compiles, backend)
