"""The cheapest path between two specs, against an exhaustive search of everything that steps can reach."""

from __future__ import annotations

import itertools
import math

import networkx as nx
import numpy as np
import pytest

from autopar.errors import SpecError
from autopar.mesh import Mesh
from autopar.sharding import ShardingSpec, all_pairs, cheapest_path, steps_from
from autopar.sharding.priced_graph import NEGLIGIBLE_BYTES
from tests.alpha_beta import AlphaBeta, uneven, uniform

parse = ShardingSpec.parse


def everything_from(start: ShardingSpec, shape, itemsize, mesh, costs) -> nx.DiGraph:
    """Every spec that any steps reach from ``start``, priced from the specs alone."""
    graph = nx.DiGraph()
    frontier = [start]
    while frontier:
        spec = frontier.pop()
        if spec in graph and graph.nodes[spec].get("seen"):
            continue
        graph.add_node(spec, seen=True)
        for step, after in steps_from(spec, len(shape), mesh):
            if not step.fits(spec, shape, mesh):
                continue
            before, then = (math.prod(s.local_shape(shape, mesh)) * itemsize for s in (spec, after))
            nbytes = then if step.kind == "all_gather" else before
            seconds = max(costs.seconds(step.kind, nbytes, a) for a in step.moved_axes(spec))
            if not graph.has_edge(spec, after) or graph[spec][after]["seconds"] > seconds:
                graph.add_edge(spec, after, seconds=seconds, peak=before + then)
            frontier.append(after)
    return graph


def oracle(graph: nx.DiGraph, src, dst, bytes_at) -> float:
    """Seconds by networkx: the cheapest path within the bound on memory, else the cheapest."""
    bound = bytes_at(src) + bytes_at(dst) + NEGLIGIBLE_BYTES
    within = nx.subgraph_view(graph, filter_edge=lambda a, b: graph[a][b]["peak"] <= bound)
    for candidate in (within, graph):
        if dst in candidate and nx.has_path(candidate, src, dst):
            return nx.dijkstra_path_length(candidate, src, dst, weight="seconds")
    return math.inf


CASES = [
    (Mesh((2,)), (8, 6), 4, ("RR P0",)),
    (Mesh((2, 2)), (1024, 2048), 4, ("RR P0", "RR P01")),
    (Mesh((2, 2)), (8, 6, 4), 4, ("RRR P1",)),
    (Mesh((2, 4)), (1024, 512, 64), 2, ("RRR P0",)),
    (Mesh((2, 4)), (4095, 1023), 2, ("RR P01", "RR Pmax0")),
    (Mesh((2, 3, 2)), (600, 7000), 8, ("RR P02",)),
]


