"""Whether a known way to train fits a budget is told by the program that would run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopar.mesh import Mesh
from autopar.planner.baselines.roles import baselines
from autopar.planner.search.settings import NEARLY_FITS
from autopar.planner.search.state import Search


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
    assert not fits(100, 100 * NEARLY_FITS + 1, None)


def test_weights_cut_over_all_axes_are_looked_at_last():
    """Where time is short and the batch does not go round all ranks, the first one that applies is the only one."""
    without_batch = [b.name for b in baselines(Mesh((4, 4, 4))) if 2 not in b.data]
    assert without_batch[0] == "DDP x TP" and without_batch[-2:] == ["TP", "TP+SP"]
