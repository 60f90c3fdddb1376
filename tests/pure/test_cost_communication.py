from __future__ import annotations

import math
import pickle
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models import BUCKETED, DEARER, KINDS, CollectiveCosts, ComputeCosts
from autopar.cost_models.algorithms import Algorithm, algorithms, fastest
from autopar.errors import AutoparError, MeshError
from autopar.mesh import Cluster, Link, Mesh, axis_links, builtin_clusters

nbytes = st.floats(0, 1e12)
kinds = st.sampled_from(KINDS)
clusters = st.sampled_from(builtin_clusters()).map(Cluster.load)


def plain(devices_per_node=8, launch_s=1e-9):
    """A cluster in which a level's cost is a + S / b: a = 1 us, b = 1 GB/s inside nodes, 10 us and 0.1 GB/s between."""
    base = Cluster.load("dgx-h100")
    return replace(
        base,
        devices_per_node=devices_per_node,
        device=replace(base.device, collective_launch_latency_s=launch_s),
        intra_node=Link("switch", latency_s=1e-6, bandwidth_bytes_per_s=1e9, efficiency=1.0),
        inter_node=replace(
            base.inter_node, latency_s=1e-5, bandwidth_bytes_per_s=1e8, efficiency=1.0, nics=devices_per_node
        ),
    )


@st.composite
def costs(draw):
    cluster = draw(clusters)
    shape = (draw(st.sampled_from([2, 4, 8])), cluster.devices_per_node)
    shape = draw(st.permutations([*shape, draw(st.sampled_from([1, 2]))]))
    return CollectiveCosts(Mesh(tuple(shape)), cluster)


@given(costs(), kinds, st.integers(0, 2), nbytes)
def test_no_collective_is_free_unless_its_axis_has_one_rank(cost, kind, axis, size):
    seconds = cost.seconds(kind, size, axis)
    if cost.mesh.shape[axis] == 1:
        assert seconds == 0
    else:
        assert math.isfinite(seconds)
        assert seconds >= 1e-6


@given(costs(), kinds, st.integers(0, 2), nbytes, nbytes)
def test_more_bytes_never_cost_less_and_two_launches_never_less_than_one(cost, kind, axis, size, more):
    one, other = cost.seconds(kind, size, axis), cost.seconds(kind, more, axis)
    both = cost.seconds(kind, size + more, axis)
    assert max(one, other) <= both <= (one + other) * (1 + 1e-12)


@given(costs(), kinds, st.integers(0, 2), st.lists(nbytes, max_size=5))
def test_arrays_and_lines_agree_with_single_sizes(cost, kind, axis, sizes):
    lines = cost.lines(kind, axis)
    single = [cost.seconds(kind, size, axis) for size in sizes]
    assert cost.seconds_array(kind, np.array(sizes), axis).tolist() == single
    assert single == [min(alpha + beta * size for alpha, beta in lines) for size in sizes]
    alphas, betas = zip(*lines, strict=True)
    assert list(alphas) == sorted(set(alphas))
    assert list(betas) == sorted(set(betas), reverse=True)


@given(st.sampled_from([kind for kind in KINDS if kind != "slice"]), nbytes, st.integers(1, 7))
def test_more_ranks_behind_one_switch_never_cost_less(kind, size, n):
    few, many = (CollectiveCosts(Mesh((ranks,)), plain()) for ranks in (n, n + 1))
    assert few.seconds(kind, size, 0) <= many.seconds(kind, size, 0)


@given(st.sampled_from([kind for kind in KINDS if kind != "slice"]), nbytes, st.integers(1, 16), clusters)
def test_more_nodes_never_cost_less(kind, size, nodes, cluster):
    per_node = cluster.devices_per_node
    few, many = (CollectiveCosts(Mesh((n * per_node,)), cluster) for n in (nodes, nodes + 1))
    assert few.seconds(kind, size, 0) <= many.seconds(kind, size, 0) * (1 + 1e-12)


