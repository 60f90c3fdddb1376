"""Compare the cheapest redistribution with Colossal-Auto's greedy heuristic and DTensor's two planners.

    python -m benchmarks.redistribution [--json FILE] [--quick]

All paths have the same prices, those of NVIDIA DGX H100 nodes. Sources are all specs of a 3-D tensor, including partial
sums; targets are all specs that are not partial. On three mesh axes they are a sample of those whose axes increase. A
path "loses" if it takes more than a millionth longer than the cheapest. It "holds more" if one of its steps holds more
memory than the bound that the cheapest obeys; such a path may be faster.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path as File
from typing import Any

import torch

from autopar import _torch
from autopar.cost_models import CollectiveCosts
from autopar.mesh import Cluster, Mesh
from autopar.sharding import ShardingSpec, Step, cheapest_path, greedy_path, steps_from
from autopar.sharding.priced_graph import NEGLIGIBLE_BYTES
from autopar.spmd.placements import to_placements

ITEMSIZE = 4
SHAPES = ((64, 64, 64), (256, 256, 256), (1024, 1024, 1024))
DGX = Cluster.load("dgx-h100")
SETTINGS = {
    "2x2": (Mesh((2, 2)), DGX),
    "2x4": (Mesh((2, 4)), DGX),
    "2x4, axis 0 between nodes": (Mesh((2, 4)), replace(DGX, devices_per_node=4)),
    "2x2x2": (Mesh((2, 2, 2)), DGX),
}
Steps = Sequence[Step]
Planner = Callable[[ShardingSpec, ShardingSpec], Steps]


@dataclass(frozen=True)
class Row:
    """One planner on one mesh and one size of tensor."""

    mesh: str
    tensor_bytes: int
    planner: str
    pairs: int
    loses: float
    mean_ratio: float
    worst_ratio: float
    worst_pair: str
    holds_more: float
    faster_by_memory: float
    search_s: float


def specs_of(mesh: Mesh, ndim: int) -> list[ShardingSpec]:
    """Return all specs of a tensor: each axis is partial, cuts a dim, or does neither."""
    partial = ShardingSpec(((),) * ndim, tuple((a, "sum") for a in range(mesh.ndim)))
    found = {partial: None}
    frontier = [partial]
    while frontier:
        new = [after for _, after in steps_from(frontier.pop(), ndim, mesh) if after not in found]
        found |= dict.fromkeys(new)
        frontier += new
    kept = [s for s in found if mesh.ndim < 3 or all(list(d) == sorted(d) for d in s.dims)]
    return sorted(kept, key=str)


def dtensor(mesh: Mesh, shape: Sequence[int], by_cost: bool | None) -> Planner:
    def steps(src: ShardingSpec, dst: ShardingSpec) -> Steps:
        ends = [to_placements(s, mesh, shape) for s in (src, dst)]
        infos = _torch.redistribution_steps(*ends, mesh.shape, shape, by_cost=by_cost)
        return [_step(axis, before, after) for axis, before, after in infos]

    return steps


def _step(axis: int, before: Any, after: Any) -> Step:
    was = "partial" if before.is_partial() else "replicated" if before.is_replicate() else "cut"
    now = "replicated" if after.is_replicate() else "cut"
    match was, now:
        case "partial", "replicated":
            return Step("all_reduce", axis, reduction=before.reduce_op)
        case "partial", _:
            return Step("reduce_scatter", axis, after.dim, reduction=before.reduce_op)
        case "cut", "replicated":
            return Step("all_gather", axis, before.dim)
        case "cut", _:
            return Step("all_to_all", axis, before.dim, after.dim)
    return Step("slice", axis, after.dim)


def priced(
    src: ShardingSpec, dst: ShardingSpec, steps: Steps, shape: Sequence[int], mesh: Mesh, costs: CollectiveCosts
) -> tuple[float, int]:
    """Return (seconds, most bytes that a step holds) of a path, which must lead from ``src`` to ``dst``."""

    def held(spec: ShardingSpec) -> int:
        return math.prod(spec.local_shape(shape, mesh)) * ITEMSIZE

    seconds, peak, spec = 0.0, 0, src
    for step in steps:
        after = step.apply(spec)
        nbytes = held(after if step.kind == "all_gather" else spec)
        seconds += max(costs.seconds(step.kind, nbytes, a) for a in step.moved_axes(spec))
        peak = max(peak, held(spec) + held(after))
        spec = after
    assert spec == dst, f"{src} -> {dst} by {[str(s) for s in steps]} ends at {spec}"
    return seconds, peak


def compare(
    name: str, mesh: Mesh, cluster: Cluster, shape: Sequence[int], pairs: Sequence[tuple[ShardingSpec, ShardingSpec]]
) -> list[Row]:
    costs = CollectiveCosts(mesh, cluster)
    args = (shape, ITEMSIZE, mesh, costs)
    planners: dict[str, Planner] = {
        "cheapest": lambda a, b: cheapest_path(a, b, *args).steps,
        "greedy": lambda a, b: greedy_path(a, b, *args).steps,
        "DTensor": dtensor(mesh, shape, None),
        "DTensor, min-cost": dtensor(mesh, shape, True),
    }
    results: dict[str, list[tuple[float, int]]] = {}
    rows = []
    for planner, plan in planners.items():
        started = time.process_time()
        paths = [plan(a, b) for a, b in pairs]
        search_s = (time.process_time() - started) / len(pairs)
        results[planner] = [priced(a, b, p, shape, mesh, costs) for (a, b), p in zip(pairs, paths, strict=True)]
        rows.append(_row(name, shape, planner, pairs, results["cheapest"], results[planner], search_s, mesh))
    return rows


def _row(
    name: str,
    shape: Sequence[int],
    planner: str,
    pairs: Sequence[tuple[ShardingSpec, ShardingSpec]],
    best: Sequence[tuple[float, int]],
    found: Sequence[tuple[float, int]],
    search_s: float,
    mesh: Mesh,
) -> Row:
    ratios = [f[0] / b[0] for f, b in zip(found, best, strict=True)]
    bounds = [_bound(a, b, shape, mesh) for a, b in pairs]
    worst = max(range(len(pairs)), key=lambda i: ratios[i])
    return Row(
        name,
        math.prod(shape) * ITEMSIZE,
        planner,
        len(pairs),
        sum(r > 1 + 1e-6 for r in ratios) / len(pairs),
        statistics.mean(ratios),
        ratios[worst],
        "{} -> {}".format(*pairs[worst]),
        sum(f[1] > bound for f, bound in zip(found, bounds, strict=True)) / len(pairs),
        sum(r < 1 - 1e-6 for r in ratios) / len(pairs),
        search_s,
    )


def _bound(src: ShardingSpec, dst: ShardingSpec, shape: Sequence[int], mesh: Mesh) -> int:
    return sum(math.prod(s.local_shape(shape, mesh)) * ITEMSIZE for s in (src, dst)) + NEGLIGIBLE_BYTES


@dataclass(frozen=True)
class Search:
    """Processor seconds of searches between random specs of a 4-D tensor."""

    mesh: str
    graph_s: float
    first_median_s: float
    first_worst_s: float
    later_median_s: float
    later_p99_s: float


def search_times(mesh: Mesh, pairs: int) -> Search:
    """Time searches; the first for a pair makes its Pareto set, which later ones for other sizes read."""
    costs = CollectiveCosts(mesh, DGX)
    start = ShardingSpec.replicated(4)
    started = time.process_time()
    cheapest_path(start, start, (128,) * 4, ITEMSIZE, mesh, costs)
    graph_s = time.process_time() - started
    specs = [s for s in _reachable_4d(mesh) if not s.partial]
    drawn = random.Random(0)
    first, later = [], []
    for _ in range(pairs):
        src, dst = drawn.sample(specs, 2)
        for times, n in ((first, 128), (later, 256), (later, 1024), (later, 128 * 1024)):
            started = time.process_time()
            cheapest_path(src, dst, (128, 128, 128, n), ITEMSIZE, mesh, costs)
            times.append(time.process_time() - started)
    medians = statistics.median(first), statistics.median(later)
    return Search(str(mesh), graph_s, medians[0], max(first), medians[1], statistics.quantiles(later, n=100)[98])


def _reachable_4d(mesh: Mesh) -> list[ShardingSpec]:
    found = {ShardingSpec.replicated(4): None}
    frontier = list(found)
    while frontier:
        new = [after for _, after in steps_from(frontier.pop(), 4, mesh) if after not in found]
        found |= dict.fromkeys(new)
        frontier += new
    return sorted(found, key=str)


def machine() -> dict[str, str]:
    cpu = platform.processor() or platform.machine()
    if File("/proc/cpuinfo").exists():
        lines = File("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), cpu)
    return {
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def table(rows: Sequence[Row], searches: Sequence[Search]) -> str:
    lines = [
        "| mesh | tensor | planner | pairs | loses | mean | worst | worst pair | holds more | faster by it | CPU |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.mesh} | {r.tensor_bytes / 1e6:,.0f} MB | {r.planner} | {r.pairs:,} | {r.loses:.1%} | {r.mean_ratio:.2f} "
        f"| {r.worst_ratio:.2f} | {r.worst_pair if r.loses else ''} | {r.holds_more:.1%} | {r.faster_by_memory:.1%} "
        f"| {r.search_s * 1e3:.2f} ms |"
        for r in rows
    ]
    lines += ["", "| 4-D tensor, CPU | graph, once | first search, median | worst | later sizes, median | 99% |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [
        f"| {s.mesh} | {s.graph_s * 1e3:.0f} ms | {s.first_median_s * 1e3:.2f} ms | {s.first_worst_s * 1e3:.2f} ms "
        f"| {s.later_median_s * 1e3:.2f} ms | {s.later_p99_s * 1e3:.2f} ms |"
        for s in searches
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=File, help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="one size, and a twentieth of the pairs")
    args = parser.parse_args(argv)
    rows = []
    for name, (mesh, cluster) in SETTINGS.items():
        specs = specs_of(mesh, 3)
        every = [(a, b) for a, b in itertools.product(specs, repeat=2) if a != b and not b.partial]
        share = 20 if args.quick or mesh.ndim > 2 else 1
        pairs = random.Random(0).sample(every, max(len(every) // share, 1))
        for shape in SHAPES[:1] if args.quick else SHAPES:
            rows += compare(name, mesh, cluster, shape, pairs)
    searches = [search_times(Mesh(shape), 20 if args.quick else 200) for shape in ((2, 2, 2), (2, 4, 2), (4, 8, 2))]
    here = machine()
    print(", ".join(here.values()), "\n")
    print(table(rows, searches))
    if args.json:
        record = {"machine": here, "rows": [asdict(r) for r in rows], "searches": [asdict(s) for s in searches]}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
