"""Seconds of a phase by its sections: what hides behind what, and what cannot."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.pricing.critical_paths import CostTerm, Sections, cost_terms, phase_paths
from autopar.planner.pricing.streams import streams

SECTIONS = 4
CUT = Sections({"forward": tuple(range(SECTIONS)), "backward": tuple(range(SECTIONS))})
ORDER = cost_terms(CUT, 2)
FORWARD, BACKWARD = streams(ORDER, CUT, 2, 1)


def taken(**by_work: dict[int, float] | list[float]) -> np.ndarray:
    """Seconds of the terms of both phases on axis 0: by section, or of each section in turn."""
    found = np.zeros(len(ORDER))
    for work, seconds in by_work.items():
        items = seconds.items() if isinstance(seconds, dict) else enumerate(seconds)
        for section, s in items:
            for phase in ("forward", "backward"):
                term = CostTerm(work, phase, section)  # type: ignore[arg-type]
                if term in ORDER:
                    found[ORDER.index(term)] = s
    return found


def test_gathers_hide_behind_the_section_before() -> None:
    assert FORWARD.seconds(taken(compute=[2.0] * 4, gather={1: 2.0, 2: 2.0, 3: 2.0})) == 8.0


def test_a_gather_runs_no_more_than_a_section_ahead() -> None:
    late = FORWARD.seconds(taken(compute=[2.0, 2.0, 2.0, 0.0], gather={2: 5.0}))
    assert late == 2.0 + 5.0  # it is launched when section 1 begins, and all else hides behind it


def test_blocks_that_gather_are_best_among_those_that_do_not() -> None:
    gathering, computing = 3.0, 3.0
    seconds = {}
    for chosen in itertools.combinations(range(SECTIONS), 2):
        compute = [0.0 if s in chosen else computing for s in range(SECTIONS)]
        seconds[chosen] = float(FORWARD.seconds(taken(compute=compute, gather=dict.fromkeys(chosen, gathering))))
    assert seconds[1, 3] == min(seconds.values()) == 6.0
    assert seconds[2, 3] > seconds[1, 3]


def test_reductions_run_beside_what_follows_and_the_last_ones_do_not_hide() -> None:
    assert BACKWARD.seconds(taken(compute=[2.0] * 4, reduce={0: 2.0, 1: 2.0, 3: 3.0})) == 9.0


def test_what_is_waited_for_comes_after_what_its_axis_has_to_send_before() -> None:
    behind = BACKWARD.seconds(taken(compute=[1.0] * 4, reduce={0: 6.0}, wait={1: 1.0}))
    assert behind == 6.0 + 1.0 + 2.0
    assert BACKWARD.seconds(taken(compute=[1.0] * 4, reduce={0: 6.0})) == 6.0


@given(st.lists(st.floats(0, 4), min_size=len(ORDER), max_size=len(ORDER)))
def test_no_path_is_longer(seconds: list[float]) -> None:
    term_s = np.array(seconds)
    for phase, paths in zip((FORWARD, BACKWARD), phase_paths(CUT, 2, 1), strict=True):
        assert float(phase.seconds(term_s)) >= float((paths.paths @ term_s).max()) * (1 - 1e-9)


@given(st.integers(1, 3), st.integers(1, 3))
def test_many_choices_are_told_at_once(rows: int, columns: int) -> None:
    term_s = np.random.default_rng(rows * 4 + columns).random((rows, columns, len(ORDER)))
    together = BACKWARD.seconds(term_s)
    assert together.shape == (rows, columns)
    for i, j in itertools.product(range(rows), range(columns)):
        assert together[i, j] == pytest.approx(float(BACKWARD.seconds(term_s[i, j])))


def test_micro_batches_but_the_last_reduce_nothing() -> None:
    forward, last, others = streams(ORDER, CUT, 2, 4)
    assert (forward.share, last.share, others.share) == (1.0, 0.25, 0.75)
    seconds = taken(compute=[1.0] * 4, reduce=[3.0] * 4)
    assert float(others.seconds(seconds)) == 4.0
    assert float(last.seconds(seconds)) == 12.0
