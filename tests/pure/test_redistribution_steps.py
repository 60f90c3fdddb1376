"""One-step transforms between specs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import SpecError
from autopar.mesh import Mesh
from autopar.sharding import ShardingSpec, Step, steps_from

parse = ShardingSpec.parse
MESH = Mesh((2, 4))


def reached(text: str, kind: str, mesh: Mesh = MESH) -> set[str]:
    spec = parse(text)
    return {str(after) for step, after in steps_from(spec, spec.ndim, mesh) if step.kind == kind}


@pytest.mark.parametrize(
    ("spec", "gathers", "slices", "moves"),
    [
        ("S01RR", {"S0RR"}, set(), {"S0RS1", "S0S1R"}),
        ("S0RR", {"RRR"}, {"S0S1R", "S0RS1", "S01RR"}, {"RS0R", "RRS0"}),
        ("RS0R", {"RRR"}, {"RS01R", "S1S0R", "RS0S1"}, {"S0RR", "RRS0"}),
    ],
)
def test_the_one_step_transforms_of_the_worked_examples(spec, gathers, slices, moves):
    assert reached(spec, "all_gather") == gathers
    assert reached(spec, "slice") == slices
    assert reached(spec, "all_to_all") == moves


def test_only_the_innermost_axis_can_be_gathered():
    assert reached("S10R", "all_gather") == {"S1R"}
    with pytest.raises(SpecError, match="innermost"):
        Step("all_gather", 1, 0).apply(parse("S10R"))


def test_a_partial_axis_is_reduced_everywhere_or_into_the_innermost_cut_of_a_dim():
    assert reached("S1R P0", "all_reduce") == {"S1R"}
    assert reached("S1R P0", "reduce_scatter") == {"S10R", "S1S0"}


@pytest.mark.parametrize("kind", ["max", "min", "avg"])
def test_each_reduction_is_kept_in_the_step(kind):
    steps = [s for s, _ in steps_from(parse(f"RR P{kind}0"), 2, MESH) if s.kind in ("all_reduce", "reduce_scatter")]
    assert len(steps) == 3
    assert {s.reduction for s in steps} == {kind}


def test_a_sum_and_a_maximum_do_not_commute_so_neither_is_reduced():
    mixed = ShardingSpec(((),), ((0, "sum"), (1, "max")))
    assert not [s for s, _ in steps_from(mixed, 1, MESH) if s.kind in ("all_reduce", "reduce_scatter")]
    assert reached("R P0 Pavg1", "all_reduce") == {"R P0", "R Pavg1"}


def test_nothing_becomes_partial():
    assert all(not after.partial for _, after in steps_from(parse("S0R"), 2, MESH))


def test_a_permute_reorders_the_axes_of_a_dim_or_trades_two_axes_of_equal_size():
    square = Mesh((2, 2))
    assert reached("S01R", "permute") == {"S10R"}
    assert reached("S0S1", "permute") == set(), "sizes 2 and 4 cannot trade places"
    assert reached("S0S1", "permute", square) == {"S1S0"}
    assert reached("S0R", "permute", square) == {"S1R"}
    assert reached("R P0", "permute", square) == {"R P1"}


def test_a_reordering_exists_only_where_both_orders_cut_at_the_same_places():
    step = Step("permute", 1, 0, axes=(1, 0))
    assert step.fits(parse("S01R"), (16, 3), MESH)
    assert not step.fits(parse("S01R"), (9, 3), MESH), "9 over (2, 4) has shards 2 2 1 0 1 1 1 1, over (4, 2) others"
    assert step.fits(parse("S01R"), (9, 3), Mesh((4, 4)))


@pytest.mark.parametrize(
    ("step", "spec"),
    [
        (Step("slice", 0, 1), "S0R"),
        (Step("all_reduce", 0), "RR"),
        (Step("all_reduce", 0, reduction="max"), "RR P0"),
        (Step("all_to_all", 0, 0, 0), "S0R"),
        (Step("all_to_all", 1, 1, 0), "S1R"),
        (Step("permute", 0, 0, axes=(0, 1)), "S0R"),
    ],
)
def test_a_step_that_cannot_be_taken_says_so(step, spec):
    with pytest.raises(SpecError, match="cannot be taken"):
        step.apply(parse(spec))


def test_a_step_reads_as_text():
    assert str(Step("all_to_all", 1, 0, 2)) == "all_to_all(dim 0 -> 2, axis 1)"
    assert str(Step("all_reduce", 0, reduction="max")) == "all_reduce(axis 0, max)"
    assert str(Step("permute", 1, 0, axes=(1, 0))) == "permute(dim 0 to axes 1,0)"


@st.composite
def specs(draw, mesh_ndim: int = 3) -> ShardingSpec:
    ndim = draw(st.integers(1, 3))
    dims: list[tuple[int, ...]] = [()] * ndim
    partial = []
    for axis in draw(st.permutations(range(mesh_ndim))):
        place = draw(st.integers(-2, ndim - 1))
        if place >= 0:
            dims[place] = (*dims[place], axis)
        elif place == -2:
            partial.append((axis, "sum"))
    return ShardingSpec(tuple(dims), tuple(partial))


@given(specs())
def test_every_step_leads_where_it_says_and_never_back_to_the_same_spec(spec):
    for step, after in steps_from(spec, spec.ndim, Mesh((2, 3, 2))):
        assert step.apply(spec) == after != spec


@given(specs())
def test_what_moves_data_without_reducing_can_be_undone_in_one_step(spec):
    mesh = Mesh((2, 3, 2))
    for step, after in steps_from(spec, spec.ndim, mesh):
        if step.kind in ("all_gather", "slice", "all_to_all", "permute"):
            assert spec in {back for _, back in steps_from(after, spec.ndim, mesh)}
