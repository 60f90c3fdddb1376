"""A plan in bfloat16 is as close to the true step, in float64, as one device in bfloat16 is."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import Tensor

from autopar.mesh import Cluster
from autopar.tracer import ColoTracer
from tests.cpu.model_checks import FORCED, Promoted, Reference, Subject, eager, plan, simulate
from tests.models import ZOO

WORSE = 1.5
"""So many times the error of one device is allowed."""
MESHES = [(2,), (4,), (2, 2), (2, 2, 2)]
MODELS = [name for name, model in ZOO.items() if not name.startswith("mixtral")] + ["mixtral_batched"]


DRAWS = 20
"""So many weights are tried. In a small network a single value on the other side of a kink, or another winner of a
maximum, makes most of the error of a gradient, which either side meets now and then: the middle errors of five draws of
the CNN are 0.4 to 4.7 times one device's. The median counts, so that no draw outweighs the others."""


@cache
def subjects(name: str, draw: int) -> tuple[Subject, Reference, Reference]:
    """The model in bfloat16, what one device gives, and the truth: the same weights and inputs in float64."""
    model, inputs = ZOO[name].made(torch.bfloat16)
    torch.manual_seed(draw)
    if draw:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    exact = copy.deepcopy(model).double()
    doubled = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    with Promoted():
        truth = eager(exact, doubled)
    one = eager(model, inputs)
    capture = subjects(name, 0)[0].capture if draw else ColoTracer().capture(model, inputs)
    return Subject(model, inputs, capture, one), one, truth


def distance(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """Of all tensors together, each by its own size, or a hundredth of the largest where it is smaller."""
    size = {n: float(t.double().norm()) for n, t in truth.items() if t.is_floating_point()}
    least = max(size.values()) / 100
    return sum((float((found[n].double() - truth[n]).norm()) / max(s, least)) ** 2 for n, s in size.items()) ** 0.5


def cases(quick):
    every = [(name, mesh, way) for name in MODELS for mesh in MESHES for way in ("joint", "random:1", *FORCED)]
    tried = [(name, quick, "joint") for name in ("mlp", "cnn")]
    tried += [("cnn", (2, 2, 2), "fully_sharded"), ("llama", quick, "tensor_parallel")]
    return [pytest.param(*c, marks=[] if c in tried else [pytest.mark.slow]) for c in every]


@pytest.mark.parametrize(("name", "mesh", "way"), cases((2, 2)))
def test_a_plan_in_bfloat16_is_as_near_to_the_truth_as_one_device(name, mesh, way) -> None:
    of = subjects(name, 0)[0]
    if way in FORCED:
        _, lowered = plan(of, mesh, FORCED[way](name, of, mesh), cluster=Cluster.load("dgx-h100"))
    else:
        _, lowered = plan(of, mesh, search=way)
    errors = []  # of outputs and gradients, by the plan and by one device
    for draw in range(DRAWS):
        of, one, truth = subjects(name, draw)
        result = simulate(lowered, of, mesh)
        assert {t.dtype for t in result.grads.values()} == {torch.bfloat16}
        made = [(m.outputs, {n: m.grads[n] for n in one.grads}) for m in (result, one)]
        errors.append([[distance(o, truth.outputs), distance(g, truth.grads)] for o, g in made])
    assert (torch.tensor(errors) > 0).all()
    planned, device = torch.tensor(errors).median(0).values
    assert (planned <= WORSE * device).all(), f"{(planned / device).tolist()} times one device's error"
