"""Copies the user's model without allocating: every parameter and buffer becomes a fake CPU tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autopar._torch import FakeTensorMode
from autopar.errors import CaptureError, InputError
from autopar.structure import is_dense
from autopar.tracer.unread import describe, detach_stand_ins, stand_in

_OF_MODULES = frozenset(vars(nn.Module()))


def fake_like(
    tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype | None = None, name: str = "a tensor"
) -> torch.Tensor:
    """Return a fake CPU tensor with the same shape and strides, and the same dtype unless another is given.

    It is always on the CPU: a fake tensor on a device that torch was built without aborts the process in autograd, and
    on the meta device parts of the backward are missing.
    """
    if not is_dense(tensor):
        raise InputError(
            "Inputs of a parallel model must be dense tensors.",
            found=f"{name}: {describe(tensor)}",
            hint="pass indices and values as dense tensors and multiply with index_add, or pad ragged data.",
        )
    with mode:
        fake = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="cpu", requires_grad=tensor.requires_grad
        )
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def fake_copy(
    model: nn.Module, mode: FakeTensorMode, dtype_of: Callable[[torch.Tensor], torch.dtype] | None = None
) -> nn.Module:
    """Return a deep copy of ``model`` on fake tensors. Parameters that are one object stay one object.

    Args:
        dtype_of: returns the dtype in which a parameter or buffer is stored; None keeps its own.

    Raises:
        CaptureError: a tensor kept as a plain attribute has no values, or the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not is_dense(tensor):
            memo[id(tensor)] = stand_in(tensor, name)
        if id(tensor) not in memo:
            given = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
            memo[id(tensor)] = fake_like(given, mode, dtype_of(tensor) if dtype_of else None)
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            held = value if isinstance(value, (list, tuple, dict)) and key not in _OF_MODULES else [value]
            for tensor in tree_leaves(held):
                if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                    memo[id(tensor)] = _constant(tensor, f"{name}.{key}" if name else key)
    try:
        copied = copy.deepcopy(model, memo)
        detach_stand_ins(copied)
        return _as_written(copied)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"The model {type(model).__name__} cannot be copied, which capture requires.",
            found=f"{type(error).__name__}: {error}",
            hint="keep open files, locks and generators out of the model's attributes.",
        ) from error


class _WholeBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm over the whole batch, which is what SyncBatchNorm computes, and the captured program too."""

    def _check_input_dim(self, x: torch.Tensor) -> None:
        """Accept any number of dims."""


def _as_written(model: nn.Module) -> nn.Module:
    """Make the copy of a parallel model run the user's own code, without communication in any module."""
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = _WholeBatchNorm  # type: ignore[assignment]
        original = getattr(type(module), "_autopar_original", None)
        if original is not None:
            module.__class__ = original
            module.__dict__.pop("_autopar", None)
    return model


def _constant(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if not is_dense(tensor):
        return stand_in(tensor, name)
    if tensor.is_meta:
        raise CaptureError(
            f"The tensor {name} is a plain attribute on the meta device, so its values are unknown.",
            found=f"{tuple(tensor.shape)} {tensor.dtype}",
            hint="register it with register_buffer, or build the model on the CPU.",
        )
    return tensor.detach().cpu()
