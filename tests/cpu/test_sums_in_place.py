"""Sums that overwrite a summand which ends there: which do, and that values stay right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.models import ZOO


class Residual(nn.Module):
    """``kind`` says what else reads the summand."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        if self.kind == "alone":
            return (made + x).square().sum()
        if self.kind == "read before":
            return (made.sigmoid().sum() + (made + x).sum()).square()
        if self.kind == "a view lives on":
            view = made.transpose(0, 1)
            return (self.second(made + x) @ view).sum()
        if self.kind == "kept for the backward":
            return (self.second(made) + made + x).square().sum()
        assert self.kind == "returned"
        return torch.cat([made + x, made]).square().sum()


def sums(plan: autopar.Plan) -> list[str]:
    return [op.phase for op in plan.program.ops if op.in_place and op.kind == "compute"]


@pytest.mark.parametrize(
    ("kind", "forward"),
    [("alone", 1), ("read before", 1), ("a view lives on", 0), ("kept for the backward", 2), ("returned", 0)],
)
def test_a_summand_is_overwritten_only_where_it_ends(kind, forward) -> None:
    torch.manual_seed(0)
    model, x = Residual(kind).double(), torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    plan = autopar.plan(model, x, mesh=(2,), cluster="cpu-2")
    assert sums(plan).count("forward") == forward
    assert plan.source.count(".add_(") == len(sums(plan))
    found = autopar.simulate(model, x, plan=plan)
    loss = model(x)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(found.outputs, loss.detach())
    for (name, _), gradient in zip(model.named_parameters(), grads, strict=True):
        if gradient is not None:
            torch.testing.assert_close(found.grads[name], gradient)


def test_residuals_and_gradients_of_a_network_are() -> None:
    model, inputs = ZOO["resnet"].made(torch.float32, 0.1)
    plan = autopar.plan(model, inputs, mesh=(1,), cluster="cpu-2")
    assert {"forward", "backward"} <= set(sums(plan))


def test_a_saved_plan_keeps_them(tmp_path) -> None:
    plan = autopar.plan(Residual("alone"), torch.randn(8, 8), mesh=(1,), cluster="cpu-2")
    assert sums(plan) == ["forward"]
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json").program == plan.program
