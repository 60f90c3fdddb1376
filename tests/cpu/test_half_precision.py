"""A plan in bfloat16 is as close to the true step, in float64, as one device in bfloat16 is."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import Tensor

from autopar.tracer import ColoTracer
from tests.cpu.model_checks import Promoted, Reference, Subject, eager, run
from tests.models import ZOO

WORSE = 1.5
"""So many times the error of one device is allowed."""
MESHES = [(2,), (4,), (2, 2), (2, 2, 2)]
MODELS = [name for name, model in ZOO.items() if not name.startswith("mixtral")] + ["mixtral_batched"]


DRAWS = {"cnn": 5}
"""So many weights are tried: in a small network a single value on the other side of a kink makes most of the error of a
gradient, which either side meets now and then. The middle one of the errors counts."""


@cache
def subjects(name: str, draw: int) -> tuple[Subject, Reference, Reference]:
    """The model in bfloat16, what one device gives, and the truth: the same weights and inputs in float64."""
    model, inputs = ZOO[name].made(torch.bfloat16)
    torch.manual_seed(draw)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + draw * 0.1 * torch.randn_like(parameter))
    exact = copy.deepcopy(model).double()
    doubled = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    with Promoted():
        truth = eager(exact, doubled)
    one = eager(model, inputs)
    return Subject(model, inputs, ColoTracer().capture(model, inputs), one), one, truth


def distance(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """Of all tensors together, each by its own size, or a hundredth of the largest where it is smaller."""
    size = {n: float(t.double().norm()) for n, t in truth.items() if t.is_floating_point()}
    least = max(size.values()) / 100
    return sum((float((found[n].double() - truth[n]).norm()) / max(s, least)) ** 2 for n, s in size.items()) ** 0.5


def cases(quick):
    every = [(name, mesh, "joint") for name in MODELS for mesh in MESHES]
    every += [(name, mesh, "random:1") for name in MODELS if name not in DRAWS for mesh in MESHES]
    return [pytest.param(*c, marks=[] if c[1] == quick and c[2] == "joint" else [pytest.mark.slow]) for c in every]


@pytest.mark.parametrize(("name", "mesh", "search"), cases((2, 2)))
def test_a_plan_in_bfloat16_is_as_near_to_the_truth_as_one_device(name, mesh, search) -> None:
    errors = []  # of outputs and gradients, by the plan and by one device
    for draw in range(DRAWS.get(name, 1)):
        of, one, truth = subjects(name, draw)
        result = run(of, mesh, search=search).result
        assert {t.dtype for t in result.grads.values()} == {torch.bfloat16}
        made = [(m.outputs, {n: m.grads[n] for n in one.grads}) for m in (result, one)]
        errors.append([[distance(o, truth.outputs), distance(g, truth.grads)] for o, g in made])
    plan, device = torch.tensor(errors).median(0).values
    assert (plan > 0).all()
    assert (plan <= WORSE * device).all(), f"{(plan / device).tolist()} times one device's error"
