"""What is recomputed, against what is known to be best: formulas for chains, brute force for the rest."""

from __future__ import annotations

import math
import re
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.mesh import Mesh
from autopar.planner import Options
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.planner.search.two_stage import CheckpointSearch

from .memory_graphs import SLACK, UNIT, chain, device, planned, runs_again, steps

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule")


def forward_steps(length: int, checkpoints: int) -> int:
    """The fewest forward steps to run a chain backward, the last step not counted (Griewank and Walther, 2000)."""
    again = next(r for r in range(length) if math.comb(checkpoints + r, checkpoints) >= length)
    return again * length - math.comb(checkpoints + again, again - 1)


@pytest.mark.parametrize(
    ("length", "checkpoints", "best"),
    [
        (10, 3, 15),
        (15, 4, 24),
        pytest.param(21, 5, 35, marks=pytest.mark.slow),
        pytest.param(28, 6, 48, marks=pytest.mark.slow),
    ],
)
def test_a_chain_runs_as_few_steps_again_as_can_be(length, checkpoints, best):
    # Beside the checkpoints, of which the input is one, there is a state that is being read and one that is made.
    plan = planned(chain(length), (checkpoints + 2) * UNIT + SLACK, time_limit_s=200.0)
    assert forward_steps(length, checkpoints) == best
    assert length - 1 + len(runs_again(plan)) == best
    assert max(runs_again(plan).count(n) for n in runs_again(plan)) == 1
    assert plan.memory.peak_bytes <= (checkpoints + 2) * UNIT + SLACK


def every_way(graph):
    """(peak, cost) of every set of values that may be kept."""
    options = Options()
    mesh = Mesh((1,))
    d = decide(graph, mesh, options, resolve(graph, mesh, {}, {}), recompute=True)
    search = CheckpointSearch(Objective(d, Prices(mesh, device())), options, [None] * len(d.variables))
    assert search.rules is not None
    values = search.rules.storages
    choices = {search.rules.choosing(kept) for count in range(len(values) + 1) for kept in combinations(values, count)}
    return [(search.measured(c)[1].peak_bytes, search.objective.seconds(c)) for c in choices]


def check_against_every_way(graph, data):
    ways = every_way(graph)
    peaks = sorted({peak for peak, _ in ways})
    budget = data.draw(st.sampled_from(peaks))
    best = min(cost for peak, cost in ways if peak <= budget)
    plan = planned(graph, budget)
    assert plan.memory.peak_bytes <= budget
    assert plan.solution.objective == pytest.approx(best, rel=1e-9)
    assert plan.solution.lower_bound <= best * (1 + 1e-9)
    with pytest.raises(InfeasibleError) as refused:
        planned(graph, peaks[0] - 1)
    named = int(re.search(r"memory_budget=(\d+)", str(refused.value)).group(1))
    assert named == peaks[0]
    assert planned(graph, named).memory.peak_bytes <= named


SETTINGS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "derandomize": True}


@settings(max_examples=40, **SETTINGS)
@given(steps(6), st.data())
def test_small_graphs_are_planned_as_well_as_by_brute_force(graph, data):
    check_against_every_way(graph, data)


@pytest.mark.slow
@settings(max_examples=40, **SETTINGS)
@given(steps(10), st.data())
def test_graphs_are_planned_as_well_as_by_brute_force(graph, data):
    check_against_every_way(graph, data)
