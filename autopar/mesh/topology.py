"""How the axes of a mesh map to a cluster, and which meshes suit a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autopar.mesh.cluster import Cluster
from autopar.mesh.mesh import Mesh


@dataclass(frozen=True)
class AxisLink:
    """The links of one group along a mesh axis, while all groups of that axis communicate at once.

    A group has ``ranks_per_node`` ranks on each of ``nodes`` nodes. Bandwidths are those of one rank in one direction.
    A level with a single member has latency 0 and infinite bandwidth, since nothing crosses it.

    Args:
        ranks_per_node: ranks of a group that share a node.
        nodes: nodes of a group.
        intra_latency_s: latency of a message inside a node.
        intra_bytes_per_s: bandwidth of a rank inside a node, exchanging with its whole group there.
        peer_bytes_per_s: bandwidth of a rank inside a node with a single peer; lower if no switch connects them.
        inter_latency_s: latency of a message between nodes.
        inter_bytes_per_s: bandwidth of a rank between nodes, its share of the node's network cards.
        reduction_latency_s: latency of an all-reduce in the node's switch, beyond its launch.
        reduction_bytes_per_s: bytes of a tensor per second that the node's switch reduces; None if it does not.
    """

    ranks_per_node: int
    nodes: int
    intra_latency_s: float
    intra_bytes_per_s: float
    peer_bytes_per_s: float
    inter_latency_s: float
    inter_bytes_per_s: float
    reduction_latency_s: float = 0.0
    reduction_bytes_per_s: float | None = None

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return self.ranks_per_node * self.nodes

    @property
    def level(self) -> Literal["single", "intra", "inter", "hierarchical"]:
        """Which kinds of links the group's messages cross."""
        if self.nodes == 1:
            return "single" if self.ranks_per_node == 1 else "intra"
        return "inter" if self.ranks_per_node == 1 else "hierarchical"


def axis_links(mesh: Mesh, cluster: Cluster) -> tuple[AxisLink, ...]:
    """Return an `AxisLink` for each mesh axis. Rank r is on node r // devices_per_node.

    A group with unequal numbers of ranks on its nodes is treated as if every step crossed nodes, and an axis as its
    slowest groups.

    Raises:
        MeshError: if the cluster was given a size that differs from the mesh's, or the mesh fills a node only partly.
    """
    cluster = cluster.sized(mesh.size)
    nodes = (np.arange(mesh.size) // cluster.devices_per_node).reshape(mesh.shape)
    return tuple(_axis_link(np.moveaxis(nodes, axis, -1).reshape(-1, n), cluster) for axis, n in enumerate(mesh.shape))


def _axis_link(group_nodes: np.ndarray, cluster: Cluster) -> AxisLink:
    """Return the link of one axis. ``group_nodes`` holds the node of each rank, one row per group."""
    size = group_nodes.shape[1]
    crossing = group_nodes[group_nodes[:, 0] != group_nodes[:, -1]]
    if not len(crossing):
        per_node, nodes = size, 1
    else:
        # Ranks and thus nodes ascend along an axis, so a group's ranks on one node are adjacent in its row.
        nodes = max(len(np.unique(row)) for row in crossing)
        per_node = size // nodes
        if not _is_uniform(crossing, per_node):
            per_node, nodes = 1, size
    senders = int(np.bincount(crossing.ravel()).max()) if len(crossing) else 1
    intra, inter = cluster.intra_node, cluster.inter_node
    return AxisLink(
        ranks_per_node=per_node,
        nodes=nodes,
        intra_latency_s=intra.latency_s if per_node > 1 else 0.0,
        intra_bytes_per_s=intra.group_bytes_per_s(per_node) if per_node > 1 else float("inf"),
        peer_bytes_per_s=intra.group_bytes_per_s(2) if per_node > 1 else float("inf"),
        inter_latency_s=inter.latency_s if nodes > 1 else 0.0,
        inter_bytes_per_s=_nic_share(cluster, senders) if nodes > 1 else float("inf"),
        reduction_latency_s=intra.reduction_latency_s or 0.0 if per_node > 1 else 0.0,
        reduction_bytes_per_s=intra.reduction_bytes_per_s if per_node > 1 else None,
    )


def _is_uniform(group_nodes: np.ndarray, per_node: int) -> bool:
    if group_nodes.shape[1] % per_node:
        return False
    runs = group_nodes.reshape(len(group_nodes), -1, per_node)
    return bool((runs == runs[:, :, :1]).all() and (np.diff(runs[:, :, 0]) > 0).all())


def _nic_share(cluster: Cluster, senders: int) -> float:
    """Return the bandwidth of each of ``senders`` ranks of a node. A single rank drives only the cards next to it."""
    link = cluster.inter_node
    cards = min(link.nics / senders, max(1.0, link.nics / cluster.devices_per_node))
    return link.bandwidth_bytes_per_s * link.efficiency * cards


def without_axis(mesh: Mesh, name: str, cluster: Cluster) -> tuple[Mesh, Cluster]:
    """Return the mesh of the ranks at one place along the axis ``name``, and their part of the cluster.

    Raises:
        MeshError: as for `axis_links`.
    """
    cluster = cluster.sized(mesh.size)
    rest = mesh.without(name)
    nodes = (np.arange(mesh.size) // cluster.devices_per_node).reshape(mesh.shape)
    counts = np.unique(np.take(nodes, 0, axis=mesh.names.index(name)), return_counts=True)[1]
    # Where nodes have unequal numbers of these ranks, every message is taken to cross nodes.
    return rest, cluster.part(rest.size, int(counts[0]) if (counts == counts[0]).all() else 1)


def candidate_meshes(world_size: int, cluster: Cluster) -> tuple[Mesh, ...]:
    """Return the meshes of one to three axes worth searching, most promising first.

    Every axis divides nodes evenly. Of meshes that differ only in the order of axes with equal links one remains. Two
    axes come first (one for the batch, one for the layers), then one, then three. Among these, axes that stay within
    nodes or cross between whole nodes precede axes that do both, and balanced axes precede lopsided ones.

    Raises:
        MeshError: as for `axis_links`.
    """
    cluster = cluster.sized(world_size)
    found: dict[tuple[AxisLink, ...], tuple[tuple[int, int, float, tuple[int, ...]], Mesh]] = {}
    for shape in _factorizations(world_size, 3):
        mesh = Mesh(shape)
        links = axis_links(mesh, cluster)
        if not _divides_nodes(mesh, cluster):
            continue
        mixed = sum(link.level == "hierarchical" for link in links)
        rank = ((2, 1, 3).index(len(shape)), mixed, max(shape) / min(shape), shape)
        same = tuple(sorted(links, key=repr))
        if same not in found or rank < found[same][0]:
            found[same] = (rank, mesh)
    return tuple(mesh for _, mesh in sorted(found.values(), key=lambda entry: entry[0]))


def _divides_nodes(mesh: Mesh, cluster: Cluster) -> bool:
    """Whether the node boundary falls between axes or splits one axis evenly."""
    inner = 1
    for n in reversed(mesh.shape):
        smaller, larger = sorted((inner * n, cluster.devices_per_node))
        if larger % smaller:
            return False
        inner *= n
    return True


def _factorizations(n: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the ordered factorizations of ``n`` into one to ``most`` factors above 1; ``(1,)`` for 1."""
    yield (n,)
    if most > 1:
        for first in range(2, n // 2 + 1):
            if n % first == 0:
                yield from ((first, *rest) for rest in _factorizations(n // first, most - 1))
