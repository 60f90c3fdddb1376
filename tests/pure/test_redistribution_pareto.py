"""The set of Pareto between two specs, against a search for each size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models import CollectiveCosts
from autopar.errors import SpecError
from autopar.mesh import Cluster, Mesh
from autopar.sharding import LinearPricing, ShardingSpec, all_pairs, cheapest_path, pareto_set
from autopar.sharding.priced_graph import NEGLIGIBLE_BYTES
from autopar.sharding.spec_graph import graph_for

parse = ShardingSpec.parse
MESHES = [Mesh(shape) for shape in ((2,), (2, 2), (2, 4), (4, 2), (2, 3), (2, 2, 2), (1, 4), (16, 2))]
PARTIAL = ShardingSpec(((), ()), ((0, "sum"),))


@dataclass(frozen=True)
class Unspoken:
    """The same prices, without a word on their being affine: searched anew for each size."""

    costs: CollectiveCosts

    def seconds(self, kind, nbytes, axis):
        return self.costs.seconds(kind, nbytes, axis)


@dataclass(frozen=True)
class Lines:
    """Any lines at all, by kind and axis, ``ways`` of them for each but a permute."""

    given: tuple[tuple[float, float], ...]
    ways: int = 1

    affine = True
    KINDS = ("all_gather", "slice", "all_to_all", "all_reduce", "reduce_scatter", "permute")

    def lines(self, kind, axis):
        # Along a permute's two axes the lines must not cross, or there is no set.
        if kind == "permute":
            return self.given[:1]
        first = 6 * axis + self.KINDS.index(kind)
        return tuple(self.given[(first + 7 * way) % len(self.given)] for way in range(self.ways))

    def seconds(self, kind, nbytes, axis):
        return min(alpha + beta * nbytes for alpha, beta in self.lines(kind, axis))


@dataclass(frozen=True)
class SizeBySize:
    lines: Lines

    def seconds(self, kind, nbytes, axis):
        return self.lines.seconds(kind, nbytes, axis)


def dgx(mesh: Mesh) -> CollectiveCosts:
    return CollectiveCosts(mesh, Cluster.load("dgx-h100").sized(mesh.size))


def nodes(mesh: Mesh, ndim: int) -> tuple[ShardingSpec, ...]:
    partial = ShardingSpec(((),) * ndim, ((0, "sum"),))
    return graph_for(ndim, mesh, (partial,)).nodes


def test_a_path_takes_the_algorithm_that_is_the_fastest_for_its_size():
    mesh = Mesh((16,))
    costs = dgx(mesh)
    alternatives, _ = pareto_set(ShardingSpec(((),), ((0, "sum"),)), parse("R"), (63,), 4, mesh, costs)
    small, large = alternatives.best(1), alternatives.best(1 << 30)
    assert small.steps == large.steps
    assert small.alpha_s < large.alpha_s
    assert small.beta_s_per_scale > large.beta_s_per_scale
    assert (small.alpha_s, large.alpha_s) == tuple(costs.lines("all_reduce", 0)[i][0] for i in (0, -1))


def test_costs_of_clusters_are_the_least_of_lines_and_say_so():
    assert isinstance(dgx(Mesh((2, 4))), LinearPricing)
    assert dgx(Mesh((2, 4))).affine
    assert not isinstance(Unspoken(dgx(Mesh((2, 4)))), LinearPricing)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_size_gets_what_a_search_for_it_finds(data):
    mesh = data.draw(st.sampled_from(MESHES))
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 8, 48, 64, 4096, 4095]), min_size=1, max_size=3)))
    src, dst = (data.draw(st.sampled_from(nodes(mesh, len(shape)))) for _ in range(2))
    itemsize = data.draw(st.one_of(st.integers(1, 8), st.integers(1, 1 << 24)))
    costs = dgx(mesh)
    expected = all_pairs([src], [dst], shape, itemsize, mesh, Unspoken(costs)).item()
    if math.isinf(expected):
        with pytest.raises(SpecError, match="No redistribution leads"):
            cheapest_path(src, dst, shape, itemsize, mesh, costs)
        return
    path = cheapest_path(src, dst, shape, itemsize, mesh, costs)
    assert path.seconds == pytest.approx(expected, rel=1e-12)
    held = [math.prod(s.local_shape(shape, mesh)) * itemsize for s in path.specs]
    assert path.peak_bytes == max((a + b for a, b in zip(held, held[1:], strict=False)), default=held[0])


prices = st.tuples(st.floats(1e-9, 1e-2), st.floats(1e-15, 1e-8))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_it_does_so_whatever_the_lines_are(data):
    mesh = data.draw(st.sampled_from([Mesh((2, 2)), Mesh((2, 4)), Mesh((2, 2, 2))]))
    lines = Lines(tuple(data.draw(st.lists(prices, min_size=18, max_size=18))), data.draw(st.integers(1, 3)))
    src, dst = (data.draw(st.sampled_from(nodes(mesh, 2))) for _ in range(2))
    if src.partial or not dst.partial:
        for rows in (1, 5, 64, 4096, 1 << 20):
            shape = (8 * rows, 16)
            expected = all_pairs([src], [dst], shape, 4, mesh, SizeBySize(lines)).item()
            if math.isfinite(expected):
                assert cheapest_path(src, dst, shape, 4, mesh, lines).seconds == pytest.approx(expected, rel=1e-12)


def test_each_path_of_a_set_is_the_best_for_some_size_and_latency_gives_way_to_bytes():
    mesh = Mesh((2, 4))
    alternatives, _ = pareto_set(parse("S01RR"), parse("RS01R"), (64, 64, 64), 4, mesh, dgx(mesh))
    assert len(alternatives.lines) > 1
    for lines in alternatives.envelopes:
        alphas, betas = [x.alpha_s for x in lines], [x.beta_s_per_scale for x in lines]
        assert alphas == sorted(alphas)
        assert betas == sorted(betas, reverse=True)
    scales = np.unique(np.geomspace(1, 1e10, 400).astype(np.int64))
    assert {alternatives.best(int(s)) for s in scales} == set(alternatives.lines)


def test_one_set_serves_tensors_whose_dims_are_as_even():
    mesh, costs = Mesh((2, 4)), dgx(Mesh((2, 4)))
    ends = parse("S0RR"), parse("RS0R")
    small, one = pareto_set(*ends, (8, 8, 8), 1, mesh, costs)
    large, scale = pareto_set(*ends, (64, 1024, 8), 2, mesh, costs)
    odd, _ = pareto_set(*ends, (64, 1023, 8), 2, mesh, costs)
    assert small is large
    assert odd is not large
    assert (one, scale) == (1, 2 * 8 * 128)


def test_a_path_that_holds_much_is_offered_only_to_tensors_for_which_that_is_negligible():
    mesh, costs = Mesh((2, 4)), dgx(Mesh((2, 4)))
    for src, dst in (("S01RR", "RS01R"), ("S0S1R", "S1S0R"), ("S10RR", "RRS01")):
        ends = parse(src), parse(dst)
        alternatives, _ = pareto_set(*ends, (64, 64, 64), 4, mesh, costs)
        assert list(alternatives.limits) == sorted(set(alternatives.limits))
        for upper, lines in zip(alternatives.limits, alternatives.envelopes, strict=True):
            assert all(line.largest_scale >= upper for line in lines)
        for scale in (1, 1000, 1 << 20, 1 << 30):
            line = alternatives.best(scale)
            held = 8 * 8 * 8 * scale // 8 * 2
            assert line.peak_units * scale <= held + NEGLIGIBLE_BYTES


def test_lines_that_cross_along_the_axes_of_one_permute_have_no_set_and_are_searched_size_by_size():
    class Crossing(Lines):
        def lines(self, kind, axis):
            return ((1e-6, 1e-9),) if axis else ((1e-5, 1e-10),)

    mesh, costs = Mesh((2, 2)), Crossing(())
    assert pareto_set(parse("S0S1"), parse("S1S0"), (8, 8), 4, mesh, costs) is None
    path = cheapest_path(parse("S0S1"), parse("S1S0"), (8, 8), 4, mesh, costs)
    assert path.seconds == max(costs.seconds("permute", 64, axis) for axis in (0, 1))


def test_costs_that_follow_measurements_have_no_set():
    class Measured(Lines):
        affine = False

    assert pareto_set(parse("S0R"), parse("RS0"), (8, 8), 4, Mesh((2,)), Measured(((1.0, 1.0),) * 6)) is None


def test_costs_that_cannot_be_hashed_have_no_set():
    class Mutable(Lines):
        __hash__ = None

    assert pareto_set(parse("S0R"), parse("RS0"), (8, 8), 4, Mesh((2,)), Mutable(((1.0, 1.0),) * 6)) is None


@pytest.mark.parametrize("shape", [(), (0, 4), (1, 1), (5,)])
def test_small_tensors_have_sets_too(shape):
    mesh = Mesh((2, 2))
    for src in nodes(mesh, len(shape)):
        for dst in nodes(mesh, len(shape)):
            expected = all_pairs([src], [dst], shape, 4, mesh, Unspoken(dgx(mesh))).item()
            if math.isfinite(expected):
                found = cheapest_path(src, dst, shape, 4, mesh, dgx(mesh)).seconds
                assert found == pytest.approx(expected, rel=1e-12)


def test_the_same_question_has_the_same_answer():
    answers = set()
    for _ in range(3):
        mesh = Mesh((2, 2, 2))
        costs = CollectiveCosts(mesh, Cluster.load("dgx-h100").sized(8))
        answers.add(str(cheapest_path(parse("S01S2R"), parse("S2RS10"), (64, 64, 64), 4, mesh, costs)))
        pareto_set.__globals__["_linear_graph"].cache_clear()
    assert len(answers) == 1
