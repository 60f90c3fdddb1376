"""Whether a known way to train fits a budget is told by the program that would run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.mesh import Mesh
from autopar.planner import Options
from autopar.planner.baselines.roles import baselines
from autopar.planner.search import candidates
from autopar.planner.search.state import Search
from autopar.settings import KNOWN_WAYS_TIMES, NEAR, NEARLY
from autopar.solver import Gap


def fits(budget: float, peak: float, arranged: float | None) -> bool:
    """``arranged``: its peak with its collectives arranged; None where nobody may ask."""

    class BaselineCandidate:
        peak_bytes = peak

        def fits(self, most: float) -> bool:
            return self.peak_bytes <= most

        @property
        def candidate(self) -> Any:
            assert arranged is not None, "arranged for nothing"
            return SimpleNamespace(memory=SimpleNamespace(peak_bytes=arranged))

    return Search.fits(SimpleNamespace(budget=budget), BaselineCandidate())  # type: ignore[arg-type]


def test_one_that_fits_as_it_is_need_not_be_arranged() -> None:
    assert fits(100, 100, None)


@pytest.mark.parametrize(("arranged", "fitting"), [(100, True), (101, False)])
def test_one_that_is_a_little_too_large_fits_where_its_arranged_program_does(arranged: float, fitting: bool) -> None:
    assert fits(100, 105, arranged) == fitting


def test_one_that_is_much_too_large_is_not_arranged() -> None:
    assert not fits(100, 100 * NEARLY + 1, None)


def gaps_of(costs: Sequence[float], monkeypatch: pytest.MonkeyPatch, *, compare: bool = False) -> list[float]:
    """The relative gap to which baselines of these costs are solved, one after the other."""
    found = []

    def choices(_: object, *, gap: Gap, **__: object) -> Iterator[tuple[object, tuple[int]]]:
        for i, cost in enumerate(costs):
            found.append(gap(cost))
            yield SimpleNamespace(name=str(i)), (i,)

    monkeypatch.setattr(candidates, "restricted_choices", choices)
    objective = SimpleNamespace(seconds=lambda choice: costs[choice[0]])
    candidates.baseline_candidates(objective, Options(gap=1e-4, compare=compare))  # type: ignore[arg-type]
    return found


def test_dear_baselines_are_solved_only_roughly(monkeypatch: pytest.MonkeyPatch) -> None:
    first, near, dear, too_dear = gaps_of([2.0, 2.1, 4.0, 100.0], monkeypatch)
    assert first == near == 1e-4
    assert dear == NEAR
    assert (1 - too_dear) * 100.0 == pytest.approx(KNOWN_WAYS_TIMES * 2.0)


def test_where_all_are_compared_all_are_solved_to_the_requested_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gaps_of([2.0, 2.1, 4.0, 100.0], monkeypatch, compare=True) == [1e-4] * 4


def test_weights_cut_over_all_axes_are_looked_at_last():
    """Where time is short and the batch does not go round all ranks, the first one that applies is the only one."""
    without_batch = [b.name for b in baselines(Mesh((4, 4, 4))) if 2 not in b.data]
    assert without_batch[0] == "DDP x TP" and without_batch[-2:] == ["TP", "TP+SP"]
