"""Optimizer state on the host: the same steps bit for bit, and not more of it on the device than one chunk."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import autopar
from autopar.cost_models import optimizer_steps_alone
from autopar.runtime import host_state
from autopar.runtime.meter import MemoryMeter, held_by

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam, one by one": lambda p: torch.optim.Adam(p, foreach=False),
    "Adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
}


NAMES = {"Adafactor", "Muon", "Rprop", *(kind.__name__ for kind in host_state.PER_PARAMETER)}


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 13), nn.Linear(13, 7)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.relu(self.up(x))) * self.scale).square().mean()


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


@cache
def plan(away: str) -> autopar.Plan:
    """A plan that keeps the optimizer state of the parameters that begin with ``away`` on the host."""
    found = autopar.plan(Mlp(), (X,), mesh=(1,))
    names = tuple(n for n in found.parameters if n.startswith(away))
    return dataclasses.replace(found, program=dataclasses.replace(found.program, offloaded_optimizer=names))


def made(away: str | None = "", backend: str = "eager") -> nn.Module:
    torch.manual_seed(0)
    return autopar.autoparallelize(Mlp(), (X,), plan=plan("nothing" if away is None else away), backend=backend)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(X * (step + 1))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(p.to_local(), q.to_local()) for p, q in pairs)


def on_host(value: Any) -> bool:
    return getattr(value, "_autopar_on_host", False)


@pytest.mark.parametrize(("name", "chunk_bytes"), [*((n, 500) for n in OPTIMIZERS), ("AdamW", 1), ("AdamW", 2**25)])
def test_steps_are_those_of_the_ordinary_optimizer_bit_for_bit(name, chunk_bytes, monkeypatch) -> None:
    monkeypatch.setattr(host_state, "optimizer_chunk_bytes", lambda total: chunk_bytes)
    ordinary, ours = made(None), made("")
    optimizer = OPTIMIZERS[name](ours.parameters())
    assert train(ordinary, OPTIMIZERS[name](ordinary.parameters()), 4) == train(ours, optimizer, 4)
    assert equal(ordinary, ours)
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, DTensor)]
    assert all(map(on_host, states))
    assert name in ("SGD", "Adagrad") or len(states) >= len(list(ours.parameters()))


def test_the_device_holds_the_state_of_one_chunk_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(host_state, "optimizer_chunk_bytes", lambda total: 1)
    model = made("")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with MemoryMeter() as meter:
        train(model, optimizer, 2)
        optimizer.step()
        meter.hold(held_by(model))
        between = meter.held
        meter.reset()
        optimizer.step()
        assert meter.held == between
        largest = max(p.to_local().nbytes for p in model.parameters())
        assert meter.peak - between <= 5 * largest
    whole = 2 * sum(p.to_local().nbytes for p in model.parameters())
    assert whole > 3 * largest


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_within_a_budget_too_small_for_all_state_some_is_the_hosts_and_the_prediction_holds() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64)
    ordinary, model = Deep(), Deep()
    model.load_state_dict(ordinary.state_dict())
    free = autopar.plan(model, (x,), mesh=(1,))
    assert free.offloaded_optimizer == ()
    budget = int(0.7 * free.peak_memory)
    model = autopar.autoparallelize(model, (x,), mesh=(1,), memory_budget=budget)
    away = model.plan.offloaded_optimizer
    assert 0 < len(away) < 6
    assert model.plan.host_memory >= len(away) * 2 * 64 * 64 * 4
    assert model.plan.step_time > free.step_time
    assert f"optimizer state of {len(away)} parameters" in str(model.plan)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (ordinary, model)]
    with MemoryMeter() as meter:
        meter.hold([*held_by(model), x])
        for _ in range(3):
            optimizers[1].zero_grad()
            model(x).backward()
            optimizers[1].step()
        assert meter.peak == pytest.approx(model.plan.peak_memory, abs=16)
    assert model.plan.peak_memory <= budget
    for _ in range(3):
        optimizers[0].zero_grad()
        ordinary(x).backward()
        optimizers[0].step()
    for p, q in zip(model.parameters(), ordinary.parameters(), strict=True):
        torch.testing.assert_close(p.to_local(), q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("away", ["", "down"])
def test_steps_of_a_compiled_model_are_the_ordinary_ones_bit_for_bit(away) -> None:
    ordinary, ours = made(None, "inductor"), made(away, "inductor")
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (ordinary, ours)]
    assert train(ordinary, optimizers[0], 4) == train(ours, optimizers[1], 4)
    assert equal(ordinary, ours)
    for name, parameter in ours.named_parameters():
        assert on_host(optimizers[1].state[parameter]["exp_avg"]) == name.startswith(away)


def test_a_plan_for_inductor_keeps_state_on_the_host_under_a_budget_and_trains_as_one_device() -> None:
    torch.manual_seed(0)
    ordinary, x = Deep(), torch.randn(4, 64)
    options = {"mesh": (1,), "backend": "inductor"}
    most = int(0.7 * autopar.plan(ordinary, (x,), **options).peak_memory)
    model = autopar.autoparallelize(copy.deepcopy(ordinary), (x,), memory_budget=most, **options)
    assert 0 < len(model.plan.offloaded_optimizer) < 6
    assert model.plan.peak_memory <= most
    for module in (ordinary, model):
        optimizer = torch.optim.AdamW(module.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            module(x).backward()
            optimizer.step()
    assert {n for n, p in model.named_parameters() if on_host(optimizer.state[p]["exp_avg"])} == set(
        model.plan.offloaded_optimizer
    )
    for p, q in zip(model.parameters(), ordinary.parameters(), strict=True):
        torch.testing.assert_close(p.to_local(), q, rtol=1e-5, atol=1e-6)


def test_only_the_named_parameters_state_goes() -> None:
    ordinary, ours = made(None), made("down")
    optimizers = [torch.optim.AdamW(m.parameters(), fused=True) for m in (ordinary, ours)]
    train(ordinary, optimizers[0], 3)
    train(ours, optimizers[1], 3)
    assert equal(ordinary, ours)
    for name, parameter in ours.named_parameters():
        assert on_host(optimizers[1].state[parameter]["exp_avg"]) == name.startswith("down")


def test_groups_keep_their_options_and_learning_rates_follow_their_schedule() -> None:
    def trained(away: str | None) -> nn.Module:
        model = made(away)
        groups = [{"params": model.up.parameters(), "lr": 0.1}, {"params": [*model.down.parameters(), model.scale]}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                train(model, optimizer, 1)
                schedule.step()
        return model

    assert equal(trained(None), trained(""))


def test_parameters_without_gradients_are_left_alone() -> None:
    ordinary, ours = made(None), made("")
    for model in (ordinary, ours):
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(X).backward()
            model.up.weight.grad = None
            optimizer.step()
        assert model.up.weight not in optimizer.state
    assert equal(ordinary, ours)


def test_a_closure_is_evaluated_once_before_any_parameter_steps() -> None:
    def trained(away: str | None) -> tuple[nn.Module, list[float]]:
        model, losses, calls = made(away), [], []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def closure() -> Tensor:
            calls.append(0)
            optimizer.zero_grad()
            loss = model(X)
            loss.backward()
            return loss

        losses += [optimizer.step(closure).item(), optimizer.step(closure=closure).item()]
        assert len(calls) == 2
        return model, losses

    (ordinary, expected), (ours, found) = trained(None), trained("")
    assert expected == found
    assert equal(ordinary, ours)


def test_hooks_of_users_run_before_and_after_all_parameters_step() -> None:
    """A hook that clips gradients, and one that reads parameters."""
    model = made("")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[float] = []

    def total(*_: Any) -> None:
        seen.append(float(sum(p.detach().to_local().sum() for p in model.parameters())))

    train(model, optimizer, 1)
    for _ in range(2):
        optimizer.register_step_pre_hook(total)
        optimizer.register_step_post_hook(total)
        seen.clear()
        train(model, optimizer, 1)
        before, after = seen[: len(seen) // 2], seen[len(seen) // 2 :]
        assert len(set(before)) == len(set(after)) == 1
        assert before != after


def test_an_error_in_a_step_leaves_groups_and_state_whole(monkeypatch) -> None:
    monkeypatch.setattr(host_state, "optimizer_chunk_bytes", lambda total: 1)
    ordinary, ours = made(None), made("")
    optimizers = [torch.optim.Adam(m.parameters()) for m in (ordinary, ours)]
    for model, optimizer in zip((ordinary, ours), optimizers, strict=True):
        train(model, optimizer, 1)
    optimizers[1].param_groups[0]["lr"] = torch.ones(2)  # refused where it is used
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        optimizers[1].step()
    optimizers[1].param_groups[0]["lr"] = 1e-3
    assert len(optimizers[1].param_groups[0]["params"]) == len(list(ours.parameters()))
    assert all(on_host(s["exp_avg"]) for s in optimizers[1].state.values())


class Together(torch.optim.Optimizer):
    """One momentum over the norm of all gradients: no parameter may step without the others."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = sum(p.grad.square().sum() for p in parameters).sqrt()
        for p in parameters:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.lerp_(p.grad / norm, 0.1)
            p.sub_(mean, alpha=0.1)