@given(st.sampled_from([kind for kind in KINDS if kind != "slice"]), nbytes)
def test_a_group_inside_a_node_is_never_slower_than_one_spread_over_nodes(kind, size):
    inside = CollectiveCosts(Mesh((8, 8)), Cluster.load("dgx-a100"))
    assert inside.seconds(kind, size, 1) < inside.seconds(kind, size, 0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_gather", 3 * (1e-6 + 8e6 / 4 / 1e9)),
        ("reduce_scatter", 3 * (1e-6 + 8e6 / 4 / 1e9)),
        ("all_reduce", 6 * (1e-6 + 8e6 / 4 / 1e9)),
        ("all_to_all", 3 * (1e-6 + 8e6 / 4 / 1e9)),
        ("permute", 1e-6 + 8e6 / 1e9),
        ("broadcast", 3 * 1e-6 + 8e6 / 1e9),
    ],
)
def test_a_ring_inside_a_node_costs_what_the_literature_says(kind, expected):
    cost = CollectiveCosts(Mesh((4,)), plain())
    assert cost.seconds(kind, 8e6, 0) == pytest.approx(expected + 1e-9)


def formulas(kind, devices_per_node, ranks, library="nccl"):
    (link,) = axis_links(Mesh((ranks,)), plain(devices_per_node))
    return {a.name: a for a in algorithms(kind, link, library)}


def test_an_all_reduce_over_nodes_has_a_ring_a_tree_and_two_levels():
    found = formulas("all_reduce", 4, 16)
    assert set(found) == {"ring", "ring, low latency", "tree", "tree, low latency", "hierarchical"}
    network = 1 / (4 * 1e8)  # s/B of a node's cards together, slower than the 1 GB/s inside
    assert found["ring"][1:] == pytest.approx((2 * (12 * 1e-6 + 3 * 1e-5), 2 * 15 / 16 * network))
    assert found["tree"][1:] == pytest.approx((2 * (3 * 1e-6 + 2 * 1e-5), 2 * network / 0.92))
    inside, between = 3 / 4 / 1e9, 3 / 4 * network
    assert found["hierarchical"][1:] == pytest.approx((2 * (3 * 1e-6 + 3 * 1e-5), 2 * (inside + between)))


def test_the_tree_of_two_nodes_sends_each_byte_once_each_way():
    tree = formulas("all_reduce", 4, 8)["tree"]
    assert tree.beta_s_per_byte == pytest.approx(max(2 * 3 / 4 / 1e9, 1 / (4 * 1e8)) / 0.92)


@given(costs(), kinds, st.integers(0, 2), nbytes)
def test_the_fastest_algorithm_for_the_size_is_taken(cost, kind, axis, size):
    link = cost.links[axis]
    if link.size == 1 or kind == "slice":
        return
    offered = algorithms(kind, link, cost.cluster.library)
    launch_s = cost.cluster.device.collective_launch_latency_s
    best = min(offered, key=lambda a: a.seconds(size))
    assert cost.seconds(kind, size, axis) == pytest.approx(best.seconds(size) + launch_s, rel=1e-12)
    assert cost.algorithm(kind, size, axis) in {a.name for a in offered}


@given(st.lists(st.tuples(st.floats(1e-9, 1e-2), st.floats(1e-15, 1e-8)), min_size=1, max_size=6), nbytes)
def test_of_any_lines_the_envelope_is_kept_and_nothing_else(lines, size):
    choices = [Algorithm(str(i), *line) for i, line in enumerate(lines)]
    kept = fastest(choices)
    assert min(a.seconds(size) for a in kept) == pytest.approx(min(a.seconds(size) for a in choices), rel=1e-9)
    assert set(kept) <= set(choices)


def test_trees_are_for_small_messages_over_many_nodes_and_rings_for_large_ones():
    cost = CollectiveCosts(Mesh((128,)), Cluster.load("dgx-h100"))
    chosen = [cost.algorithm("all_reduce", size, 0) for size in (1e3, 1e7, 1e10)]
    assert chosen == ["tree, low latency", "tree", "ring"]
    assert [cost.algorithm("all_gather", size, 0) for size in (1e3, 1e10)] == ["ring, low latency", "ring"]


