"""A part of a product that the backward reads is copied under a budget, and the rest of the product is let go."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar import passes
from autopar.mesh import Cluster, Mesh
from autopar.planner.memory.exact import profile
from autopar.planner.options import Options
from autopar.planner.pricing.prices import Prices
from autopar.planner.schedule.copied_parts import COPIED, with_parts_copied
from autopar.plans import Plan
from autopar.program import AGAIN
from autopar.runtime.simulation import simulate_program
from autopar.tracer import ColoTracer
from tests.cpu.model_checks import cluster_where_sharding_pays

LAYERS, ROWS, WIDTH = 4, 256, 64


class Gated(nn.Module):
    """One product makes a gate and what it gates, as Mamba's first projection does.

    The backward needs the gate, and of the other half only what is made of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, gated = self.both(x).chunk(2, dim=-1)
        return x + gate * (gated + 1).relu()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Gated() for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(self.layers(x), torch.zeros_like(x))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, WIDTH)}


@cache
def cluster() -> Cluster:
    """One whose host is too slow to offload to."""
    found = cluster_where_sharding_pays().sized(2)
    return replace(found, host=replace(found.host, bandwidth_bytes_per_s=1.0))


def plan(model: nn.Module, inputs: dict[str, Tensor], budget: int | None = None) -> Plan:
    made = autopar.plan(model, inputs, mesh=(2,), cluster=cluster(), optimizer="sgd", memory_budget=budget)
    assert isinstance(made, Plan)
    return made


def copies(plan: Plan) -> list[str]:
    return [op.reads[0] for op in plan.program.ops if op.kind == "copy"]


def assert_equals_one_device(model: nn.Module, inputs: dict[str, Tensor], found: autopar.Simulation) -> None:
    loss = model(**inputs)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(found.outputs, loss)
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(found.grads[name], gradient, msg=name)


def test_half_of_each_product_is_let_go_where_the_budget_asks_for_it(model, inputs) -> None:
    free = plan(model, inputs)
    assert not copies(free)
    half = ROWS * WIDTH * 4 // 2
    budget = free.peak_memory - half * (LAYERS - 1)
    short = plan(model, inputs, budget)
    assert copies(short)
    assert short.peak_memory <= budget
    assert not any(op.name.endswith(AGAIN) for op in short.program.ops)
    found = autopar.simulate(model, inputs, short)
    assert found.peak_memory <= short.peak_memory
    assert_equals_one_device(model, inputs, found)


def test_no_more_parts_are_copied_than_necessary(model, inputs) -> None:
    free, half = plan(model, inputs), ROWS * WIDTH * 4 // 2
    turn = next(at for at, op in enumerate(free.program.ops) if op.phase == "backward" and op.kind == "compute")
    for copied in range(1, LAYERS + 1):
        over = [(copied - 1) * half + 1 if at == turn else 0 for at in range(len(free.program.ops))]
        found = with_parts_copied(free.program, Prices(Mesh((2,)), cluster()), over, 0)
        assert found is not None
        assert sum(op.kind == "copy" for op in found.ops) == copied


def test_a_copied_part_costs_what_reading_and_writing_it_takes(model, inputs) -> None:
    free = plan(model, inputs)
    prices = Prices(Mesh((2,)), cluster())
    found = with_parts_copied(free.program, prices, [1] * (len(free.program.ops) + 1), 0)
    assert found is not None
    launch_s, s_per_byte = prices.compute.copy_line()
    for op in found.ops:
        if op.kind == "copy":
            assert op.seconds == launch_s + 2 * s_per_byte * op.writes[0].bytes
            assert op.writes[0].name == op.reads[0] + COPIED


def test_the_backward_reads_copies_and_the_memory_is_as_predicted(model, inputs) -> None:
    free, mesh, options = plan(model, inputs), Mesh((2,)), Options(optimizer="sgd")
    prices = Prices(mesh, cluster())
    capture = ColoTracer().capture(model, inputs)
    before = profile(free.program, capture.graph, mesh, options)
    found = with_parts_copied(free.program, prices, before.timeline, 0)
    assert found is not None
    copied = {op.reads[0] for op in found.ops if op.kind == "copy"}
    assert not any(copied & set(op.reads) for op in found.ops if op.phase == "backward")
    after = profile(found, capture.graph, mesh, options)
    assert after.peak_bytes < before.peak_bytes
    named = {("input", n): t for n, t in inputs.items()}
    named |= {("parameter", n): p.detach() for n, p in model.named_parameters()}
    named |= {("constant", k): t for k, t in capture.constants.items()}
    _, ran = simulate_program(
        passes.compose(passes.lower(found, capture.graph, mesh), capture.graph), capture.graph, mesh, named, 0
    )
    assert ran.peak_memory <= after.peak_bytes


def test_nothing_is_copied_where_the_memory_is_ample(model, inputs) -> None:
    free = plan(model, inputs)
    assert copies(plan(model, inputs, free.peak_memory)) == []


def test_a_plan_with_copies_is_saved_read_and_printed(model, inputs, tmp_path: Path) -> None:
    free = plan(model, inputs)
    short = plan(model, inputs, free.peak_memory - ROWS * WIDTH * 4 * 2)
    short.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert copies(again) == copies(short) != []
    assert_equals_one_device(model, inputs, autopar.simulate(model, inputs, again))
    assert "clone(" in short.source
