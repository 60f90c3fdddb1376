"""The process group and DeviceMesh of a parallel module."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import _torch
from autopar.mesh import Mesh


def ensure_process_group(model: nn.Module) -> None:
    """Join the job that torchrun started, or be a job of one process, unless a process group is there."""
    if dist.is_initialized():
        return
    backend = "nccl" if device_type(model) == "cuda" else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def device_type(model: nn.Module) -> str:
    """Where to train: on CUDA when the process group or the model is there, or when there is a GPU and no group."""
    if dist.is_initialized():
        return "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_mesh_for(mesh: Mesh, given: Any, model: nn.Module) -> DeviceMesh:
    """The torch DeviceMesh of ``mesh``: the user's own when they gave one."""
    _torch.end_quietly()
    if isinstance(given, DeviceMesh):
        return given
    return init_device_mesh(device_type(model), mesh.shape, mesh_dim_names=mesh.names)
