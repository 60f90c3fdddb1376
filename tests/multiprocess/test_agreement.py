"""The ranks agree on every call while they compute: none waits before its first collective, and none goes on alone."""

from __future__ import annotations

import datetime as dt
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import spmd
from autopar.errors import AutoparError, RankError
from autopar.runtime.agreement import Agreement
from autopar.spmd import ProcessRank

pytestmark = pytest.mark.multiprocess


class Net(nn.Module):
    """Batch norm changes buffers, and with dropout ranks need a common seed."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x)))).square().mean()


def rows(number: int, seed: int = 0) -> Tensor:
    return torch.randn(number, 8, generator=torch.Generator().manual_seed(seed))


def parallel(model: nn.Module, **options: Any) -> Any:
    torch.manual_seed(0)
    return autopar.autoparallelize(model, rows(8), mesh=(2,), cluster="cpu-2", time_limit=5, **options)


def _ahead() -> list[str]:
    """Rank 1 begins its call when rank 0 is in the middle of its own. What rank 0 did, in order."""
    model = parallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), search="baseline:DDP")
    model(rows(8)).sum().backward()
    store: Any = dist.distributed_c10d._get_default_store()
    seen: list[str] = []
    section, settle, launch = spmd.section, Agreement.settle, ProcessRank.launch

    def begins(module: str) -> None:
        seen.append(module)
        if module == "2" and "go" not in seen and dist.get_rank() == 0:
            seen.append("go")
            store.set("rank 0 computes", "1")
        section(module)

    def settles(self: Agreement) -> None:
        seen.extend(["settled"] if self._under_way is not None else [])
        settle(self)

    def launches(self: ProcessRank, *args: Any) -> Tensor:
        seen.append("launched")
        return launch(self, *args)

    with (
        patch.object(spmd, "section", begins),
        patch.object(Agreement, "settle", settles),
        patch.object(ProcessRank, "launch", launches),
    ):
        if dist.get_rank() == 1:
            store.wait(["rank 0 computes"], dt.timedelta(seconds=60))
        loss = model(rows(8)).sum()
        seen.append("returned")
        loss.backward()
    return seen


def test_a_rank_computes_before_the_others_have_begun_the_call(pool) -> None:
    for seen in pool.run(_ahead):
        assert seen.index("0") < seen.index("2") < seen.index("settled") < seen.index("launched")
        assert seen.index("settled") < seen.index("returned")


def _refused(options: dict[str, Any], dropout: float) -> tuple[list[str], bool, list[float]]:
    """Rank 1 makes other calls, whose programs are known: the errors, whether buffers stayed, losses of good calls."""
    model = parallel(Net(dropout), **options)
    for module in (model.eval(), model.train()):
        for number in (8, 6):
            module(rows(number)).backward()
            with torch.no_grad():
                module(rows(number))
    odd = dist.get_rank() == 1
    kept = [b.clone() for b in model.buffers()]
    said = []

    def alone(number: int, training: bool, gradients: bool) -> None:
        with torch.set_grad_enabled(gradients):
            model.train(training)(rows(number))

    wrong = [(6, True, True), (8, False, True), (8, True, False)]
    for other in wrong:
        for common in ((8, True, True), (8, False, False)):
            try:
                alone(*(other if odd else common))
            except AutoparError as error:
                said.append(f"{type(error).__name__} {'rank 1' in str(error).lower()}")
    try:
        model.train()(torch.zeros(8, 8, 1) if odd else rows(8))
    except AutoparError as error:
        said.append(f"{type(error).__name__} {isinstance(error, RankError) == (not odd)}")
    stayed = all(torch.equal(a, b) for a, b in zip(kept, model.buffers(), strict=True))
    return said, stayed, [model.eval()(rows(8, seed)).item() for seed in (1, 2)]


CASES = [({}, 0.0), ({}, 0.5), pytest.param({"backend": "inductor"}, 0.0, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("options", "dropout"), CASES, ids=["eager", "dropout", "inductor"])
def test_ranks_whose_calls_differ_all_stop_and_go_on_with_the_next(pool, options, dropout) -> None:
    first, second = pool.run(_refused, options, dropout, timeout=400)
    for said, stayed, _ in (first, second):
        assert said[:6] == ["RankError True"] * 6
        assert stayed
    assert (first[0][6], second[0][6]) == ("RankError True", "InputError True")
    assert first[2] == second[2]


def _without_collectives() -> tuple[list[str], float]:
    """A program in which ranks tell each other nothing."""
    model = parallel(nn.Linear(8, 1), constraints={"weight": "RR"})
    assert not [c for c in model.plan.collectives if c.phase == "forward"]
    said = []
    odd = dist.get_rank() == 1
    for number in (8, 6):
        model(rows(number))
    try:
        model(rows(6 if odd else 8))
    except RankError as error:
        said.append(str(error).splitlines()[0])
    return said, model(rows(8)).sum().item()


def test_ranks_agree_where_a_program_has_no_collective(pool) -> None:
    (said, loss), second = pool.run(_without_collectives)
    assert len(said) == 1
    assert second == (said, loss)