def test_a_slow_network_between_fast_nodes_makes_two_levels_the_best():
    slow = plain()
    slow = replace(slow, inter_node=replace(slow.inter_node, bandwidth_bytes_per_s=1e7))
    assert CollectiveCosts(Mesh((32,)), slow).algorithm("all_reduce", 1e9, 0) == "hierarchical"


def test_a_switch_that_reduces_is_for_large_messages():
    cost = CollectiveCosts(Mesh((8,)), Cluster.load("dgx-h100"))
    assert cost.algorithm("all_reduce", 1e3, 0) == "ring, low latency"
    assert cost.algorithm("all_reduce", 1e9, 0) == "in the switch"
    assert cost.algorithm("reduce_scatter", 1e9, 0) == "ring"


def test_gloo_makes_a_reduce_scatter_of_an_all_reduce_and_knows_no_tree():
    cost = CollectiveCosts(Mesh((2,)), Cluster.load("cpu-2"))
    assert cost.lines("reduce_scatter", 0) == cost.lines("all_reduce", 0)
    assert set(formulas("all_reduce", 4, 8, "gloo")) == {"ring"}
    broadcast = formulas("broadcast", 4, 8, "gloo")["binomial tree"]
    assert broadcast[1:] == pytest.approx((2 * 1e-6 + 1e-5, 2 / 1e9 + 1 / 1e8))


@given(st.sampled_from(["nccl", "gloo"]), st.sampled_from(KINDS), st.integers(1, 8), st.integers(1, 40))
def test_no_algorithm_is_free(library, kind, per_node, nodes):
    if per_node * nodes > 1 and kind != "slice":
        for a in formulas(kind, per_node, per_node * nodes, library).values():
            assert a.alpha_s > 0
            assert a.beta_s_per_byte > 0


@given(st.sampled_from(["nccl", "gloo"]), st.sampled_from(KINDS), st.integers(1, 8), st.integers(1, 40), nbytes)
def test_one_more_node_never_costs_less_by_either_library(library, kind, per_node, nodes, size):
    if per_node * nodes > 1 and kind != "slice":
        few, many = (formulas(kind, per_node, per_node * m, library).values() for m in (nodes, nodes + 1))
        assert min(a.seconds(size) for a in few) <= min(a.seconds(size) for a in many) * (1 + 1e-12)


@given(nbytes)
def test_an_all_reduce_takes_at_most_a_reduce_scatter_and_an_all_gather_less_one_launch(size):
    cluster = Cluster.load("dgx-h100")
    cost = CollectiveCosts(Mesh((2, 16)), cluster)
    for axis in (0, 1):
        parts = cost.seconds("reduce_scatter", size, axis) + cost.seconds("all_gather", size, axis)
        launch_s = cluster.device.collective_launch_latency_s
        assert cost.seconds("all_reduce", size, axis) <= (parts - launch_s) * (1 + 1e-12)


@given(nbytes)
def test_two_levels_of_an_all_to_all_cost_what_they_cost_one_after_the_other(size):
    cluster = plain()
    flat, nested = CollectiveCosts(Mesh((32,)), cluster), CollectiveCosts(Mesh((4, 8)), cluster)
    levels = nested.seconds("all_to_all", size, 0) + nested.seconds("all_to_all", size, 1)
    assert flat.seconds("all_to_all", size, 0) == pytest.approx(levels - 1e-9)


def test_a_slice_costs_its_copy_and_launch():
    cluster = Cluster.load("dgx-h100")
    seconds = CollectiveCosts(Mesh((4, 8)), cluster).seconds("slice", 8e9, 1)
    assert seconds == pytest.approx(ComputeCosts(cluster).seconds(0, 2e9, "bfloat16", "memory"))
    assert CollectiveCosts(Mesh((8,)), cluster).seconds("slice", 0, 0) > 0


