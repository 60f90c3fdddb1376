"""Build a cluster from measurements of this process group: figures for the formulas, and the measured times."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.mesh import (
    Cluster,
    CollectiveTimes,
    Device,
    KernelTimes,
    Link,
    Measured,
    Mesh,
    axis_links,
    cluster_of_device,
)
from autopar.profiling.collectives import launches, measured_overlap, timed_collectives
from autopar.profiling.group import local_world_size
from autopar.profiling.kernels import call_seconds, runs, timed_kernels
from autopar.profiling.timing import Allowance, Stopwatch
from autopar.spmd import ProcessRank

SOURCE = "autopar profile"
DIGITS = 4
"""Significant digits of a measured time in the file."""


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Args:
        largest_message_bytes: largest message of collectives; smaller ones are a quarter each, down to bytes.
        largest_elements: most elements of a tensor that kernels stream or multiply.
        budget_s: seconds for each kernel or collective at each size.
        kernels_s: seconds after which each remaining kernel is timed only once.
        collectives_s: the same for collectives, which are measured first.
    """

    largest_message_bytes: int = 2**26
    largest_elements: int = 2**24
    budget_s: float = 0.04
    kernels_s: float = 15.0
    collectives_s: float = 12.0

    @property
    def message_sizes(self) -> tuple[int, ...]:
        sizes, size = [], self.largest_message_bytes
        while size >= 64:
            sizes.append(size)
            size //= 4
        return tuple(reversed(sizes))


