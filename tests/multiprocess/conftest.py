"""Processes that the tests share, since importing torch takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multiprocess.pool import RankPool


def _ranks(number: int) -> Iterator[RankPool]:
    made = RankPool(number)
    yield made
    made.close()


@pytest.fixture(scope="package")
def single() -> Iterator[RankPool]:
    yield from _ranks(1)


@pytest.fixture(scope="package")
def pool() -> Iterator[RankPool]:
    yield from _ranks(2)


@pytest.fixture(scope="package")
def four() -> Iterator[RankPool]:
    yield from _ranks(4)
