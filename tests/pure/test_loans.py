"""Loans of query rows balance causal attention."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.mesh import Mesh
from autopar.sharding.loan import Loan, Share, loan, mirrored, own_rows, share, work

MESHES = [Mesh((n,)) for n in (2, 3, 4, 5, 8, 16, 32)] + [Mesh((2, 2)), Mesh((2, 4)), Mesh((3, 2)), Mesh((2, 2, 2))]
CUTS = st.sampled_from(MESHES).flatmap(lambda m: st.tuples(st.just(m), st.integers(m.size * m.size, 20_000)))


def shares(n: int, mesh: Mesh) -> tuple[Loan, list[Share]]:
    axes = tuple(range(mesh.ndim))
    made = loan(n, axes, mesh)
    assert made is not None
    return made, [share(n, axes, made.lent, mesh, mesh.coordinate(r)) for r in range(mesh.size)]


def worked(s: Share) -> int:
    return work(s.start, s.start + s.kept) + work(s.first, s.first + s.guests)


@given(CUTS)
def test_every_row_is_worked_on_once(cut: tuple[Mesh, int]) -> None:
    mesh, n = cut
    _, ranks = shares(n, mesh)
    rows = [r for s in ranks for r in (*range(s.start, s.start + s.kept), *range(s.first, s.first + s.guests))]
    assert sorted(rows) == list(range(n))
    assert sum(map(worked, ranks)) == work(0, n)


@given(CUTS)
def test_what_a_rank_lends_its_mirror_works_on(cut: tuple[Mesh, int]) -> None:
    mesh, n = cut
    axes, (made, ranks) = tuple(range(mesh.ndim)), shares(n, mesh)
    for r in range(mesh.size):
        other = mesh.rank(mirrored(axes, mesh, mesh.coordinate(r)))
        assert mesh.rank(mirrored(axes, mesh, mesh.coordinate(other))) == r
        assert ranks[other].guests == ranks[r].lent == made.lent[r]
        assert not (ranks[r].lent and ranks[r].guests)
        assert not ranks[r].guests or ranks[r].first + ranks[r].guests == ranks[other].stop


@given(st.integers(2, 32), st.integers(1, 600))
def test_of_k_rows_a_rank_the_fullest_does_at_most_one_kth_more_than_the_mean(ways: int, k: int) -> None:
    _, ranks = shares(ways * k, Mesh((ways,)))
    mean = sum(map(worked, ranks)) / ways
    assert max(map(worked, ranks)) <= mean * (1 + 1 / k)


@pytest.mark.parametrize(("n", "ways", "most"), [(131_072, 8, 1.0001), (8192, 8, 1.001), (4096, 16, 1.0032)])
def test_long_sequences_are_balanced(n: int, ways: int, most: float) -> None:
    _, ranks = shares(n, Mesh((ways,)))
    assert max(map(worked, ranks)) <= most * sum(map(worked, ranks)) / ways


def test_ranks_along_several_axes_are_numbered_by_their_rows() -> None:
    mesh = Mesh((2, 3, 2))
    made = loan(120, (0, 2), mesh)
    assert made is not None
    assert own_rows(120, (0, 2), mesh) == [(0, 30), (30, 60), (60, 90), (90, 120)]
    assert made.lent[:2] == (0, 0)
    assert mirrored((0, 2), mesh, (0, 1, 1)) == (1, 1, 0)
    assert share(120, (0, 2), made.lent, mesh, (1, 2, 1)).lent == made.lent[3] == made.most


def test_an_uncut_dim_needs_no_loan() -> None:
    assert loan(8, (), Mesh((2,))) is None
    assert loan(8, (0,), Mesh((1, 2))) is None
