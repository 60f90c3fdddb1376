r"""Seconds of one kernel on one device, by a roofline model that small kernels approach gradually.

The roofline model (Williams, Waterman and Patterson, 2009) bounds a kernel by its arithmetic and by its memory
traffic. Small kernels stay below both roofs, so each roof is scaled by an efficiency that saturates:

    efficiency(x) = e x / (x + e peak ramp)

where ``e`` is the share of the peak that the largest kernels reach, and ``ramp`` is the duration of a kernel that
reaches half of that share. Both are figures of the device (``matmul_efficiency``, ``matmul_ramp_s`` and
``memory_efficiency``, ``memory_ramp_s``). Time ``x / (peak efficiency(x))`` is then ``x / (e peak) + ramp``.

If the cluster was measured, the curves of its kernels replace both roofs: that of the op itself, else that of its kind
("matmul", "attention", "memory"). A curve over FLOPs comes from shapes with many FLOPs per byte. If there is also one
over bytes, from thin shapes (``"matmul:traffic"``), a kernel takes the sum of both, since libraries repack operands
before they multiply; otherwise it takes the longer of the time of its FLOPs and that of its bytes by the memory curve.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Union

import numpy as np
from numpy.typing import NDArray

from autopar.errors import AutoparError
from autopar.mesh import Cluster, Curve, Device

ComputeKind = Literal["matmul", "attention", "memory", "view"]
Amounts = Union[float, NDArray[np.floating], NDArray[np.integer]]
Seconds = NDArray[np.float64]


class _Roof(NamedTuple):
    flops_per_s: float
    flops_ramp_s: float
    bytes_per_s: float
    bytes_ramp_s: float
    launch_latency_s: float


class _Curves(NamedTuple):
    """Measured seconds over FLOPs and over bytes; None where the roofline applies.

    A kernel takes the longer of the two, or with ``added`` their sum, with the latency counted once.
    """

    flops: Curve | None
    bytes: Curve | None
    added: bool = False


FREE = Curve((1.0,), (1e-30,))
"""The curve over bytes of an op whose measured time over FLOPs includes its traffic, as on CPUs, which overlap none."""


@dataclass(frozen=True)
class ComputeCosts:
    """Seconds of kernels on the devices of ``cluster``."""

    cluster: Cluster

    def seconds(
        self, flops: float, bytes_read_written: float, dtype: str, kind: ComputeKind = "matmul", op: str = ""
    ) -> float:
        """Return the seconds of one kernel on one device, monotone in both amounts.

        Args:
            flops: floating-point operations; a multiply-add counts as two.
            bytes_read_written: traffic to and from the device's memory.
            dtype: dtype of the operands, whose peak bounds a contraction.
            kind: "matmul" for contractions; "attention" for the fused kernel; "memory" for all other kernels, whose
                arithmetic runs at the rate of float32 and rarely matters; "view" for ops that only change shapes and
                strides, without a kernel.
            op: name of the op, such as ``"aten.gelu"``, for clusters on which it was measured by itself.
        """
        return float(self.seconds_array(flops, bytes_read_written, dtype, kind, op))

    def seconds_array(
        self, flops: Amounts, bytes_read_written: Amounts, dtype: str, kind: ComputeKind = "matmul", op: str = ""
    ) -> Seconds:
        """Return `seconds` for arrays of amounts that broadcast with each other, bit for bit equal to it."""
        work, traffic = np.broadcast_arrays(np.asarray(flops, np.float64), np.asarray(bytes_read_written, np.float64))
        if kind == "view":
            return np.full(work.shape, self.cluster.measured.call_s)
        roof, curves = self._priced(dtype, kind, op)
        arithmetic_s = (
            np.where(work > 0, work / roof.flops_per_s + roof.flops_ramp_s + roof.launch_latency_s, 0.0)
            if curves.flops is None
            else curves.flops.at(work)
        )
        memory_s = (
            np.where(traffic > 0, traffic / roof.bytes_per_s + roof.bytes_ramp_s + roof.launch_latency_s, 0.0)
            if curves.bytes is None
            else curves.bytes.at(traffic)
        )
        if curves.added and curves.bytes is not None:
            seconds = arithmetic_s + np.maximum(memory_s - curves.bytes.seconds[0], 0.0)
        else:
            seconds = np.maximum(arithmetic_s, memory_s)
        return np.maximum(seconds, roof.launch_latency_s)

    def _priced(self, dtype: str, kind: str, op: str) -> tuple[_Roof, _Curves]:
        found = self._roofs.get((dtype, kind, op))
        if found is None:
            found = _roof(self.cluster.device, dtype, kind), self._curves(dtype, kind, op)
            self._roofs[dtype, kind, op] = found
        return found

    @cached_property
    def _roofs(self) -> dict[tuple[str, str, str], tuple[_Roof, _Curves]]:
        return {}

    def _curves(self, dtype: str, kind: str, op: str) -> _Curves:
        """Return the op's own curve if it was measured, else that of its kind, and the memory curve for traffic."""
        measured = self.cluster.measured
        own = measured.kernel(op, dtype) or (measured.kernel(op, "float32") if kind == "memory" else None)
        if own is not None and own.unit == "bytes":
            return _Curves(None, own.curve)
        work = own or (None if kind == "memory" else measured.kernel(kind, dtype))
        if work is None and kind == "attention":
            work = measured.kernel("matmul", dtype)
        of = f"{work.kind}:traffic" if work else ""
        thin = measured.kernel(of, dtype) or measured.kernel(of, "float32")
        if work is not None and thin is not None:
            return _Curves(work.curve, thin.curve, added=True)
        if own is not None and self.cluster.device.kind == "cpu":
            return _Curves(own.curve, FREE)
        traffic = measured.kernel("memory", dtype) or measured.kernel("memory", "float32")
        return _Curves(work.curve if work else None, traffic.curve if traffic else None)

    def copy_line(self) -> tuple[float, float]:
        """Return (alpha_s, beta_s_per_byte) of a memory-bound kernel, which takes alpha + beta * bytes."""
        traffic = self.cluster.measured.kernel("memory", "float32")
        if traffic is not None:
            first, last = traffic.curve.seconds[0], traffic.curve.seconds[-1]
            return first, last / traffic.curve.amounts[-1]
        roof = _roof(self.cluster.device, "float32", "memory")
        return roof.launch_latency_s + roof.bytes_ramp_s, 1 / roof.bytes_per_s


def _roof(device: Device, dtype: str, kind: str) -> _Roof:
    if kind not in {"matmul", "attention", "memory"}:
        raise AutoparError(
            "There is no such kind of kernel.", found=repr(kind), hint='use "matmul", "attention", "memory" or "view".'
        )
    contracts = kind != "memory"
    return _Roof(
        flops_per_s=device.peak(dtype if contracts else "float32") * device.matmul_efficiency,
        flops_ramp_s=device.matmul_ramp_s if contracts else 0.0,
        bytes_per_s=device.memory_bytes_per_s * device.memory_efficiency,
        bytes_ramp_s=device.memory_ramp_s,
        launch_latency_s=device.launch_latency_s,
    )
