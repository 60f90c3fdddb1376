"""The process group to measure: joined if a launcher started it, otherwise launched, or a single process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.errors import AutoparError


def launched() -> bool:
    """Whether torchrun or a similar launcher started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def join(backend: str | None = None) -> None:
    """Join the job that a launcher started, or form a job of one process, unless a process group exists already.

    Args:
        backend: by default nccl if each process of the node has a GPU, else gloo.
    """
    if dist.is_initialized():
        return
    chosen = backend or default_backend(local_world_size())
    if "nccl" in chosen:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    elif local_world_size() > 1:
        torch.set_num_threads(max((os.cpu_count() or 1) // local_world_size(), 1))
    if launched():
        dist.init_process_group(chosen)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(chosen, store=store, rank=0, world_size=1)


def default_backend(processes: int) -> str:
    """Return nccl if each of ``processes`` on this node can have a GPU, else gloo."""
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= processes else "gloo"


def local_world_size() -> int:
    """Return the number of processes on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def run_under_torchrun(processes: int, arguments: Sequence[str]) -> int:
    """Run ``python -m autopar *arguments`` as ``processes`` processes on this machine, and return the exit status.

    Raises:
        AutoparError: if a launcher started this process.
    """
    if launched():
        raise AutoparError(
            "--nproc cannot launch processes from a process that a launcher started.",
            found=f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set",
            hint="omit --nproc: under torchrun, autopar profile joins the job.",
        )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={processes}",
        "--master-addr=127.0.0.1",
        f"--master-port={_free_port()}",
        "-m",
        "autopar",
        *arguments,
    ]
    threads = str(max((os.cpu_count() or 1) // processes, 1))
    return subprocess.run(command, env={"OMP_NUM_THREADS": threads, **os.environ}, check=False).returncode


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
