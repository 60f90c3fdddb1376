"""Processes that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multiprocess.pool import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two ranks; a module that needs others has a pool of its own."""
    made = RankPool(2)
    yield made
    made.close()
