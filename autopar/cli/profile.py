"""``autopar profile``: measure a process group and write a cluster file."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from autopar.errors import MeshError
from autopar.mesh import Cluster, Mesh

EXAMPLES = """\
examples:
  autopar profile --nproc 2 cpu.toml                       two processes over gloo, on this machine
  torchrun --nproc-per-node 8 -m autopar profile ours.toml --mesh 8

The file holds latencies, bandwidths and kernel times. Any machine can plan for it: autopar plan ... --cluster ours.toml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "output", nargs="?", type=Path, default=Path("cluster.toml"), help="the file to write (default cluster.toml)"
    )
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="launch N processes on this machine; without it join the torchrun group"
    )
    parser.add_argument("--backend", help="gloo or nccl (default nccl if every process has a GPU)")
    parser.add_argument("--mesh", metavar="N,M", help="shape of the mesh whose axes are measured (default one axis)")
    parser.add_argument("--name", help="name of the cluster (default that of the file)")
    parser.add_argument("--quick", action="store_true", help="measure small sizes only; takes seconds")


def run(arguments: argparse.Namespace) -> int:
    from autopar.profiling.group import join, run_under_torchrun

    if arguments.nproc is not None:
        if arguments.nproc < 1:
            raise MeshError("--nproc must be at least 1.", found=str(arguments.nproc), hint="use, say, --nproc 2.")
        return run_under_torchrun(arguments.nproc, _without_nproc(arguments.given))
    join(arguments.backend)
    return _measure(arguments)


def _without_nproc(given: list[str]) -> list[str]:
    kept = [a for a in given if not a.startswith("--nproc=")]
    while "--nproc" in kept:
        at = kept.index("--nproc")
        del kept[at : at + 2]
    return kept


def _measure(arguments: argparse.Namespace) -> int:
    import torch.distributed as dist

    from autopar.profiling import Effort, profile_cluster

    started = time.perf_counter()
    first = dist.get_rank() == 0
    effort = Effort(2**20, 2**18, 0.01) if arguments.quick else Effort()
    bar = Progress(
        TextColumn("{task.percentage:>3.0f}%"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        disable=not first,
    )
    with bar:
        task = bar.add_task("starting")
        cluster = profile_cluster(
            _mesh(arguments.mesh, dist.get_world_size()),
            name=arguments.name or arguments.output.stem,
            effort=effort,
            progress=lambda what, done, total: bar.update(task, completed=done, total=total, description=what),
        )
    if first:
        cluster.save(arguments.output)
        _show(cluster)
        took_s = time.perf_counter() - started
        print(f"\n{arguments.output} written after {took_s:.0f} s; use it as cluster={str(arguments.output)!r}")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _mesh(text: str | None, world_size: int) -> Mesh:
    if text is None:
        return Mesh((world_size,))
    sizes = text.split(",")
    if not all(s.isdecimal() and int(s) for s in sizes) or math.prod(map(int, sizes)) != world_size:
        raise MeshError(
            f"--mesh must be a shape of {world_size} ranks.", found=text, hint=f"use --mesh {world_size}, or omit it."
        )
    return Mesh(tuple(map(int, sizes)))


def _show(cluster: Cluster) -> None:
    console = Console(width=100)
    collectives = Table("collective", "ranks", "latency", "bandwidth", "fit error", title=cluster.description)
    for c in cluster.measured.collectives:
        ranks = f"{c.ranks_per_node}" + (f" x {c.nodes} nodes" if c.nodes > 1 else "")
        speed = f"{1e-9 / c.beta_s_per_byte:.3g} GB/s"
        collectives.add_row(c.kind, ranks, f"{c.alpha_s * 1e6:.4g} us", speed, f"{c.error:.0%}")
    kernels = Table("kernel", "dtype", "smallest", "largest", "best rate", "spread")
    for k in cluster.measured.kernels:
        rate = max(a / s for a, s in zip(k.curve.amounts, k.curve.seconds, strict=True)) * 1e-9
        unit = "GFLOP/s" if k.unit == "flops" else "GB/s"
        times = (f"{s * 1e6:,.4g} us" for s in (k.curve.seconds[0], k.curve.seconds[-1]))
        kernels.add_row(k.kind, k.dtype, *times, f"{rate:.4g} {unit}", f"{k.error:.0%}")
    if cluster.measured.collectives:
        console.print(collectives)
    console.print(kernels)
    m = cluster.measured
    console.print(f"overlap of communication and computation {m.overlap:.0%}, a call {m.call_s * 1e6:.2g} us")
