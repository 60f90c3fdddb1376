from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models import KINDS, CollectiveCosts, ComputeCosts
from autopar.errors import AutoparError, MeshError
from autopar.mesh import Cluster, Mesh, builtin_clusters

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
        intra_node=replace(base.intra_node, latency_s=1e-6, bandwidth_bytes_per_s=1e9, efficiency=1.0),
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
    alpha, beta = cost.linear(kind, axis)
    single = [cost.seconds(kind, size, axis) for size in sizes]
    assert cost.seconds_array(kind, np.array(sizes), axis).tolist() == single
    assert single == [alpha + beta * size for size in sizes]


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


def test_an_all_reduce_over_nodes_is_a_reduce_scatter_inside_one_between_and_a_gather_inside():
    cost = CollectiveCosts(Mesh((8,)), plain(devices_per_node=4))
    inside, between = 3 * (1e-6 + 8e6 / 4 / 1e9), 2 * 1 * (1e-5 + 8e6 / 4 / 2 / 1e8)
    assert cost.seconds("all_reduce", 8e6, 0) == pytest.approx(2 * inside + between + 1e-9)


@given(nbytes)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather_less_one_launch(size):
    cluster = Cluster.load("dgx-h100")
    cost = CollectiveCosts(Mesh((2, 16)), cluster)
    for axis in (0, 1):
        parts = cost.seconds("reduce_scatter", size, axis) + cost.seconds("all_gather", size, axis)
        launch_s = cluster.device.collective_launch_latency_s
        assert cost.seconds("all_reduce", size, axis) == pytest.approx(parts - launch_s)


@given(st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]), nbytes)
def test_an_axis_over_whole_nodes_costs_what_its_two_levels_cost_one_after_the_other(kind, size):
    """With 8 ranks a node, 32 ranks gather like 4 nodes with an eighth of the bytes and then 8 ranks with all."""
    cluster = plain()
    flat, nested = CollectiveCosts(Mesh((32,)), cluster), CollectiveCosts(Mesh((4, 8)), cluster)
    outer = size if kind == "all_to_all" else size / 8
    levels = nested.seconds(kind, outer, 0) + nested.seconds(kind, size, 1)
    assert flat.seconds(kind, size, 0) == pytest.approx(levels - 1e-9)


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
        with pytest.raises(AutoparError, match="No such collective or mesh axis") as caught:
            cost.seconds(kind, 1, axis)
        assert "all_gather" in caught.value.hint
    with pytest.raises(MeshError):
        CollectiveCosts(Mesh((3, 4)), Cluster.load("dgx-h100"))


def test_costs_compare_hash_and_pickle_by_mesh_and_cluster():
    cost = CollectiveCosts(Mesh((2, 4)), Cluster.load("dgx-h100"))
    again = pickle.loads(pickle.dumps(cost))
    assert (again, hash(again)) == (cost, hash(cost))
    assert again.seconds("all_gather", 1e6, 1) == cost.seconds("all_gather", 1e6, 1)
