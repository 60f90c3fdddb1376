"""Copies to pinned memory of the host and back, beside what the GPU computes."""

from __future__ import annotations

import pytest
import torch

from autopar import spmd
from autopar.mesh import Mesh
from autopar.spmd import LocalRank


def rank() -> LocalRank:
    return LocalRank(Mesh((1,)), (0,), torch.device("cuda", torch.cuda.current_device()))


def busy() -> torch.Tensor:
    """Work for a while on the current stream."""
    x = torch.randn(2048, 2048, device="cuda")
    for _ in range(50):
        x = torch.nn.functional.normalize(x @ x)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_what_comes_back_is_what_went(dtype) -> None:
    x = torch.arange(4 * 6 * 5, device="cuda").reshape(4, 6, 5).to(dtype)
    for each in (x, x.transpose(0, 2), x[1:3], x[:, ::2], x[:1].expand(4, 6, 5), x[1, 2, 3], x[:, :0]):
        held = spmd.arrived(spmd.offload(rank(), each))
        assert held.tensor.is_pinned() or not each.numel()
        back = spmd.arrived(spmd.fetch(rank(), held))
        assert back.device.type == "cuda"
        assert torch.equal(back, each)


def test_an_offload_copies_what_was_computed_before_it_and_nothing_that_comes_after() -> None:
    x = busy()
    sent = spmd.offload(rank(), x)
    expected = x.clone()
    held = spmd.arrived(sent)
    del sent
    x.zero_()  # the compute stream has waited for the copy
    assert torch.equal(spmd.arrived(spmd.fetch(rank(), held)), expected)


def test_memory_is_given_back_where_the_program_waits_and_reused_without_harm() -> None:
    sums, held = [], []
    torch.cuda.synchronize()
    for i in range(20):
        x = torch.full((8, 2**20), float(i), device="cuda")
        sums.append(x.sum())
        sent = spmd.offload(rank(), x)
        del x
        held.append(spmd.arrived(sent))
        del sent
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    launched = spmd.fetch(rank(), held[0])
    assert torch.cuda.memory_allocated() - before == 8 * 2**22
    back = spmd.arrived(launched)
    del launched, back
    assert torch.cuda.memory_allocated() == before
    for expected, each in zip(sums, held, strict=True):
        assert torch.equal(spmd.arrived(spmd.fetch(rank(), each)).sum(), expected)


def test_a_fetch_that_is_never_waited_for_harms_nobody() -> None:
    held = spmd.arrived(spmd.offload(rank(), torch.ones(2**24, device="cuda")))
    for _ in range(5):
        busy()
        del_me = spmd.fetch(rank(), held)
        del del_me
        other = torch.zeros(2**24, device="cuda")
        assert not other.any()