@pytest.mark.parametrize("price", [uniform, uneven])
@pytest.mark.parametrize(("mesh", "shape", "itemsize", "partials"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_no_path_is_dearer_than_any_alternative(mesh, shape, itemsize, partials, price):
    costs = price(mesh)
    graph = nx.compose_all([everything_from(parse(p), shape, itemsize, mesh, costs) for p in partials])

    def bytes_at(spec: ShardingSpec) -> int:
        return math.prod(spec.local_shape(shape, mesh)) * itemsize

    nodes = sorted(graph, key=str)
    picked = [nodes[i] for i in np.random.default_rng(0).permutation(len(nodes))[:12]]
    seconds = all_pairs(picked, picked, shape, itemsize, mesh, costs)
    for (i, src), (j, dst) in itertools.product(enumerate(picked), enumerate(picked)):
        expected = oracle(graph, src, dst, bytes_at)
        assert seconds[i, j] == pytest.approx(expected, rel=1e-12)
        if math.isinf(expected):
            with pytest.raises(SpecError, match="No redistribution leads"):
                cheapest_path(src, dst, shape, itemsize, mesh, costs)
            continue
        path = cheapest_path(src, dst, shape, itemsize, mesh, costs)
        assert path.seconds == seconds[i, j], "both forms price alike, to the last bit"
        assert (path.specs[0], path.specs[-1]) == (src, dst)
        for step, before, after in zip(path.steps, path.specs, path.specs[1:], strict=False):
            assert step.apply(before) == after


def test_two_axes_move_to_another_dim_without_a_full_replica():
    mesh = Mesh((2, 4))
    path = cheapest_path(parse("S01RR"), parse("RS01R"), (16, 16, 16), 4, mesh, uniform(mesh))
    assert str(path) == "S01RR -> S0RR -> RS0R -> RS01R"
    assert [str(s) for s in path.steps] == [
        "all_gather(dim 0, axis 1)",
        "all_to_all(dim 0 -> 1, axis 0)",
        "slice(dim 1, axis 1)",
    ]


def test_a_large_tensor_takes_more_launches_to_send_less():
    mesh = Mesh((2, 4))
    path = cheapest_path(parse("S01RR"), parse("RS01R"), (1024, 1024, 1024), 4, mesh, uniform(mesh))
    assert {s.kind for s in path.steps} <= {"all_to_all", "permute"}
    assert path.peak_bytes == 2 * 4 * 1024**3 // 8


def test_memory_stays_within_source_and_target_where_any_path_does():
    mesh = Mesh((2, 2))
    shape, local = (4096, 4096), 4 * 4096 * 4096 // 4
    launches_only = AlphaBeta(mesh, (1.0, 1.0), (0.0, 0.0))
    path = cheapest_path(parse("S01R"), parse("RS01"), shape, 4, mesh, launches_only)
    assert path.peak_bytes == 2 * local
    assert len(path.steps) == 3, "permute and two all_to_alls, though gathering takes one launch less"


def test_memory_goes_beyond_the_bound_when_nothing_else_is_possible():
    mesh = Mesh((2, 4))
    src, dst = parse("S01"), parse("S10")
    path = cheapest_path(src, dst, (9_000_001,), 4, mesh, uniform(mesh))
    assert str(path) == "S01 -> S0 -> R -> S1 -> S10"
    assert path.peak_bytes > sum(4 * s.local_shape((9_000_001,), mesh)[0] for s in (src, dst)) + NEGLIGIBLE_BYTES


def test_a_slow_axis_is_crossed_with_as_little_as_possible():
    mesh = Mesh((2, 8))
    path = cheapest_path(parse("S0R"), parse("RR"), (8192, 8192), 4, mesh, uneven(mesh))
    assert [s.kind for s in path.steps] == ["slice", "all_gather", "all_gather"]
    assert [s.axis for s in path.steps] == [1, 0, 1]


def test_staying_costs_nothing():
    mesh = Mesh((2,))
    path = cheapest_path(parse("S0R"), parse("S0R"), (8, 8), 4, mesh, uniform(mesh))
    assert (path.steps, path.seconds, path.peak_bytes) == ((), 0.0, 4 * 32)


def test_of_equally_cheap_paths_the_one_with_fewer_steps_and_then_the_first_is_taken():
    class Unit:
        def seconds(self, kind: str, nbytes: int, axis: int) -> float:
            return 1.0

    mesh = Mesh((2, 2))
    paths = [cheapest_path(parse("RR"), parse("S0S1"), (8, 8), 4, mesh, Unit()) for _ in range(3)]
    assert {str(p) for p in paths} == {str(paths[0])}
    assert len(paths[0].steps) == 2


@pytest.mark.parametrize(
    ("src", "dst"), [("RR", "RR P0"), ("RR Pmax0", "RR P0"), ("S0R", "RR P1"), ("RR P0 Pmax1", "RR")]
)
def test_what_cannot_be_reached_is_infinite_and_an_error(src, dst):
    mesh = Mesh((2, 2))
    args = ((8, 8), 4, mesh, uniform(mesh))
    assert all_pairs([parse(src)], [parse(dst)], *args).item() == math.inf
    with pytest.raises(SpecError, match="No redistribution leads"):
        cheapest_path(parse(src), parse(dst), *args)


def test_a_dim_is_cut_finer_than_its_elements_only_where_an_end_asks_for_it():
    mesh = Mesh((4, 4))
    shape = (3, 4096, 4096)
    for src, dst in itertools.product(map(parse, ("RS01R", "RRS0", "RS0S1", "RS10R")), repeat=2):
        path = cheapest_path(src, dst, shape, 4, mesh, uniform(mesh))
        assert all(not spec.dims[0] for spec in path.specs)
    assert cheapest_path(parse("S0RR"), parse("S01RR"), shape, 4, mesh, uniform(mesh)).steps


@pytest.mark.parametrize("shape", [(), (0, 4), (1, 1), (5,)])
def test_every_spec_of_a_small_tensor_reaches_every_other(shape):
    mesh = Mesh((2, 2))
    ndim = len(shape)
    starts = [ShardingSpec.replicated(ndim)]
    specs = starts + [after for _, after in steps_from(starts[0], ndim, mesh)]
    partial = ShardingSpec(((),) * ndim, ((0, "sum"),))
    assert np.isfinite(all_pairs([*specs, partial], specs, shape, 4, mesh, uniform(mesh))).all()


def test_prices_do_not_depend_on_which_dims_are_involved():
    mesh = Mesh((2, 4))
    costs = uniform(mesh)
    first = all_pairs([parse("S0RR")], [parse("RS0R"), parse("RRS01")], (64, 64, 64), 4, mesh, costs)
    traded = all_pairs([parse("RRS0")], [parse("S0RR"), parse("RS01R")], (64, 64, 64), 4, mesh, costs)
    fresh = all_pairs([parse("RRS0")], [parse("S0RR"), parse("RS01R")], (64, 64, 64), 4, mesh, uniform(mesh, 1e-5))
    np.testing.assert_array_equal(first, traded)
    np.testing.assert_array_equal(first, fresh)


def test_orders_that_only_an_end_has_work_on_a_mesh_of_four_axes():
    mesh = Mesh((2, 2, 2, 2))
    specs = [parse(t) for t in ("S3210R", "S0123R", "RS31", "S02S13", "RR P03")]
    seconds = all_pairs(specs, specs[:-1], (64, 64), 4, mesh, uniform(mesh))
    for (i, src), (j, dst) in itertools.product(enumerate(specs), enumerate(specs[:-1])):
        assert cheapest_path(src, dst, (64, 64), 4, mesh, uniform(mesh)).seconds == seconds[i, j]


@pytest.mark.parametrize("price", [uniform, uneven])
@pytest.mark.parametrize("mesh", [Mesh((2, 2)), Mesh((1, 2)), Mesh((2, 2, 4))], ids=str)
def test_a_pair_costs_the_same_alone_and_among_others(mesh, price):
    specs = [parse(t) for t in ("RR P0", "RR P1", "RR P01", "RR Pmax0", "S10R", "S0R P1", "RS0", "RR", "RS1 P0")]
    for shape in ((64, 64), (4096, 8192), (4095, 8191), (2, 4096), (3, 1)):
        together = all_pairs(specs, specs, shape, 4, mesh, price(mesh))
        for (i, src), (j, dst) in itertools.product(enumerate(specs), repeat=2):
            assert all_pairs([src], [dst], shape, 4, mesh, price(mesh)).item() == together[i, j]
            if math.isfinite(together[i, j]):
                assert cheapest_path(src, dst, shape, 4, mesh, price(mesh)).seconds == together[i, j]


def test_partial_sums_may_move_to_a_faster_axis_of_equal_size_before_they_are_added():
    mesh = Mesh((2, 2))
    costs = AlphaBeta(mesh, (1e-5, 1e-6), (1e-10, 1e-11))

    class FastPermutes(AlphaBeta):
        def seconds(self, kind: str, nbytes: int, axis: int) -> float:
            return 1e-9 if kind == "permute" else costs.seconds(kind, nbytes, axis)

    path = cheapest_path(parse("R P0"), parse("R"), (4096,), 4, mesh, FastPermutes(mesh, (), ()))
    assert str(path) == "R P0 -> R P1 -> R"


def test_an_unusual_order_of_uneven_shards_is_reached_cut_by_cut():
    mesh = Mesh((2, 3, 2, 5))
    path = cheapest_path(parse("R"), parse("S3210"), (1001,), 4, mesh, uniform(mesh))
    assert str(path) == "R -> S3 -> S32 -> S321 -> S3210"


def test_an_axis_of_one_rank_changes_no_price():
    with_it, without = Mesh((1, 2, 4)), Mesh((2, 4))
    for src, dst in (("S12R", "RS2"), ("RR P2", "RS21"), ("S2R", "S1R")):
        shifted = [parse(t.replace("1", "0").replace("2", "1")) for t in (src, dst)]
        expected = cheapest_path(*shifted, (64, 64), 4, without, uniform(without)).seconds
        assert cheapest_path(parse(src), parse(dst), (64, 64), 4, with_it, uniform(with_it)).seconds == expected
        ends = [[parse(src), parse("S0R")], [parse(dst), parse("S210R")]]
        assert all_pairs(*ends, (64, 64), 4, with_it, uniform(with_it))[0, 0] == expected


def test_costs_that_cannot_be_hashed_are_priced_afresh():
    class Mutable:
        __hash__ = None
        alpha = 1.0

        def seconds(self, kind: str, nbytes: int, axis: int) -> float:
            return self.alpha

    mesh, costs = Mesh((2,)), Mutable()
    assert all_pairs([parse("R")], [parse("S0")], (8,), 4, mesh, costs).item() == 1.0
    costs.alpha = 3.0
    assert all_pairs([parse("R")], [parse("S0")], (8,), 4, mesh, costs).item() == 3.0
