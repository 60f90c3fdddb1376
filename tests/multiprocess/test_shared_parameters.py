"""Models that share a backbone or a parameter, made parallel one after the other, train as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_models import distance, whole

pytestmark = pytest.mark.multiprocess
CUT = {"encoder.up.weight": "S0R", "encoder.down.weight": "RS0"}
QUICK: dict[str, Any] = {"cluster": "cpu-2", "time_limit": 2}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


class WithHead(nn.Module):
    def __init__(self, encoder: nn.Module, outputs: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def _a_backbone() -> tuple[nn.Module, nn.Module]:
    encoder = Encoder()
    return WithHead(encoder, 3), WithHead(encoder, 5)


def _the_whole_first_model() -> tuple[nn.Module, nn.Module]:
    encoder = WithHead(Encoder(), 8)
    return encoder, WithHead(encoder, 5)


def _a_part_of_the_first_model() -> tuple[nn.Module, nn.Module]:
    first = WithHead(Encoder(), 3)
    return first, first.encoder  # type: ignore[return-value]


def _one_parameter() -> tuple[nn.Module, nn.Module]:
    first, second = WithHead(Encoder(), 3), WithHead(Encoder(), 5)
    second.encoder.up.weight = first.encoder.up.weight  # type: ignore[union-attr]
    return first, second


def _trained(make: Callable[[], tuple[nn.Module, nn.Module]]) -> tuple[float, bool]:
    """The worst distance from one device, and whether the models still share what they shared."""
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    plain = make()
    models = copy.deepcopy(plain)
    autopar.autoparallelize(models[0], x, mesh=(2,), constraints=CUT, **QUICK)
    autopar.autoparallelize(models[1], x, **QUICK)
    found = []
    optimizers = [torch.optim.SGD({p: 0 for m in both for p in m.parameters()}, lr=0.1) for both in (models, plain)]
    for _ in range(2):
        for (first, second), optimizer in zip((models, plain), optimizers, strict=True):
            optimizer.zero_grad()
            (first(x).square().mean() + second(x).sin().mean()).backward()
        pairs = list(zip(*([p for m in both for p in m.parameters()] for both in (models, plain)), strict=True))
        found += [distance(p.grad, q.grad) for p, q in pairs if q.grad is not None and q.grad.abs().max() > 1e-6]
        for optimizer in optimizers:
            optimizer.step()
        found += [distance(p, q) for p, q in pairs]
    with torch.no_grad():  # programs of another mode leave the parameters where they are
        found += [distance(a.eval()(x), b.eval()(x)) for a, b in zip(models, plain, strict=True)]
    one, other = ({id(p) for p in both.parameters()} for both in models)
    theirs, others = ({id(p) for p in both.parameters()} for both in plain)
    return max(found), len(one & other) == len(theirs & others)


@pytest.mark.parametrize("make", [_a_backbone, _the_whole_first_model, _a_part_of_the_first_model, _one_parameter])
def test_models_that_share_parameters_train_as_on_one_device(pool: RankPool, make: Any):
    for worst, share in pool.run(_trained, make):
        assert worst < 1e-5
        assert share


def _refused() -> list[str]:
    x, said = torch.randn(8, 8), []
    encoder = Encoder()
    first = autopar.autoparallelize(WithHead(encoder, 3), x, mesh=(2,), constraints=CUT, **QUICK)
    second = WithHead(encoder, 5)
    plan = autopar.plan(WithHead(Encoder(), 5), x, mesh=(2,), constraints={"encoder.up.weight": "RS0"}, **QUICK)
    wrong: list[dict[str, Any]] = [
        {"mesh": (1, 2)},
        {"constraints": {"encoder.up.weight": "RS0"}},
        {"plan": plan},
        {"mixed_precision": autopar.MixedPrecision(parameter="bfloat16")},
    ]
    for options in wrong:
        try:
            autopar.autoparallelize(second, x, **QUICK, **options)
        except AutoparError as error:
            said.append(str(error))
    dist.barrier()
    assert type(second) is WithHead
    whole(first(x))
    return said


def test_what_would_move_a_shared_parameter_is_refused_by_name(pool: RankPool):
    for mesh, constraint, plan, precision in pool.run(_refused):
        assert "found: (2,) there, (1, 2) here" in mesh
        assert "found: S0R there, RS0 in the constraints" in constraint
        assert "in the plan" in plan
        assert "torch.float32 there, torch.bfloat16 here" in precision
        assert all("encoder.up." in text for text in (mesh, constraint, plan, precision))
