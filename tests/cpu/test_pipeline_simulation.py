"""A simulated pipeline computes what one device does, whatever the schedule, and holds as much as it should."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

import autopar
from autopar.pipelines.actions import Action
from autopar.pipelines.orders import SCHEDULES
from autopar.pipelines.request import Pipeline
from autopar.planner.pipeline import drawing, search
from tests.multiprocess.training_models import distance, gpt2, llama, seeded, tokens

FLOAT = 1e-5


def _uneven(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    labels = batch["labels"].clone()
    for i, row in enumerate(labels):
        row[: i % 7] = -100
    return {**batch, "labels": labels}


def _simulated(model: Any, batch: Any, mesh: dict[str, int], pipeline: Pipeline) -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan: Any = autopar.plan(model, batch, mesh=mesh, cluster="cpu-2", pipeline=pipeline)
        return plan, autopar.simulate(model, batch, plan)


def _check(model: Any, batch: Any, run: Any) -> None:
    expected = model(**batch)
    expected.loss.backward()
    assert distance(run.outputs.loss, expected.loss) < FLOAT
    assert distance(run.outputs.logits, expected.logits) < FLOAT
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert run.grads.keys() == gradients.keys()
    assert max(distance(run.grads[n], g) for n, g in gradients.items()) < FLOAT


def test_a_tied_model_beside_data_parallelism() -> None:
    model, batch = seeded(gpt2), _uneven(seeded(tokens))
    _, run = _simulated(model, batch, {"pp": 2, "dp": 2}, Pipeline(micro_batches=4, schedule="1f1b"))
    _check(model, batch, run)


@pytest.mark.slow
def test_last_backwards_that_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SPLIT_GAIN", -math.inf)
    monkeypatch.setattr(drawing, "SCHEDULES", {"1f1b": SCHEDULES["1f1b"]})
    model, batch = seeded(lambda: llama(num_hidden_layers=4)), _uneven(seeded(tokens))
    plan, run = _simulated(model, batch, {"pp": 2, "dp": 2}, Pipeline(micro_batches=4))
    assert plan.schedule.order[1][-3:] == (Action("F", 1, 3), Action("I", 1, 3), Action("W", 1, 3))
    _check(model, batch, run)
    assert all(held <= told for held, told in zip(run.peaks, plan.peaks, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "zb", "zbv", "interleaved", "listed"])
def test_every_schedule(schedule: str) -> None:
    model, batch = seeded(lambda: llama(num_hidden_layers=4)), _uneven(seeded(tokens))
    chunks: Any = 2 if schedule in ("zbv", "interleaved") else "auto"
    _, run = _simulated(model, batch, {"pp": 2}, Pipeline(micro_batches=4, schedule=schedule, chunks=chunks))
    _check(model, batch, run)


@pytest.mark.slow
def test_the_first_rank_of_1f1b_holds_fewer_micro_batches_than_that_of_gpipe() -> None:
    batch = seeded(lambda: tokens(16, 16))
    peaks = {}
    for schedule in ("1f1b", "gpipe"):
        model = seeded(lambda: llama(num_hidden_layers=4))
        pipeline = Pipeline(micro_batches=8, schedule=schedule, split="uniform")
        plan, run = _simulated(model, batch, {"pp": 2}, pipeline)
        peaks[schedule] = run.peaks
        assert len(run.peaks) == plan.ranks
        assert run.peak_memory == max(run.peaks)
    assert peaks["1f1b"][0] < peaks["gpipe"][0]
    assert peaks["1f1b"][1] < peaks["gpipe"][1]
