"""A run goes on from its checkpoint: bit for bit under the same plan, and under any other plan or world size."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import autopar
from autopar.errors import AutoparError
from autopar.training import Checkpointer, ResumableDataLoader
from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_models import SHARDED, Mlp, gpt2, is_cut, seeded, state_distance, tokens, whole

pytestmark = pytest.mark.multiprocess


class Run:
    """Dropout, weights cut unevenly, a schedule and shuffled data; every rank reads the whole batch."""

    def __init__(self, folder: str, constraints: dict[str, str], seed: int = 0, plan: Any = None) -> None:
        warnings.simplefilter("ignore")
        model = seeded(lambda: Mlp(dropout=0.2), seed)
        x = torch.empty(4, 8)
        chosen: dict[str, Any] = {"plan": plan} if plan else {"mesh": (dist.get_world_size(),)}
        self.model = autopar.autoparallelize(model, (x,), **chosen, **({} if plan else {"constraints": constraints}))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
        self.data = ResumableDataLoader(DataLoader(rows, batch_size=4, shuffle=True))
        self.checkpointer = Checkpointer(folder)
        self.batches = self.endless()

    def endless(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.data

    def parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.scheduler, self.data

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            self.optimizer.zero_grad()
            loss = self.model(next(self.batches)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(float(loss.detach()))
        return losses


def _saved(folder: str) -> dict[str, Any]:
    run = Run(folder, SHARDED["mlp"])
    run.steps(6)
    run.checkpointer.save(6, *run.parts(), extra="six")
    losses = run.steps(6)  # while it is written
    run.checkpointer.wait()
    return {"losses": losses, "cut": sum(map(is_cut, run.model.parameters()))}


def _resumed(folder: str, constraints: dict[str, str], same_plan: bool) -> dict[str, Any]:
    torch.manual_seed(77 + dist.get_rank())
    plan = Checkpointer(folder).plan() if same_plan else None
    run = Run(folder, constraints, seed=3, plan=plan)
    resumed = run.checkpointer.load(*run.parts())
    assert resumed is not None
    return {"losses": run.steps(6), "step": resumed.step, "extra": resumed.extra, "planned": plan is not None}


def test_a_run_goes_on_under_the_same_plan_another_and_fewer_ranks(pool: RankPool, single: RankPool, tmp_path: Path):
    folder = str(tmp_path)
    (first, second) = pool.run(_saved, folder)
    assert first["cut"] > 0
    assert first["losses"] == second["losses"]
    for found in pool.run(_resumed, folder, {}, True):
        assert (found["step"], found["extra"], found["planned"]) == (6, "six", True)
        assert found["losses"] == first["losses"]
    for found in pool.run(_resumed, folder, {"up.weight": "RS0", "down.weight": "S0R"}, False):
        assert found["losses"] == pytest.approx(first["losses"], rel=1e-5)
    (found,) = single.run(_resumed, folder, {}, True)
    assert not found["planned"]  # the plan is for two ranks, so one plans again
    assert found["losses"] == pytest.approx(first["losses"], rel=1e-5)


def _failing(folder: str) -> list[str]:
    """One rank cannot write."""
    model, errors = nn.Linear(2, 2), []
    path = Path(folder, "here")
    checkpointer = Checkpointer(path)
    checkpointer.save(1, model, wait=True)
    if dist.get_rank() == 1:
        checkpointer.folder = Path(folder, "file")
    checkpointer.save(2, copy.deepcopy(model))
    try:
        checkpointer.wait()
    except AutoparError as error:
        errors.append(str(error))
    return [*errors, str(Checkpointer(path).steps())]


def test_a_rank_that_cannot_write_is_an_error_on_all(pool: RankPool, tmp_path: Path):
    (tmp_path / "file").write_text("")
    for error, steps in pool.run(_failing, str(tmp_path)):
        assert "could not be written" in error
        assert "rank 1" in error
        assert steps == "[1]"


def _between_random_plans(folder: str, searches: list[str]) -> list[tuple[float, int]]:
    """From each plan to the next: the model and the optimizer's state that arrive."""
    warnings.simplefilter("ignore")
    batch = seeded(lambda: tokens(4))
    reference, made = seeded(lambda: gpt2(n_layer=1)), []
    for i, search in enumerate(searches):
        model = autopar.autoparallelize(seeded(lambda: gpt2(n_layer=1), i), batch, mesh=(2, 2), search=search)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        checkpointer = Checkpointer(Path(folder, str(i)))
        if i == 0:
            model(**batch).loss.backward()
            optimizer.step()
            reference.load_state_dict({k: whole(v) for k, v in model.state_dict().items()})
            moments = [whole(optimizer.state[p]["exp_avg"]) for p in model.parameters()]
        else:
            Checkpointer(Path(folder, str(i - 1))).load(model, optimizer)
            arrived = [whole(optimizer.state[p]["exp_avg"]) for p in model.parameters()]
            equal = all(torch.equal(a, b) for a, b in zip(arrived, moments, strict=True))
            made.append((state_distance(model, reference) if equal else 1.0, sum(map(is_cut, model.parameters()))))
        checkpointer.save(i, model, optimizer, wait=True)
    return made


@pytest.mark.slow
def test_checkpoints_go_from_any_plan_to_any_other_on_four_ranks(tmp_path: Path):
    four = RankPool(4)
    try:
        for found in four.run(_between_random_plans, str(tmp_path), [f"random:{i}" for i in range(4)]):
            assert [distance for distance, _ in found] == [0.0] * 3
            assert all(cut > 0 for _, cut in found)
    finally:
        four.close()
