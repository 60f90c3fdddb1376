"""Models whose forward takes derivatives: the gradient of a gradient is captured like any other op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.tracer import ColoTracer
from tests.cpu.bad_input_checks import refused
from tests.zoo.entry import Entry
from tests.zoo.measure import captured, check

MESHES = [(1,), (4,), (2, 2)]


def inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 3), "y": torch.randn(8)}


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 12), nn.Softplus(), nn.Linear(12, 1))
        self.register_buffer("steps", torch.zeros(()))


class Penalty(Base):
    """A critic whose gradient's norm is kept near one (Gulrajani et al. 2017)."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        leaf = x.detach().requires_grad_()
        score = self.net(leaf).squeeze(1)
        (slope,) = torch.autograd.grad(score.sum(), leaf, create_graph=True)
        self.steps += 1
        return {"loss": (score - y).square().mean() + (slope.norm(dim=1) - 1).square().mean(), "score": score}


class Forces(Base):
    """An energy by the network, forces by torch.func, no loss of its own."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def energy(at: Tensor) -> Tensor:
            return self.net(at).squeeze() * y.sum()

        return torch.func.vmap(torch.func.grad(energy))(x)


class Inner(Base):
    """One step of an inner optimization (MAML, Finn et al. 2017)."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        before = dict(self.net.named_parameters())
        loss = (self.net(x[:4]).squeeze(1) - y[:4]).square().mean()
        grads = torch.autograd.grad(loss, list(before.values()), create_graph=True)
        after = {n: p - 0.1 * g for (n, p), g in zip(before.items(), grads, strict=True)}
        found = torch.func.functional_call(self.net, after, x[4:]).squeeze(1)
        return (found - y[4:]).square().mean()


@pytest.mark.parametrize("model", [Penalty, Forces, Inner])
def test_second_derivatives_equal_one_device(model: type[nn.Module]) -> None:
    entry = Entry(model.__name__, "other", model, inputs)
    of = captured(entry)
    for mesh in MESHES:
        check(entry, of, mesh)


class Drops(Penalty):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(nn.functional.dropout(x), y)


def test_random_numbers_beside_derivatives_are_refused() -> None:
    with refused(CaptureError, "random numbers", "input"):
        ColoTracer().capture(Drops(), inputs())


class Literal(Penalty):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(x * torch.tensor([1.0, 2.0, 3.0]), y)


def test_literals_beside_derivatives_are_refused() -> None:
    with refused(CaptureError, "register_buffer"):
        ColoTracer().capture(Literal(), inputs())


class Branches(Penalty):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = super().forward(x, y)
        return out if out["loss"] > 0 else {"loss": -out["loss"], "score": y}


def test_a_branch_on_a_derivative_names_its_line() -> None:
    with refused(CaptureError, "test_capture_derivatives.py", 'out["loss"] > 0'):
        ColoTracer().capture(Branches(), inputs())
