"""Tests of the solver are of small problems, which are to reach the steps that large ones are solved by."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autopar import settings


@pytest.fixture(autouse=True, scope="module")
def _no_elimination(request: pytest.FixtureRequest) -> Iterator[None]:
    """Without an elimination, which would solve most of them at once; its own tests ask for it."""
    with pytest.MonkeyPatch.context() as patch:
        if "test_solver" in request.module.__name__ and not request.module.__name__.endswith("elimination"):
            patch.setattr(settings, "ELIMINATED", 0)
        yield
