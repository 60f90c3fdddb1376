"""Gradient clipping for any mixture of placements, as if all gradients were on one device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from autopar.errors import AutoparError
from autopar.runtime.pipeline.norms import over_stages, pipeline_of

Parameters = nn.Module | Tensor | Iterable[Tensor]


def clip_grad_norm_(
    parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients in place so that their norm over the model is at most ``max_norm``.

    Every rank must call it. It takes one collective for all parameters of a device mesh.

    Args:
        parameters: parameters of a model, or the model itself.
        norm_type: order p of the norm, positive; ``inf`` means the largest element.
        error_if_nonfinite: raise if the norm is nan or infinite; otherwise scale by it all the same.

    Returns:
        The norm before clipping, a plain scalar that is the same on every rank.

    Raises:
        AutoparError: ``norm_type`` is not positive, or the norm is not finite and ``error_if_nonfinite`` is set.
    """
    gradients = _gradients(parameters)
    norm = grad_norm(gradients, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise AutoparError(
            "The norm of the gradients is not finite.",
            found=f"norm {float(norm)} of order {norm_type}",
            hint="look for an overflow in the loss, or omit error_if_nonfinite.",
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = _local(gradient)
        local.mul_(factor.to(device=local.device, dtype=_real(local.dtype)))
    return norm


def clip_grad_value_(parameters: Parameters, clip_value: float) -> None:
    """Clamp every element of the gradients to ``[-clip_value, clip_value]`` in place.

    Gradients that are still partial sums are summed first, so every rank must call it.
    """
    for parameter in _parameters(parameters):
        if parameter.grad is not None:
            if isinstance(parameter.grad, DTensor):
                parameter.grad = _summed(parameter.grad)
            _local(parameter.grad).clamp_(-clip_value, clip_value)


def grad_norm(gradients: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all elements of ``gradients``, as if they were on one device, as a plain scalar.

    Replicas count once: of the ranks that hold the same shard, only the one at coordinate 0 of the replicating mesh
        axes
    contributes its sum of p-th powers. One all-reduce over the mesh adds up the contributions, and another those of a
    pipeline's stages.
    """
    if norm_type <= 0:
        raise AutoparError(
            "The order of a norm must be positive.", found=repr(norm_type), hint="use norm_type=2.0 or float('inf')."
        )
    found = pipeline_of(gradients)
    counted = gradients if found is None else found[1]
    of_meshes: dict[DeviceMesh | None, list[Tensor]] = {}
    for gradient in counted:
        of_meshes.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    totals = [_total_of_mesh(mesh, each, norm_type) for mesh, each in of_meshes.items()]
    device = _local(gradients[0]).device if gradients else torch.device("cpu")
    combined = _combined([t.to(device) for t in totals], norm_type, device)
    if found is not None:
        combined = over_stages(combined, found[0], norm_type)
    norm = combined if math.isinf(norm_type) else combined.pow(1.0 / norm_type)
    double = any(g.dtype in (torch.float64, torch.complex128) for g in gradients)
    return norm if double else norm.float()


def _total_of_mesh(mesh: DeviceMesh | None, gradients: Sequence[Tensor], p: float) -> Tensor:
    """Return the sum of p-th powers (or the largest element) over all ranks; plain gradients are equal on all."""
    if mesh is None:
        return _combined([_power(g, p) for g in gradients], p, gradients[0].device)
    parts = []
    for gradient in gradients:
        assert isinstance(gradient, DTensor)
        whole = _summed(gradient)
        if math.isinf(p) or _counts(whole):
            parts.append(_power(whole.to_local(), p))
    total = _combined(parts, p, _local(gradients[0]).device)
    return _reduced(total, mesh, dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM)


def _combined(parts: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack([part.to(device) for part in parts])
    return stacked.amax() if math.isinf(p) else stacked.sum()


def _power(local: Tensor, p: float) -> Tensor:
    """Return the p-th power of one shard's norm, or its largest element, in float64 to avoid overflow."""
    if local.numel() == 0:  # an uneven shard may be empty, and then has no largest element
        return torch.zeros((), dtype=torch.float64, device=local.device)
    exact = torch.float32 if local.dtype in (torch.float16, torch.bfloat16) else None
    norm: Tensor = torch.linalg.vector_norm(local.detach(), p, dtype=exact).double()
    return norm if math.isinf(p) else norm.pow(p)


def _counts(gradient: DTensor) -> bool:
    """Whether this rank's shard counts: it is the first among the ranks that hold the same shard."""
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(c == 0 for c, p in zip(coordinate, gradient.placements, strict=True) if isinstance(p, Replicate))


def _summed(gradient: DTensor) -> DTensor:
    """Return ``gradient`` with its partial sums reduced; a partial sum has no norm."""
    if not any(isinstance(p, Partial) for p in gradient.placements):
        return gradient
    return gradient.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in gradient.placements])


def _reduced(total: Tensor, mesh: DeviceMesh, op: dist.ReduceOp.RedOpType) -> Tensor:
    if mesh.size() == dist.get_world_size():
        dist.all_reduce(total, op)
        return total
    for axis in range(mesh.ndim):
        dist.all_reduce(total, op, group=mesh.get_group(axis))
    return total


def _parameters(parameters: Parameters) -> list[Tensor]:
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _gradients(parameters: Parameters) -> list[Tensor]:
    return [p.grad for p in _parameters(parameters) if p.grad is not None]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
