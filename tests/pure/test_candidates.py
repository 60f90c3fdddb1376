"""Which plan is taken among the search's own and the baselines."""

from __future__ import annotations

from typing import Any, cast

import pytest

from autopar.planner.memory.exact import MemoryProfile
from autopar.planner.schedule.timeline import Timeline
from autopar.planner.search.candidates import Candidate, settled
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
