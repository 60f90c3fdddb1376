"""The chosen plan is never slower than the best baseline that fits, in cost and in simulated seconds."""

from __future__ import annotations

import itertools

import pytest

from tests.baseline_laws import BUDGETS, MESHES, no_baseline_is_better, plan_on
from tests.models import ZOO


@pytest.mark.parametrize(
    ("name", "mesh", "budget"),
    [("mlp", (4,), "least"), ("cnn", (2,), "half"), ("gpt2", (2,), "all")],
)
def test_no_baseline_beats_the_plan(name: str, mesh: tuple[int, ...], budget: str):
    no_baseline_is_better(plan_on(name, mesh, budget))


@pytest.mark.parametrize(("name", "mesh"), [("gpt2", (2,)), ("mlp", (2, 2))])
def test_what_is_not_looked_at_would_not_have_been_chosen(name: str, mesh: tuple[int, ...]):
    alone, compared = plan_on(name, mesh, compare=False), plan_on(name, mesh)
    assert len(alone.baselines) < len(compared.baselines)
    assert alone.timeline.seconds <= min(b.step_time for b in compared.baselines) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "budget"), itertools.product(ZOO, MESHES, BUDGETS), ids=str)
def test_no_baseline_beats_the_plan_anywhere(name: str, mesh: tuple[int, ...], budget: str):
    no_baseline_is_better(plan_on(name, mesh, budget))
