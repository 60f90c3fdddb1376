"""Loads plain state dicts into parallel models: each whole tensor is sharded like its parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.attributes import absent_from
from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.runtime.shard_step import SCALARS, is_marked
from autopar.spmd.placements import from_placements


def accept_whole_tensors(model: nn.Module) -> None:
    """Make ``load_state_dict`` of ``model`` and its modules accept whole tensors beside DTensors."""
    for module in model.modules():
        absent = any(absent_from(table) for table in (module._parameters, module._buffers))
        if absent or any(isinstance(p, DTensor) for p in module._parameters.values()):
            module.register_load_state_dict_pre_hook(_cut)  # type: ignore[no-untyped-call]


def _cut(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Shard whole tensors in ``state_dict``, which is load_state_dict's own copy: the caller's dict is unaffected.

    Tensors that other ranks hold are dropped from it.
    """
    for table in (module._parameters, module._buffers):
        for name in absent_from(table):
            if table.get(name) is None:
                state_dict.pop(prefix + name, None)
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
    """Assign ``parameter.data`` for a parameter of a parallel model, of which this rank keeps its shard.

    Returns:
        Whether ``parameter`` belongs to a parallel model; if not, nothing was done.

    Raises:
        AutoparError: the value has another shape or dtype.
    """
    if not is_marked(parameter):
        return False
    if value.shape != parameter.shape or value.dtype != parameter.dtype:
        raise AutoparError(
            "A parameter of a parallel model cannot change its shape or dtype.",
            found=f"data of {tuple(value.shape)} {value.dtype} for {tuple(parameter.shape)} {parameter.dtype}",
            hint="assign the whole tensor; replace the module for another shape, and use model.to for another dtype.",
        )
    with torch.no_grad():
        if not isinstance(value, DTensor):
            value = shard_like(value, parameter)
        _torch.replace_shard(parameter, value.redistribute(parameter.device_mesh, parameter.placements).to_local())
    return True


def state_like(key: str, value: Any, parameter: Tensor) -> Any:
    """Shard optimizer state like its parameter if it has one element per parameter element, else return it as it is."""
    whole = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape
    return shard_like(value, parameter) if whole and isinstance(parameter, DTensor) and key not in SCALARS else value


def shard_like(whole: Tensor, like: DTensor) -> DTensor:
    """Return this rank's shard of ``whole``, placed like ``like``, without communication."""
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
