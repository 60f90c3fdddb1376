"""From a choice down to one that holds less, by single decisions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.mesh import Mesh
from autopar.planner import Options
from autopar.planner.memory.active_set import ActiveSet
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.planner.search import descent
from autopar.planner.search.descent import descended
from autopar.planner.search.rounds import Result, Rounds
from autopar.planner.search.two_stage import CheckpointSearch
from autopar.solver import Edge, Problem

from .memory_graphs import SLACK, UNIT, chain, device

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule")


def from_keeping_all(length: int, budget: float = 0.0, hideable_s: float = 0.0) -> tuple[Result, Result]:
    """The choice that keeps every state of a chain, and what is found from there."""
    graph, mesh, options = chain(length), Mesh((1,)), Options()
    d = decide(graph, mesh, options, resolve(graph, mesh, {}, {}), recompute=True)
    objective = Objective(d, Prices(mesh, device()))
    rounds = Rounds(graph, objective, options, budget, lambda _: None, hideable_s=hideable_s)
    rules = CheckpointSearch(objective, options, [None] * len(d.variables)).rules
    assert rules is not None
    kept = rounds.of_choice(rules.choosing(rules.storages))
    return kept, descended(rounds, ActiveSet(d, options), kept, math.inf)


def test_values_that_are_kept_at_the_peak_are_made_again() -> None:
    kept, least = from_keeping_all(8)
    assert kept.memory.peak_bytes > 8 * UNIT
    assert least.memory.peak_bytes <= 6 * UNIT + SLACK
    assert math.isfinite(least.solution.objective)
    assert not any(op.kind == "offload" for op in least.program.ops)  # for which there is no time


def test_it_goes_no_further_than_the_budget() -> None:
    kept, least = from_keeping_all(8)
    _, fits = from_keeping_all(8, budget=7 * UNIT + SLACK)
    assert least.memory.peak_bytes < fits.memory.peak_bytes <= 7 * UNIT + SLACK < kept.memory.peak_bytes


def test_the_same_choice_leads_to_the_same_one_however_much_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_keeping_all(6)[1].solution.choice == from_keeping_all(6)[1].solution.choice
    monkeypatch.setattr(descent, "MOST_OPS", 0)
    kept, least = from_keeping_all(6)
    assert least is kept


def test_what_goes_with_a_change_changes_too_and_nothing_that_is_forbidden_is_chosen() -> None:
    """The second goes with the first's option; the third need not change; the first's last option is not allowed."""
    same = np.where(np.eye(3, dtype=bool), 0.0, math.inf)
    costs = np.array([0.0, 0.0, math.inf]), np.zeros(3), np.zeros(2)
    neighbours = descent._Neighbours(Problem(costs, (Edge(0, 1, same), Edge(1, 2, np.zeros((3, 2))))))
    assert neighbours.changed((0, 0, 1), 0, 1) == (1, 1, 1)
    assert neighbours.changed((0, 0, 1), 1, 1) == (1, 1, 1)
    assert neighbours.changed((0, 0, 1), 0, 2) is None
    assert neighbours.changed((0, 0, 1), 1, 2) is None
