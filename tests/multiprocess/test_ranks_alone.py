"""What all ranks do together raises within seconds where one rank does it alone, and says what the others do."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import RankError
from autopar.runtime import waiting
from autopar.training import Booster, Checkpointer
from tests.multiprocess.pool import RankPool
from tests.ranks import run_ranks

pytestmark = pytest.mark.multiprocess
HASTE = {"PATIENCE_S": 0.5, "IN_COLLECTIVE_S": 0.3, "LOOK_S": 0.1}


def _parallel(**options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return autopar.autoparallelize(
        model,
        torch.randn(8, 8),
        mesh=(2,),
        cluster="cpu-2",
        constraints={"0.weight": "S0R", "2.weight": "RR"},
        time_limit=2,
        **options,
    )


def _alone(folder: str) -> tuple[dict[str, str], float]:
    """What rank 0 hears that does something alone, and the longest time that it took to hear it."""
    model, x = _parallel(), torch.randn(8, 8)
    board = waiting.board()
    assert board is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[2].weight.full_tensor()  # whole on every rank: each may look at it by itself
    path = Path(folder, "alone")

    def idle(name: str) -> None:
        board.store.wait([name], timedelta(seconds=60))

    def barrier(name: str) -> None:
        dist.barrier()

    together: dict[str, tuple[Callable[[], Any], Callable[[str], None]]] = {
        "full_tensor": (model[0].weight.full_tensor, idle),
        "save_model": (lambda: Booster().save_model(model, path), barrier),
        "load_model": (lambda: Booster().load_model(model, path), idle),
        "save_optimizer": (lambda: Booster().save_optimizer(optimizer, path), idle),
        "Checkpointer.save": (lambda: Checkpointer(folder).save(0, model), idle),
        "autoparallelize": (_parallel, idle),
        "deliver_gradients": (model.deliver_gradients, lambda _: model[0].weight.full_tensor()),
        "calls the model": (lambda: model(x), idle),
    }
    said, longest = {}, 0.0
    for i, (name, (on_first, on_second)) in enumerate(together.items()):
        board.calls = 100 * (i + 1)  # an error ends a job; here the next case begins anew
        began = time.monotonic()
        try:
            on_first() if dist.get_rank() == 0 else on_second(name)
        except RankError as error:
            said[name] = str(error)
            longest = max(longest, time.monotonic() - began)
        if dist.get_rank() == 0:
            board.store.set(name, "1")
            if on_second is barrier:
                dist.barrier()
    return said, longest


def _alone_in_a_hurry(folder: str) -> tuple[dict[str, str], float]:
    with patch.multiple(waiting, **HASTE):
        return _alone(folder)


def test_a_rank_that_does_alone_what_is_for_all_hears_what_the_others_do(tmp_path: Path):
    (said, longest), (other, _) = run_ranks(2, _alone_in_a_hurry, str(tmp_path))
    assert set(other) == {"deliver_gradients"}
    assert longest < 15
    here = Path(__file__).name
    for name, text in said.items():
        assert name in text
        assert "outside of `if rank == 0`" in text
        if name == "save_model":
            assert "rank 1 waits in a collective" in text
        elif name == "deliver_gradients":
            assert "rank 1 calls full_tensor of (8, 8)" in text
        else:
            assert f"rank 1 stands still at {Path(__file__).parent}" in text
            assert here in text
    assert len(said) == 8


def _late() -> tuple[float, float]:
    """Rank 1 computes for longer than the patience of rank 0, and then comes."""
    model, x = _parallel(), torch.randn(8, 8)
    with patch.multiple(waiting, **HASTE):
        end = time.monotonic() + 2.0 * dist.get_rank()
        while time.monotonic() < end:
            torch.randn(64, 64) @ torch.randn(64, 64)
        with torch.no_grad():
            return float(model(x).sum()), float(model[0].weight.full_tensor().sum())


def test_a_rank_that_computes_is_waited_for(pool: RankPool):
    first, second = pool.run(_late)
    assert first == second
