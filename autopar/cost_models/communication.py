r"""Seconds of collectives along the axes of a mesh.

A message of S bytes takes a + S / b (Hockney, 1994): a the latency, b the bandwidth of one rank. Ring algorithms
(Thakur, Rabenseifner and Gropp, 2005) then give, for n ranks,

    all-gather, reduce-scatter    (n - 1) (a + S / (n b))
    all-reduce                  2 (n - 1) (a + S / (n b))
    all-to-all                    (n - 1) (a + S / (n b))
    permute                                a + S / b
    broadcast (pipelined)         (n - 1)  a + S / b

in the S of the bus-bandwidth conventions of NCCL's tests. On an axis of m nodes with k ranks in each, the collective
runs in two levels: inside the nodes with k in the place of n, and between nodes with m, where gathers and reductions
have S / k left to move; a permute takes as long as its slowest message. Each launch adds the device's
``collective_launch_latency_s``.

Where the cluster was measured in groups that lie over its nodes as an axis's do, the measured times of a kind take
the place of these formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from autopar.cost_models.compute import Amounts, ComputeCosts, Seconds
from autopar.errors import AutoparError
from autopar.mesh import AxisLink, Cluster, CollectiveTimes, Mesh, axis_links

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "slice", "broadcast"]
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


@dataclass(frozen=True)
class CollectiveCosts:
    """Seconds of each collective on each axis of ``mesh``.

    ``nbytes`` is always the larger of what one rank holds before and after:

    ==================  ===========================================================================
    all_gather          the gathered tensor: n times what each rank contributes
    reduce_scatter      the local tensor before it is reduced: n times what each rank keeps
    all_reduce          the local tensor, as large before as after
    all_to_all          the local tensor, as large before as after
    permute             the local tensor that each rank sends
    slice               the local tensor before slicing; each rank copies 1/n of it, and sends nothing
    broadcast           the tensor
    ==================  ===========================================================================

    An axis of one rank costs nothing. On any other, every kind costs more than 0 s, even for 0 bytes, and never less
    for more bytes. By formula it is affine in ``nbytes``, so that one launch for two tensors is never slower than
    two launches; measured times may rise faster, where the larger message no longer fits a cache.

    Raises:
        MeshError: the mesh does not fit the cluster.
    """

    mesh: Mesh
    cluster: Cluster

    def __post_init__(self) -> None:
        _ = self._lines

    @cached_property
    def links(self) -> tuple[AxisLink, ...]:
        """What each axis communicates over."""
        return axis_links(self.mesh, self.cluster)

    @cached_property
    def _lines(self) -> tuple[dict[str, tuple[float, float]], ...]:
        return tuple({kind: self._line(kind, link) for kind in KINDS} for link in self.links)

    @cached_property
    def _measured(self) -> tuple[dict[str, CollectiveTimes], ...]:
        times = self.cluster.sized(self.mesh.size).measured
        found = [{kind: times.collective(kind, k.ranks_per_node, k.nodes) for kind in KINDS} for k in self.links]
        return tuple({kind: t for kind, t in of.items() if t is not None} for of in found)

    @cached_property
    def affine(self) -> bool:
        """Whether `linear` equals `seconds`: nothing follows measurements."""
        return not any(self._measured)

    def linear(self, kind: CollectiveKind, axis: int) -> tuple[float, float]:
        """(alpha_s, beta_s_per_byte) of the line alpha_s + beta_s_per_byte * nbytes; (0, 0) for one rank.

        It equals `seconds` where that follows the formulas, and fits it best where it follows measurements.

        Raises:
            AutoparError: no such kind or axis.
        """
        self._check(kind, axis)
        measured = self._measured[axis].get(kind)
        return (measured.alpha_s, measured.beta_s_per_byte) if measured is not None else self._lines[axis][kind]

    def _check(self, kind: CollectiveKind, axis: int) -> None:
        if kind not in KINDS or not 0 <= axis < self.mesh.ndim:
            raise AutoparError(
                "No such collective or mesh axis.",
                found=f"{kind} on axis {axis} of mesh {self.mesh}",
                hint=f"kinds are {', '.join(KINDS)}; axes 0 to {self.mesh.ndim - 1}.",
            )

    def seconds(self, kind: CollectiveKind, nbytes: float, axis: int) -> float:
        """Seconds of one launch; see the class for what ``nbytes`` counts."""
        self._check(kind, axis)
        if kind in self._measured[axis]:
            return float(self.seconds_array(kind, nbytes, axis))
        alpha_s, beta_s_per_byte = self._lines[axis][kind]
        return alpha_s + beta_s_per_byte * nbytes

    def seconds_array(self, kind: CollectiveKind, nbytes: Amounts, axis: int) -> Seconds:
        """`seconds` for an array of sizes; equal to it bit by bit."""
        self._check(kind, axis)
        measured = self._measured[axis].get(kind)
        if measured is not None:
            return measured.curve.at(np.maximum(nbytes, measured.curve.amounts[0]))
        alpha_s, beta_s_per_byte = self._lines[axis][kind]
        return np.asarray(alpha_s + beta_s_per_byte * np.asarray(nbytes, np.float64))

    def _line(self, kind: CollectiveKind, link: AxisLink) -> tuple[float, float]:
        if link.size == 1:
            return 0.0, 0.0
        if kind == "slice":
            alpha_s, beta_s_per_byte = ComputeCosts(self.cluster.sized(self.mesh.size)).copy_line()
            return alpha_s, 2 / link.size * beta_s_per_byte
        alpha_s, beta_s_per_byte = ring(kind, link)
        return alpha_s + self.cluster.device.collective_launch_latency_s, beta_s_per_byte


def ring(kind: CollectiveKind, link: AxisLink) -> tuple[float, float]:
    """(alpha_s, beta_s_per_byte) of the module's formulas over ``link``, without the launch."""
    k, m = link.ranks_per_node, link.nodes
    a, b = link.intra_latency_s, link.intra_bytes_per_s
    A, B = link.inter_latency_s, link.inter_bytes_per_s
    if kind == "permute":
        return max(a, A), max(1 / link.peer_bytes_per_s, 1 / B)
    alpha_s = (k - 1) * a + (m - 1) * A
    if kind == "broadcast":
        return alpha_s, 1 / b + 1 / B
    if kind == "all_to_all":
        return alpha_s, (k - 1) / (k * b) + (m - 1) / (m * B)
    beta_s_per_byte = (k - 1) / (k * b) + (m - 1) / (m * k * B)
    passes = 2 if kind == "all_reduce" else 1
    return passes * alpha_s, passes * beta_s_per_byte
