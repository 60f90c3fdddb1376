"""What a forward does beside computing is captured as it is meant, or refused: never lost without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import autopar
from autopar.errors import CaptureError, InputError, PlanError
from tests.cpu.bad_input_checks import refused
from tests.cpu.capture_checks import assert_simulates, captured


class Two(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.steps, self.body = 0, body or (lambda m, x: m.two(m.one(x).relu()).square().mean())
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)


# Done as it is meant.


def in_inference(m: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        h = m.one(x)
    return m.two(h.clone()).mean()


def on_the_host(m: Any, x: Tensor) -> Tensor:
    with save_on_cpu():
        return m.one(x).sin().mean()


def data(m: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, m.one.weight.data * 2).mean() + m.two(x).mean()


def counts_for_show(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    return m.one(x).mean()


@pytest.mark.parametrize("body", [in_inference, on_the_host, data, counts_for_show])
def test_what_a_graph_can_hold_equals_one_device(body: Any) -> None:
    assert_simulates(Two(body), X)


def test_hooks_that_compute_are_captured() -> None:
    model = Two()
    model.one.register_forward_hook(lambda module, args, out: out * 2)
    model.two.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert_simulates(model, X)


# Refused, with the line or the hook.


def backward(m: Any, x: Tensor) -> Tensor:
    m.one(x).mean().backward()
    return m.two(x).mean()


def seeds(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return m.one(x).mean() * torch.rand(())


def packs(m: Any, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t.round(), lambda t: t):
        return m.one(x).sin().mean()


def counts(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    return m.one(x).mean() * m.steps


def freezes(m: Any, x: Tensor) -> Tensor:
    m.one.weight.requires_grad_(False)
    return m.two(m.one(x)).mean()


def writes_data(m: Any, x: Tensor) -> Tensor:
    m.one.weight.data.clamp_(-1, 1)
    return m.one(x).mean()


def branches(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, m.one, m.two, (x,)).mean()


def gamma(m: Any, x: Tensor) -> Tensor:
    return m.one(x).mean() * torch.distributions.Gamma(x.abs() + 1, 1.0).sample().mean()


def generator(m: Any, x: Tensor) -> Tensor:
    return m.one(x).mean() * torch.rand((), generator=torch.Generator())


REFUSED = {
    backward: ("calls backward", "test_capture_side_effects.py:", "torch.autograd.grad"),
    seeds: ("seeds torch's generator", "test_capture_side_effects.py:", "outside"),
    packs: ("packs the tensors", "test_capture_side_effects.py:", "memory_budget"),
    counts: ("changes steps", "0 becomes 1", "register_buffer('steps'"),
    freezes: ("one.weight", "requires_grad True becomes False"),
    writes_data: ("one.weight in place",),
    branches: ("cond", "torch.where"),
    gamma: ("differ between ranks", "_standard_gamma", "pass the numbers as an input"),
    generator: ("without a generator",),
}


@pytest.mark.parametrize("body", REFUSED, ids=lambda b: b.__name__)
def test_what_would_be_lost_is_refused(body: Any) -> None:
    with refused(CaptureError, *REFUSED[body]):
        captured(Two(body), X)


def looks(module: Any, args: Any, out: Any) -> None:
    """Sees the value and returns nothing."""


def doubles(module: Any, given: Any, made: Any) -> Any:
    return (given[0] * 2,)


HOOKS: dict[str, tuple[Callable[[Two], Any], tuple[str, ...]]] = {
    "looks at values": (lambda m: m.one.register_forward_hook(looks), ("hook on one returns nothing", "looks at")),
    "changes gradients": (lambda m: m.two.register_full_backward_hook(doubles), ("module two", "autograd.Function")),
    "before the backward": (
        lambda m: m.two.register_full_backward_pre_hook(lambda module, made: made), ("module two", "gradients"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_would_be_lost_are_refused(name: str) -> None:
    model, (add, words) = Two(), HOOKS[name]
    add(model)
    with refused(CaptureError, *words):
        captured(model, X)


def test_a_hook_on_a_parameter_is_refused_before_the_parameter_changes() -> None:
    model = Two()
    model.one.weight.register_hook(lambda grad: grad * 2)
    with refused(PlanError, "one.weight", "after autoparallelize"):
        autopar.autoparallelize(model, X, mesh=(1,))
    assert type(model) is Two


def test_hooks_of_the_root_run_around_the_program_once() -> None:
    model = Two()
    seen: list[Tensor] = []
    model.register_forward_hook(lambda module, args, out: seen.append(out) or out * 2)
    plan = autopar.plan(model, X, mesh=(2,))
    with refused(PlanError, "remove them for the simulation"):
        autopar.simulate(model, X, plan=plan)
    assert not seen
    expected = model.body(model, X).item()
    parallel = autopar.autoparallelize(model, X, mesh=(1,))
    assert parallel(X).item() == pytest.approx(2 * expected, rel=1e-12)
    assert len(seen) == 1


def test_sparse_inputs_are_refused() -> None:
    with refused(InputError, "sparse_coo", "index_add"):
        captured(Two(lambda m, x: torch.sparse.mm(x, m.one.weight).mean()), X.to_sparse())
