"""Collectives by formula against bus bandwidths that others measured with NCCL and published; see docs/costs.md.

A bus bandwidth is what nccl-tests report: bytes over seconds, times 2 (n - 1) / n for all-reduce and (n - 1) / n for
all-gather and reduce-scatter (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from autopar.cost_models import CollectiveCosts
from autopar.cost_models.algorithms import algorithms
from autopar.mesh import Cluster, Mesh, axis_links

H100, A100 = Cluster.load("dgx-h100"), Cluster.load("dgx-a100")
FOUR_CARDS = replace(A100, inter_node=replace(A100.inter_node, nics=4))
LARGE = 8e9
"""Bytes where a source names none but says that sizes are large."""


@dataclass(frozen=True)
class Published:
    """One measurement. ``algorithm`` is that which the source forced, else the library's choice is predicted."""

    source: str
    cluster: Cluster
    ranks: int
    kind: str
    nbytes: float
    bus_bytes_per_s: float
    tolerance: float = 0.2
    algorithm: str = ""

    def predicted_bus_bytes_per_s(self) -> float:
        mesh, n = Mesh((self.ranks,)), self.ranks
        costs = CollectiveCosts(mesh, self.cluster)
        seconds = costs.seconds(self.kind, self.nbytes, 0)
        if self.algorithm:
            (link,) = axis_links(mesh, self.cluster)
            ways = {a.name: a for a in algorithms(self.kind, link, "nccl")}
            launch_s = self.cluster.device.collective_launch_latency_s
            seconds = ways[self.algorithm].seconds(self.nbytes) + launch_s
        return (2 if self.kind == "all_reduce" else 1) * (n - 1) / n * self.nbytes / seconds


PUBLISHED = (
    Published("NVIDIA/nccl-tests#212", H100, 8, "all_reduce", LARGE, 370e9, algorithm="ring"),
    Published("NVIDIA/nccl-tests#212", H100, 8, "all_reduce", LARGE, 480e9),
    Published("NVIDIA/nccl-tests#290", H100, 8, "all_reduce", LARGE, 476e9),
    Published("NVIDIA/nccl#1281", H100, 8, "reduce_scatter", LARGE, 360e9),
    Published("NVIDIA/nccl#1281", H100, 8, "all_gather", LARGE, 350e9),
    Published("NVIDIA/nccl-tests#149", A100, 8, "all_reduce", 2**30, 200e9),
    Published("NVIDIA/nccl-tests#119", FOUR_CARDS, 24, "all_reduce", 2**27, 96e9),
)


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda r: f"{r.source}, {r.kind} of {r.ranks} {r.algorithm}".strip())
def test_the_bus_bandwidth_is_near_the_published_one(row):
    assert row.predicted_bus_bytes_per_s() == pytest.approx(row.bus_bytes_per_s, rel=row.tolerance)


def test_a_card_of_400_gigabits_carries_what_its_users_see():
    """46 to 48 GB/s a card, NVIDIA/nccl-tests#290."""
    link = H100.inter_node
    assert link.bandwidth_bytes_per_s * link.efficiency == pytest.approx(47e9, rel=0.1)
