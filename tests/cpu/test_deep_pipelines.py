"""Pipelines of deep models: as many layers as a stage has are planned, and stand for all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import AutoparError, Pipeline
from autopar.planner.pipeline import search
from tests.multiprocess.training_models import distance, seeded

LAYERS, WIDTH, BATCH = 16, 64, 16
MESH = {"pp": 4, "dp": 2}
ASKED = Pipeline(micro_batches=8, schedule="1f1b")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), y)


def inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, 8), "y": torch.randint(0, 8, (BATCH,))}


def planned(**options: Any) -> Any:
    return autopar.plan(seeded(Deep), seeded(inputs), MESH, "cpu-2:8", pipeline=ASKED, **options)


def test_the_layers_of_a_stage_tell_what_all_of_them_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    plan_graph = search.plan_graph

    def watched(graph: Any, *args: Any, **options: Any) -> Any:
        sizes.append(len(graph.nodes))
        return plan_graph(graph, *args, **options)

    monkeypatch.setattr(search, "plan_graph", watched)
    plan = planned()
    monkeypatch.setattr(search, "shortened", lambda *_: None)
    whole = planned()
    assert sizes[0] < 0.6 * sizes[-1]
    assert plan.starts == whole.starts
    assert plan.step_time <= 1.02 * whole.step_time
    assert 0.1 * whole.lower_bound < plan.lower_bound <= whole.step_time


@pytest.mark.slow
def test_a_deep_pipeline_keeps_to_its_budget() -> None:
    budget = int(0.8 * planned().peak_memory)
    assert planned(memory_budget=budget).peak_memory <= budget


def test_a_constraint_on_any_layer_holds() -> None:
    named = {"blocks.9.up.weight": "S0R"}
    stage = next(s for s in planned(constraints=named).stages if "blocks.9.up.weight" in s.specs)
    assert str(stage.specs["blocks.9.up.weight"]) == "S0R"


def test_a_constraint_on_no_layer_is_refused() -> None:
    with pytest.raises(AutoparError, match=r"blocks\.16"):
        planned(constraints={"blocks.16.up.weight": "S0R"})


def test_a_deep_pipeline_computes_what_one_device_does() -> None:
    model, batch = seeded(Deep), seeded(inputs)
    run: Any = autopar.simulate(model, batch, planned())
    loss = model(**batch)
    loss.backward()
    assert distance(run.outputs, loss) < 1e-5
    assert max(distance(run.grads[n], p.grad) for n, p in model.named_parameters()) < 1e-5
