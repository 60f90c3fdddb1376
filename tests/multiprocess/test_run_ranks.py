"""The launcher that every multi-process test stands on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from autopar.errors import MeshError
from tests.ranks import RankTraceback, run_ranks


def _summed(start: int) -> tuple[int, int, float, torch.Tensor]:
    x = torch.full((2,), float(start + dist.get_rank()))
    dist.all_reduce(x)
    return dist.get_rank(), torch.get_num_threads(), torch.rand(()).item(), x


def _fails_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise MeshError("No such axis.", found="axis 7", hint="count from 0.")
    dist.barrier()


class TwoPartError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a + b)


def _fails_with_an_error_that_cannot_travel() -> None:
    raise TwoPartError(1, 2)


def _waits_for_a_message_that_nobody_sends() -> None:
    if dist.get_rank() == 1:
        dist.recv(torch.empty(1), src=0)
    time.sleep(60 if dist.get_rank() == 0 else 0)


def _dies() -> None:
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()


def test_returns_each_ranks_value_in_order_with_equal_seeds_and_one_thread():
    results = run_ranks(2, _summed, 10)
    assert [rank for rank, *_ in results] == [0, 1]
    assert [threads for _, threads, *_ in results] == [1, 1]
    assert results[0][2] == results[1][2]
    for *_, x in results:
        assert x.tolist() == [21.0, 21.0]


def test_raises_the_first_error_with_the_traceback_of_its_rank():
    with pytest.raises(MeshError, match="No such axis") as caught:
        run_ranks(2, _fails_on_rank_1)
    assert caught.value.hint == "count from 0."
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "rank 1:" in str(caught.value.__cause__)
    assert "in _fails_on_rank_1" in str(caught.value.__cause__)


def test_an_error_that_cannot_be_pickled_arrives_as_text():
    with pytest.raises(RuntimeError, match="TwoPartError: 3"):
        run_ranks(1, _fails_with_an_error_that_cannot_travel)


def test_a_rank_that_dies_is_an_error():
    with pytest.raises(RuntimeError, match="rank 0 died without a word, exit code 7"):
        run_ranks(2, _dies)


@pytest.mark.slow
def test_a_deadlock_ends_in_time_and_shows_where_each_rank_stands():
    with pytest.raises(TimeoutError, match=r"not done: \[0, 1\]") as caught:
        run_ranks(2, _waits_for_a_message_that_nobody_sends, timeout=20)
    assert "_waits_for_a_message_that_nobody_sends" in str(caught.value)
