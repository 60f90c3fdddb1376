"""How plans answer to the memory budget, over random steps on one device."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError

from .memory_graphs import chain, planned, runs_again, steps

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule")
SETTINGS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "derandomize": True}


def within(graph, budget):
    """A proven plan, or None where nothing fits."""
    try:
        plan = planned(graph, budget)
    except InfeasibleError:
        return None
    assert plan.solution.proven
    return plan


@settings(max_examples=24, **SETTINGS)
@given(steps(7), st.floats(0.3, 1.1), st.floats(0.3, 1.1))
def test_a_larger_budget_is_never_slower_and_a_smaller_one_has_never_a_higher_peak(graph, one, other):
    free = planned(graph).memory.peak_bytes
    small, large = (within(graph, share * free) for share in sorted((one, other)))
    if small is not None:
        assert large is not None
        assert large.solution.objective <= small.solution.objective * (1 + 1e-9)
        assert small.memory.peak_bytes <= large.memory.peak_bytes


@settings(max_examples=24, **SETTINGS)
@given(steps(7))
def test_with_enough_memory_nothing_is_recomputed(graph):
    free = planned(graph)
    enough = planned(graph, free.memory.peak_bytes)
    assert not runs_again(free)
    assert not runs_again(enough)
    assert enough.solution.objective == free.solution.objective


@settings(max_examples=20, **SETTINGS)
@given(steps(7), st.floats(0.3, 1.0))
def test_a_plan_fits_exactly_the_budget_of_its_own_peak(graph, share):
    plan = within(graph, share * planned(graph).memory.peak_bytes)
    if plan is not None:
        again = planned(graph, plan.memory.peak_bytes)
        assert again.solution.objective == pytest.approx(plan.solution.objective, rel=1e-9)
        assert again.memory.peak_bytes == plan.memory.peak_bytes


def test_equal_requests_have_equal_plans():
    first, second = (planned(chain(8), 6.5 * 2**20) for _ in range(2))
    assert first.program == second.program


def test_what_cannot_fit_is_refused_with_the_smallest_budget_that_was_found():
    with pytest.raises(InfeasibleError, match="smallest budget that works"):
        planned(chain(8), 2.0 * 2**20)
