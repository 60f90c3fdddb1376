r"""Seconds of one kernel on one device: a roofline whose roof is reached gradually.

The roofline model (Williams, Waterman and Patterson, 2009) bounds a kernel by its arithmetic and by its memory
traffic. Small kernels stay below both roofs, so each roof is scaled by an efficiency that saturates:

    efficiency(x) = e x / (x + e peak ramp)

where ``e`` is the share of the peak that the largest kernels reach and ``ramp`` the seconds for which a kernel runs
at half of that share. Both are figures of the device (``matmul_efficiency``, ``matmul_ramp_s`` and
``memory_efficiency``, ``memory_ramp_s``). Time ``x / (peak efficiency(x))`` is then ``x / (e peak) + ramp``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Union

import numpy as np
from numpy.typing import NDArray

from autopar.errors import AutoparError
from autopar.mesh import Cluster, Device

ComputeKind = Literal["matmul", "memory", "view"]
Amounts = Union[float, NDArray[np.floating], NDArray[np.integer]]
Seconds = NDArray[np.float64]


class _Roof(NamedTuple):
    flops_per_s: float
    flops_ramp_s: float
    bytes_per_s: float
    bytes_ramp_s: float
    launch_latency_s: float


@dataclass(frozen=True)
class ComputeCosts:
    """Seconds of kernels on the devices of ``cluster``."""

    cluster: Cluster

    def seconds(self, flops: float, bytes_read_written: float, dtype: str, kind: ComputeKind = "matmul") -> float:
        """Seconds of one kernel on one device, monotone in both amounts.

        Args:
            flops: floating-point operations, a multiplication and an addition being two.
            bytes_read_written: traffic to and from the device's memory.
            dtype: of the operands: whose peak bounds a contraction.
            kind: "matmul" for contractions; "memory" for everything else that runs a kernel, whose arithmetic is at
                float32's rate and seldom counts; "view" for what only changes shapes and strides, which takes 0 s.
        """
        if kind == "view":
            return 0.0
        roof = self._roof(dtype, kind)
        arithmetic_s = flops / roof.flops_per_s + roof.flops_ramp_s if flops > 0 else 0.0
        memory_s = bytes_read_written / roof.bytes_per_s + roof.bytes_ramp_s if bytes_read_written > 0 else 0.0
        return max(arithmetic_s, memory_s) + roof.launch_latency_s

    def seconds_array(
        self, flops: Amounts, bytes_read_written: Amounts, dtype: str, kind: ComputeKind = "matmul"
    ) -> Seconds:
        """`seconds` for arrays of amounts that broadcast against each other; equal to it bit by bit."""
        work, traffic = np.broadcast_arrays(np.asarray(flops, np.float64), np.asarray(bytes_read_written, np.float64))
        if kind == "view":
            return np.zeros(work.shape)
        roof = self._roof(dtype, kind)
        arithmetic_s = np.where(work > 0, work / roof.flops_per_s + roof.flops_ramp_s, 0.0)
        memory_s = np.where(traffic > 0, traffic / roof.bytes_per_s + roof.bytes_ramp_s, 0.0)
        return np.asarray(np.maximum(arithmetic_s, memory_s) + roof.launch_latency_s)

    def _roof(self, dtype: str, kind: str) -> _Roof:
        roof = self._roofs.get((dtype, kind))
        if roof is None:
            roof = self._roofs[dtype, kind] = _roof(self.cluster.device, dtype, kind)
        return roof

    @cached_property
    def _roofs(self) -> dict[tuple[str, str], _Roof]:
        return {}

    def copy_line(self) -> tuple[float, float]:
        """(alpha_s, beta_s_per_byte) of a memory-bound kernel of any positive traffic: alpha + beta * bytes."""
        roof = self._roof("float32", "memory")
        return roof.launch_latency_s + roof.bytes_ramp_s, 1 / roof.bytes_per_s

    def host_seconds(self, nbytes: float) -> float:
        """Seconds to copy ``nbytes`` between a device and pinned memory of its host, in one direction."""
        host = self.cluster.host
        return host.latency_s + nbytes / (host.bandwidth_bytes_per_s * host.efficiency)


def _roof(device: Device, dtype: str, kind: str) -> _Roof:
    if kind not in {"matmul", "memory"}:
        raise AutoparError("No such kind of kernel.", found=repr(kind), hint='one of "matmul", "memory", "view".')
    return _Roof(
        flops_per_s=device.peak(dtype if kind == "matmul" else "float32") * device.matmul_efficiency,
        flops_ramp_s=device.matmul_ramp_s if kind == "matmul" else 0.0,
        bytes_per_s=device.memory_bytes_per_s * device.memory_efficiency,
        bytes_ramp_s=device.memory_ramp_s,
        launch_latency_s=device.launch_latency_s,
    )
