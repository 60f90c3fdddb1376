"""Colossal-Auto's heuristic, as its worked examples describe it."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from autopar.errors import SpecError
from autopar.mesh import Mesh
from autopar.sharding import ShardingSpec, all_pairs, greedy_path, steps_from
from autopar.sharding.greedy import distance
from tests.alpha_beta import uneven, uniform

parse = ShardingSpec.parse
SHAPE = (64, 64, 64)
SPECS = "RRR S0RR RS0R RRS0 S1RR RS1R RRS1 S01RR RS01R RRS01 S0S1R S0RS1 S1S0R S1RS0 RS0S1 RS1S0".split()


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [("S0", "S1", 31), ("R", "S01", 16), ("S01", "R", 46), ("S1", "S01", 42), ("S01", "S1", 57), ("S0", "S0", 0)],
)
def test_the_similarity_of_one_dim(a, b, expected):
    assert distance(parse(a), parse(b)) == expected


@pytest.mark.parametrize(
    ("start", "scores"),
    [
        ("S01RR", {"S0RR": 36, "S0RS1": 56, "S0S1R": 62}),
        ("S0RR", {"RS0R": 5, "RRR": 16, "RRS0": 36, "S0RS1": 56, "S0S1R": 62, "S01RR": 62}),
        ("RS0R", {"RS01R": 0, "RRR": 16, "S1S0R": 25, "RS0S1": 25, "S0RR": 36, "RRS0": 36}),
    ],
)
def test_the_scores_of_the_neighbours_in_the_worked_example(start, scores):
    neighbours = steps_from(parse(start), 3, Mesh((2, 4)))
    assert {str(s): distance(s, parse("RS01R")) for step, s in neighbours if step.kind != "permute"} == scores


def test_the_greedy_path_of_the_worked_example():
    mesh = Mesh((2, 4))
    path = greedy_path(parse("S01RR"), parse("RS01R"), SHAPE, 4, mesh, uniform(mesh))
    assert str(path) == "S01RR -> S0RR -> RS0R -> RS01R"


def test_it_ends_within_three_steps_for_all_pairs_of_a_three_dim_tensor_on_a_two_axis_mesh():
    mesh = Mesh((2, 2))
    pairs = itertools.product(map(parse, SPECS), repeat=2)
    steps = Counter(len(greedy_path(a, b, SHAPE, 4, mesh, uniform(mesh)).steps) for a, b in pairs)
    assert steps == {0: 16, 1: 78, 2: 126, 3: 36}


@pytest.mark.parametrize("price", [uniform, uneven])
def test_it_is_never_cheaper_than_the_cheapest_path_and_sometimes_dearer(price):
    mesh = Mesh((2, 4))
    specs = [parse(t) for t in SPECS]
    cheapest = all_pairs(specs, specs, SHAPE, 4, mesh, price(mesh))
    greedy = [[greedy_path(a, b, SHAPE, 4, mesh, price(mesh)).seconds for b in specs] for a in specs]
    assert (cheapest <= [[g * (1 + 1e-12) for g in row] for row in greedy]).all()
    assert (cheapest < [[g * 0.99 for g in row] for row in greedy]).any()


def test_it_reduces_partial_sums_straight_into_the_cut_that_the_target_has():
    mesh = Mesh((2, 4))
    path = greedy_path(parse("RRR P1"), parse("S1RR"), SHAPE, 4, mesh, uniform(mesh))
    assert [s.kind for s in path.steps] == ["reduce_scatter"]


def test_what_has_no_path_is_an_error():
    mesh = Mesh((2, 4))
    with pytest.raises(SpecError, match="No redistribution leads"):
        greedy_path(parse("RRR"), parse("RRR P0"), SHAPE, 4, mesh, uniform(mesh))
