"""Training as a pipeline on real processes: what one process computes, from every schedule and beside every axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from autopar.pipelines.request import Pipeline
from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_models import distance, gpt2, llama, pair, seeded, tokens, whole

pytestmark = pytest.mark.multiprocess
FLOAT = 1e-4
CLUSTER = "cpu-2"
SILENT = dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
DROPPING = dict(attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)


class Skips(nn.Module):
    """Four blocks; the first one's result, an integer mask and a sum of squares from each go beyond the next block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        extra = x.new_zeros(())
        first = None
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
            first = x if first is None else first
            extra = extra + x.pow(2).sum()
        out = x + first * (first > 0)
        return {"loss": (out - y).pow(2).sum() / y.shape[0] + 1e-3 * extra / y.shape[0], "out": out}


def uneven(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A different number of labelled tokens in every row."""
    labels = batch["labels"].clone()
    for i, row in enumerate(labels):
        row[: i % 7] = -100
    return {**batch, "labels": labels}


def _loss(returned: Any) -> Tensor:
    found: Tensor = returned["loss"]
    return found


def _compared(
    model: nn.Module,
    batch: dict[str, Tensor],
    mesh: dict[str, int],
    *,
    steps: int = 3,
    lr: float = 1e-3,
    **options: Any,
) -> dict[str, float]:
    """Train ``model`` for some AdamW steps beside one process; return the largest differences."""
    reference, model = pair(model, batch, mesh, cluster=CLUSTER, **options)
    expected = dict(reference.named_parameters())
    # The gradient of a bias of keys is zero but for rounding, which a smaller eps would blow up to whole steps.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=lr, eps=1e-6) for m in (model, reference)]
    found = dict.fromkeys(("loss", "gradients", "norm", "parameters"), 0.0)
    for step in range(steps):
        losses = []
        for module in (model, reference):
            losses.append(_loss(module(**batch)))
            (losses[-1] * 0.5).backward()
        found["loss"] = max(found["loss"], distance(*losses))
        if step == 0:
            gradients = [distance(p.grad, expected[n].grad) for n, p in model.named_parameters()]
            found["gradients"] = max(found["gradients"], *gradients)
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, reference)]
        found["norm"] = max(found["norm"], distance(*norms))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found["parameters"] = max(distance(p, expected[n]) for n, p in model.named_parameters())
    found["held"] = len(list(model.parameters())) / len(expected)
    return found


def _language(name: str, layers: int, mesh: dict[str, int], pipeline: Pipeline, **options: Any) -> dict[str, float]:
    build = {"gpt2": lambda: gpt2(n_layer=layers), "llama": lambda: llama(num_hidden_layers=layers)}[name]
    return _compared(seeded(build), uneven(seeded(tokens)), mesh, pipeline=pipeline, **options)


def _check(found: list[dict[str, float]]) -> None:
    for each in found:
        assert each.pop("held") < 1
        assert {k: v for k, v in each.items() if not v < FLOAT} == {}


def _data_parallel() -> dict[str, float]:
    pipeline = Pipeline(micro_batches=4, schedule="1f1b")
    return _language("gpt2", 2, {"pp": 2, "dp": 2}, pipeline, constraints={"input:*": "S0R"})


def test_a_tied_model_on_two_stages_of_two_ranks(four: RankPool) -> None:
    _check(four.run(_data_parallel))


def _gathered_once(backend: str) -> dict[str, float]:
    cut = {"*.weight": "S0R", "*norm.weight": "S0"}
    pipeline = Pipeline(micro_batches=4, schedule="zb")
    return _language("llama", 2, {"pp": 2, "dp": 2}, pipeline, constraints=cut, backend=backend)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_parameters_that_are_gathered_once_a_call(four: RankPool, backend: str) -> None:
    _check(four.run(_gathered_once, backend))


COLUMNS = {f"*{n}_proj.weight": "S0R" for n in ("q", "k", "v", "gate", "up")}
ROWS = {f"*{n}_proj.weight": "RS0" for n in ("o", "down")}


def _tensor_parallel() -> dict[str, float]:
    pipeline = Pipeline(micro_batches=2, schedule="gpipe")
    return _language("llama", 2, {"pp": 2, "tp": 2}, pipeline, constraints={**COLUMNS, **ROWS})


@pytest.mark.slow
def test_stages_that_are_tensor_parallel(four: RankPool) -> None:
    _check(four.run(_tensor_parallel))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_four_stages(four: RankPool, schedule: str) -> None:
    _check(four.run(_language, "llama", 4, {"pp": 4}, Pipeline(micro_batches=8, schedule=schedule, split="uniform")))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved", "zbv", "listed", "auto"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_several_stages_on_a_rank(pool: RankPool, name: str, schedule: str) -> None:
    chunks: Any = "auto" if schedule in ("listed", "auto") else 2
    pipeline = Pipeline(micro_batches=4, schedule=schedule, chunks=chunks)
    _check(pool.run(_language, name, 4, {"pp": 2}, pipeline))


def _skips(mesh: dict[str, int], pipeline: Pipeline) -> dict[str, float]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 12), "y": torch.randn(8, 12)}
    return _compared(seeded(Skips), batch, mesh, pipeline=pipeline)


@pytest.mark.slow
def test_values_that_skip_stages(four: RankPool) -> None:
    split = [f"blocks.{i}" for i in (1, 2, 3)]
    _check(four.run(_skips, {"pp": 4}, Pipeline(micro_batches=4, schedule="1f1b", split=split)))


def _dropout(mesh: dict[str, int], pipeline: Pipeline | None) -> list[float]:
    model = seeded(lambda: gpt2(**DROPPING))
    batch = seeded(tokens)
    _, model = pair(model, batch, mesh, cluster=CLUSTER, pipeline=pipeline)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
def test_dropout_does_not_depend_on_stages_or_micro_batches(four: RankPool) -> None:
    expected = four.run(_dropout, {"dp": 4}, None)[0]
    for mesh, m in (({"pp": 2, "dp": 2}, 4), ({"pp": 4}, 2)):
        pipeline = Pipeline(micro_batches=m, schedule="1f1b", split="uniform")
        for losses in four.run(_dropout, mesh, pipeline):
            assert losses == pytest.approx(expected, rel=1e-5)


def _two_phases(case: str) -> dict[str, float]:
    """The backward runs in ``backward()``: by request, in eval mode, and where the caller makes the loss."""
    batch = uneven(seeded(tokens))
    options: dict[str, Any] = {"pipeline": Pipeline(micro_batches=4, two_phase=case == "asked")}
    given = {"input_ids": batch["input_ids"]} if case == "logits" else batch
    options |= {"outputs": "whole"} if case == "whole" else {}
    reference, model = pair(seeded(gpt2), given, {"pp": 2}, cluster=CLUSTER, **options)
    expected = dict(reference.named_parameters())
    found: dict[str, float] = {}
    for module in (model, reference):
        module.train(case != "eval")
        out = module(**given)
        if case in ("logits", "whole"):
            logits = out.logits.full_tensor() if isinstance(out.logits, DTensor) else out.logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
            loss = loss + (out.loss if case == "whole" else 0.0)
        else:
            loss = out.loss
        (loss * 2).backward()
        found[f"loss {len(found)}"] = float(whole(loss).detach())
    difference = abs(found.pop("loss 0") - found.pop("loss 1"))
    gradients = max(distance(p.grad, expected[n].grad) for n, p in model.named_parameters())
    return {"loss": difference, "gradients": gradients, "held": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["asked", "eval", "logits", "whole"])
def test_backwards_that_run_in_backward(pool: RankPool, case: str) -> None:
    _check(pool.run(_two_phases, case))


def _cut_logits(rows: int) -> dict[str, float]:
    batch = {name: torch.cat([t, t])[:rows] for name, t in uneven(seeded(tokens)).items()}
    options = {"pipeline": Pipeline(micro_batches=4), "constraints": {"input:*": "S0R", "output:logits": "S0RR"}}
    reference, model = pair(seeded(gpt2), batch, {"pp": 2, "dp": 2}, cluster=CLUSTER, **options)
    out, expected = model(**batch), reference(**batch)
    found = {"loss": distance(out.loss, expected.loss), "held": 0.5}
    if out.logits is not None:
        assert out.logits.placements == (Shard(0),)
        found["logits"] = distance(out.logits, expected.logits)
    return found


@pytest.mark.parametrize("rows", [8, pytest.param(12, id="unevenly", marks=pytest.mark.slow)])
def test_logits_whose_rows_are_cut_come_in_the_order_of_the_batch(four: RankPool, rows: int) -> None:
    made = four.run(_cut_logits, rows)
    _check(made)
    assert sum("logits" in found for found in made) == 2
