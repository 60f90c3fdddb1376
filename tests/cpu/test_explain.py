"""``plan.explain``: each alternative is the same problem solved again with that spec forced."""

from __future__ import annotations

import re

import pytest

import autopar
from autopar.errors import ConstraintError, PlanError
from tests.models import MLP, regression

CONSTRAINTS = {"layers.0.weight": "column", "layers.3.weight": "column"}
ROW = re.compile(r"^([* ]) (\S+) +([\d.]+) ms +([\d.]+) x +([\d.]+) ms  (.*)$")


def planned(**options):
    return autopar.plan(MLP(), regression(), mesh=(2, 2), cluster="dgx-h100", **options)


def rows(text: str) -> list[tuple[str, ...]]:
    return [m.groups() for line in text.splitlines() if (m := ROW.match(line))]


@pytest.fixture(scope="module")
def free():
    return planned()


@pytest.fixture(scope="module")
def constrained():
    return planned(constraints=CONSTRAINTS)


def test_every_spec_has_a_row_and_the_planned_one_is_marked(free):
    found = rows(free.explain("layers.2.weight"))
    assert len(found) == 9  # each of two axes cuts one of two dims, or none
    assert [spec for mark, spec, *_ in found if mark == "*"] == [str(free.specs["layers.2.weight"])]


def test_no_alternative_is_cheaper_than_the_plan_and_rows_are_in_order(free):
    ratios = [float(ratio) for _, _, _, ratio, _, _ in rows(free.explain("layers.2.weight"))]
    assert ratios[0] == 1.0
    assert ratios == sorted(ratios)


def test_an_alternative_costs_what_the_plan_costs_with_it_forced(free):
    for _, spec, cost, _, step, _ in rows(free.explain("layers.2.weight"))[:4]:
        forced = planned(constraints={"layers.2.weight": spec})
        assert float(cost) == pytest.approx(forced.objective * 1e3, abs=6e-4)
        assert float(step) == pytest.approx(forced.step_time * 1e3, abs=6e-4)


def test_it_says_what_an_alternative_would_have_forced_elsewhere(constrained):
    found = {spec: text for _, spec, _, _, _, text in rows(constrained.explain("layers.2.weight"))}
    assert found[str(constrained.specs["layers.2.weight"])] == "nothing"
    assert any("->" in text or "collectives" in text for text in found.values())


def test_a_glob_that_covers_the_name_still_holds_for_the_rest_and_no_alternative_is_impossible():
    plan = planned(constraints={"layers.*.weight": "column"})
    text = plan.explain("layers.2.weight")
    assert "impossible" not in text
    (now,) = [spec for mark, spec, *_ in rows(text) if mark == "*"]
    assert now == str(plan.specs["layers.2.weight"])
    spec, cost = next((spec, cost) for mark, spec, cost, *_ in rows(text) if mark != "*")
    rest = {n: "column" for n in plan.parameters if n.endswith("weight") and n != "layers.2.weight"}
    forced = planned(constraints={**rest, "layers.2.weight": spec})
    assert float(cost) == pytest.approx(forced.objective * 1e3, abs=6e-4)


def test_what_each_constraint_costs_against_the_free_plan(constrained, free):
    lines = constrained.explain().splitlines()
    numbers = [float(n) for n in re.findall(r"([\d.]+) ms", lines[0])]
    assert numbers[0] == pytest.approx(constrained.objective * 1e3, abs=6e-4)
    assert numbers[1] == pytest.approx(free.objective * 1e3, abs=6e-4)
    assert [line.split()[1] for line in lines[1:]] == list(CONSTRAINTS)


def test_without_name_and_constraints_there_is_nothing_to_explain(free):
    assert free.explain() == "The plan has no constraints."


@pytest.mark.parametrize("name", ["input:x", "layers.2", "output:0"])
def test_inputs_modules_and_outputs_can_be_asked_about(free, name: str):
    assert f"{name}: each spec it could have" in free.explain(name)


def test_an_unknown_name_is_refused_with_the_nearest(free):
    with pytest.raises(ConstraintError, match="matches no name") as error:
        free.explain("layers.2.wieght")
    assert "layers.2.weight" in error.value.hint


@pytest.mark.parametrize("name", [3, None, ["layers.2.weight"]])
def test_what_is_no_name_is_refused(free, name):
    with pytest.raises(PlanError, match="takes the name of a tensor"):
        free.explain(name)


def test_a_loaded_plan_cannot_be_asked(free):
    with pytest.raises(PlanError, match="cannot be explained"):
        autopar.Plan.from_json(free.to_json()).explain("layers.2.weight")


@pytest.mark.slow
def test_under_a_budget_an_alternative_is_told_from_the_plan_and_not_from_a_shorter_search(free):
    """What nothing near it stands against costs one redistribution, and not what a search of a second left open."""
    plan = planned(memory_budget=int(0.6 * free.peak_memory), time_limit=10.0)
    name = "layers.2.weight"
    found = {spec: (float(cost), float(ratio)) for _, spec, cost, ratio, _, _ in rows(plan.explain(name))}
    assert found[str(plan.specs[name])] == (pytest.approx(plan.objective * 1e3, abs=6e-4), 1.0)
    assert min(ratio for _, ratio in found.values()) > 0.9
