"""``accumulation_steps``: training on two processes whose gradients add up inside the program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
