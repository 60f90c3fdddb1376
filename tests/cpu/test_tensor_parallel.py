"""1-D, 2-D, 2.5-D and 3-D tensor parallelism as points of one space: constraints name where the tensors lie, the
planner finds the collectives. ``torch.nn.Linear`` stores a weight as [out, in], the table of shapes as [in, out].

========  ==============  ====================================================================================
1-D       axis p          W1 cut by columns, W2 by rows (Megatron)
2-D       axes i, j       tokens by i, features by j; each weight by both (SUMMA)
2.5-D     axes d, i, j    the same in d layers, between which the tokens are cut and the weights replicated
3-D       axes i, j, l    X_ijl tokens by (i, j), features by l; A_lji in by l, out by (j, i); the next layer has
                          j and l traded, since the product is scattered over l
========  ==============  ====================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import autopar


class Perceptron(nn.Module):
    """The mean square of 256 -> 1024 -> 256."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 1024)
        self.down = nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x))).square().mean()


@dataclass(frozen=True)
class Mode:
    mesh: tuple[int, ...]
    specs: dict[str, str]
    shapes: dict[str, tuple[int, ...]]


MODES = {
    "1D": Mode(
        (2,),
        {"up.weight": "S0R", "down.weight": "RS0", "input:x": "RR", "up": "RS0", "down": "RR"},
        {"W1": (256, 512), "W2": (512, 256), "input": (16, 256), "after 1": (16, 512), "after 2": (16, 256)},
    ),
    "2D": Mode(
        (2, 2),
        {"up.weight": "S1S0", "down.weight": "S1S0", "input:x": "S0S1", "up": "S0S1", "down": "S0S1"},
        {"W1": (128, 512), "W2": (512, 128), "input": (8, 128), "after 1": (8, 512), "after 2": (8, 128)},
    ),
    "2.5D": Mode(
        (2, 2, 2),
        {"up.weight": "S2S1", "down.weight": "S2S1", "input:x": "S01S2", "up": "S01S2", "down": "S01S2"},
        {"W1": (128, 512), "W2": (512, 128), "input": (4, 128), "after 1": (4, 512), "after 2": (4, 128)},
    ),
    "3D": Mode(
        (2, 2, 2),
        {"up.weight": "S10S2", "down.weight": "S20S1", "input:x": "S01S2", "up": "S02S1", "down": "S01S2"},
        {"W1": (128, 256), "W2": (512, 64), "input": (4, 128), "after 1": (4, 512), "after 2": (4, 128)},
    ),
}
GLOBAL = {
    "up.weight": (1024, 256),
    "down.weight": (256, 1024),
    "input:x": (16, 256),
    "up": (16, 1024),
    "down": (16, 256),
}
NAMES = {"W1": "up.weight", "W2": "down.weight", "input": "input:x", "after 1": "up", "after 2": "down"}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Perceptron().double()


@pytest.fixture(scope="module", params=MODES)
def planned(request, model):
    mode = MODES[request.param]
    x = torch.randn(16, 256, dtype=torch.double)
    return mode, x, autopar.plan(model, (x,), mesh=mode.mesh, cluster="dgx-h100", constraints=mode.specs)


def test_every_rank_holds_the_shapes_of_the_table(planned):
    mode, _, plan = planned
    for what, name in NAMES.items():
        spec = plan.specs[name]
        assert str(spec) == mode.specs[name]
        for rank in range(plan.mesh.size):
            held = spec.local_shape(GLOBAL[name], plan.mesh, plan.mesh.coordinate(rank))
            assert (held[::-1] if name.endswith("weight") else held) == mode.shapes[what], what


def test_the_numerics_are_the_dense_ones(planned, model):
    _, x, plan = planned
    loss = model(x)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    result = autopar.simulate(model, (x,), plan=plan)
    torch.testing.assert_close(result.outputs, loss.detach(), rtol=1e-12, atol=0)
    for (name, _), gradient in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(result.grads[name], gradient, rtol=1e-9, atol=1e-12)