def profile_cluster(
    mesh: Mesh,
    *,
    name: str = "profiled",
    effort: Effort | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Cluster:
    """Measure the default process group, which must have the size of ``mesh``. Every rank calls this.

    Kernels that run on a single CPU thread are timed by its processor time, so that other programs on the machine do
    not count. For the same reason a collective on CPUs counts with its shortest time, and with at most its latency plus
    its processor time.

    Args:
        progress: called after each measurement with its description, the number done, and the total.

    Returns:
        The cluster, equal on all ranks, with the name ``name``.
    """
    device_type = "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
    effort = effort or Effort(largest_elements=2**24 if device_type == "cpu" else 2**26)
    rank = ProcessRank(init_device_mesh(device_type, mesh.shape, mesh_dim_names=mesh.names))
    on_cpu = device_type == "cpu"
    quantile = 0.0 if on_cpu else 0.5
    watch = Stopwatch(rank.device, effort.budget_s, quantile=quantile, allowance=Allowance(effort.collectives_s))
    base = replace(_base(device_type), devices_per_node=local_world_size(), fixed=False)
    links = axis_links(mesh, base)
    planned = list(runs(rank.device, effort.largest_elements))
    total = len(planned) + len(list(launches(rank, effort.message_sizes)))
    done = 0

    def step(what: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(what, done, total)

    collectives = timed_collectives(rank, links, effort.message_sizes, watch, step)
    apart = [axis for axis, n in enumerate(mesh.shape) if n > 1]
    overlap = measured_overlap(rank, apart[0], min(2**22, effort.largest_message_bytes), watch) if apart else 1.0
    kernel_watch = replace(watch, quantile=0.5, allowance=Allowance(effort.kernels_s), on_device=not on_cpu)
    if on_cpu and torch.get_num_threads() == 1:
        kernel_watch = replace(kernel_watch, clock=time.thread_time, quantile=0.25)
    kernels = timed_kernels(rank.device, planned, kernel_watch, step)
    measured = _rounded(Measured(collectives, kernels, call_seconds(rank.device, kernel_watch), overlap=overlap))
    return _described(base, measured, name, mesh)


def _base(device_type: str) -> Cluster:
    """Return the cluster whose figures apply where nothing was measured."""
    if device_type == "cpu":
        return Cluster.load("cpu-2")
    return cluster_of_device(torch.cuda.get_device_name()) or Cluster.load("l40s-pcie")


def _rounded(measured: Measured) -> Measured:
    def short(x: float) -> float:
        return float(f"{x:.{DIGITS}g}")

    collectives = tuple(
        replace(
            c,
            curve=replace(c.curve, seconds=tuple(map(short, c.curve.seconds))),
            alpha_s=short(c.alpha_s),
            beta_s_per_byte=short(c.beta_s_per_byte),
            error=round(c.error, DIGITS),
        )
        for c in measured.collectives
    )
    kernels = tuple(
        replace(k, curve=replace(k.curve, seconds=tuple(map(short, k.curve.seconds))), error=round(k.error, DIGITS))
        for k in measured.kernels
    )
    return replace(
        measured,
        collectives=collectives,
        kernels=kernels,
        call_s=short(measured.call_s),
        overlap=round(measured.overlap, 2),
    )


def _described(base: Cluster, measured: Measured, name: str, mesh: Mesh) -> Cluster:
    backend = dist.get_backend()
    on_cpu = "nccl" not in str(backend)
    processes = dist.get_world_size()
    inside = [c for c in measured.collectives if c.nodes == 1]
    between = [c for c in measured.collectives if c.ranks_per_node == 1]
    intra, launch_s = _link(base.intra_node, inside, f"{backend}, one node", on_cpu)
    inter, across_s = _link(base.inter_node, between, f"{backend}, between nodes", on_cpu)
    device = _device(base.device, measured, min(launch_s or across_s, across_s or launch_s))
    return replace(
        base,
        name=name,
        device=device,
        intra_node=intra,
        inter_node=inter,
        measured=measured,
        oversubscribe=on_cpu,
        library="gloo" if on_cpu else "nccl",
        description=f"{SOURCE}: {processes} processes, {backend}, mesh {mesh}, torch {torch.__version__}",
        sources=(("devices_per_node", "processes that each node ran"),),
    )


def _link(link: Link, times: Sequence[CollectiveTimes], kind: str, on_cpu: bool) -> tuple[Link, float]:
    """Fit the ring formulas of `cost_models.algorithms`, and return the link and the launch latency.

    With n ranks a gather takes the launch plus n - 1 latencies, an all-reduce twice as many, and gloo's reduce-scatter
    is an all-reduce. The slope of each kind gives a bandwidth; the link gets their median.
    """
    lines = {c.kind: (c.ranks_per_node * c.nodes, c.alpha_s, c.beta_s_per_byte) for c in times}
    if "all_gather" not in lines or "all_reduce" not in lines:
        return link, 0.0
    n, gather_s, _ = lines["all_gather"]
    step_s = (lines["all_reduce"][1] - gather_s) / (n - 1)
    step_s = min(max(step_s, 0.1 * gather_s / (n - 1)), 0.9 * gather_s / (n - 1))
    passes = {"all_gather": 1, "reduce_scatter": 2 if on_cpu else 1, "all_to_all": 1, "all_reduce": 2}
    bandwidths = [passes[k] * (m - 1) / (m * beta) for k, (m, _, beta) in lines.items() if k in passes]
    sources = tuple((k, SOURCE) for k in ("latency_s", "bandwidth_bytes_per_s", "efficiency"))
    made = replace(
        link,
        kind=kind if on_cpu else link.kind,
        latency_s=float(f"{step_s:.3g}"),
        efficiency=1.0,
        bandwidth_bytes_per_s=float(f"{statistics.median(bandwidths):.3g}"),
        peer_bandwidth_bytes_per_s=None,
        sources=(*sources, *((k, t) for k, t in link.sources if k == "nics")),
    )
    return made, float(f"{gather_s - (n - 1) * step_s:.3g}")


def _device(base: Device, measured: Measured, launch_s: float) -> Device:
    """Return a device with whose peaks, bandwidth and launch latency the formulas approximate the measured curves."""
    peaks = {k.dtype: _rate(k) for k in measured.kernels if k.kind == "matmul"}
    memory = measured.kernel("memory", "float32")
    figures: dict[str, object] = {"name": _device_name(base)}
    if "float32" in peaks:
        figures |= {"peak_flops_per_s": tuple(sorted(peaks.items())), "matmul_efficiency": 1.0}
    if memory is not None:
        streamed = memory.curve.amounts[-1] / memory.curve.seconds[-1]
        figures |= {"memory_bytes_per_s": float(f"{streamed:.3g}"), "memory_efficiency": 1.0}
        figures["launch_latency_s"] = min(memory.curve.seconds[0], base.launch_latency_s)
    if launch_s > 0:
        figures["collective_launch_latency_s"] = launch_s
    figures["memory_bytes"] = _memory_bytes()
    said = dict(base.sources) | dict.fromkeys(figures, SOURCE)
    sources = tuple((f.name, said[f.name]) for f in fields(Device) if f.name in said and f.name != "name")
    return replace(base, **figures, sources=sources)  # type: ignore[arg-type]


def _rate(kernel: KernelTimes) -> float:
    """Return the best rate at any size, in FLOP/s."""
    best = max(a / s for a, s in zip(kernel.curve.amounts, kernel.curve.seconds, strict=True))
    return float(f"{best:.3g}")


def _device_name(base: Device) -> str:
    if "nccl" in str(dist.get_backend()):
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} of {os.cpu_count()} CPU cores" if base.name else ""


def _memory_bytes() -> int:
    """Return the memory of one device: that of the GPU, or this process's share of its host's."""
    if "nccl" in str(dist.get_backend()):
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_world_size()
