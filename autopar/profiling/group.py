"""The process group that is measured: joined where a launcher started it, else launched or of one process."""

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
    """Whether torchrun, or something like it, started this process as one of several."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def join(backend: str | None = None) -> None:
    """Join the job that a launcher started, or be a job of one process, unless a process group is there.

    Args:
        backend: None is nccl where there is a GPU for each process of the node, else gloo.
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
    """The backend: nccl where each of ``processes`` on this node can have a GPU, else gloo."""
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= processes else "gloo"


def local_world_size() -> int:
    """Processes on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def run_under_torchrun(processes: int, arguments: Sequence[str]) -> int:
    """Run ``python -m autopar *arguments`` as ``processes`` processes of this machine; the exit status.

    Raises:
        AutoparError: a launcher has started this process already.
    """
    if launched():
        raise AutoparError(
            "Processes cannot be launched from a process that a launcher started.",
            found=f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set",
            hint="leave out --nproc: under torchrun, autopar profile joins the job.",
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
