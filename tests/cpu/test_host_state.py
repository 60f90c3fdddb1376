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
from autopar.runtime import host_state
from autopar.runtime.meter import MemoryMeter, held_by

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam, one by one": lambda p: torch.optim.Adam(p, foreach=False),
    "Adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
}


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


def made(away: str | None = "") -> nn.Module:
    torch.manual_seed(0)
    return autopar.autoparallelize(Mlp(), (X,), plan=plan("nothing" if away is None else away))


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


@pytest.mark.parametrize("chunk_bytes", [1, 500, 2**25])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_ordinary_optimizer_bit_for_bit(name, chunk_bytes, monkeypatch) -> None:
    monkeypatch.setattr(host_state, "OPTIMIZER_CHUNK_BYTES", chunk_bytes)
    ordinary, ours = made(None), made("")
    assert train(ordinary, OPTIMIZERS[name](ordinary.parameters()), 4) == train(
        ours, optimizer := OPTIMIZERS[name](ours.parameters()), 4
    )
    assert equal(ordinary, ours)
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, DTensor)]
    assert all(map(on_host, states))
    assert name in ("SGD", "Adagrad") or len(states) >= len(list(ours.parameters()))


def test_the_device_holds_the_state_of_one_chunk_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(host_state, "OPTIMIZER_CHUNK_BYTES", 1)
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
