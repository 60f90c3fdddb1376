"""Mixtures of known choices: no worse than any of them, and as good as the limit and the paths allow."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.pricing.mixing import Entries, Mixing, Segments
from autopar.solver import Usage

BLOCKS = 4
Table = tuple[int, np.ndarray, int, int]
"""Seconds of a term by option of a variable, and of another variable (-1 for none)."""


def entries(tables: list[Table]) -> Entries:
    starts = np.cumsum([0, *(seconds.size for _, seconds, _, _ in tables)])[:-1]
    columns = zip(*[(t, s.shape[-1] if c >= 0 else 1, r, c) for t, s, r, c in tables], strict=True)
    term, width, row, column = map(np.array, columns)
    return Entries(2, np.concatenate([s.ravel() for _, s, _, _ in tables]), term, starts, width, row, column)


def longer(seconds: np.ndarray) -> np.ndarray:
    """Two streams, one for each term."""
    return np.asarray(seconds.max(axis=-1))


def blocks(tables: list[Table], **limited: object) -> Mixing:
    """A run of blocks of one variable each, and what every block choosing 0, and every block choosing 1, can be mixed
    to."""
    run = Segments(np.arange(BLOCKS), (tuple(range(BLOCKS)),))
    return Mixing(run, entries(tables), longer, [(0,) * BLOCKS, (1,) * BLOCKS], **limited)  # type: ignore[arg-type]


def either_stream(seconds: float) -> list[Table]:
    """Every block takes so long, on the first stream under option 0 and on the second under option 1."""
    on = [np.array([seconds, 0.0]), np.array([0.0, seconds])]
    return [(term, on[term], block, -1) for term in (0, 1) for block in range(BLOCKS)]


def longest(tables: list[Table], choice: tuple[int, ...]) -> float:
    lengths = [0.0, 0.0]
    for term, seconds, row, column in tables:
        lengths[term] += float(seconds[choice[row]] if column < 0 else seconds[choice[row], choice[column]])
    return max(lengths)


def test_blocks_share_two_streams_evenly() -> None:
    tables = either_stream(2.0)
    assert longest(tables, (0,) * BLOCKS) == longest(tables, (1,) * BLOCKS) == 8.0
    chosen = blocks(tables).best()
    assert chosen is not None
    assert longest(tables, chosen) == 4.0


def test_what_changes_between_blocks_is_paid_once() -> None:
    change = [(0, np.array([[0.0, 0.5], [0.5, 0.0]]), i, i + 1) for i in range(BLOCKS - 1)]
    tables = [*either_stream(2.0), *change]
    chosen = blocks(tables).best()
    assert chosen is not None
    assert sum(a != b for a, b in itertools.pairwise(chosen)) == 1
    assert longest(tables, chosen) == 4.5


def test_a_forbidden_pair_is_never_taken() -> None:
    forbidden = [(0, np.array([[0.0, np.inf], [np.inf, 0.0]]), i, i + 1) for i in range(BLOCKS - 1)]
    assert blocks([*either_stream(2.0), *forbidden]).best() in ((0,) * BLOCKS, (1,) * BLOCKS)


def test_a_mixture_keeps_within_the_limit() -> None:
    usages = [Usage(block, np.array([0.0, 3.0]), 0, 1) for block in range(BLOCKS)]
    chosen = blocks(either_stream(2.0), usages=usages, limit=3.0).best()
    assert chosen is not None
    assert sum(chosen) == 1


def test_there_is_none_where_no_known_choice_is_within_the_limit() -> None:
    usages = [Usage(block, np.array([2.0, 3.0]), 0, 1) for block in range(BLOCKS)]
    assert blocks(either_stream(2.0), usages=usages, limit=7.0).best() is None


seconds = st.floats(0.0, 4.0)
pairs = st.lists(seconds, min_size=4, max_size=4).map(lambda four: np.array(four).reshape(2, 2))
singles = st.lists(seconds, min_size=2, max_size=2).map(np.array)


@given(
    st.lists(st.tuples(st.integers(0, 1), singles), min_size=BLOCKS, max_size=BLOCKS),
    st.lists(st.tuples(st.integers(0, 1), pairs), min_size=BLOCKS - 1, max_size=BLOCKS - 1),
)
def test_a_mixture_is_no_worse_than_what_it_mixes_and_no_single_step_makes_it_better(
    own: list[tuple[int, np.ndarray]], between: list[tuple[int, np.ndarray]]
) -> None:
    tables: list[Table] = [(term, cost, i, -1) for i, (term, cost) in enumerate(own)]
    tables += [(term, cost, i, i + 1) for i, (term, cost) in enumerate(between)]
    chosen = blocks(tables).best()
    assert chosen is not None
    found = longest(tables, chosen)
    assert found <= min(longest(tables, (way,) * BLOCKS) for way in (0, 1)) + 1e-9
    for first, end in itertools.combinations(range(BLOCKS + 1), 2):
        for way in (0, 1):
            step = (*chosen[:first], *[way] * (end - first), *chosen[end:])
            assert longest(tables, step) >= found * (1 - 2e-4) - 1e-9
