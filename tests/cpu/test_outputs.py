"""Which output is the loss, and what the others are for the training loop around the model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import autopar
from autopar.errors import AutoparError
from tests.cpu.capture_checks import captured

X = torch.randn(6, 4)
LABELS = torch.randint(0, 4, (6,))


@dataclass
class Result:
    loss: Tensor | None
    scale: Tensor
    features: Tensor


@dataclass
class Objective:
    objective: Tensor
    features: Tensor


class Named(NamedTuple):
    energy: Tensor
    forces: Tensor


class Returning(nn.Module):
    """Features, a temperature that is learned, and what ``build`` makes of them."""

    def __init__(self, build: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.scale, self.build = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.5)), build

    def forward(self, x: Tensor) -> Any:
        return self.build(self.layer(x), self.scale.exp())


LOSS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str | None]] = {
    "alone": (lambda f, s: f.sum() * s, "0"),
    "alone in a dict": (lambda f, s: {"objective": f.sum() * s}, "objective"),
    "first in a tuple": (lambda f, s: (f.sum() * s, f), "0"),
    "first in a list, of two": (lambda f, s: [f.sum(), s], "0"),
    "first in a named tuple": (lambda f, s: Named(f.sum() * s, f), "energy"),
    "first in a dataclass": (lambda f, s: Objective(f.sum() * s, f), "objective"),
    "by name": (lambda f, s: {"scale": s, "loss": f.sum()}, "loss"),
    "by name inside": (lambda f, s: (s, {"loss": f.sum()}), "1.loss"),
    "by name in a dataclass": (lambda f, s: Result(f.sum(), s, f), "loss"),
    "last": (lambda f, s: (f, f * 2, s), None),
    "second": (lambda f, s: (f.detach(), s), None),
    "first in a dict": (lambda f, s: {"scale": s, "features": f}, None),
    "with a gradient alone in a dict": (lambda f, s: {"scale": s * f.sum(), "most": f.argmax(-1)}, None),
    "after None": (lambda f, s: (None, s, f), None),
    "after None in a dataclass": (lambda f, s: Result(None, s, f), None),
    "after an integer": (lambda f, s: (f.argmax(), s * f.sum(), f), None),
    "after a scalar without a gradient": (lambda f, s: (f.detach().sum(), s * f.sum(), f), None),
    "first inside": (lambda f, s: ((s, f), f), None),
    "called loss, of each sample": (lambda f, s: {"loss": (f * s).sum(-1), "scale": s}, None),
    "no scalar": (lambda f, s: (f, f * s), None),
}


@pytest.mark.parametrize("where", LOSS)
def test_a_scalar_is_the_loss_where_it_is_alone_first_or_named(where: str):
    build, name = LOSS[where]
    capture = captured(Returning(build), (X,))
    assert (None if capture.loss is None else capture.returned.paths[capture.loss]) == name
    assert (capture.graph.lone_scalar if capture.graph.has_loss else None) == name


def test_a_temperature_among_the_outputs_leaves_them_whole():
    """As CLIP returns them, for a loss outside."""
    model = Returning(lambda f, s: (f, f * 2, s))
    reference = copy.deepcopy(model)
    autopar.autoparallelize(model, (X,), time_limit=2)
    for module in (model, reference):
        images, texts, scale = module(X)
        F.cross_entropy(scale * images @ texts.t(), torch.arange(6)).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)


def test_what_has_no_gradient_beside_a_temperature_is_whole_too():
    model = Returning(lambda f, s: {"scale": s * f.sum(), "most": f.argmax(-1)})
    autopar.autoparallelize(model, (X,), time_limit=2)
    assert type(model(X)["most"]) is Tensor


@pytest.fixture(scope="module")
def model() -> nn.Module:
    made = Returning(lambda f, s: {"loss": f.square().mean() * s, "logits": f})
    return autopar.autoparallelize(made, (X,), time_limit=2)


MEETINGS: dict[str, Callable[[Tensor], Any]] = {
    "a loss": lambda out: F.cross_entropy(out, LABELS),
    "labels": lambda out: out.argmax(-1) == LABELS,
    "what is computed": lambda out: F.nll_loss(out.float().log_softmax(-1), LABELS),
    "cat": lambda out: torch.cat([X, out]),
    "a mask": lambda out: out[X > 0],
    "a copy": lambda out: torch.empty(6, 4).copy_(out.detach()),
    "numpy": lambda out: out.detach().cpu().numpy(),
    "asarray": lambda out: np.asarray(out.detach()),
    "tolist": lambda out: out.argmax(-1).tolist(),
    "all_reduce": lambda out: dist.all_reduce(out.detach()),
    "all_gather": lambda out: dist.all_gather([torch.empty(6, 4)], out.detach()),
    "an op without shards": lambda out: out.argmax(-1).bincount(),
}


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="ops of DTensor pass by the class of an output in torch 2.11, whose own error is then what one sees",
)
@pytest.mark.parametrize("how", MEETINGS)
def test_where_a_dtensor_meets_a_plain_tensor_the_error_says_what_to_do(model: nn.Module, how: str):
    with pytest.raises(AutoparError, match=r'(?s)output logits is a DTensor.*found: .*outputs="whole".*full_tensor'):
        MEETINGS[how](model(X)["logits"])


def test_outputs_are_dtensors_otherwise(model: nn.Module):
    out = model(X)["logits"]
    whole = out.full_tensor()
    assert isinstance(out, DTensor)
    torch.testing.assert_close(out.redistribute(placements=[Replicate()]).to_local(), whole)
    torch.testing.assert_close((out.softmax(-1) + 1).sum().item(), whole.softmax(-1).add(1).sum().item())
    torch.testing.assert_close(out.detach().clone().add_(1).full_tensor(), whole + 1)
    assert type(pickle.loads(pickle.dumps(out.detach()))) is DTensor
    torch.testing.assert_close(copy.deepcopy(out.detach()).full_tensor(), whole)
    compiled = torch.compile(lambda x: (x * 2).relu().sum(), backend="aot_eager")(out)
    torch.testing.assert_close(compiled.full_tensor(), (whole * 2).relu().sum())
    with torch.inference_mode():
        changed = model(X)["logits"]
        assert changed.add_(1) is changed
        torch.testing.assert_close(changed.full_tensor(), whole + 1)


def test_gradients_flow_through_them(model: nn.Module):
    model.zero_grad()
    out = model(X)
    weight = model.layer.weight.full_tensor().detach()
    (out["logits"] * 2).sum().full_tensor().backward()
    torch.testing.assert_close(model.layer.weight.grad.full_tensor(), 2 * X.sum(0).expand_as(weight))
