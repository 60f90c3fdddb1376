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
from typing import Literal, Union

import numpy as np
from numpy.typing import NDArray

from autopar.errors import AutoparError
from autopar.mesh.cluster import Cluster

ComputeKind = Literal["matmul", "memory", "view"]
Amounts = Union[float, NDArray[np.floating], NDArray[np.integer]]
Seconds = NDArray[np.float64]


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
        return float(self.seconds_array(flops, bytes_read_written, dtype, kind))

    def seconds_array(
        self, flops: Amounts, bytes_read_written: Amounts, dtype: str, kind: ComputeKind = "matmul"
    ) -> Seconds:
        """`seconds` for arrays of amounts that broadcast against each other; equal to it bit by bit."""
        work, traffic = np.broadcast_arrays(np.asarray(flops, np.float64), np.asarray(bytes_read_written, np.float64))
        if kind == "view":
            return np.zeros(work.shape)
        if kind not in {"matmul", "memory"}:
            raise AutoparError("No such kind of kernel.", found=repr(kind), hint='one of "matmul", "memory", "view".')
        device = self.cluster.device
        peak = device.peak(dtype if kind == "matmul" else "float32") * device.matmul_efficiency
        arithmetic = _ramped(work, peak, device.matmul_ramp_s if kind == "matmul" else 0.0)
        memory = _ramped(traffic, device.memory_bytes_per_s * device.memory_efficiency, device.memory_ramp_s)
        return np.asarray(np.maximum(arithmetic, memory) + device.launch_latency_s)

    def copy_line(self) -> tuple[float, float]:
        """(alpha_s, beta_s_per_byte) of a memory-bound kernel of any positive traffic: alpha + beta * bytes."""
        device = self.cluster.device
        return (
            device.launch_latency_s + device.memory_ramp_s,
            1 / (device.memory_bytes_per_s * device.memory_efficiency),
        )

    def host_seconds(self, nbytes: float) -> float:
        """Seconds to copy ``nbytes`` between a device and pinned memory of its host, in one direction."""
        host = self.cluster.host
        return host.latency_s + nbytes / (host.bandwidth_bytes_per_s * host.efficiency)


def _ramped(amount: Seconds, per_s: float, ramp_s: float) -> Seconds:
    return np.where(amount > 0, amount / per_s + ramp_s, 0.0)
