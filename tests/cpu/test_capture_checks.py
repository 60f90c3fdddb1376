"""Checks of values that only raise are assumed to pass; every other branch on a value is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from tests.cpu.bad_input_checks import refused
from tests.cpu.capture_checks import assert_simulates, captured


class Checked(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.strict = True
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def in_range(m: Any, x: Tensor) -> Tensor:
    if x.max() >= 100:
        raise ValueError("too large")
    return m.lin(x)


def with_options(m: Any, x: Tensor) -> Tensor:
    if m.strict and x is not None and x.isnan().any():
        message = f"NaN among {x.shape[0]} rows"
        raise ValueError(message)
    return m.lin(x)


def not_all(m: Any, x: Tensor) -> Tensor:
    if m.strict and not torch.isfinite(x).all():
        raise ValueError("not finite")
    return m.lin(x)


def either(m: Any, x: Tensor) -> Tensor:
    if x.max() > 100 or x.min() < -100:
        raise ValueError("out of range")
    return m.lin(x)


def asserted(m: Any, x: Tensor) -> Tensor:
    assert (x < 100).all(), "too large"
    assert not (x > 100).any().item(), "too large"
    return m.lin(x)


@pytest.mark.parametrize("body", [in_range, with_options, not_all, either, asserted])
def test_a_check_that_only_raises_passes_and_is_a_notice(body: Callable[[Any, Tensor], Any]) -> None:
    found = captured(Checked(body), torch.randn(4, 4))
    assert any(n.startswith("checks of values are assumed to pass: test_capture_checks.py:") for n in found.notices)
    assert {n.packet for n in found.graph.nodes if n.phase == "forward"} <= {
        "placeholder",
        "autopar.contract",
        "aten.add",
        "autopar.lookup",
    }


def otherwise(m: Any, x: Tensor) -> Tensor:
    if x.max() > 100:
        raise ValueError("too large")
    else:  # noqa: RET506  the case itself
        x = x * 2
    return m.lin(x)


def repairs(m: Any, x: Tensor) -> Tensor:
    if x.max() > 100:
        x = x.clamp(max=100)
    return m.lin(x)


def disagree(m: Any, x: Tensor) -> Tensor:
    if x.max() > 100 and not (x > 0).all():
        raise ValueError("which of the two it is cannot be said")
    return m.lin(x)


def chosen(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) if x.max() > 100 else x


@pytest.mark.parametrize("body", [otherwise, repairs, disagree, chosen])
def test_every_other_branch_on_a_value_is_refused(body: Callable[[Any, Tensor], Any]) -> None:
    with refused(CaptureError, "test_capture_checks.py:"):
        captured(Checked(body), torch.randn(4, 4))


def test_a_check_of_what_is_known_still_raises() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        if x.shape[0] != 3:
            raise ValueError("three rows, please")
        return m.lin(x)

    with refused(CaptureError, "three rows, please"):
        captured(Checked(body), torch.randn(4, 4))


def test_counts_of_values_below_a_given_number() -> None:
    """As mixtures of experts count the tokens of each; how many counts there are would depend on values."""

    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 5)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            scores = self.gate(x).softmax(-1)
            chosen = scores.topk(2)[1].flatten()
            counts, weighted = torch.bincount(chosen, minlength=5), chosen.bincount(x[:, :2].flatten().exp(), 5)
            return (scores.mean(0) * counts).sum() + (scores.sum(0) * weighted).mean()

    for search in ("joint", "random:0", "random:1"):
        plan = assert_simulates(Balanced(), torch.randn(8, 4, dtype=torch.float64), (2, 2), search=search)
        assert any("checks of values are assumed to pass: test_capture_checks.py" in n for n in plan.notices)


def test_a_covariance_of_a_distribution_is_checked() -> None:
    """Which torch does by branches that return; said aloud, since Dynamo turns the default off for a whole process."""

    class Likelihood(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.factor = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 3))
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            covariance = self.factor @ self.factor.mT + torch.eye(3, dtype=x.dtype)
            normal = torch.distributions.MultivariateNormal(self.mean(x), covariance, validate_args=True)
            return -normal.log_prob(x[:, :3]).mean()

    plan = assert_simulates(Likelihood(), torch.randn(8, 4, dtype=torch.float64))
    assert any("checks of values are assumed to pass" in n for n in plan.notices)


def test_the_checks_of_one_hot_are_taken_as_passed() -> None:
    """As codebooks and gates use it: on newer versions of torch it asserts its range."""

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.encode, self.codes, self.decode = nn.Linear(4, 4), nn.Embedding(5, 4), nn.Linear(4, 4)
            self.register_buffer("usage", torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            z = self.encode(x)
            nearest = torch.cdist(z, self.codes.weight).argmin(-1)
            self.usage.mul_(0.9).add_(nn.functional.one_hot(nearest, 5).to(x.dtype).sum(0), alpha=0.1)
            code = self.codes(nearest)
            loss = (code - z.detach()).square().mean() + (z - code.detach()).square().mean() / 4
            return (self.decode(z + (code - z).detach()) - x).square().mean() + loss

    for search in ("joint", "random:1"):
        assert_simulates(Codebook().double(), torch.randn(8, 4).double(), (2, 2), search=search, time_limit=5)