def test_pairwise_links_make_an_all_reduce_of_a_pair_as_slow_as_one_link():
    mi300x = Cluster.load("mi300x")
    pair, eight = CollectiveCosts(Mesh((4, 2)), mi300x), CollectiveCosts(Mesh((8,)), mi300x)
    assert pair.seconds("all_reduce", 1e9, 1) == pytest.approx(1e9 / (64e9 * 0.7), rel=1e-2)
    assert eight.seconds("all_reduce", 1e9, 0) == pytest.approx(1e9 * 14 / 8 / (448e9 * 0.7), rel=2e-2)

    assert eight.seconds("permute", 1e9, 0) == pytest.approx(1e9 / (64e9 * 0.7), rel=1e-2)


def test_the_bus_bandwidth_of_a_large_all_reduce_is_that_of_the_link():
    cost = CollectiveCosts(Mesh((8,)), Cluster.load("dgx-a100"))
    bus = 1e10 / cost.seconds("all_reduce", 1e10, 0) * 2 * 7 / 8
    assert bus == pytest.approx(234e9, rel=1e-2)


def test_what_does_not_exist_is_an_error():
    cost = CollectiveCosts(Mesh((2, 4)), Cluster.load("dgx-h100"))
    for kind, axis in (("gossip", 0), ("all_gather", 2), ("all_gather", -1)):
        with pytest.raises(AutoparError, match="no such collective or mesh axis") as caught:
            cost.seconds(kind, 1, axis)
        assert "all_gather" in caught.value.hint
    with pytest.raises(MeshError):
        CollectiveCosts(Mesh((3, 4)), Cluster.load("dgx-h100"))


def test_costs_compare_hash_and_pickle_by_mesh_and_cluster():
    cost = CollectiveCosts(Mesh((2, 4)), Cluster.load("dgx-h100"))
    again = pickle.loads(pickle.dumps(cost))
    assert (again, hash(again)) == (cost, hash(cost))
    assert again.seconds("all_gather", 1e6, 1) == cost.seconds("all_gather", 1e6, 1)


@given(costs(), kinds, st.integers(0, 2), st.integers(0, 10**9), st.sampled_from(["bool", "float8_e4m3fn", "int16"]))
def test_what_cannot_be_reduced_is_sent_in_a_wider_dtype(cost, kind, axis, size, dtype):
    wide = cost.of(dtype)
    widened = {"bool": 4, "float8_e4m3fn": 4, "int16": 2}[dtype] if kind in ("all_reduce", "reduce_scatter") else 1
    assert wide.seconds(kind, size, axis) == pytest.approx(cost.seconds(kind, widened * size, axis), rel=1e-12)
    assert wide.sent(kind, size) == widened * size
    assert cost.of("bfloat16") is cost
    assert cost.of(dtype) is cost.of(dtype)


@given(costs(), kinds, st.integers(0, 2), nbytes)
def test_a_launch_is_a_part_of_a_collective_that_no_bytes_change(cost, kind, axis, size):
    launch = cost.launches.seconds(kind, size, axis)
    assert launch <= cost.seconds(kind, size, axis)
    if kind != "slice":
        assert launch == cost.launches.seconds(kind, 0, axis)


@given(costs(), st.sampled_from(sorted(BUCKETED)), st.integers(0, 2), nbytes)
def test_a_share_of_a_collective_costs_no_more_than_one_of_its_own_and_no_less_than_its_launch(cost, kind, axis, size):
    launch, share = cost.launches.seconds(kind, size, axis), cost.bucketed.seconds(kind, size, axis)
    assert launch <= share <= cost.seconds(kind, size, axis)
    assert cost.bucketed.seconds(kind, 0, axis) == launch


@given(costs(), kinds, st.integers(0, 2), nbytes)
def test_dearer_axes_tell_which_axis_something_takes_its_seconds_on(cost, kind, axis, size):
    """Each of the costs has one more axis that is dearer, and nothing else changes."""
    before = [cost, *cost.by_axis]
    told = [(b.seconds(kind, size, axis) - a.seconds(kind, size, axis)) / DEARER for a, b in pairwise(before)]
    expected = [cost.seconds(kind, size, axis) if a == axis else 0.0 for a in range(cost.mesh.ndim - 1)]
    assert told == pytest.approx(expected, rel=1e-6)
