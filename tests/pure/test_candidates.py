"""Which plan is taken among the search's own and the baselines."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autopar.planner.memory.exact import MemoryProfile
from autopar.planner.options import Options
from autopar.planner.schedule.timeline import Timeline
from autopar.planner.search.candidates import Candidate, settled
from autopar.planner.search.search import shortest
from autopar.planner.search.state import SearchState
from autopar.program import Program
from autopar.solver import Solution

GAP = 1e-3


def candidate(name: str, cost: float, step_s: float) -> Candidate:
    return Candidate(
        name,
        cast("Any", None),
        Solution((), cost, 0.0, proven=False),
        Program((), ()),
        MemoryProfile((1,), 0, {}),
        Timeline((), step_s, step_s, 0.0),
        step_s,
    )


@pytest.mark.parametrize(
    ("own", "baselines", "taken"),
    [
        ((1.0, 1.0), [(1.1, 1.1)], "own"),
        ((1.0, 1.0), [(1.0005, 0.9)], "0"),  # dearer within the gap, and shorter
        ((1.2, 0.9), [(1.0, 1.0)], "0"),  # the shortest, but beaten in cost
        ((1.0, 1.1), [(1.2, 1.0), (1.1, 1.2)], "0"),  # every one is beaten in something
        ((1.0, 1.0), [], "own"),
    ],
)
def test_no_baseline_beats_what_is_taken_where_that_can_be(own, baselines, taken):
    known = [candidate(str(i), *figures) for i, figures in enumerate(baselines)]
    assert settled([candidate("own", *own), *known], known, GAP).name == taken


@pytest.mark.parametrize(
    ("plans", "taken", "looked_at"),
    [
        ([(1.0, 1.1), (1.2, 1.2)], 0, 1),  # a step is no shorter than its cost
        ([(1.0, 1.5), (1.2, 1.3)], 1, 2),
        ([(1.0, 1.5), (1.2, 1.6), (1.4, 1.45), (1.5, 1.5)], 2, 3),
    ],
)
def test_of_plans_that_fit_the_shortest_step_is_taken(
    plans: list[tuple[float, float]], taken: int, looked_at: int
) -> None:
    found = [SimpleNamespace(cost=cost, plan=candidate("own", cost, step_s)) for cost, step_s in plans]
    asked: list[Any] = []

    def arranged(result: Any) -> Candidate:
        asked.append(result)
        return cast(Candidate, result.plan)

    search = cast("Any", SimpleNamespace(arranged=arranged, ends=math.inf, options=Options()))
    best = shortest(search, cast("Any", SimpleNamespace(plans=tuple(found), bound=0.9)))
    assert (best.solution.objective, best.timeline.seconds) == plans[taken]
    assert best.solution.lower_bound == 0.9
    assert len(asked) == looked_at


def test_a_plan_that_is_found_twice_is_kept_once() -> None:
    def plan(cost: float) -> Any:
        return SimpleNamespace(cost=cost, memory=SimpleNamespace(peak_bytes=5))

    search = cast("Any", SimpleNamespace(budget=10))
    state = SearchState().with_plan(search, plan(2.0)).with_plan(search, plan(1.0)).with_plan(search, plan(2.0))
    assert [kept.cost for kept in state.plans] == [1.0, 2.0]
