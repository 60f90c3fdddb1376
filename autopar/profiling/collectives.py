"""Time collectives on each axis of a mesh, with the functions that planned programs call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar import spmd
from autopar.mesh import AxisLink, CollectiveTimes, rising
from autopar.profiling.fit import fit_line
from autopar.profiling.timing import Stopwatch
from autopar.spmd.ranks import Exchange, ProcessRank

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
ITEMSIZE = 4
ROUNDS = 9
"""Repetitions of each of the three timings of `measured_overlap`."""
COLUMNS = 16
"""Columns of the float32 matrices that are sent."""


@dataclass(frozen=True)
class Launch:
    """One collective to time on one axis at one size.

    Args:
        nbytes: message size, counted as in `cost_models.CollectiveCosts`.
    """

    kind: str
    axis: int
    nbytes: int


def launches(rank: ProcessRank, sizes: Sequence[int]) -> Iterator[Launch]:
    """Yield every kind on every axis of more than one rank, at every size rounded to whole rows, smallest first."""
    for axis, n in enumerate(rank.mesh.shape):
        if n > 1:
            row = n * COLUMNS * ITEMSIZE
            rounded = sorted({max(row, size // row * row) for size in sizes})
            yield from (Launch(kind, axis, size) for size in rounded for kind in KINDS)


def prepared(launch: Launch, rank: ProcessRank) -> Callable[[], Tensor]:
    """Return a function that runs the collective once, from a contiguous tensor to a contiguous tensor."""
    n, axis = rank.mesh.shape[launch.axis], launch.axis
    rows = launch.nbytes // (COLUMNS * ITEMSIZE)
    held = rows // n if launch.kind == "all_gather" else rows
    x = torch.ones((held, COLUMNS), device=rank.device)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: spmd.all_gather(rank, x, 0, axis, rows),
        "reduce_scatter": lambda: spmd.reduce_scatter(rank, x, 0, axis),
        "all_reduce": lambda: spmd.all_reduce(rank, x, axis),
        "all_to_all": lambda: spmd.all_to_all(rank, x.view(held // n, COLUMNS * n), 0, 1, axis, held),
    }
    if launch.kind == "permute":
        exchange = Exchange("permute", -1, "sum", _next_along(rank, axis), tuple(x.shape))
        return lambda: rank.finish(rank.launch(x, exchange))
    call = calls[launch.kind]
    return lambda: spmd.wait(call())


def _next_along(rank: ProcessRank, axis: int) -> tuple[int, ...]:
    """Return the next rank along ``axis`` for each rank, cyclically."""
    sources = []
    for r in range(rank.mesh.size):
        place = list(rank.mesh.coordinate(r))
        place[axis] = (place[axis] + 1) % rank.mesh.shape[axis]
        sources.append(rank.mesh.rank(tuple(place)))
    return tuple(sources)


def timed_collectives(
    rank: ProcessRank, links: Sequence[AxisLink], sizes: Sequence[int], watch: Stopwatch, step: Callable[[str], None]
) -> tuple[CollectiveTimes, ...]:
    """Return curves and fitted lines of every kind. Axes with equal layout over nodes share the slower one."""
    found: dict[tuple[str, int, int], dict[int, float]] = {}
    latency_s: dict[tuple[str, int], float] = {}
    for launch in launches(rank, sizes):
        link = links[launch.axis]
        points = found.setdefault((launch.kind, link.ranks_per_node, link.nodes), {})
        call = prepared(launch, rank)
        seconds = watch.time(call).seconds
        least_s = latency_s.setdefault((launch.kind, launch.axis), seconds)
        if rank.device.type == "cpu":
            seconds = min(seconds, least_s + _processor_seconds(call, watch))
        points[launch.nbytes] = max(seconds, points.get(launch.nbytes, 0.0))
        step(f"{launch.kind} of {launch.nbytes:,} B")
    return tuple(_times(kind, per_node, nodes, points) for (kind, per_node, nodes), points in found.items())


def _processor_seconds(call: Callable[[], Tensor], watch: Stopwatch) -> float:
    """Return the processor time of a call over all threads, on the busiest rank, in seconds.

    On an idle machine a message between CPUs takes at most the time of the smallest message, which is mostly waiting,
    plus this work. If the machine is busy with other programs, it takes longer.
    """
    return replace(watch, clock=time.process_time, quantile=0.25, least=2, most=5).time(call).seconds


def _times(kind: str, per_node: int, nodes: int, points: dict[int, float]) -> CollectiveTimes:
    sizes = sorted(points)
    curve = rising(sizes, [points[size] for size in sizes])
    return CollectiveTimes(kind, per_node, nodes, curve, *fit_line(curve.amounts, curve.seconds))


def measured_overlap(rank: ProcessRank, axis: int, nbytes: int, watch: Stopwatch) -> float:
    """Return the share of a collective's time that concurrent computation hides, from 0 to 1.

    Two tasks of about equal duration are timed alone and together: an all-reduce of ``nbytes``, and matrix products
    between its launch and its wait.
    """
    x = torch.ones((nbytes // ITEMSIZE,), device=rank.device)
    a = torch.ones((256, 256), device=rank.device)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(a, a)

    def together(times: int) -> None:
        pending = spmd.all_reduce(rank, x, axis)
        multiply(times)
        spmd.wait(pending)

    alone_s = watch.time(lambda: together(0)).seconds
    times = max(1, round(alone_s / watch.time(lambda: multiply(1)).seconds))
    # Interleaved, so that a busy period of the machine affects all three; the minimum of each counts.
    rounds = [
        [watch.once(f) for f in (lambda: together(0), lambda: multiply(times), lambda: together(times))]
        for _ in range(ROUNDS)
    ]
    alone_s, compute_s, both_s = (min(taken) for taken in zip(*rounds, strict=True))
    return float(min(max((alone_s + compute_s - both_s) / min(alone_s, compute_s), 0.0), 1.0))
