"""Ordinary optimizers on uneven shards of two processes, against the same on one."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError
from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_models import SHARDED, Mlp, pair, state_distance, whole

pytestmark = pytest.mark.multiprocess
EXACT = 1e-9


def _mlp(**options: Any) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(6, 8, dtype=torch.float64)
    return *pair(Mlp().double(), (x,), (2,), **{"constraints": SHARDED["mlp"], **options}), x


def _error_of(action: Any) -> str:
    try:
        action()
    except AutoparError as error:
        return str(error)
    return ""


OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.1},
    "AdamW": {"lr": 0.1},
    "Adagrad": {"lr": 0.1},
    "RMSprop": {"lr": 0.01},
    "NAdam": {"lr": 0.1},
    "RAdam": {"lr": 0.1},
    "Adamax": {"lr": 0.1},
    "Adadelta": {"lr": 1.0},
    "ASGD": {"lr": 0.1},
}


class Lion(torch.optim.Optimizer):
    """Signs of a moving average: stands for optimizers that users bring."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(mean.lerp(p.grad, 0.1).sign_() * group["lr"])
                mean.lerp_(p.grad, 0.01)


def _optimized() -> dict[str, float]:
    reference, model, x = _mlp()
    start = {k: v.clone() for k, v in reference.state_dict().items()}
    makers = {
        f"{name} foreach={each}": (lambda ps, n=name, k=kwargs, e=each: getattr(torch.optim, n)(ps, foreach=e, **k))
        for (name, kwargs), each in itertools.product(OPTIMIZERS.items(), (True, False))
    }
    makers |= {"Lion": Lion, "AdamW fused": lambda ps: torch.optim.AdamW(ps, fused=True)}
    makers |= {"Adam fused": lambda ps: torch.optim.Adam(ps, fused=True)}
    found = {}
    for name, make in makers.items():
        for module in (reference, model):
            module.load_state_dict(start)
            optimizer = make(module.parameters())
            for step in range(3):
                optimizer.zero_grad()
                module(x * (step + 1)).square().mean().backward()
                optimizer.step()
        found[name] = state_distance(model, reference)
    return found


def test_optimizers_on_uneven_shards(pool: RankPool):
    for found in pool.run(_optimized):
        assert len(found) == 23
        assert {name: value for name, value in found.items() if value > EXACT} == {}


def _orthogonalized() -> dict[str, float]:
    """Muon of the matrices, whose Newton-Schulz iteration runs in float64, so that equality can be asked for."""
    reference, model, x = _mlp()
    found = {}
    with unittest.mock.patch.object(Tensor, "bfloat16", Tensor.double):
        for module in (reference, model):
            optimizer = torch.optim.Muon([p for p in module.parameters() if p.ndim == 2], lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                module(x * (step + 1)).square().mean().backward()
                optimizer.step()
    found["Muon"] = state_distance(model, reference)
    return found


def test_muon_on_uneven_shards(pool: RankPool):
    for found in pool.run(_orthogonalized):
        assert found["Muon"] < EXACT


def _unfit() -> dict[str, str]:
    _, model, x = _mlp()
    model(x).sum().backward()
    before = {k: whole(v).clone() for k, v in model.state_dict().items()}
    kinds = {
        "Adafactor": {},
        "Rprop": {},
        "LBFGS": {},
        "SGD": {"fused": True, "lr": 0.1},
        "Adagrad": {"fused": True},
    }
    found = {}
    for name, kwargs in kinds.items():
        optimizer = getattr(torch.optim, name)(model.parameters(), **kwargs)
        found[name] = _error_of(lambda o=optimizer: o.step(lambda: 0.0))
    assert all(torch.equal(whole(v), before[k]) for k, v in model.state_dict().items())
    torch.optim.Rprop(nn.Linear(2, 2).parameters()).step()  # others' parameters are none of our business
    return found


def test_optimizers_that_do_not_work_on_shards_say_so(pool: RankPool):
    for found in pool.run(_unfit):
        assert all(f"{name} does not work on sharded parameters" in text for name, text in found.items())
        assert all("hint:  use" in text for text in found.values())


# Optimizer state that the host keeps.


def _kept_by_host(names: tuple[str, ...], constraints: dict[str, str]) -> dict[str, Any]:
    """Options of a plan whose optimizer state of the parameters in ``names`` is the host's."""
    torch.manual_seed(0)
    x = torch.randn(6, 8, dtype=torch.float64)
    found = autopar.plan(Mlp().double(), (x,), mesh=(2,), constraints=constraints)
    away = tuple(n for n in found.parameters if n.startswith(names))
    return {"plan": dataclasses.replace(found, program=dataclasses.replace(found.program, offloaded_optimizer=away))}


def _optimized_on_host() -> dict[str, float]:
    reference, model, x = _mlp(constraints=None, **_kept_by_host(("",), SHARDED["mlp"]))
    start = {k: v.clone() for k, v in reference.state_dict().items()}
    found = {}
    for name, kwargs in OPTIMIZERS.items():
        for module in (reference, model):
            module.load_state_dict(start)
            optimizer = getattr(torch.optim, name)(module.parameters(), **kwargs)
            for step in range(3):
                optimizer.zero_grad()
                module(x * (step + 1)).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
        states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, DTensor)]
        assert states
        assert all(v._autopar_on_host for v in states)
        found[name] = state_distance(model, reference)
    return found


