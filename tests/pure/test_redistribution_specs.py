"""Specs: their text, what each rank holds of a tensor, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import SpecError
from autopar.mesh import Mesh
from autopar.sharding import LocalLength, ShardingSpec, Step, cheapest_path, local_length
from tests.alpha_beta import uniform

parse = ShardingSpec.parse


@st.composite
def specs(draw, mesh_ndim: int = 4, max_ndim: int = 5) -> ShardingSpec:
    dims: list[tuple[int, ...]] = [()] * draw(st.integers(0, max_ndim))
    partial = []
    for axis in draw(st.permutations(range(mesh_ndim))):
        place = draw(st.integers(-2, len(dims) - 1))
        if place >= 0:
            dims[place] = (*dims[place], axis)
        elif place == -2:
            partial.append((axis, draw(st.sampled_from(["sum", "max", "min", "avg"]))))
    return ShardingSpec(tuple(dims), tuple(partial))


@pytest.mark.parametrize(
    ("text", "dims", "partial"),
    [
        ("S01RR", ((0, 1), (), ()), ()),
        ("S10R", ((1, 0), ()), ()),
        ("S0R P1", ((0,), ()), ((1, "sum"),)),
        ("S0R Pmax1", ((0,), ()), ((1, "max"),)),
        ("R P1 Pavg02", ((),), ((0, "avg"), (1, "sum"), (2, "avg"))),
        ("S(1,10)R", ((1, 10), ()), ()),
        ("-", (), ()),
        ("- P0", (), ((0, "sum"),)),
    ],
)
def test_the_text_form(text, dims, partial):
    assert parse(text) == ShardingSpec(dims, partial)
    assert parse(str(parse(text))) == parse(text)


@given(specs(mesh_ndim=12))
def test_reading_what_was_written_gives_the_same_spec(spec):
    assert parse(str(spec)) == spec


def cut(whole: np.ndarray, spec: ShardingSpec, mesh: Mesh, coordinate) -> np.ndarray:
    """Chunk after chunk, as torch.chunk does it: parts of ceil(n / k), the last ones shorter or empty."""
    for dim, axes in enumerate(spec.dims):
        for axis in axes:
            n, size = whole.shape[dim], -(-whole.shape[dim] // mesh.shape[axis])
            start = min(size * coordinate[axis], n)
            whole = whole.take(range(start, min(start + size, n)), axis=dim)
    return whole


@given(specs(mesh_ndim=3, max_ndim=3), st.data())
def test_every_rank_holds_what_cutting_dim_by_dim_and_axis_by_axis_leaves_it(spec, data):
    mesh = Mesh(data.draw(st.sampled_from([(2, 2, 2), (2, 3, 4), (1, 5, 2)])))
    shape = tuple(data.draw(st.lists(st.integers(0, 13), min_size=spec.ndim, max_size=spec.ndim)))
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    for coordinate in itertools.product(*map(range, mesh.shape)):
        expected = cut(whole, spec, mesh, coordinate)
        assert spec.local_shape(shape, mesh, coordinate) == expected.shape
        np.testing.assert_array_equal(whole[spec.local_slices(shape, mesh, coordinate)], expected)


@given(specs(mesh_ndim=3, max_ndim=3), st.data())
def test_the_shards_cover_the_tensor_once_for_each_replica(spec, data):
    mesh = Mesh((2, 3, 2))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=spec.ndim, max_size=spec.ndim)))
    held = np.zeros(shape, dtype=int)
    for rank in range(mesh.size):
        held[spec.local_slices(shape, mesh, mesh.coordinate(rank))] += 1
    assert (held == mesh.size // spec.ways(mesh)).all()


def test_the_last_ranks_hold_less_or_nothing():
    mesh, spec = Mesh((4,)), parse("S0")
    assert [spec.local_shape((9,), mesh, (i,)) for i in range(4)] == [(3,), (3,), (3,), (0,)]
    assert [spec.local_shape((5,), mesh, (i,)) for i in range(4)] == [(2,), (2,), (1,), (0,)]
    assert spec.local_slices((9,), mesh, (3,)) == (slice(9, 9),)


def test_two_axes_on_one_dim_cut_in_their_order():
    mesh = Mesh((2, 3))
    starts = {
        text: [parse(text).local_slices((6,), mesh, mesh.coordinate(r))[0].start for r in range(6)]
        for text in ("S01", "S10")
    }
    assert starts == {"S01": [0, 1, 2, 3, 4, 5], "S10": [0, 2, 4, 1, 3, 5]}


def test_a_length_is_a_number_where_all_ranks_agree():
    mesh = Mesh((2, 4))
    assert local_length(16, (0, 1), mesh) == 2
    assert local_length(12, (0, 1), mesh) == LocalLength(12, (0, 1))


@given(specs(mesh_ndim=3, max_ndim=3), st.integers(0, 2))
def test_a_larger_axis_never_enlarges_what_the_fullest_rank_holds(spec, axis):
    small, shape = (2, 3, 2), (24, 7, 10)[: spec.ndim]
    large = tuple(n + (i == axis) for i, n in enumerate(small))
    pairs = zip(spec.local_shape(shape, Mesh(large)), spec.local_shape(shape, Mesh(small)), strict=True)
    assert all(a <= b for a, b in pairs)


def shown(error: pytest.ExceptionInfo[SpecError], *parts: str) -> None:
    """Every error says what is wrong, with what, and shows what would be right."""
    text = str(error.value)
    assert "found:" in text
    assert "hint:" in text
    for part in parts:
        assert part in text


@pytest.mark.parametrize("text", ["S1S1", "S11R", "S01R P1", "R Pmax1 P1"])
def test_an_axis_that_is_used_twice_is_refused(text):
    with pytest.raises(SpecError, match="axis 1 is used twice") as error:
        parse(text)
    shown(error, text, "S01R or S0S1")


@pytest.mark.parametrize("text", ["", "Q", "S", "SR", "S0X", "R0", "s0r", "S0 R", "RR Q0", "RR P", "RR Pmean0", "S(1R"])
def test_what_is_no_spec_is_refused_with_examples(text):
    with pytest.raises(SpecError, match="not a sharding spec") as error:
        parse(text)
    shown(error, repr(text), "S01RR, S0R P1")


def test_a_spec_for_another_number_of_dims_is_refused():
    mesh = Mesh((2, 4))
    with pytest.raises(SpecError, match=r"has 3 dims, but lm_head\.weight has 2") as error:
        parse("S0RR").check(2, mesh, "lm_head.weight")
    shown(error, "S0RR", "RR replicates it")
    with pytest.raises(SpecError, match="3 dims") as error:
        cheapest_path(parse("S0RR"), parse("RR"), (8, 8), 4, mesh, uniform(mesh))
    shown(error, "write one letter per dim")


def test_an_axis_that_the_mesh_does_not_have_is_refused():
    mesh = Mesh((2, 4))
    with pytest.raises(SpecError, match="mesh axis 2, but the mesh has axes 0 to 1") as error:
        cheapest_path(parse("RR"), parse("S2R"), (8, 8), 4, mesh, uniform(mesh))
    shown(error, "S2R on mesh (2, 4)", "S0R")


@pytest.mark.parametrize(
    "step",
    [
        Step("slice", 1, 2),
        Step("all_gather", 0, 7),
        Step("all_gather", 0),
        Step("reduce_scatter", 1, 2),
        Step("all_to_all", 0, 0, 2),
        Step("permute", 0, 3, axes=(0, 1)),
    ],
    ids=str,
)
def test_a_step_on_a_dim_that_is_not_there_is_refused(step):
    with pytest.raises(SpecError, match="the tensor has 2 dims") as error:
        step.apply(parse("S0R P1"))
    shown(error, "S0R P1", "dims count from 0 to 1")


def test_a_scalar_has_no_dim_to_cut():
    with pytest.raises(SpecError, match="has 0 dims") as error:
        Step("slice", 0, 0).apply(parse("-"))
    shown(error, "a scalar has no dim to cut")
