"""Creates the process group and DeviceMesh of a parallel module."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import _torch
from autopar.mesh import Mesh


def ensure_process_group() -> None:
    """Join the job that torchrun started, or start a job of one process, unless there is a process group."""
    if dist.is_initialized():
        return
    backend = "nccl" if device_type() == "cuda" else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def device_type() -> str:
    """Return the device type to train on: that of the process group, else cuda if there is a GPU."""
    if dist.is_initialized():
        return "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_mesh_for(mesh: Mesh, given: Any) -> DeviceMesh:
    """Return the torch DeviceMesh for ``mesh``: the user's own if they gave one."""
    _torch.idle_gloo_at_exit()
    if isinstance(given, DeviceMesh):
        return given
    return init_device_mesh(device_type(), mesh.shape, mesh_dim_names=mesh.names)
