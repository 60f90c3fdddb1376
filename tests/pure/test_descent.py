"""From a choice down to one that holds less, by single decisions."""

from __future__ import annotations

import math

import pytest

from autopar.mesh import Mesh
from autopar.planner import Options, descent
from autopar.planner.constraints import resolve
from autopar.planner.decisions import decide
from autopar.planner.descent import descended
from autopar.planner.objective import Objective
from autopar.planner.pricing import Prices
from autopar.planner.rounds import Result, Rounds
from autopar.planner.tightening import Rows
from autopar.planner.two_stage import CheckpointSearch

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
    return kept, descended(rounds, Rows(d, options), kept, math.inf)


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
