"""Seconds of collectives along the axes of a mesh, by the library's fastest algorithm for each size.

`cost_models.algorithms` has the formulas and their sources. Each is a line of latency and seconds per byte, so the time
of a collective is the lower envelope of a few lines: concave, non-decreasing, and never 0. Each launch adds the
device's ``collective_launch_latency_s``.

If the cluster was measured with groups that are spread over nodes like those of an axis, the measured times replace
these formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from autopar.cost_models.algorithms import Algorithm, algorithms, fastest
from autopar.cost_models.compute import Amounts, ComputeCosts, Seconds
from autopar.errors import AutoparError
from autopar.mesh import AxisLink, Cluster, CollectiveTimes, Mesh, axis_links

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "slice", "broadcast"]
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)

BUCKETED = frozenset({"all_gather", "reduce_scatter", "all_reduce"})
"""The kinds that can carry several tensors in one launch."""

DEARER = 1e-6
"""Relative increase of the price of an axis in `CollectiveCosts.by_axis`."""
BUCKET = 4
"""Assumed size of a bucket, in multiples of the bytes that take as long to send as the launch latency."""

REDUCED_BYTES: Mapping[str, int] = {
    "bool": 4,
    "int16": 2,
    "uint16": 2,
    "uint32": 2,
    "float8_e4m3fn": 4,
    "float8_e5m2": 4,
}
"""Bytes sent per byte of a reduced tensor if libraries cannot reduce its dtype; 1 for all other dtypes."""


@dataclass(frozen=True)
class CollectiveCosts:
    """Seconds of each collective on each axis of ``mesh``.

    ``nbytes`` is the larger of what one rank holds before and after:

    ==================  ===========================================================================
    all_gather          the gathered tensor: n times what each rank contributes
    reduce_scatter      the local tensor before it is reduced: n times what each rank keeps
    all_reduce          the local tensor, equally large before and after
    all_to_all          the local tensor, equally large before and after
    permute             the local tensor that each rank sends
    slice               the local tensor before slicing; each rank copies 1/n of it and sends nothing
    broadcast           the tensor
    ==================  ===========================================================================

    An axis of one rank costs nothing. On any other, every kind costs more than 0 s, even for 0 bytes, and never less
    for more bytes. By formula the cost is concave in ``nbytes``, so one launch for two tensors is never slower than two
    launches; measured times may rise faster if the larger message no longer fits a cache.

    Args:
        reduced_bytes: bytes that all_reduce and reduce_scatter send for each of ``nbytes``; see `of`.
        part: ``"launch"`` counts only the launch, which the calling program pays; see `launches`.
        in_buckets: whether a tensor shares its launch with others; see `bucketed`.
        dearer: number of leading axes that cost a little more; see `by_axis`.

    Raises:
        MeshError: if the mesh does not fit the cluster.
    """

    mesh: Mesh
    cluster: Cluster
    reduced_bytes: int = 1
    part: Literal["whole", "launch"] = "whole"
    in_buckets: bool = False
    dearer: int = 0

    def __post_init__(self) -> None:
        _ = self._choices

    def of(self, dtype: str) -> CollectiveCosts:
        """Return the costs for tensors of ``dtype``. Some dtypes are reduced, and thus sent, in a wider one."""
        ratio = REDUCED_BYTES.get(dtype, 1)
        if ratio not in self._by_ratio:
            self._by_ratio[ratio] = replace(self, reduced_bytes=ratio)
        return self._by_ratio[ratio]

    @cached_property
    def _by_ratio(self) -> dict[int, CollectiveCosts]:
        return {self.reduced_bytes: self}

    @cached_property
    def launches(self) -> CollectiveCosts:
        """The part of each collective that nothing can hide: its launch, without the latency of its links."""
        return replace(self, part="launch")

    @cached_property
    def bucketed(self) -> CollectiveCosts:
        """The costs in a bucket: a launch, and a share of the bucket by bytes, if that is less than a launch of its
        own.

        Each tensor is charged a full launch, so that none is cut or gathered merely because its bytes cost little.
        """
        return replace(self, in_buckets=True)

    @cached_property
    def by_axis(self) -> tuple[CollectiveCosts, ...]:
        """For each axis but the last, these costs with all axes up to it more expensive by a factor of 1 + ``DEARER``.

        The increase of the cheapest cost with the price of an axis shows how much of it is spent on that axis. Ties go
        to the choice that is cheapest when earlier axes are more expensive.
        """
        return tuple(replace(self, dearer=axis + 1) for axis in range(self.mesh.ndim - 1))

    def sent(self, kind: str, nbytes: int) -> int:
        """Return how many bytes are sent for ``nbytes``, in the dtype that is sent."""
        return nbytes * self._ratio(kind)

    def _ratio(self, kind: str) -> int:
        return self.reduced_bytes if kind in ("all_reduce", "reduce_scatter") else 1

    @cached_property
    def links(self) -> tuple[AxisLink, ...]:
        """The links of each axis."""
        return axis_links(self.mesh, self.cluster)

    @cached_property
    def _choices(self) -> tuple[dict[str, tuple[Algorithm, ...]], ...]:
        factors = [1 + DEARER if axis < self.dearer else 1.0 for axis in range(self.mesh.ndim)]
        return tuple(
            {kind: tuple(a.times(factor) for a in self._algorithms(kind, link)) for kind in KINDS}
            for factor, link in zip(factors, self.links, strict=True)
        )

    @cached_property
    def _measured(self) -> tuple[dict[str, CollectiveTimes], ...]:
        if self.part == "launch":
            return tuple({} for _ in self.links)
        times = self.cluster.sized(self.mesh.size).measured
        found = [{kind: times.collective(kind, k.ranks_per_node, k.nodes) for kind in KINDS} for k in self.links]
        return tuple({kind: t for kind, t in of.items() if t is not None} for of in found)

    @cached_property
    def affine(self) -> bool:
        """Whether `seconds` is the minimum of `lines`, since no measurements are used."""
        return not any(self._measured)

    def lines(self, kind: CollectiveKind, axis: int) -> tuple[tuple[float, float], ...]:
        """Return (alpha_s, beta_s_per_byte) of the lines whose minimum over nbytes is `seconds`.

        They are ordered by increasing alpha and decreasing beta. One rank has the line (0, 0). If `seconds` follows
        measurements, there is one line, the best fit.

        Raises:
            AutoparError: if there is no such kind or axis.
        """
        self._check(kind, axis)
        measured = self._measured[axis].get(kind)
        if measured is not None:
            return ((measured.alpha_s, measured.beta_s_per_byte * self._ratio(kind)),)
        return tuple((a.alpha_s, a.beta_s_per_byte) for a in self._choices[axis][kind])

    def algorithm(self, kind: CollectiveKind, nbytes: float, axis: int) -> str:
        """Return the name of the algorithm that the library is assumed to run, or ``"measured"``."""
        self._check(kind, axis)
        if kind in self._measured[axis]:
            return "measured"
        return min(self._choices[axis][kind], key=lambda a: a.seconds(nbytes)).name

    def _check(self, kind: CollectiveKind, axis: int) -> None:
        if kind not in KINDS or not 0 <= axis < self.mesh.ndim:
            raise AutoparError(
                "There is no such collective or mesh axis.",
                found=f"{kind} on axis {axis} of mesh {self.mesh}",
                hint=f"kinds are {', '.join(KINDS)}; axes are 0 to {self.mesh.ndim - 1}.",
            )

    def seconds(self, kind: CollectiveKind, nbytes: float, axis: int) -> float:
        """Return the seconds of one collective. The class says what ``nbytes`` counts."""
        self._check(kind, axis)
        if kind in self._measured[axis]:
            return float(self.seconds_array(kind, nbytes, axis))
        return min(a.seconds(nbytes) for a in self._choices[axis][kind])

    def seconds_array(self, kind: CollectiveKind, nbytes: Amounts, axis: int) -> Seconds:
        """Return `seconds` for an array of sizes, bit for bit equal to it."""
        self._check(kind, axis)
        measured = self._measured[axis].get(kind)
        if measured is not None:
            sent = np.asarray(nbytes) * self._ratio(kind)
            alone = measured.curve.at(np.maximum(sent, measured.curve.amounts[0]))
            if self.in_buckets and kind in BUCKETED:
                fit = Algorithm("measured", measured.alpha_s, measured.beta_s_per_byte)
                launch_s = min(self.cluster.device.collective_launch_latency_s, fit.alpha_s)
                alone = np.minimum(alone, launch_s + sent * self._share(fit))
            return alone * (1 + DEARER) if axis < self.dearer else alone
        sizes = np.asarray(nbytes, np.float64)
        ways = np.array([a.alpha_s + a.beta_s_per_byte * sizes for a in self._choices[axis][kind]])
        return np.asarray(ways.min(axis=0))

    def _algorithms(self, kind: CollectiveKind, link: AxisLink) -> tuple[Algorithm, ...]:
        if link.size == 1:
            return (Algorithm("nothing", 0.0, 0.0),)
        if kind == "slice":
            alpha_s, beta_s_per_byte = ComputeCosts(self.cluster.sized(self.mesh.size)).copy_line()
            if self.in_buckets:  # the collective after a copy is launched late, so prefer an exchange
                alpha_s += self._algorithms("all_to_all", link)[0].alpha_s
            return (Algorithm("copy", alpha_s, 2 / link.size * beta_s_per_byte),)
        launch_s, ratio = self.cluster.device.collective_launch_latency_s, self._ratio(kind)
        choices = fastest(algorithms(kind, link, self.cluster.library))
        found = tuple(Algorithm(a.name, a.alpha_s + launch_s, a.beta_s_per_byte * ratio) for a in choices)
        if self.part == "launch":
            return (Algorithm("launch", launch_s, 0.0),)
        if not self.in_buckets or kind not in BUCKETED:
            return found
        return fastest((Algorithm("in a bucket", launch_s, self._share(found[-1])), *found))

    def _share(self, largest: Algorithm) -> float:
        """Return the seconds per byte in a full bucket, without its launch, plus those of packing and unpacking."""
        launch_s = self.cluster.device.collective_launch_latency_s
        nbytes = BUCKET * largest.alpha_s / largest.beta_s_per_byte
        _, copied_s = ComputeCosts(self.cluster.sized(self.mesh.size)).copy_line()
        return (largest.seconds(nbytes) - min(launch_s, largest.alpha_s)) / nbytes + 2 * copied_s
