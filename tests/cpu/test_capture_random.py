"""Every random op of torch is drawn by counters: captured, the same on every mesh, and of the right distribution."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from tests.cpu.capture_checks import captured_once

N = 4096


class Draw(nn.Module):
    """Draws a matrix, and returns it beside a loss."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.draw = draw

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        drawn = self.draw(x)
        return {"drawn": drawn, "loss": (drawn * self.scale).sum()}


def like(x: Tensor) -> Tensor:
    return torch.empty_like(x)


P = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    # what is drawn, its mean, its standard deviation
    "rand": (torch.rand_like, 0.5, math.sqrt(1 / 12)),
    "randn": (torch.randn_like, 0, 1),
    "normal of tensors": (lambda x: torch.normal(x + 2, x + 3), 2, 3),
    "randint_like": (lambda x: torch.randint_like(x, 2, 7), 4, math.sqrt(2)),
    "bernoulli": (lambda x: torch.bernoulli(x + 0.3), 0.3, math.sqrt(0.21)),
    "bernoulli_ of a tensor": (lambda x: like(x).bernoulli_(x + 0.3), 0.3, math.sqrt(0.21)),
    "exponential_": (lambda x: like(x).exponential_(2.0), 0.5, 0.5),
    "geometric_": (lambda x: like(x).geometric_(0.25), 4, math.sqrt(12)),
    "log_normal_": (lambda x: like(x).log_normal_(0, 0.5), math.exp(0.125), 0.604),
    "median of cauchy_": (lambda x: (like(x).cauchy_(1.0, 2.0) > 1).to(x.dtype), 0.5, 0.5),
    "random_": (lambda x: like(x).random_(5), 2, math.sqrt(2)),
    "multinomial": (lambda x: torch.multinomial(P.expand(N, 4), 1).to(x.dtype), 2, 1),
    "multinomial with replacement": (lambda x: torch.multinomial(P, N, replacement=True).to(x.dtype), 2, 1),
    "gumbel_softmax": (lambda x: functional.gumbel_softmax(x.view(-1, 4), hard=True)[:, 0], 0.25, math.sqrt(3) / 4),
    "dropout": (lambda x: functional.dropout(x + 1, 0.25), 1, math.sqrt(1 / 3)),
    "dropout1d": (lambda x: functional.dropout1d((x + 1)[:, None], 0.25)[:, 0], 1, math.sqrt(1 / 3)),
    "alpha_dropout": (lambda x: functional.alpha_dropout(torch.randn_like(x), 0.2, training=True), 0, 1),
    "feature_alpha_dropout": (
        lambda x: functional.feature_alpha_dropout(torch.randn_like(x)[:, None], 0.2, training=True)[:, 0],
        0,
        1,
    ),
    "rrelu": (lambda x: functional.rrelu(x - 8, 0.25, 0.75, training=True), -4, 8 / 2 / math.sqrt(12)),
}


@pytest.mark.parametrize("name", DRAWS)
@captured_once()
def test_what_is_drawn_is_one_on_every_mesh_and_distributed_as_torch_says(name: str) -> None:
    draw, mean, deviation = DRAWS[name]
    model, x = Draw(draw), torch.zeros(N, 2, dtype=torch.float64)
    drawn = []
    for mesh in ((1,), (2, 2)):
        plan = autopar.plan(model, x, mesh=mesh, search="random:1", time_limit=2)
        drawn.append(autopar.simulate(model, x, plan=plan, seed=3).outputs["drawn"])
    assert torch.equal(drawn[0], drawn[1])
    values = drawn[0].double()
    standard_error = deviation / math.sqrt(values.numel())
    assert abs(values.mean().item() - mean) < 5 * standard_error
    assert values.std().item() == pytest.approx(deviation, rel=0.1)
    assert values.unique().numel() > 1


@captured_once()
def test_recurrent_dropout_is_drawn_by_counters_too() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(4, 4, 2, dropout=0.5).double()
    x = torch.randn(3, 4, 4, dtype=torch.float64)
    outputs = []
    for mesh in ((1,), (2,)):
        plan = autopar.plan(model, x, mesh=mesh, time_limit=2)
        outputs.append(autopar.simulate(model, x, plan=plan, seed=1).outputs[0])
    torch.testing.assert_close(outputs[0], outputs[1])
