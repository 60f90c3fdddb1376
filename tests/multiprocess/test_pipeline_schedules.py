"""The documented ways to run a pipeline: schedules, steps by hand, and ``Booster.execute_pipeline``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.pipelines.request import Pipeline
from autopar.training import Booster, Engine, InterleavedPipelineSchedule, PipelineSchedule
from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_models import distance, gpt2, llama, pair, seeded, tokens

pytestmark = pytest.mark.multiprocess
FLOAT = 1e-4
MICRO_BATCHES = 4


def _pair(build: Any, mesh: dict[str, int], **pipeline: Any) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    batch = seeded(tokens)
    asked = Pipeline(micro_batches=MICRO_BATCHES, **pipeline)
    reference, model = pair(seeded(build), batch, mesh, cluster="cpu-2", pipeline=asked)
    return reference, model, batch


def _gradients(model: nn.Module, reference: nn.Module) -> float:
    expected = dict(reference.named_parameters())
    return max(distance(p.grad, expected[n].grad) for n, p in model.named_parameters())


def _by_hand() -> dict[str, float]:
    """Two steps of a schedule written as a loop: all forwards, then all backwards."""
    reference, model, batch = _pair(llama, {"pp": 2}, schedule="1f1b")
    engine, schedule = Engine(model), PipelineSchedule(MICRO_BATCHES)
    first = dist.get_rank() == 0
    found: dict[str, float] = {}
    for step in range(2):
        data = {k: t.roll(step, 0) for k, t in batch.items()}
        schedule.load_batch(iter([data]))
        total, returned, sent, came = torch.zeros(()), [], [], []
        for _ in range(MICRO_BATCHES):
            taken = None
            if not first:
                taken = torch.empty(2, 8, 32)
                dist.recv(taken, 0)
            out = schedule.forward_step(engine, taken, returned, accum_loss=total)
            if first:
                dist.send(out, 1)
            came.append(taken)
            sent.append(out)
        for i in range(MICRO_BATCHES):
            tangent = None
            if first:
                tangent = torch.empty(2, 8, 32)
                dist.recv(tangent, 1)
            back = schedule.backward_step(engine, came[i], sent[i], tangent)
            assert (back is None) == first
            if back is not None:
                dist.send(back, 0)
        expected = reference(**data).loss
        expected.backward()
        if not first:
            found[f"loss {step}"] = distance(total, expected)
            assert [label.shape for _, label in returned] == [(2, 8)] * MICRO_BATCHES
        found[f"gradients {step}"] = _gradients(model, reference)
    try:
        schedule.forward_step(engine, None, [])
    except AutoparError as error:
        found["refused"] = 0.0 if "no micro-batch" in str(error) else 1.0
    return found


def test_a_loop_by_hand_gets_what_one_process_gets(pool: RankPool) -> None:
    first, second = pool.run(_by_hand)
    assert {k: v for k, v in (*first.items(), *second.items()) if not v < FLOAT} == {}
    assert "refused" in first and "loss 1" in second


def _scheduled(chunks: int) -> dict[str, float]:
    kind = "1f1b" if chunks == 1 else "interleaved"
    reference, model, batch = _pair(lambda: gpt2(n_layer=4), {"pp": 2}, schedule=kind, chunks=chunks)
    schedule = PipelineSchedule(MICRO_BATCHES, tensor_shape=(2, 8, 32))
    if chunks > 1:
        schedule = InterleavedPipelineSchedule(MICRO_BATCHES, chunks)
    output, label, loss = schedule.forward_backward_step(Engine(model), iter([batch]))
    expected = reference(**batch).loss
    expected.backward()
    found = {"loss": distance(loss, expected), "gradients": _gradients(model, reference)}
    assert torch.equal(label, batch["labels"])
    assert output is not None
    result = Booster().execute_pipeline(iter([batch]), model, lambda outputs, inputs: outputs.loss)
    reference(**batch).loss.backward()
    return {
        **found,
        "loss again": distance(result["loss"], expected),
        "gradients again": _gradients(model, reference),
        "no outputs": float(result["outputs"] is not None),
    }


@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_schedule_and_a_booster_get_what_one_process_gets(pool: RankPool, chunks: int) -> None:
    for found in pool.run(_scheduled, chunks):
        assert {k: v for k, v in found.items() if not v < FLOAT} == {}


def _refused() -> list[str]:
    _, model, batch = _pair(gpt2, {"pp": 2}, schedule="1f1b")
    found = []
    for schedule in (
        PipelineSchedule(2),
        PipelineSchedule(MICRO_BATCHES, tensor_shape=(3, 8, 32)),
        InterleavedPipelineSchedule(MICRO_BATCHES, 2),
    ):
        try:
            schedule.forward_backward_step(Engine(model), iter([batch]))
        except AutoparError as error:
            found.append(str(error).splitlines()[0])
    return found


def test_a_schedule_that_is_not_the_plan_s_is_refused(pool: RankPool) -> None:
    first, second = pool.run(_refused)
    assert first == second
    assert [("micro-batches" in e, "shape" in e, "stages on each rank" in e) for e in first] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
