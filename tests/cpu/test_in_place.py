"""Sums and activations that overwrite an operand which ends there: which do, and that values stay right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.simulation import Simulation
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
        if self.kind == "summed before":
            total = made.sum(0, keepdim=True)
            changed = made + x
            return (changed * total.reshape(8)).square().sum()
        assert self.kind == "returned"
        return torch.cat([made + x, made]).square().sum()


class Activated(nn.Module):
    """An activation of ``kind``, of which the backward needs the result or the operand."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        if self.kind == "gated":
            return self.second(nn.functional.silu(made) * self.first(x)).square().sum()
        return self.second(getattr(nn.functional, self.kind)(made)).square().sum()


def in_place(plan: autopar.Plan) -> list[tuple[str, str]]:
    """Phase and op of what overwrites an operand."""
    return [(op.phase, op.node) for op in plan.program.ops if op.in_place and op.kind == "compute"]


def sums(plan: autopar.Plan) -> list[str]:
    return [phase for phase, node in in_place(plan) if "add" in node]


def check(model: nn.Module, x: Tensor, plan: autopar.Plan) -> Simulation:
    """Outputs and gradients of the simulated plan are the model's."""
    found = autopar.simulate(model, x, plan=plan)
    loss = model(x)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(found.outputs, loss.detach())
    for (name, _), gradient in zip(model.named_parameters(), grads, strict=True):
        if gradient is not None:
            torch.testing.assert_close(found.grads[name], gradient)
    return found


@pytest.mark.parametrize(
    ("kind", "forward"),
    [
        ("alone", 1),
        ("read before", 1),
        ("a view lives on", 0),
        ("kept for the backward", 2),
        ("summed before", 1),
        ("returned", 0),
    ],
)
def test_a_summand_is_overwritten_only_where_it_ends(kind, forward) -> None:
    torch.manual_seed(0)
    model, x = Residual(kind).double(), torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    plan = autopar.plan(model, x, mesh=(2,), cluster="cpu-2")
    assert sums(plan).count("forward") == forward
    assert plan.source.count(".add_(") == len(sums(plan))
    check(model, x, plan)


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        ("relu", [".relu_()", "threshold_backward.grad_input("]),
        ("gelu", ["gelu_backward.grad_input("]),
        ("silu", ["silu_backward.grad_input("]),
        ("gated", ["silu_backward.grad_input(", ".mul_("]),
    ],
)
@pytest.mark.parametrize("mesh", [(1,), (2,)])
def test_an_activation_is_made_in_what_ends_with_it(kind, written, mesh) -> None:
    torch.manual_seed(0)
    model, x = Activated(kind).double(), torch.randn(8, 8, dtype=torch.float64)
    plan = autopar.plan(model, x, mesh=mesh, cluster="cpu-2", constraints={"input:x": "S0R" if mesh == (2,) else "RR"})
    assert [text for text in written if text not in plan.source] == []
    assert check(model, x, plan).peak_memory <= plan.peak_memory


def test_residuals_and_gradients_of_a_network_are() -> None:
    model, inputs = ZOO["resnet"].made(torch.float32, 0.1)
    plan = autopar.plan(model, inputs, mesh=(1,), cluster="cpu-2")
    assert {"forward", "backward"} <= set(sums(plan))
    assert plan.source.count(".relu_()") > 1


def test_a_saved_plan_keeps_them(tmp_path) -> None:
    plan = autopar.plan(Residual("alone"), torch.randn(8, 8), mesh=(1,), cluster="cpu-2")
    assert sums(plan) == ["forward"]
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json").program == plan.program
