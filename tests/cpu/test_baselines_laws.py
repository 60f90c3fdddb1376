"""The chosen plan is never slower than the best baseline that fits, in cost and in simulated seconds."""

from __future__ import annotations

import pytest

from tests.baseline_laws import BUDGETS, MESHES, no_baseline_is_better, plan_on
from tests.models import ZOO


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("name", "mesh"), [("mlp", (4,)), ("cnn", (2,)), ("gpt2", (2,))])
def test_no_baseline_beats_the_plan(name: str, mesh: tuple[int, ...], budget: str):
    no_baseline_is_better(plan_on(name, mesh, budget))


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_no_baseline_beats_the_plan_anywhere(name: str, mesh: tuple[int, ...], budget: str):
    no_baseline_is_better(plan_on(name, mesh, budget))
