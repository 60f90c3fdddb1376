"""The linear program of a block and the ends: a bound on any number of copies, and choices where copies differ."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.solver import evaluate
from autopar.solver.blocks import blocks_linear
from autopar.solver.blocks.blocks_linear import relax_blocks
from autopar.solver.blocks.folding import fold
from autopar.solver.integer import highs
from autopar.solver.integer.ilp import build
from autopar.solver.problem import Duals, UsagePrices
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.incumbent import Incumbent
from tests.brute_force import brute_force
from tests.pure.test_solver_folding import chain
from tests.pure.test_solver_mixture import knapsack

pytestmark = pytest.mark.skipif(not highs.is_installed(), reason="needs HiGHS")


def relaxed(problem) -> Incumbent:
    incumbent, tied = Incumbent(problem, 60.0, 1e-9, None), fold(problem)
    assert tied is not None
    relax_blocks(incumbent, tied.parts, 60.0)
    return incumbent


def linear_optimum(problem) -> float:
    graph = Graph(problem)
    model = build(graph, 1.0)
    found = highs.solve_relaxation(model, 60.0)
    assert found is not None
    return found.objective * model.scale + graph.offset


@pytest.mark.parametrize("seam", [0.0, 0.25])
@pytest.mark.parametrize("limit", [25.0, 55.0, 100.0, 119.0])
def test_it_is_the_linear_program_of_all_copies(limit: float, seam: float) -> None:
    problem = knapsack(12, limit, seam)
    found = relaxed(problem)
    assert found.lower_bound <= linear_optimum(problem) * (1 + 1e-9)
    assert found.lower_bound >= 12 - limit / 10 - 1e-6
    assert found.objective == pytest.approx(12 - limit // 10 + (seam if limit > 10 else 0.0))
    assert found.duals.usage_prices.total() == pytest.approx(0.1)


def test_what_only_some_copies_have_room_for_is_not_barred() -> None:
    """All copies together could not take it: ten bytes each, of fifteen."""
    assert relaxed(knapsack(12, 15.0)).objective == pytest.approx(11.0)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_the_bound_lies_below_the_optimum_and_choices_keep_to_the_limit(seed: int) -> None:
    random = np.random.default_rng(seed)
    problem = chain(random, 7, width=1, options=3, limit=float(random.integers(5, 25)))
    try:
        best = brute_force(problem).objective
    except InfeasibleError:
        return
    found = relaxed(problem)
    assert found.lower_bound <= best * (1 + 1e-7) + 1e-9
    if found.choice is not None:
        assert evaluate(problem, found.choice) == (pytest.approx(found.objective), True)
        assert found.objective >= best * (1 - 1e-9)


@pytest.mark.parametrize("limit", [25.0, 55.0, 100.0])
def test_known_prices_of_the_limit_prove_a_choice_without_the_linear_program(
    limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it is too large to end in time; without prices of the limit no choice is known to cost anything."""
    problem = knapsack(12, limit)
    solved = relaxed(problem)
    monkeypatch.setattr(blocks_linear, "solve_relaxed", lambda *_: None)
    for prices, bound in ((solved.usage_prices, solved.lower_bound), (UsagePrices(), 0.0)):
        incumbent, tied = Incumbent(problem, 60.0, 1e-9, None), fold(problem)
        assert tied is not None and solved.choice is not None
        incumbent.begin_with(Duals(prices))
        incumbent.offer(solved.choice, "known")
        relax_blocks(incumbent, tied.parts, 60.0)
        assert incumbent.bound() == pytest.approx(bound, abs=1e-6)


@given(seed=st.integers(0, 2**32 - 1), price=st.floats(0.0, 3.0))
@settings(max_examples=8, deadline=None)
def test_no_prices_of_the_limit_bound_a_choice_too_high(seed: int, price: float) -> None:
    random = np.random.default_rng(seed)
    problem = chain(random, 7, width=1, options=3, limit=float(random.integers(5, 25)))
    try:
        best = brute_force(problem)
    except InfeasibleError:
        return
    incumbent, tied = Incumbent(problem, 60.0, 1e-9, None), fold(problem)
    assert tied is not None
    times = np.unique([usage.start for usage in problem.usages]).astype(float)
    incumbent.begin_with(Duals(UsagePrices(times, price * random.random(len(times)))))
    incumbent.offer(best.choice, "known")
    relax_blocks(incumbent, tied.parts, 60.0)
    assert incumbent.lower_bound <= best.objective * (1 + 1e-7) + 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_the_options_of_a_known_choice_are_enough(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where copies choose differently, which are one block of the program."""
    problem = chain(np.random.default_rng(seed), 8, width=1, options=3, hub=True, limit=20.0)
    best = brute_force(problem)
    incumbent, tied = Incumbent(problem, 60.0, 1e-9, None), fold(problem)
    assert tied is not None
    incumbent.offer(best.choice, "known")
    monkeypatch.setattr("autopar.settings.MANY_FLOWS", -1)
    monkeypatch.setattr("autopar.settings.NEAREST", 0.0)
    monkeypatch.setattr("autopar.settings.FEW", 1)
    relax_blocks(incumbent, tied.parts, 60.0)
    assert -math.inf < incumbent.expected <= best.objective * (1 + 1e-7) + 1e-9
