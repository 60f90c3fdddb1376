"""How much of a launch counts where reductions share it, and what is planned then."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar import settings
from autopar.planner import Options
from autopar.planner.pricing.objective import Objective
from autopar.planner.schedule.schedule import schedule
from autopar.planner.search.candidates import Candidate, baseline_candidates
from autopar.planner.search.search import JOINT, run_phases
from autopar.planner.search.shared_launches import share_of_launches, sharing_launches
from autopar.planner.search.state import SearchState
from tests.pure.searches import search_for
from tests.pure.test_objective import objective, whole

SMALL = (4096, 128)
"""By itself no gradient is worth a launch."""

OPTIONS = Options(outputs="dtensor")


@pytest.fixture(scope="module")
def asked() -> Objective:
    return objective(*SMALL)


@pytest.fixture(scope="module")
def data_parallel(asked: Objective) -> Candidate:
    return baseline_candidates(asked, OPTIONS, "DDP")[0].candidate


def searched(asked: Objective, baseline: Candidate, budget: float) -> list[Candidate]:
    search = search_for(asked, OPTIONS, budget)
    state = run_phases(search, SearchState(), JOINT)
    return sharing_launches(search, state, [baseline])


def test_with_its_share_of_launches_a_plan_costs_what_its_step_takes(asked: Objective, data_parallel: Candidate):
    launched = share_of_launches(data_parallel, asked.prices)
    assert settings.NEAR < launched < 1
    shared = Objective(asked.decisions, asked.prices, launched)
    assert shared.seconds(data_parallel.solution.choice) == pytest.approx(data_parallel.timeline.seconds)


def test_the_plan_reduces_gradients_that_are_not_worth_a_launch_each(asked: Objective, data_parallel: Candidate):
    alone = asked.minimize(asked.problem(), whole, gap=1e-9)
    assert not schedule(asked.decisions, alone.choice, asked.prices).collectives
    [found] = searched(asked, data_parallel, math.inf)
    assert found.program.collectives
    assert found.timeline.seconds < alone.objective < found.solution.objective
    assert found.solution.objective == asked.seconds(found.solution.choice)


def test_it_fits_the_budget(asked: Objective, data_parallel: Candidate):
    [free] = searched(asked, data_parallel, math.inf)
    for found in searched(asked, data_parallel, free.memory.peak_bytes - 1):
        assert found.memory.peak_bytes < free.memory.peak_bytes


def test_nothing_is_searched_where_the_baseline_shares_no_launch(asked: Objective, data_parallel: Candidate):
    alone = replace(data_parallel, timeline=replace(data_parallel.timeline, seconds=data_parallel.solution.objective))
    assert share_of_launches(alone, asked.prices) == 1
    assert searched(asked, alone, math.inf) == []
