"""What a script made of a model's parameters before the model was parallel, in a world of one."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.training import MasterWeights

X = torch.randn(6, 4)


class Net(nn.Module):
    """One layer, and the loss."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer if layer is not None else nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return autopar.plan(Net(), (X,), mesh=(1,), time_limit=2)


def same(model: nn.Module, reference: nn.Module) -> None:
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b)


def stepped(model: nn.Module, optimizer: Any) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(X)
        loss.backward()
        return loss

    optimizer.step(closure)


def test_lbfgs_made_before_trains(plan: autopar.Plan):
    model = Net()
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.LBFGS(m.parameters(), max_iter=3) for m in (model, reference)]
    autopar.autoparallelize(model, (X,), plan=plan)
    for m, optimizer in zip((model, reference), optimizers, strict=True):
        stepped(m, optimizer)
    same(model, reference)


def test_groups_stay_what_they_are_and_other_models_parameters_stay_in_them(plan: autopar.Plan):
    model, other = Net(), nn.Linear(2, 2)
    groups = [{"params": [model.layer.weight, other.weight], "lr": 0.5}, {"params": [model.layer.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    lists = [group["params"] for group in optimizer.param_groups]
    autopar.autoparallelize(model, (X,), plan=plan)
    assert [group["params"] for group in optimizer.param_groups] == lists
    assert lists[0][0] is model.layer.weight
    assert lists[0][1] is other.weight
    assert lists[1] == [model.layer.bias]


def test_a_gradient_that_is_there_counts_in_the_next_step(plan: autopar.Plan):
    model = Net()
    reference = copy.deepcopy(model)
    for m in (model, reference):
        m(X).backward()
    autopar.autoparallelize(model, (X,), plan=plan)
    for m in (model, reference):
        m(X).backward()
    torch.testing.assert_close(model.layer.weight.grad.full_tensor(), reference.layer.weight.grad)


@pytest.mark.parametrize(
    "use",
    [
        lambda held: torch.nn.utils.clip_grad_norm_(held, 1.0),
        lambda held: [p.sub_(0.1 * p.grad) for p in held if p.grad is not None],
    ],
)
def test_who_asks_an_old_parameter_for_its_gradient_is_told(plan: autopar.Plan, use: Callable[[Any], Any]):
    model = Net()
    held = list(model.parameters())
    start = [p.detach().clone() for p in held]
    model(X).backward()
    autopar.autoparallelize(model, (X,), plan=plan)
    with pytest.raises(AutoparError, match=r"(?s)no longer receives gradients.*layer\.weight.*after autoparallelize"):
        use(held)
    assert all(map(torch.equal, held, start))


def test_an_optimizer_that_is_not_found_stops_at_its_first_step(plan: autopar.Plan):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    gc.freeze()
    try:
        autopar.autoparallelize(model, (X,), plan=plan)
    finally:
        gc.unfreeze()
    model(X).backward()
    with pytest.raises(AutoparError, match="no longer receives gradients"):
        optimizer.step()


def test_parameters_of_subclasses_and_on_meta(plan: autopar.Plan):
    class Own(nn.Parameter):
        pass

    with torch.device("meta"):
        model = Net()
    model.layer.weight = Own(model.layer.weight)
    old = model.layer.weight
    optimizer = torch.optim.AdamW(model.parameters())
    autopar.autoparallelize(model, (X,), plan=plan, initialize=False)
    assert list(model.parameters()) == optimizer.param_groups[0]["params"]
    assert isinstance(old, Own)
    with pytest.raises(AutoparError):
        _ = old.grad


def _whole_vectors(model: nn.Module) -> Any:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    stepped(model, optimizer)
    return optimizer


def _without_values(model: nn.Module) -> Any:
    return torch.optim.Adagrad(model.to("meta").parameters())


@pytest.mark.parametrize(("make", "said"), [(_whole_vectors, "cannot be sharded"), (_without_values, "meta device")])
def test_state_that_cannot_be_cut_is_refused_and_the_model_is_as_it_was(
    plan: autopar.Plan, make: Callable[[nn.Module], Any], said: str
):
    model = Net()
    optimizer = make(model)
    with pytest.raises(AutoparError, match=rf"(?s){said}.*{type(optimizer).__name__}.*model\.parameters\(\)"):
        autopar.autoparallelize(model, (X,), plan=plan)
    assert type(model) is Net
    assert all(type(p) is nn.Parameter for p in optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("master", [None, "fp32"])
def test_state_has_the_dtype_that_the_optimizer_steps_in(master: str | None):
    model = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    policy = autopar.MixedPrecision(parameter="bf16", reduce="fp32", master=master)
    autopar.autoparallelize(model, (X,), mesh=(1,), mixed_precision=policy, time_limit=2)
    stepped(model, MasterWeights(optimizer) if master else optimizer)
    averages = optimizer.state[model.layer.weight]["exp_avg"]
    assert averages.dtype == (torch.float32 if master else torch.bfloat16)
