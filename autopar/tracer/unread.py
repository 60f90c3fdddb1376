"""Sparse, nested and quantized tensors in a model, which no program takes.

Those that the forward does not read do not matter; the stand-in for one that it reads raises an error that names it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopar.errors import CaptureError

_ATTRIBUTES = (
    "shape",
    "dtype",
    "layout",
    "ndim",
    "requires_grad",
    "is_sparse",
    "is_sparse_csr",
    "is_nested",
    "is_quantized",
    "is_mkldnn",
    "is_meta",
)
_METHODS = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex)
_DESCRIBED = frozenset((*(getattr(Tensor, name).__get__ for name in _ATTRIBUTES), *_METHODS))
"""Functions that describe a tensor without reading its values."""


_HINTS = {
    "sparse": "keep its indices and values as two dense buffers, and write a product with it as index_select, a "
    "multiplication and index_add.",
    "nested": "pad it, torch.nested.to_padded_tensor(x, 0.0), and keep a mask of the entries that are not padding.",
    "quantized": "keep the values it stands for, x.dequantize(), or its int_repr(), scale and zero point.",
    "MKL-DNN": "keep x.to_dense().",
}


class StandIn(Tensor):
    """Describes the tensor that it stands for, and raises wherever an op reads it."""

    fqn: str
    of: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, StandIn))
        if func == Tensor.device.__get__:
            return torch.device("cpu")
        if func in _DESCRIBED:
            return func(found.of, *args[1:], **kwargs)
        if func is Tensor.__repr__:
            return f"<{found.fqn}>"
        raise _refused(found)


def stand_in(tensor: Tensor, name: str) -> StandIn:
    made = torch.empty(0).as_subclass(StandIn)
    made.__dict__.update(fqn=name, of=tensor.detach())
    return made


def detach_stand_ins(model: nn.Module) -> None:
    """Make stand-ins among the parameters and buffers of a copy plain attributes, which are not inputs."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name in [n for n, t in table.items() if isinstance(t, StandIn)]:
                module.__dict__[name] = table.pop(name)


def _refused(found: StandIn) -> CaptureError:
    tensor = found.of
    kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else "sparse"
    if tensor.is_mkldnn:
        kind = "MKL-DNN"
    return CaptureError(
        f"The forward reads {found.fqn}, a {kind} tensor, but programs take only dense tensors.",
        found=describe(tensor),
        hint=_HINTS[kind],
    )


def describe(tensor: Tensor) -> str:
    shape = "" if tensor.is_nested else f"{tuple(tensor.shape)} "
    return f"{shape}{tensor.dtype}, {tensor.layout}"
