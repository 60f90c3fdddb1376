"""Plain state dicts into parallel models: each whole tensor is cut as its parameter is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.runtime.shard_step import SCALARS, is_marked
from autopar.spmd.placements import from_placements


def accept_whole_tensors(model: nn.Module) -> None:
    """Let ``load_state_dict`` of ``model`` and its modules take whole tensors beside DTensors."""
    for module in model.modules():
        if any(isinstance(p, DTensor) for p in module._parameters.values()):
            module.register_load_state_dict_pre_hook(_cut)  # type: ignore[no-untyped-call]


def _cut(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """``state_dict`` is load_state_dict's own shallow copy, so the caller's stays as it is."""
    for name, parameter in dict[str, Any](module._parameters).items():
        value = state_dict.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
            if value.shape == parameter.shape:
                state_dict[prefix + name] = shard_like(value, parameter)
            elif value.shape == parameter.to_local().shape:
                raise AutoparError(
                    f"The state dict holds a shard of {prefix}{name}, not the whole parameter.",
                    found=f"{tuple(value.shape)}; the parameter is {tuple(parameter.shape)}",
                    hint="load it with torch.distributed.checkpoint, which knows where shards belong.",
                )


def put_data(parameter: DTensor, value: Tensor) -> bool:
    """``parameter.data = value`` for a parameter of a parallel model: this rank keeps its shard of a whole tensor.

    Returns:
        Whether the parameter is one.

    Raises:
        AutoparError: the value has another shape or dtype.
    """
    if not is_marked(parameter):
        return False
    if value.shape != parameter.shape or value.dtype != parameter.dtype:
        raise AutoparError(
            "A parameter of a parallel model keeps its shape and dtype.",
            found=f"data of {tuple(value.shape)} {value.dtype} for {tuple(parameter.shape)} {parameter.dtype}",
            hint="assign the whole tensor; replace the module for another shape, and use model.to for another dtype.",
        )
    with torch.no_grad():
        if not isinstance(value, DTensor):
            value = shard_like(value, parameter)
        _torch.replace_shard(parameter, value.redistribute(parameter.device_mesh, parameter.placements).to_local())
    return True


def state_like(key: str, value: Any, parameter: Tensor) -> Any:
    """Optimizer state of a parameter, cut as that is where it has an element for each of its elements."""
    whole = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape
    return shard_like(value, parameter) if whole and isinstance(parameter, DTensor) and key not in SCALARS else value


def shard_like(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's shard of ``whole``, without communication, placed as ``like``."""
    device_mesh = like.device_mesh
    mesh = Mesh(tuple(device_mesh.mesh.shape))
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    spec = from_placements(like.placements, whole.ndim, mesh)
    part = whole.detach()[spec.local_slices(tuple(whole.shape), mesh, coordinate)]
    local = part.to(like.to_local().device, copy=True).contiguous()
    return DTensor.from_local(
        local, device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
