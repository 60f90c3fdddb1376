"""How many collectives the textbook's plans launch, when their constraints are given and the rest is the planner's.

The loss is outside and nothing stands before the first layer, whose input needs no gradient unless it is said. Sizes
are small, so that a launch costs more than its bytes and the planner takes as few as it can.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import autopar
from autopar.tracer import ColoTracer

LAYERS, WIDTH, HEADS = 6, 64, 8
COLUMN, ROW = ("0", "4", "8"), ("2", "6", "10")


def counts(plan: autopar.Plan, phase: str | None = None) -> Counter[str]:
    return Counter(c.kind for c in plan.collectives if phase in (None, c.phase))


def perceptron(width: int, *, bias: bool = True) -> nn.Sequential:
    """Linear layers at the even places, activations at the odd ones."""
    layers = [m for _ in range(LAYERS) for m in (nn.Linear(width, width, bias), nn.GELU())]
    return nn.Sequential(*layers[:-1])


def column_row_pairs(ranks: int, *, input_needs_gradient: bool = False) -> autopar.Plan:
    constraints = {"input:input": "RR"} | dict.fromkeys(ROW, "RR")
    constraints |= {f"{i}.weight": "S0R" for i in COLUMN} | {f"{i}.bias": "S0" for i in COLUMN}
    constraints |= {f"{i}.weight": "RS0" for i in ROW} | {f"{i}.bias": "R" for i in ROW}
    x = torch.empty(32, WIDTH, requires_grad=input_needs_gradient)
    return autopar.plan(perceptron(WIDTH), x, mesh=(ranks,), cluster="dgx-h100", constraints=constraints)


@pytest.mark.parametrize("ranks", [2, 4])
def test_column_and_row_pairs_of_six_linear_layers(ranks) -> None:
    plan = column_row_pairs(ranks)
    assert counts(plan, "forward") == {"all_reduce": 3}
    assert counts(plan) == {"all_reduce": 5}


def test_an_input_that_needs_a_gradient_takes_one_more() -> None:
    plan = column_row_pairs(4, input_needs_gradient=True)
    assert counts(plan, "forward") == {"all_reduce": 3}
    assert counts(plan) == {"all_reduce": 6}


FORMS = [
    ("DDP", {"all_reduce": 6}, {"all_reduce": 1}),
    ("ZeRO-1/2", {"all_gather": 6, "reduce_scatter": 6}, {"all_gather": 1, "reduce_scatter": 1}),
    # The backward does not read the first weight, so it gathers five.
    ("ZeRO-3", {"all_gather": 11, "reduce_scatter": 6}, {"all_gather": 2, "reduce_scatter": 1}),
]


def data_parallel(form: str, width: int, batch: int) -> autopar.Plan:
    with torch.device("meta"):
        model, x = perceptron(width, bias=False), torch.empty(batch, width)
    return autopar.plan(model, x, mesh=(4,), cluster="dgx-h100", outputs="dtensor", search=f"baseline:{form}")


@pytest.mark.parametrize(("form", "tensors", "launches"), FORMS)
def test_small_data_parallel_tensors_go_in_one_launch(form, tensors, launches) -> None:
    plan = data_parallel(form, 32, 256)
    assert counts(plan) == launches
    assert Counter(c.kind for c in plan.collectives for _ in c.tensors) == tensors
    assert sum(c.bytes for c in plan.collectives) == sum(tensors.values()) * 32 * 32 * 4


@pytest.mark.parametrize(("form", "tensors", "launches"), FORMS)
def test_large_data_parallel_tensors_go_one_by_one(form, tensors, launches) -> None:
    plan = data_parallel(form, 4096, 4096)
    assert counts(plan) == tensors
    assert all(len(c.tensors) == 1 for c in plan.collectives)


def test_gradients_that_only_their_reduction_reads_are_overwritten_by_it() -> None:
    plan = data_parallel("DDP", 4096, 4096)
    assert [op.in_place for op in plan.program.collectives] == [True] * 6
    assert plan.source.count("in_place=True") == 6
    assert autopar.Plan.from_json(plan.to_json()).program == plan.program


class Layer(nn.Module):
    """A transformer layer, normalised before or after its parts; the heads' projections stand head by head."""

    def __init__(self, *, before: bool, affine: bool = True) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=affine) for _ in range(2))
        self.before = before

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (HEADS, 3, -1)).transpose(1, 2).unbind(3)
        return self.o(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.attend(self.norm1(x))
            return x + self.down(gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.down(gelu(self.up(x))))


HEADS_AND_FEATURES_CUT = {
    "*.qkv.weight": "S0R",
    "*.qkv.bias": "S0",
    "*.up.weight": "S0R",
    "*.up.bias": "S0",
    "*.o.weight": "RS0",
    "*.o.bias": "R",
    "*.down.weight": "RS0",
    "*.down.bias": "R",
}


@pytest.mark.parametrize(("before", "expected"), [(False, 4 * 2 - 1), (True, 8)])
def test_two_transformer_layers_with_heads_and_features_cut(before, expected) -> None:
    model = nn.Sequential(Layer(before=before), Layer(before=before))
    constraints = {"input:input": "RRR", "*.o": "RRR", "*.down": "RRR", **HEADS_AND_FEATURES_CUT}
    plan = autopar.plan(model, torch.empty(4, 16, WIDTH), mesh=(4,), cluster="dgx-h100", constraints=constraints)
    assert counts(plan) == {"all_reduce": expected}


@pytest.mark.parametrize("input_needs_gradient", [False, True])
def test_two_transformer_layers_with_the_sequence_cut_between_their_parts(input_needs_gradient) -> None:
    """Without scales and shifts, whose gradients would have to be added up over the pieces of the sequence."""
    layers = [Layer(before=True, affine=False) for _ in range(2)]
    model = nn.Sequential(*layers, nn.LayerNorm(WIDTH, elementwise_affine=False))
    x = torch.empty(4, 16, WIDTH, requires_grad=input_needs_gradient)
    between = ["input:input", "*.o", "*.down", "*.norm?", "2", "native_layer_norm_backward*"]
    between += gradients_of_normalised(model, x)
    constraints = dict.fromkeys(between, "RS0R") | {"*.qkv": "RRS0", "*.up": "RRS0"} | HEADS_AND_FEATURES_CUT
    plan = autopar.plan(model, x, mesh=(4,), cluster="dgx-h100", constraints=constraints, outputs="dtensor")
    assert counts(plan, "forward") == {"all_gather": 4, "reduce_scatter": 4}
    # One less in the backward where nothing before the first normalisation needs a gradient.
    assert counts(plan, "backward")["reduce_scatter"] == 4 - (not input_needs_gradient)
    assert set(counts(plan)) == {"all_gather", "reduce_scatter"}
    # What the forward gathers is kept for the backward; the input's gradient, given whole, is one gather more.
    assert counts(plan)["all_gather"] == 8 + input_needs_gradient


def gradients_of_normalised(model: nn.Module, x: Tensor) -> list[str]:
    """The nodes that make the gradients of what the layers' normalisations gave."""
    graph = ColoTracer().capture(model, x).graph
    backward = [n for n in graph.nodes if n.packet == "aten.native_layer_norm_backward"]
    return [n.inputs[0].node for n in backward if graph.by_name[n.inputs[0].node].op != "placeholder"]


def test_launches_name_parameters_and_gradients_as_users_do() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    plan = autopar.plan(
        model,
        torch.empty(4096, 64),
        mesh=(4,),
        cluster="dgx-h100",
        search="baseline:ZeRO-3",
    )
    again = autopar.Plan.from_json(plan.to_json())
    for one in (plan, again):
        carried = {phase: {t for c in one.collectives if c.phase == phase for t in c.tensors} for phase in PHASES}
        assert {"0.weight", "1.weight"} <= carried["forward"]
        assert {"0.weight.grad", "1.weight.grad"} <= carried["backward"]


PHASES = ("forward", "backward")
