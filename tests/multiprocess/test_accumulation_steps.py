"""``accumulation_steps``: training on two processes whose gradients add up inside the program."""

from __future__ import annotations

import unittest.mock
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.training import accumulate_gradient
from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_models import MODELS, Mlp, gradient_distance, pair, seeded, state_distance, whole

pytestmark = pytest.mark.multiprocess
EXACT = 1e-9
FLOAT = 1e-5


def _trained(name: str) -> dict[str, Any]:
    """Two steps of three micro-batches, with a loss for each divided by three."""
    build, make = MODELS[name]
    model = seeded(build).double()
    batches = [{k: t.double() if t.is_floating_point() else t for k, t in seeded(make, i).items()} for i in range(6)]
    reference, model = pair(model, batches[0], (2,), accumulation_steps=3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    found: dict[str, Any] = {"early": 0, "changed": 0}
    for i, batch in enumerate(batches):
        before = [whole(p).detach().clone() for p in model.parameters()]
        for module in (reference, model):
            (module(**batch).loss / 3).backward()
        if i % 3 < 2:
            found["early"] += sum(p.grad is not None for p in model.parameters())
            after = zip(model.parameters(), before, strict=True)
            found["changed"] += sum(not torch.equal(whole(p), b) for p, b in after)
        else:
            found[f"gradients {i}"] = gradient_distance(model, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    found["state"] = state_distance(model, reference)
    found["put off"] = sum(bool(s.partial) for n, s in model.plan.specs.items() if n.startswith("accumulated:"))
    return found


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_training_equals_one_process(pool: RankPool, name: str) -> None:
    for found in pool.run(_trained, name):
        assert found.pop("early") == 0
        assert found.pop("changed") == 0
        found.pop("put off")
        assert {k: v for k, v in found.items() if v > FLOAT} == {}


def _cycles() -> dict[str, Any]:
    """An incomplete cycle, another batch size within one, a step too early, and a deep copy."""
    torch.manual_seed(0)
    x, small = torch.randn(6, 8, dtype=torch.float64), torch.randn(2, 8, dtype=torch.float64)
    specs = {"up.weight": "S0R", "down.weight": "RR", "input:x": "S0R"}
    reference, model = pair(Mlp().double(), (x,), (2,), accumulation_steps=4, constraints=specs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {}
    for module in (reference, model):
        for batch in (x, small, 2 * x):
            module(batch).pow(2).mean().backward()
    try:
        optimizer.step()
    except AutoparError as error:
        found["early"] = str(error)
    found["delivered"] = model.deliver_gradients()
    found["incomplete"] = gradient_distance(model, reference)
    optimizer.step()
    found["none pending"] = model.deliver_gradients()
    for module in (reference, model):
        module.zero_grad()
    for module in (reference, model):
        for batch in (x, small, 2 * x, 3 * x):
            module(batch).pow(2).mean().backward()
    reference.load_state_dict({k: whole(v) for k, v in model.state_dict().items()})
    for module in (reference, model):
        module.zero_grad()
        for batch in (x, small, 2 * x, 3 * x):
            module(batch).pow(2).mean().backward()
    found["next"] = gradient_distance(model, reference)
    return found


def test_an_incomplete_cycle_is_delivered_on_request_and_never_lost_silently(pool: RankPool) -> None:
    for found in pool.run(_cycles):
        assert "accumulation_steps=4" in found["early"]
        assert "deliver_gradients" in found["early"]
        assert (found["delivered"], found["none pending"]) == (3, 0)
        assert found["incomplete"] < EXACT
        assert found["next"] < EXACT


def _wrapped() -> tuple[float, str]:
    """The wrappers of ``accumulate_gradient`` on a model that adds up by itself."""
    torch.manual_seed(0)
    batches = [torch.randn(4, 8, dtype=torch.float64) for _ in range(5)]
    reference, model = pair(Mlp().double(), (batches[0],), (2,), accumulation_steps=2)
    for module in (reference, model):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer, loader, _, _ = accumulate_gradient(module, optimizer, batches, 2)
        for batch in loader:
            optimizer.zero_grad()
            optimizer.backward(module(batch).pow(2).mean())
            optimizer.step()
    try:
        accumulate_gradient(model, torch.optim.SGD(model.parameters()), batches, 3)
    except AutoparError as error:
        return state_distance(model, reference), str(error)
    return state_distance(model, reference), ""


def test_the_wrappers_and_the_plan_agree_on_the_number_of_steps(pool: RankPool) -> None:
    for difference, error in pool.run(_wrapped):
        assert difference < EXACT
        assert "accumulation_steps=2" in error


def _local_batch() -> float:
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    whole_batches = [torch.randn(8, 8, dtype=torch.float64) for _ in range(2)]
    mine = [b[4 * rank : 4 * rank + 4] for b in whole_batches]
    reference, model = pair(Mlp().double(), (mine[0],), (2,), accumulation_steps=2, batch="local", outputs="dtensor")
    for b, part in zip(whole_batches, mine, strict=True):
        reference(b).pow(2).mean().backward()
        model(part).pow(2).mean().full_tensor().backward()
    return gradient_distance(model, reference)


def test_local_batches_add_up(pool: RankPool) -> None:
    assert max(pool.run(_local_batch)) < EXACT


def test_a_plan_says_in_which_spec_gradients_add_up() -> None:
    plan = autopar.plan(Mlp(), torch.empty(4, 8), mesh=(2,), cluster="dgx-h100", accumulation_steps=2)
    assert set(plan.parameters) == {n.removeprefix("accumulated:") for n in plan.specs if n.startswith("accumulated:")}


class Tasks(nn.Module):
    """Two heads, of which a call uses one, and dropout that does nothing but in training."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 4), nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor, task: str = "a") -> Tensor:
        x = self.body(x).relu()
        return (self.a(x) if task == "a" else self.b(x) * (2.0 if self.training else 1.0)).square().mean()


X = torch.arange(48, dtype=torch.float64).reshape(6, 8).sin()


def _by_turns(model: nn.Module) -> None:
    for i in range(4):
        model(X * (i + 1), task="ab"[i % 2]).backward()


def _freezing(model: nn.Module) -> None:
    """What is frozen in the last micro-batch keeps the gradient that it has."""
    for i, (body, head) in enumerate([(True, True), (False, True), (True, False), (False, False)]):
        model.body.requires_grad_(body)
        model.a.requires_grad_(head)
        model(X * (i + 1), task="b" if i == 3 else "a").backward()
    model.requires_grad_(True)


def _of_many_kinds(model: nn.Module) -> None:
    """Other shapes and modes, some without gradients, and one whose parameters are all frozen."""
    model(X, task="b").backward()
    with torch.no_grad():
        model(X, task="a")
    model.eval()
    model(X[:2], task="b").backward()
    model.train()
    given = X.clone().requires_grad_()
    model.requires_grad_(False)
    model(given, task="a").backward()
    model.requires_grad_(True)
    assert given.grad is not None
    (model(X[:4], task="a") * 3).backward()
    model(X, task="a").backward()


def _in_one_backward(model: nn.Module) -> None:
    (model(X, task="a") + model(X, task="b")).backward()
    (model(2 * X, task="b") + model(X[:2], task="a")).backward()


def _halfway(model: nn.Module) -> None:
    """Delivered in the middle; then a whole cycle that ends with the other head."""
    for task in ("a", "b"):
        model(X, task=task).backward()
    if isinstance(model, autopar.api.ParallelModule):
        assert model.deliver_gradients() == 2
    _by_turns(model)


CYCLES = {f.__name__: f for f in (_by_turns, _freezing, _of_many_kinds, _in_one_backward, _halfway)}


def _cycled() -> dict[str, float]:
    """Every cycle, without forgetting the gradients in between; hooks see what comes with another's program too."""
    options = {"accumulation_steps": 4, "time_limit": 2, "constraints": {"a.weight": "S0R"}}
    torch.manual_seed(0)
    reference, model = pair(Tasks().double(), {"x": X, "task": "a"}, (2,), **options)
    seen: list[str] = []
    model.b.weight.register_post_accumulate_grad_hook(lambda _: seen.append("b"))
    found = {}
    for name, cycle in CYCLES.items():
        for module in (reference, model):
            cycle(module)
        assert model.deliver_gradients() == 0, name
        found[name] = gradient_distance(model, reference)
    assert "b" in seen
    return found


def test_gradients_of_whatever_programs_a_cycle_has_add_up(pool: RankPool) -> None:
    for found in pool.run(_cycled):
        assert {n: d for n, d in found.items() if not d < EXACT} == {}


def _cut_otherwise() -> tuple[float, int]:
    """Two programs that add one parameter up in different specs."""
    torch.manual_seed(0)
    options = {"constraints": {"input:x": "S0R"}, "accumulation_steps": 3, "time_limit": 2}
    reference, model = pair(Mlp().double(), (X,), (2,), **options)
    others = dict.fromkeys(("up.weight", "down.weight"), "S0R")
    with unittest.mock.patch("autopar.assembly._accumulators", return_value=others):
        for module in (reference, model):
            for x in (X, X[:4], X):
                module(x).square().mean().backward()
    sums = [a for v in model._autopar.programs for a in v.executable.accumulators]
    return gradient_distance(model, reference), len({spec for m, spec, _ in sums if m.name == "up.weight"})


def test_programs_may_add_one_parameter_up_in_different_specs(pool: RankPool) -> None:
    for distance, specs in pool.run(_cut_otherwise):
        assert distance < EXACT
        assert specs == 2
