"""Parameters and buffers as DTensors: each rank keeps its shard, and holds at most one whole parameter at a time."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.sharding import ShardingSpec
from autopar.spmd.placements import to_placements

Owner = tuple[nn.Module, str, str]


def owners(model: nn.Module) -> dict[int, list[Owner]]:
    """Every place (module, attribute, FQN) that holds a parameter or buffer, by the tensor's identity."""
    found: dict[int, list[Owner]] = {}
    for path, module in model.named_modules(remove_duplicate=True):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append((module, name, f"{path}.{name}" if path else name))
    return found


def materialize(
    model: nn.Module, specs: Mapping[str, ShardingSpec], mesh: Mesh, device_mesh: DeviceMesh,
    coordinate: tuple[int, ...], device: torch.device, seed: int,
) -> None:  # fmt: skip
    """Replace every parameter by a DTensor at its spec, and put buffers on ``device``.

    Tensors on the meta device are initialised by their module's own ``reset_parameters`` or the model's
    ``_init_weights``, one at a time, from a seed of their own: the values are the same on every mesh.
    """
    for places in list(owners(model).values()):
        module, name, fqn = places[0]
        is_parameter = name in module._parameters
        table = module._parameters if is_parameter else module._buffers
        old = table[name]
        assert old is not None
        whole = _initialised(model, module, name, fqn, seed) if old.is_meta else old.detach()
        if not is_parameter:
            new: Any = whole.to(device)
        else:
            spec = next((specs[f] for _, _, f in places if f in specs), ShardingSpec.replicated(whole.ndim))
            new = _parameter(whole, spec, mesh, device_mesh, coordinate, device, old.requires_grad)
        del whole
        for owner, attribute, _ in places:
            (owner._parameters if is_parameter else owner._buffers)[attribute] = new


def _parameter(
    whole: Tensor, spec: ShardingSpec, mesh: Mesh, device_mesh: DeviceMesh, coordinate: tuple[int, ...],
    device: torch.device, requires_grad: bool,
) -> nn.Parameter:  # fmt: skip
    part = whole[spec.local_slices(tuple(whole.shape), mesh, coordinate)]
    local = part.to(device, copy=True).contiguous()
    stride = torch.empty(whole.shape, device="meta").stride()
    tensor = DTensor.from_local(
        local, device_mesh, to_placements(spec, mesh, tuple(whole.shape)), run_check=False,
        shape=whole.shape, stride=stride,
    )  # fmt: skip
    return nn.Parameter(tensor, requires_grad=requires_grad)


def _initialised(model: nn.Module, module: nn.Module, name: str, fqn: str, seed: int) -> Tensor:
    """The whole tensor, initialised alone: every other tensor of its module stays on the meta device."""
    table = module._parameters if name in module._parameters else module._buffers
    meta = table[name]
    assert meta is not None
    real = torch.full_like(meta, float("nan") if meta.is_floating_point() else 0, device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed((seed + zlib.crc32(fqn.encode())) % 2**31)
        table[name] = nn.Parameter(real, requires_grad=meta.requires_grad) if isinstance(meta, nn.Parameter) else real
        try:
            _initialiser(model, module, fqn)()
            result = table[name]
        finally:
            table[name] = meta
    assert result is not None
    if result.is_meta or (result.is_floating_point() and bool(result.isnan().any())):
        raise _uninitialised(fqn, module)
    return result.detach()


def _initialiser(model: nn.Module, module: nn.Module, fqn: str) -> Callable[[], Any]:
    init = getattr(model, "_init_weights", None)
    if callable(init):
        return lambda: init(module)
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        return reset  # type: ignore[no-any-return]
    raise _uninitialised(fqn, module)


def _uninitialised(fqn: str, module: nn.Module) -> AutoparError:
    return AutoparError(
        f"{fqn} is on the meta device and nothing initialises it.",
        found=f"{type(module).__name__} without a reset_parameters() that sets it",
        hint="give the module a reset_parameters method, or build the model on the CPU.",
    )
