from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import MeshError
from autopar.mesh import Cluster, Mesh, axis_links, builtin_clusters, candidate_meshes

H100 = Cluster.load("dgx-h100")


def levels(shape, cluster=H100):
    return [(link.ranks_per_node, link.nodes) for link in axis_links(Mesh(shape), cluster)]


def test_an_axis_is_inside_a_node_across_nodes_or_both():
    assert levels((4, 8)) == [(1, 4), (8, 1)]
    assert levels((8, 4)) == [(2, 4), (4, 1)]
    assert levels((2, 16)) == [(1, 2), (8, 2)]
    assert levels((32,)) == [(8, 4)]
    assert levels((2, 2, 2, 4)) == [(1, 2), (1, 2), (2, 1), (4, 1)]
    assert levels((1, 8)) == [(1, 1), (8, 1)]
    assert [link.level for link in axis_links(Mesh((4, 1, 2, 4)), H100)] == ["inter", "single", "intra", "intra"]
    assert axis_links(Mesh((32,)), H100)[0].level == "hierarchical"


def test_a_group_that_fills_nodes_unevenly_is_priced_as_crossing_at_each_step():
    # Ranks 0, 4, 8 of the middle axis are on nodes 0, 0, 1.
    assert levels((2, 3, 4)) == [(1, 2), (1, 3), (4, 1)]
    # A group of 12 ranks fills one node and half of the next.
    assert levels((2, 12)) == [(1, 2), (1, 12)]


def test_ranks_that_send_at_once_share_the_network_cards_of_their_node():
    link = H100.inter_node
    full = link.bandwidth_bytes_per_s * link.efficiency
    assert axis_links(Mesh((4, 8)), H100)[0].inter_bytes_per_s == full
    p3 = Cluster.load("p3.16xlarge")
    card = p3.inter_node.bandwidth_bytes_per_s * p3.inter_node.efficiency
    assert axis_links(Mesh((4, 8)), p3)[0].inter_bytes_per_s == pytest.approx(card / 8)
    assert axis_links(Mesh((32,)), p3)[0].inter_bytes_per_s == pytest.approx(card / 8)
    l40s = Cluster.load("l40s-pcie")
    card = l40s.inter_node.bandwidth_bytes_per_s * l40s.inter_node.efficiency
    assert axis_links(Mesh((2, 8)), l40s)[0].inter_bytes_per_s == pytest.approx(card / 2)


def test_a_rank_drives_only_the_network_cards_next_to_it():
    # Of mesh (8, 3) only the groups 6-7-8 and 15-16-17 leave their node, two ranks of a node at most.
    card = H100.inter_node.bandwidth_bytes_per_s * H100.inter_node.efficiency
    assert axis_links(Mesh((8, 3)), H100)[1].inter_bytes_per_s == card
    two_cards_each = replace(H100, inter_node=replace(H100.inter_node, nics=16))
    assert axis_links(Mesh((4, 8)), two_cards_each)[0].inter_bytes_per_s == 2 * card


def test_part_of_a_node_has_links_inside_it_alone():
    assert levels((2, 2)) == [(2, 1), (2, 1)]
    assert levels((4,), Cluster.load("dgx-h100:4")) == [(4, 1)]
    assert levels((72,), Cluster.load("gb200-nvl72")) == [(72, 1)]


def test_devices_joined_pairwise_reach_less_in_small_groups():
    mi300x = Cluster.load("mi300x")
    pair, four = axis_links(Mesh((2, 4)), mi300x)
    (eight,) = axis_links(Mesh((8,)), mi300x)
    assert four.intra_bytes_per_s == pytest.approx(3 * pair.intra_bytes_per_s)
    assert eight.intra_bytes_per_s == pytest.approx(7 * pair.intra_bytes_per_s)
    assert pair.peer_bytes_per_s == four.peer_bytes_per_s == eight.peer_bytes_per_s == pair.intra_bytes_per_s


def test_a_mesh_that_does_not_fit_is_an_error():
    with pytest.raises(MeshError, match="has 32 devices, the mesh 16 ranks"):
        axis_links(Mesh((2, 8)), Cluster.load("dgx-h100:32"))
    with pytest.raises(MeshError, match="do not fill whole nodes"):
        axis_links(Mesh((3, 4)), H100)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from(builtin_clusters()))
def test_each_axis_keeps_its_size_and_a_crossed_level_has_finite_figures(shape, name):
    cluster = Cluster.load(name)
    try:
        links = axis_links(Mesh(tuple(shape)), cluster)
    except MeshError:
        assert math.prod(shape) % cluster.devices_per_node
        return
    assert [link.size for link in links] == shape
    for link in links:
        assert (0 < link.intra_bytes_per_s < math.inf) == (link.ranks_per_node > 1) == (link.intra_latency_s > 0)
        assert (0 < link.inter_bytes_per_s < math.inf) == (link.nodes > 1) == (link.inter_latency_s > 0)


def shapes(world_size, cluster=H100):
    return [mesh.shape for mesh in candidate_meshes(world_size, cluster)]


def test_candidates_put_one_axis_across_nodes_and_one_inside_first():
    assert shapes(32)[0] == (4, 8)
    assert shapes(16)[0] == (2, 8)
    assert (32,) in shapes(32)
    assert (4, 2, 4) in shapes(32)


def test_candidates_inside_a_node_leave_out_exchanged_axes():
    assert shapes(8) == [(2, 4), (8,), (2, 2, 2)]
    assert shapes(6) == [(2, 3), (6,)]
    assert shapes(7) == [(7,)]
    assert shapes(1) == [(1,)]


def test_candidates_never_fill_a_node_unevenly():
    assert (2, 12) not in shapes(24)
    assert (2, 3, 4) not in shapes(24)
    assert (3, 8) in shapes(24)


@pytest.mark.parametrize("world_size", [2, 8, 16, 24, 64, 1024])
@pytest.mark.parametrize("name", builtin_clusters())
def test_candidates_are_distinct_meshes_of_the_world_size_in_a_stable_order(world_size, name):
    cluster = Cluster.load(name)
    try:
        meshes = candidate_meshes(world_size, cluster)
    except MeshError:
        assert world_size % cluster.devices_per_node
        return
    assert meshes
    assert all(mesh.size == world_size and mesh.ndim <= 3 for mesh in meshes)
    assert len({mesh.shape for mesh in meshes}) == len(meshes)
    assert meshes == candidate_meshes(world_size, cluster)
    per_node = cluster.sized(world_size).devices_per_node
    for mesh in meshes:
        for link in axis_links(mesh, cluster):
            assert per_node % link.ranks_per_node == 0
