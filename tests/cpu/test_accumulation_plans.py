"""``accumulation_steps``: when gradients are reduced is the plan's choice, and never changes what they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.planner.graphs.accumulation import with_gradient_sums
from autopar.planner.options import Options
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import Decisions, decide
from autopar.planner.search.two_stage import sharded_as, with_lean_sums
from autopar.tracer import ColoTracer
from tests.cpu.model_checks import (
    FLOOR,
    TOLERANCE,
    Promoted,
    cluster_where_sharding_pays,
    eager,
)
from tests.models import ZOO

QUICK = [("mlp", (2, 2)), ("cnn", (2,)), ("gpt2", (2,))]
EVERY = [(name, mesh) for name in ZOO for mesh in [(2,), (2, 2)]]


def _planned(name, mesh, **options):
    model, inputs = ZOO[name].made(torch.float64)
    with Promoted():
        plan = autopar.plan(model, inputs, mesh=mesh, cluster=cluster_where_sharding_pays(), **options)
    return model, inputs, plan


def _assert_exact(model, inputs, plan):
    with Promoted():
        result, reference = autopar.simulate(model, inputs, plan=plan), eager(model, inputs)
    largest = max(float(g.abs().max()) for g in reference.grads.values())
    assert set(result.grads) == set(reference.grads)
    for name, gradient in reference.grads.items():
        scale = max(float(gradient.abs().max()), FLOOR * largest)
        assert float((result.grads[name] - gradient).abs().max()) <= TOLERANCE[torch.float64] * scale, name
    return result


@pytest.mark.parametrize(
    ("name", "mesh"), [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in EVERY if c not in QUICK)]
)
def test_gradients_and_memory_are_those_of_one_device(name, mesh) -> None:
    if torch.float64 not in ZOO[name].dtypes:
        pytest.skip("runs in float32 alone")
    model, inputs, plan = _planned(name, mesh, accumulation_steps=3)
    assert _assert_exact(model, inputs, plan).peak_memory <= plan.peak_memory


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3))])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_random_specs_of_the_sums_are_exact(name, seed) -> None:
    model, inputs, plan = _planned(name, (2, 2), accumulation_steps=2, search=f"random:{seed}")
    _assert_exact(model, inputs, plan)


class Wide(nn.Module):
    """Two layers whose gradients are large beside what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 4096, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()


def _wide(**options):
    with torch.device("meta"):
        model, x = Wide(), torch.empty(32768, 4096)
    replicated = {"*.weight": "RR"}
    return autopar.plan(model, x, mesh=(8,), cluster="dgx-h100", constraints=replicated, **options)


def test_a_reduction_is_put_off_where_memory_allows_it() -> None:
    plan = _wide(accumulation_steps=8)
    assert {str(s) for n, s in plan.specs.items() if n.startswith("accumulated:")} == {"RR P0"}
    assert "def accumulate(" in plan.source
    before_last = plan.source.split("def accumulate(")[1]
    assert "all_reduce" in plan.source
    assert "all_reduce" not in before_last


def test_what_is_not_reduced_yet_is_held_within_the_budget() -> None:
    """Sums cut as well as reduced at once need an eighth of the memory."""
    put_off = _wide(accumulation_steps=8)
    least = put_off.peak_memory - 2 * 4096 * 4096 * 4 // 2
    tight = _wide(accumulation_steps=8, memory_budget=least)
    assert tight.peak_memory <= least < put_off.peak_memory
    specs = {str(s) for n, s in tight.specs.items() if n.startswith("accumulated:")}
    assert specs != {"RR P0"}
    assert tight.objective > put_off.objective


def test_more_micro_batches_in_a_step_cost_each_less() -> None:
    costs = [_wide(accumulation_steps=n).step_time for n in (2, 4, 16)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2"])
def test_what_is_no_number_of_steps_is_refused(steps) -> None:
    with pytest.raises(AutoparError, match="accumulation_steps"):
        autopar.plan(nn.Linear(2, 2), torch.empty(2, 2), mesh=(2,), cluster="dgx-h100", accumulation_steps=steps)


def test_a_saved_plan_keeps_its_steps(tmp_path) -> None:
    model, inputs, plan = _planned("mlp", (2,), accumulation_steps=3)
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.options["accumulation_steps"] == 3
    _assert_exact(model, inputs, loaded)


def _decisions(steps: int) -> Decisions:
    graph = ColoTracer().capture(Wide(), {"x": torch.zeros(32, 4096)}).graph
    options = Options(accumulation_steps=steps)
    mesh = Mesh((8,))
    return decide(with_gradient_sums(graph, steps, None), mesh, options, resolve(graph, mesh, {}, {}))


def test_known_shardings_leave_open_how_sums_are_held() -> None:
    d = _decisions(4)
    still = sharded_as(d, [0] * len(d.variables), d)
    free = {v.key for v, options in zip(d.variables, still, strict=True) if options is None and v.kind != "copy"}
    accumulators = {i.node for i in d.graph.inputs if i.kind == "accumulator"}
    assert len(accumulators) == 2
    assert free == d.summing > accumulators
    assert not _decisions(1).summing


def test_the_leanest_sums_are_reduced_at_once() -> None:
    d = _decisions(4)
    lean = with_lean_sums(d, tuple(None for _ in d.variables))
    for v, options in zip(d.variables, lean, strict=True):
        if v.kind != "accumulator":
            assert options is None
            continue
        assert options and len(options) < len(v.options)
        specs = [v.options[o].outputs[0] for o in options]
        assert all(not s.partial and any(s.dims) for s in specs if s is not None)
