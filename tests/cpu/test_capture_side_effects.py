"""What a forward does beside computing is captured as it is meant, or refused: never lost without a word."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar

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


def converts_to_what_it_is(m: Any, x: Tensor) -> Tensor:
    m.one = m.one.to(torch.float64)
    return m.two(m.one(x)).sin().mean()


CALLS: list[Any] = []
TABLES: dict[int, Tensor] = {}
SEEN = 0


class Run:
    """What a script keeps beside its model."""

    settings: ClassVar = {"factor": 1}


def counts_for_show(m: Any, x: Tensor) -> Tensor:
    global SEEN  # noqa: PLW0603  what users write
    SEEN += 1
    m.steps += 1
    CALLS.append(x.shape)
    return m.one(x).mean()


def keeps_for_show(m: Any, x: Tensor) -> Tensor:
    m.seen = [m.one(x)]
    CALLS.append(m.seen[0])
    return m.two(m.seen[0]).mean()


def keeps_a_table(m: Any, x: Tensor) -> Tensor:
    """What is kept is the same in each call, so that it may be computed in each."""
    if len(x) not in TABLES:
        TABLES[len(x)] = torch.linspace(0, 1, 4, dtype=x.dtype).cos()
        m.steps = len(x)
    return (m.one(x) * TABLES[len(x)] * cached_table(4)).mean()


@functools.cache
def cached_table(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float64)


AS_IT_IS = (
    in_inference,
    on_the_host,
    data,
    converts_to_what_it_is,
    counts_for_show,
    keeps_for_show,
    keeps_a_table,
)


@pytest.mark.parametrize("body", AS_IT_IS)
def test_what_a_graph_can_hold_equals_one_device(body: Any) -> None:
    model = Two(body)
    expected = body(copy.deepcopy(model), X).item()
    CALLS.clear(), TABLES.clear(), cached_table.cache_clear()
    before = SEEN
    notices = captured(model, X).notices
    assert [n for n in notices if "keeps its old value" in n] or body not in (counts_for_show, keeps_for_show)
    assert ([], {}, before) == (CALLS, TABLES, SEEN)  # nothing of the trace is left to the user
    assert_simulates(model, X, again=True)
    assert body(model, X).item() == pytest.approx(expected, rel=1e-12)
    captured(model, X)  # what that call left in the model is no harm


def test_hooks_that_compute_are_captured() -> None:
    model = Two()
    model.one.register_forward_hook(lambda module, args, out: out * 2)
    model.two.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert_simulates(model, X, again=True)


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


def counts_in_the_file(m: Any, x: Tensor) -> Tensor:
    global SEEN  # noqa: PLW0603  what users write
    SEEN += 1
    return m.one(x).mean() * SEEN


def grows_a_list(m: Any, x: Tensor) -> Tensor:
    CALLS.append(1)
    return m.one(x).mean() * len(CALLS)


def changes_a_setting(m: Any, x: Tensor) -> Tensor:
    Run.settings["factor"] *= 2
    return m.one(x).mean() * Run.settings["factor"]


def only_the_first_time(m: Any, x: Tensor) -> Tensor:
    y = m.one(x).mean()
    if not hasattr(m, "ready"):
        m.ready = True
        y = y * 2
    return y


def remembers(m: Any, x: Tensor) -> Tensor:
    before = getattr(m, "before", torch.zeros_like(x))
    m.before = m.one(x).detach()
    return (m.before + m.two(before)).mean()


def freezes(m: Any, x: Tensor) -> Tensor:
    m.one.weight.requires_grad_(False)
    return m.two(m.one(x)).mean()


def writes_data(m: Any, x: Tensor) -> Tensor:
    m.one.weight.data.clamp_(-1, 1)
    return m.one(x).mean()


def converts(m: Any, x: Tensor) -> Tensor:
    m.one = m.one.to(torch.float32)
    return m.one(x.float()).mean()


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
    counts_in_the_file: ("SEEN", "0 becomes 1"),
    grows_a_list: ("CALLS", "[] becomes [1]"),
    changes_a_setting: ("Run.settings", "'factor': 2"),
    only_the_first_time: ("ready", "nothing becomes True"),
    remembers: ("before", "becomes a tensor (6, 4)"),
    freezes: ("one.weight", "requires_grad True becomes False"),
    writes_data: ("one.weight in place",),
    converts: ("m.one.to(torch.float32)", "not in forward"),
    branches: ("cond", "torch.where"),
    gamma: ("differ between ranks", "_standard_gamma", "pass the numbers as an input"),
    generator: ("without a generator",),
}


@pytest.mark.parametrize("body", REFUSED, ids=lambda b: b.__name__)
def test_what_would_be_lost_is_refused(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SEEN", 0)
    CALLS.clear()
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
        lambda m: m.two.register_full_backward_pre_hook(lambda module, made: made),
        ("module two", "gradients"),
    ),
}


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