def test_an_optimizer_that_looks_at_all_parameters_gets_all_of_its_state_and_says_so() -> None:
    host_state._warn_of_all.cache_clear()
    ordinary, ours = made(None), made("")
    optimizers = [Together(m.parameters()) for m in (ordinary, ours)]
    train(ordinary, optimizers[0], 3)
    with pytest.warns(UserWarning, match="Together may look at several parameters together"):
        train(ours, optimizers[1], 3)
    assert equal(ordinary, ours)
    assert all(on_host(s["mean"]) for s in optimizers[1].state.values())


def test_an_optimizer_of_another_model_is_none_of_our_business() -> None:
    made("")
    other = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(other.parameters())
    other(torch.ones(2)).sum().backward()
    optimizer.step()
    assert not any(on_host(v) for s in optimizer.state.values() for v in s.values())
    assert len(optimizer._optimizer_step_pre_hooks) == 0


@pytest.mark.parametrize("how", ["state_dict", "checkpoint"])
@pytest.mark.parametrize(("first", "second"), [("", ""), (None, ""), ("", None)])
def test_training_continues_from_a_saved_optimizer(how, first, second, tmp_path) -> None:
    """State that was on the host when it was saved, when it is loaded, or both."""
    one, other = made(first), made(second)
    optimizer, again = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (one, other))
    train(one, optimizer, 2)
    if how == "state_dict":
        other.load_state_dict(one.state_dict())
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        saved = {"model": one.state_dict(), "optimizer": get_optimizer_state_dict(one, optimizer)}
        dcp.save(saved, checkpoint_id=str(tmp_path))
        into = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, again)}
        dcp.load(into, checkpoint_id=str(tmp_path))
        other.load_state_dict(into["model"])
        set_optimizer_state_dict(other, again, into["optimizer"])
        assert second is None or all(on_host(s["exp_avg"]) for s in again.state.values())
    train(one, optimizer, 2)
    train(other, again, 2)
    assert equal(one, other)
    assert second is None or all(on_host(s["exp_avg"]) for s in again.state.values())


def test_the_planner_knows_which_optimizers_treat_parameters_alone() -> None:
    known = {kind for kind in vars(torch.optim).values() if isinstance(kind, type) and kind.__name__ in NAMES}
    assert {kind for kind in known if optimizer_steps_alone(kind)} == set(host_state.PER_PARAMETER)
