"""Losses in half precision: no copy of the logits in float32, the same bits; sums and averages are rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.tracer.normalize import Normalizing
from tests.cpu.model_checks import cluster_where_sharding_pays
from tests.models import ZOO

VOCABULARY = 50


class Model(nn.Module):
    """Logits as models hand them to a loss: converted, and shifted by one or not."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.head = nn.Linear(8, VOCABULARY, dtype=torch.bfloat16)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x).float()
        if self.style == "shifted":
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:]
        smoothing = 0.1 if "smoothed" in self.style else 0.0
        weight = torch.linspace(0.5, 1.5, VOCABULARY) if "weighted" in self.style else None
        loss = functional.cross_entropy(
            logits.reshape(-1, VOCABULARY), labels.reshape(-1), weight, label_smoothing=smoothing
        )
        return loss + logits.logsumexp(-1).square().mean() if self.style == "beside another loss" else loss


def inputs() -> dict[str, Tensor]:
    labels = torch.randint(0, VOCABULARY, (4, 6))
    labels[0, :3] = -100
    return {"x": torch.randn(4, 6, 8, dtype=torch.bfloat16), "labels": labels}


def wide_logits(model: nn.Module, given: dict[str, Tensor]) -> int:
    """How many tensors of the captured program hold logits in float32."""
    graph = autopar.ColoTracer().capture(model, given).graph
    metas = [m for node in graph.nodes for m in node.outputs if m is not None]
    return sum(m.dtype == "float32" and m.shape[-1:] == (VOCABULARY,) and len(m.shape) > 1 for m in metas)


NARROW = ("plain", "shifted", "weighted", "smoothed", "weighted and smoothed")


@pytest.mark.parametrize("style", [*NARROW, "beside another loss"])
def test_logits_stay_in_half_precision_and_results_keep_their_bits(style, monkeypatch) -> None:
    model, given = Model(style), inputs()
    found = autopar.simulate(model, given, plan=autopar.plan(model, given, mesh=(1,), cluster="cpu-2:1"))
    kept = wide_logits(model, given)
    monkeypatch.setattr(Normalizing, "before_widening", lambda self, x: x)
    plainly = autopar.simulate(model, given, plan=autopar.plan(model, given, mesh=(1,), cluster="cpu-2:1"))
    before = wide_logits(model, given)
    assert before > 0
    assert kept == 0 if style in NARROW else kept > 0
    for name, gradient in plainly.grads.items():
        assert torch.equal(found.grads[name], gradient)
    assert found.outputs.dtype == plainly.outputs.dtype == torch.float32
    assert torch.equal(found.outputs, plainly.outputs)


def test_a_model_of_hugging_face_keeps_no_wide_logits(monkeypatch) -> None:
    """And its step needs less memory."""
    model, given = ZOO["llama"].made(torch.bfloat16, 0.0)
    wanted = {"mesh": (2,), "cluster": "cpu-2", "time_limit": 5.0}
    found = autopar.plan(model, given, **wanted)
    result = autopar.simulate(model, given, plan=found)
    monkeypatch.setattr(Normalizing, "before_widening", lambda self, x: x)
    plainly = autopar.plan(model, given, **wanted)
    assert found.peak_memory < plainly.peak_memory
    expected = autopar.simulate(model, given, plan=plainly)
    for name, gradient in expected.grads.items():
        torch.testing.assert_close(result.grads[name], gradient, rtol=0.1, atol=0.02 * float(gradient.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_averages_in_half_precision_hold_sums_that_it_does_not(dtype: torch.dtype) -> None:
    """3,200 times 90 is more than float16 holds."""

    class Means(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            h = x * self.scale
            return h.mean((1, 2)).mean() + nn.functional.mse_loss(h, 0.99 * h) + nn.functional.l1_loss(h, x / 2)

    x, model = torch.linspace(80, 100, 4 * 400 * 8).reshape(4, 400, 8).to(dtype), Means()
    model(x).backward()
    expected = model.scale.grad
    assert expected.isfinite().all()
    for mesh in [(2,), (4,)]:
        plan = autopar.plan(model, x, mesh=mesh, cluster=cluster_where_sharding_pays(), time_limit=2)
        found = autopar.simulate(model, x, plan=plan)
        torch.testing.assert_close(found.outputs, model(x).detach(), rtol=2 * torch.finfo(dtype).eps, atol=0)
        torch.testing.assert_close(found.grads["scale"], expected, rtol=0.02, atol=0)


def test_a_sum_in_half_precision_is_rounded_once() -> None:
    """Not each rank's part: 257 and 261 would be 256 and 260, whose sum is 516, and 518 is 520."""

    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).sum()

    x, model = torch.tensor([256.0, 1.0, 260.0, 1.0], dtype=torch.bfloat16), Total()
    wanted = {"cluster": cluster_where_sharding_pays(), "constraints": {"input:x": "S0"}}
    plan = autopar.plan(model, x, mesh=(2,), **wanted)
    assert torch.equal(autopar.simulate(model, x, plan=plan).outputs, model(x).detach())
