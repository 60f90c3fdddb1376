"""Evaluation as loops and libraries do it: metrics on the outputs of a model that also returns its loss."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_models import distance

pytestmark = pytest.mark.multiprocess
CUT = {"up.weight": "S0R", "down.weight": "S0R", "output:logits": "RS0"}


class Classifier(nn.Module):
    """Returns its loss beside logits, probabilities of each sample, and a table that has no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 6)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.down(torch.relu(self.up(x)))
        found = {"logits": logits, "best": logits.softmax(-1).amax(-1), "table": self.down.weight * 2}
        return found if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **found}


def _samples(number: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(number)
    return {"x": torch.randn(number, 8, generator=made), "labels": torch.randint(0, 6, (number,), generator=made)}


def _of_rank(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.chunk(dist.get_world_size())[dist.get_rank()].contiguous() for name, t in batch.items()}


def _evaluated(batch: str) -> dict[str, Any]:
    torch.manual_seed(0)
    reference = Classifier()
    shown = _samples(8) if batch == "global" else _of_rank(_samples(8))
    model = autopar.autoparallelize(
        copy.deepcopy(reference), shown, mesh=(2,), batch=batch, constraints=CUT, cluster="cpu-2", time_limit=2
    )
    found: dict[str, Any] = {"DTensors in training": isinstance(model(**shown)["logits"], DTensor), "worst": 0.0}
    model.eval()
    rows = []
    for number in (8, 8, 4):  # the last batch is smaller
        whole = _samples(number)
        with torch.no_grad():
            out, wanted = model(**(whole if batch == "global" else _of_rank(whole))), reference(**whole)
        found["DTensors"] = any(isinstance(t, DTensor) for t in out.values())
        wanted = (
            wanted
            if batch == "global"
            else {**_of_rank(wanted | {"loss": torch.zeros(2)}), **{name: wanted[name] for name in ("loss", "table")}}
        )
        found["worst"] = max(found["worst"], *(distance(out[name], wanted[name]) for name in wanted))
        rows.append(out["logits"].argmax(-1).numpy())
    found["rows"] = sum(map(len, rows))
    with torch.inference_mode():
        found["a DTensor without labels"] = isinstance(model(x=shown["x"])["logits"], DTensor)
    return found


@pytest.mark.parametrize(("batch", "rows"), [("global", 20), ("local", 10)])
def test_outputs_of_an_evaluation_are_plain_tensors_of_the_samples_that_the_rank_passed(
    pool: RankPool, batch: str, rows: int
):
    for found in pool.run(_evaluated, batch):
        assert found["worst"] < 1e-5
        assert found == {
            "DTensors in training": True,
            "DTensors": False,
            "rows": rows,
            "a DTensor without labels": False,
            "worst": found["worst"],
        }


def _warned(*, alike: bool) -> list[str]:
    whole = _samples(8)
    model = autopar.autoparallelize(Classifier(), whole, mesh=(2,), constraints=CUT, cluster="cpu-2", time_limit=2)
    own = whole if alike or dist.get_rank() == 0 else {name: t.flip(0) for name, t in whole.items()}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            model(**own)
    return [str(each.message) for each in found if "batch" in str(each.message)]


def test_ranks_that_read_other_samples_are_told_to_plan_for_it_once(pool: RankPool):
    for (said,) in pool.run(partial(_warned, alike=False)):
        assert "x has other values on rank 1 than on rank 0" in said
        assert 'Plan with batch="local"' in said
    assert pool.run(partial(_warned, alike=True)) == [[], []]
