"""Gradients of weights behind the collectives of the backward's chain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.planner.search import candidates
from tests.cpu.capture_checks import captured_once
from tests.cpu.model_checks import cluster_where_sharding_pays
from tests.models import ZOO


class Tower(nn.Module):
    """Gated products, cut by columns and then by rows: three weights' gradients between two messages."""

    def __init__(self, d: int = 16, h: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(d, h) for _ in range(depth))
        self.ups = nn.ModuleList(nn.Linear(d, h) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(h, d) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for gate, up, down in zip(self.gates, self.ups, self.downs, strict=True):
            x = x + down(gate(x).sigmoid() * up(x))
        return x.square().mean()


def planned(**options) -> autopar.Plan:
    """Tensor parallelism as it is written by hand."""
    with torch.device("meta"):
        model, x = Tower(4096, 4096), torch.empty(2048, 4096)
    options = {"mesh": (8,), "cluster": "dgx-h100", "async_tensor_parallel": False} | options
    return autopar.plan(model, x, search="baseline:TP", **options)


def test_weights_wait_until_the_chain_has_been_served(monkeypatch) -> None:
    """The last layer's come before the first message of the chain as autograd orders them, and after it here."""
    seen, real = [], candidates.deferred
    monkeypatch.setattr(candidates, "deferred", lambda p, graph: seen.append((p, real(p, graph))) or seen[-1][1])
    planned()
    program, ops = seen[-1]
    assert sorted(op.name for op in ops) == sorted(op.name for op in program.ops)
    made: set[str] = set()
    for op in ops:
        assert made.issuperset(op.reads)
        made.update(t.name for t in op.writes)
    weight = next(name for output, name in program.results if output.name == "downs.2.weight")
    message = next(op.name for op in program.collectives if op.phase == "backward")

    def weight_waits(order) -> bool:
        names = [op.name for op in order]
        return names.index(message) < names.index(program.ops[program.writer[weight]].name)

    assert (weight_waits(ops), weight_waits(program.ops)) == (True, False)


def test_nothing_moves_where_the_budget_forbids_it() -> None:
    budget = planned().peak_memory
    assert planned(memory_budget=budget).peak_memory <= budget


@pytest.mark.parametrize(
    ("name", "mesh", "seed"),
    [("cnn", (2, 2), 0), *(pytest.param("gpt2", m, s, marks=pytest.mark.slow) for m in [(2,), (2, 2)] for s in (0, 1))],
)
@captured_once()
def test_any_order_that_is_made_is_exact(name, mesh, seed, monkeypatch) -> None:
    """Random plans, moved whether or not that gains."""
    monkeypatch.setattr(candidates, "EQUAL_SHARE", -1e9)
    model, inputs = ZOO[name].made(torch.float64, 0.1)
    plan = autopar.plan(model, inputs, mesh=mesh, cluster=cluster_where_sharding_pays(), search=f"random:{seed}")
    kept = autopar.simulate(model, inputs, plan=plan, seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "deferred", lambda program, graph: program.ops)
        other = autopar.plan(model, inputs, mesh=mesh, cluster=cluster_where_sharding_pays(), search=f"random:{seed}")
    expected = autopar.simulate(model, inputs, plan=other, seed=3)
    assert plan.specs == other.specs
    for parameter, gradient in expected.grads.items():
        torch.testing.assert_close(kept.grads[parameter], gradient, rtol=1e-9, atol=1e-11)