def test_optimizers_whose_state_the_host_keeps(pool: RankPool):
    for found in pool.run(_optimized_on_host):
        assert set(found) == set(OPTIMIZERS)
        assert {name: value for name, value in found.items() if value > EXACT} == {}


def _compiled_on_host() -> tuple[list[bool], float, bool]:
    """Whether steps with a compiled program have the same bits wherever the optimizer's state is."""
    options = _kept_by_host(("",), SHARDED["mlp"])
    there = options["plan"]
    here = dataclasses.replace(there, program=dataclasses.replace(there.program, offloaded_optimizer=()))
    trained = []
    for plan in (here, there):
        reference, model, x = _mlp(constraints=None, plan=plan, backend="inductor")
        for module in (reference, model):
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                module(x).square().mean().backward()
                optimizer.step()
        trained.append(model)
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, DTensor)]
    pairs = zip(*(m.parameters() for m in trained), strict=True)
    equal = [torch.equal(p.to_local(), q.to_local()) for p, q in pairs]
    return equal, state_distance(model, reference), bool(states) and all(v._autopar_on_host for v in states)


def test_a_compiled_program_steps_on_state_that_the_host_keeps(pool: RankPool):
    for equal, distance, on_host in pool.run(_compiled_on_host):
        assert on_host
        assert all(equal)
        assert distance < EXACT


def _checkpointed_on_host(folder: str) -> float:
    """Save with all optimizer state on the host; go on under another plan, with some of it there."""
    reference, first, x = _mlp(constraints=None, **_kept_by_host(("",), SHARDED["mlp"]))
    _, second, _ = _mlp(constraints=None, **_kept_by_host(("down",), {"up.weight": "RS0", "down.weight": "S0R"}))

    def trained(module: nn.Module, optimizer: torch.optim.Optimizer, scale: float) -> None:
        optimizer.zero_grad()
        module(x * scale).square().mean().backward()
        optimizer.step()

    alone, one, other = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (reference, first, second))
    trained(first, one, 1)
    dcp.save({"model": first.state_dict(), "optimizer": get_optimizer_state_dict(first, one)}, checkpoint_id=folder)
    into = {"model": second.state_dict(), "optimizer": get_optimizer_state_dict(second, other)}
    dcp.load(into, checkpoint_id=folder)
    second.load_state_dict(into["model"])
    set_optimizer_state_dict(second, other, into["optimizer"])
    trained(second, other, 2)
    trained(reference, alone, 1)
    trained(reference, alone, 2)
    return state_distance(second, reference)


def test_a_checkpoint_with_state_on_the_host_continues_under_another_plan(pool: RankPool, tmp_path: Path):
    for found in pool.run(_checkpointed_on_host, str(tmp_path / "saved")):
        assert found < EXACT


MADE_BEFORE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 0.1},
    "Adam": {"lr": 0.1, "fused": True},
    "Adagrad": {"lr": 0.1},
    "NAdam": {"lr": 0.1},
    "ASGD": {"lr": 0.1, "foreach": True},
}


class Scaled(Mlp):
    """A layer that is frozen, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.down.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def _steps(model: nn.Module, optimizer: Any, scheduler: Any, x: Tensor) -> None:
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def _made_before(steps: int) -> dict[str, float]:
    """Optimizers and schedules of the plain model, which has made ``steps`` times two steps and a backward."""
    torch.manual_seed(0)
    x = torch.randn(6, 8, dtype=torch.float64)
    start = Scaled().double()
    plan = autopar.plan(start, (x,), mesh=(2,), constraints=SHARDED["mlp"], time_limit=2)
    found = {}
    for name, options in MADE_BEFORE.items():
        models = [copy.deepcopy(start) for _ in range(2)]
        optimizers: list[Any] = [getattr(torch.optim, name)(m.parameters(), **options) for m in models]
        loops = [(m, o, torch.optim.lr_scheduler.StepLR(o, 1, 0.9), x) for m, o in zip(models, optimizers, strict=True)]
        for loop in loops * steps:
            _steps(*loop)
            loop[0](x).square().mean().backward()
        autopar.autoparallelize(models[1], (x,), plan=plan)
        for loop in loops:
            _steps(*loop)
        found[name] = state_distance(models[1], models[0])
        held = [t for p in models[1].parameters() for k, t in optimizers[1].state[p].items() if t is not None]
        assert all(isinstance(t, DTensor) for t in held if t.ndim)
    return found


@pytest.mark.parametrize("steps", [0, 1])
def test_an_optimizer_made_before_trains_the_parallel_model(pool: RankPool, steps: int) -> None:
    for found in pool.run(_made_before, steps):
        assert {n: d for n, d in found.items() if not d < EXACT} == {}


def _state_of_one_rank() -> str:
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(6, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if torch.distributed.get_rank() == 0:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    error = _error_of(lambda: autopar.autoparallelize(model, (x,), mesh=(2,), time_limit=2))
    assert type(model) is Mlp
    return error


def test_state_that_only_one_rank_has_is_refused_by_all(pool: RankPool) -> None:
    for error in pool.run(_state_of_one_rank):
        assert "different optimizer state or gradients of up.weight" in error
        assert "load the same checkpoint on every rank" in error
