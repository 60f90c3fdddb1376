"""One plan for a range of sizes: every size equals one device, nothing is searched again, and formulas are true."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import autopar
from autopar import planner
from autopar.errors import InputError, PlanError
from autopar.strategies import flops
from autopar.tracer import ColoTracer
from tests.cpu.bad_input_checks import refused
from tests.cpu.capture_checks import assert_grads, assert_same, eager

VOCABULARY, WIDTH = 40, 8


class Small(nn.Module):
    def __init__(self, limit: int = 1000) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.limit = limit
        self.double()

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        h = self.embed(ids)
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        if ids.shape[1] > self.limit:
            k = k * 2
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) + h
        logits = self.head(h)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(batch * length))


BATCH, LENGTH = Dim("batch", min=2, max=12), Dim("length", min=3, max=9)
RANGE = {"ids": {0: BATCH, 1: LENGTH}}


def planned(model: nn.Module, **options: Any) -> autopar.Plan:
    options = {"mesh": (2, 2), "cluster": "dgx-h100:4", "time_limit": 5, "dynamic_shapes": RANGE, **options}
    return autopar.plan(model, ids(8, 6), **options)


@pytest.fixture(scope="module")
def served() -> tuple[nn.Module, autopar.Plan]:
    torch.manual_seed(0)
    model = Small()
    cut = {"head.weight": "S0R", "input:ids": "RS1", "output:logits": "S0RR"}
    return model, autopar.Plan.from_json(planned(model, constraints=cut).to_json())


@pytest.mark.parametrize("size", [(8, 6), (12, 9), (2, 3), (5, 8), (3, 7)])
def test_every_size_of_the_range_equals_one_device(
    served: tuple[nn.Module, autopar.Plan], size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "plan_graph", None)
    model, plan = served
    result = autopar.simulate(model, ids(*size), plan=plan)
    output, grads, _ = eager(model, ids(*size))
    assert_same(result.outputs, output)
    assert_grads(result.grads, grads)
    assert plan.specs["head.weight"] == autopar.Plan.from_json(plan.to_json()).specs["head.weight"]


def test_formulas_are_those_of_each_size(served: tuple[nn.Module, autopar.Plan]) -> None:
    model, plan = served
    for size in ((8, 6), (12, 9), (4, 4)):
        at = {"batch": size[0], "length": size[1]}
        graph = ColoTracer().capture(model, ids(*size)).graph
        counted = sum(flops(node, tuple(graph.meta(v) for v in node.inputs)) for node in graph.nodes)
        assert int(plan.symbolic["flops"].subs(at)) == counted
        assert tuple(n.subs(at) for n in plan.symbolic["output:logits"]) == (*size, VOCABULARY)
    saved = plan.symbolic["saved_bytes"]
    assert {str(s) for s in saved.free_symbols} == {"batch", "length"}
    program, here = plan.program, {"batch": 8, "length": 6}
    read = {name for op in program.ops if op.phase == "backward" for name in op.reads}
    made = [t for op in program.ops if op.phase == "forward" and op.kind != "input" for t in op.writes]
    assert saved.subs(here) == sum(t.bytes for t in made if t.name in read and program.root[t.name] == t.name)


def test_a_size_outside_is_another_plans() -> None:
    model = Small()
    plan = planned(model)
    with refused(PlanError, "dynamic_shapes"):
        autopar.simulate(model, ids(13, 6), plan=plan)


def test_a_program_that_changes_within_the_range_is_refused() -> None:
    with refused(PlanError, "'length': 9", "smaller range"):
        planned(Small(limit=7))


@pytest.mark.parametrize(
    "given", [{"idz": {0: BATCH}}, {"ids": {2: BATCH}}, {"ids": {0: Dim("big", min=9, max=12)}}, {"ids": {0: Dim("b")}}]
)
def test_ranges_that_do_not_fit(given: Any) -> None:
    with refused(InputError, "torch.export.Dim"):
        planned(Small(), dynamic_shapes=given)


def test_training_calls_of_any_size_search_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    reference, model = Small(), Small()
    model.load_state_dict(reference.state_dict())
    model = autopar.autoparallelize(model, ids(8, 6), mesh=(1,), time_limit=5, dynamic_shapes=RANGE)
    monkeypatch.setattr(planner, "plan_graph", None)
    for size in ((8, 6), (2, 9), (12, 3), (2, 9)):
        losses = [m(ids(*size))["loss"] for m in (reference, model)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
        losses[1].backward()
    assert len(model._autopar.programs) == 3


def test_under_a_budget_the_largest_size_fits() -> None:
    model = Small()
    largest = autopar.plan(model, ids(12, 9), mesh=(2,), cluster="dgx-h100:2", time_limit=5).peak_memory
    plan = planned(model, mesh=(2,), cluster="dgx-h100:2", memory_budget=largest)
    assert plan.peak_memory <= largest
    assert autopar.simulate(model, ids(12, 9), plan=plan).peak_memory <= largest
