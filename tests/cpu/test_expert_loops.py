"""Experts that a model goes through in a loop, picking the tokens of each."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import CaptureError
from autopar.planner.graphs.routed import with_routed_experts
from autopar.tracer import ColoTracer
from tests.cpu.bad_input_checks import refused
from tests.cpu.model_checks import Reference, Subject, assert_equal, eager, run

WIDTH, EXPERTS, CHOSEN = 8, 4, 2
KINDS = ("where", "index_add", "accumulate", "out of place")


class Gated(nn.Module):
    """One expert of Mixtral, with biases."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 16, bias=bias), nn.Linear(WIDTH, 16, bias=bias)
        self.w2 = nn.Linear(16, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return made


class Block(nn.Module):
    """A mixture of experts as it is mostly written by hand, in several ways."""

    def __init__(self, kind: str, bias: bool = True, experts: int = EXPERTS) -> None:
        super().__init__()
        self.kind, self.gate = kind, nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(Gated(bias) for _ in range(experts))

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.gate(x).softmax(-1).topk(CHOSEN, -1)
        return weights / weights.sum(-1, keepdim=True), ids

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, WIDTH)
        w, ids = self.chosen(rows)
        out = torch.zeros_like(rows)
        mask = functional.one_hot(ids, len(self.experts)).permute(2, 1, 0)
        for i, expert in enumerate(self.experts):
            if self.kind == "index_add":
                k, t = torch.where(mask[i])
                picked = rows[None, t].reshape(-1, WIDTH)
                out.index_add_(0, t, (expert(picked) * w[t, k, None]).to(x.dtype))
                continue
            t, k = torch.where(ids == i)
            made = expert(rows[t]) * w[t, k, None]
            if self.kind == "where":
                out[t] += made
            elif self.kind == "accumulate":
                out.index_put_((t,), made, accumulate=True)
            else:
                out = out.index_add(0, t, made)
        return (x + out.view(x.shape)).square().mean()


def subject(model: nn.Module) -> Subject:
    inputs = {"x": torch.randn(4, 6, WIDTH, dtype=torch.float64)}
    return Subject(model, inputs, ColoTracer().capture(model, inputs), eager(model, inputs))


def packets(of: Subject) -> list[str]:
    return [n.packet for n in of.capture.graph.nodes]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_over_experts_is_one_product_of_all_and_equals_one_device(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    of = subject(Block(kind, bias).double())
    assert packets(of).count("autopar.experts_mm") + packets(of).count("autopar.experts_mm_weight") == 7
    assert of.reference is not None
    for mesh in ((2,), (2, 2)):
        assert_equal(run(of, mesh).result, of.reference, 1e-9)


@pytest.mark.parametrize("kind", ["where", "index_add"])
def test_tokens_of_such_experts_go_to_the_ranks_of_their_experts_too(kind: str) -> None:
    torch.manual_seed(0)
    of = subject(Block(kind).double())
    graph = with_routed_experts(of.capture.graph, 4.0)
    routed = dataclasses.replace(of, capture=dataclasses.replace(of.capture, graph=graph))
    assert "autopar.experts_mm" not in packets(routed)
    assert of.reference is not None
    assert_equal(run(routed, (2,), search="baseline:EP x FSDP").result, of.reference, 1e-9)


def test_batch_and_sequence_stay_dims_of_their_own() -> None:
    torch.manual_seed(0)
    of = subject(Block("where").double())
    shapes = [n.outputs[0].shape for n in of.capture.graph.nodes if n.packet == "autopar.experts_mm" and n.outputs[0]]
    assert all(shape[:3] == (4, 6, CHOSEN) for shape in shapes)


def test_dropout_in_experts_is_the_same_on_every_mesh() -> None:
    torch.manual_seed(0)
    model = Block("where").double()
    model.experts = nn.ModuleList(nn.Sequential(e, nn.Dropout(0.5)) for e in model.experts)
    inputs = {"x": torch.randn(4, 6, WIDTH, dtype=torch.float64)}
    of = Subject(model, inputs, ColoTracer().capture(model, inputs), None)
    one, other = (run(of, mesh).result for mesh in ((1,), (2, 2)))
    assert_equal(other, Reference(one.outputs, one.grads, {}), 1e-9)


class Odd(Block):
    """A loop that differs from the known kind in one way."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, WIDTH)
        w, ids = self.chosen(rows)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            if self.kind == "leaves one out" and i == 1:
                continue
            if self.kind == "another order":
                i = EXPERTS - 1 - i
            t, k = torch.where((ids % 2 if self.kind == "other ids" else ids) == i)
            made = expert(rows[t]) * w[t, k, None]
            if self.kind == "mixes rows":
                made = made - made.mean(0)
            if self.kind == "one expert is different" and i == 2:
                made = made.relu()
            out[t] += made
            if self.kind == "reads what is not done":
                rows = rows + out
        return out.square().mean()


ODD = (
    "leaves one out",
    "another order",
    "other ids",
    "mixes rows",
    "one expert is different",
    "reads what is not done",
)


@pytest.mark.parametrize("kind", ODD)
def test_any_doubt_leaves_the_loop_which_is_then_refused(kind: str) -> None:
    inputs: dict[str, Any] = {"x": torch.randn(2, 3, WIDTH)}
    with refused(CaptureError, "torch.where", "weights that are zero elsewhere"):
        ColoTracer().capture(Odd(kind), inputs)
