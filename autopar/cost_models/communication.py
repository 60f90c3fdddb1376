"""Seconds of collectives along the axes of a mesh: of the algorithms that the library has, the fastest for a size.

`cost_models.algorithms` has the formulas and their sources; each is a line, latency and seconds a byte, so that a
collective's time is the lower envelope of a few lines: concave, never falling, and never 0. Each launch adds the
device's ``collective_launch_latency_s``.

Where the cluster was measured in groups that lie over its nodes as an axis's do, the measured times of a kind take
the place of these formulas.
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
"""Those that can carry several tensors in one launch."""

DEARER = 1e-6

BUCKET = 4
"""Times the bytes that take as long to send as a launch: so large are launches that tensors share."""

REDUCED_BYTES: Mapping[str, int] = {
    "bool": 4,
    "int16": 2,
    "uint16": 2,
    "uint32": 2,
    "float8_e4m3fn": 4,
    "float8_e5m2": 4,
}
"""Bytes sent for each byte of a tensor that is reduced, where libraries cannot reduce its dtype; 1 for all others."""


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
    for more bytes. By formula it is concave in ``nbytes``, so that one launch for two tensors is never slower than
    two launches; measured times may rise faster, where the larger message no longer fits a cache.

    Args:
        reduced_bytes: sent by all_reduce and reduce_scatter for each of ``nbytes``; see `of`.
        part: of the seconds, those of the ``"launch"``, which the calling program pays; see `launches`.
        in_buckets: what a tensor costs that shares its launch with others; see `bucketed`.
        dearer: so many axes, the first ones, cost a little more; see `by_axis`.

    Raises:
        MeshError: the mesh does not fit the cluster.
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
        """The costs for tensors of ``dtype``: some are reduced in a wider one, in which they are then sent."""
        ratio = REDUCED_BYTES.get(dtype, 1)
        if ratio not in self._by_ratio:
            self._by_ratio[ratio] = replace(self, reduced_bytes=ratio)
        return self._by_ratio[ratio]

    @cached_property
    def _by_ratio(self) -> dict[int, CollectiveCosts]:
        return {self.reduced_bytes: self}

    @cached_property
    def launches(self) -> CollectiveCosts:
        """The part of each collective that nothing can hide: its launch, and not the latency of its links."""
        return replace(self, part="launch")

    @cached_property
    def bucketed(self) -> CollectiveCosts:
        """A launch, and a tensor's share by its bytes of a collective of several, where that is less than its own.

        Launches are not shared here: so no tensor is cut or gathered for the little that its bytes cost.
        """
        return replace(self, in_buckets=True)

    @cached_property
    def by_axis(self) -> tuple[CollectiveCosts, ...]:
        """For each axis but the last, these costs with all axes up to it dearer by a share of ``DEARER``.

        What the cheapest way of doing something takes on an axis is by how much it gets dearer with that axis. Of ways
        that cost the same the one is meant that is cheapest where earlier axes are dearer.
        """
        return tuple(replace(self, dearer=axis + 1) for axis in range(self.mesh.ndim - 1))

    def sent(self, kind: str, nbytes: int) -> int:
        """``nbytes`` in the dtype that is sent."""
        return nbytes * self._ratio(kind)

    def _ratio(self, kind: str) -> int:
        return self.reduced_bytes if kind in ("all_reduce", "reduce_scatter") else 1

    @cached_property
    def links(self) -> tuple[AxisLink, ...]:
        """What each axis communicates over."""
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
        """Whether `seconds` is the least of `lines`: nothing follows measurements."""
        return not any(self._measured)

    def lines(self, kind: CollectiveKind, axis: int) -> tuple[tuple[float, float], ...]:
        """(alpha_s, beta_s_per_byte) of each line alpha_s + beta_s_per_byte * nbytes of which the lowest is `seconds`.

        Alphas rise and betas fall. One rank has the line (0, 0). Where `seconds` follows measurements, there is one
        line, which fits them best.

        Raises:
            AutoparError: no such kind or axis.
        """
        self._check(kind, axis)
        measured = self._measured[axis].get(kind)
        if measured is not None:
            return ((measured.alpha_s, measured.beta_s_per_byte * self._ratio(kind)),)
        return tuple((a.alpha_s, a.beta_s_per_byte) for a in self._choices[axis][kind])

    def algorithm(self, kind: CollectiveKind, nbytes: float, axis: int) -> str:
        """The name in `cost_models.algorithms` of what the library is taken to run, or ``"measured"``."""
        self._check(kind, axis)
        if kind in self._measured[axis]:
            return "measured"
        return min(self._choices[axis][kind], key=lambda a: a.seconds(nbytes)).name

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
        return min(a.seconds(nbytes) for a in self._choices[axis][kind])

    def seconds_array(self, kind: CollectiveKind, nbytes: Amounts, axis: int) -> Seconds:
        """`seconds` for an array of sizes; equal to it bit by bit."""
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
            if self.in_buckets:  # what follows a copy is launched when the program comes there: an exchange is better
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
        """Seconds a byte in a collective as large as buckets are, whose launch is paid, and of copying it there and
        back."""
        launch_s = self.cluster.device.collective_launch_latency_s
        nbytes = BUCKET * largest.alpha_s / largest.beta_s_per_byte
        _, copied_s = ComputeCosts(self.cluster.sized(self.mesh.size)).copy_line()
        return (largest.seconds(nbytes) - min(launch_s, largest.alpha_s)) / nbytes + 2 * copied_s
