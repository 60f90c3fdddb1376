"""What a model holds that no program takes: sparse, nested and quantized tensors. One that the forward does not read is
no subject; the stand-in for one that it reads names it."""

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
"""What says what a tensor is, and reads nothing of it."""


_HINTS = {
    "sparse": "keep its indices and values as two dense buffers, and write a product with it as index_select, a "
    "multiplication and index_add.",
    "nested": "pad it, torch.nested.to_padded_tensor(x, 0.0), and keep a mask of what is no padding.",
    "quantized": "keep what it stands for, x.dequantize(), or its int_repr(), scale and zero point.",
    "MKL-DNN": "keep x.to_dense().",
}


class StandIn(Tensor):
    """Tells what the tensor that it stands for is, and raises wherever an op reads it."""

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


def take_out(model: nn.Module) -> None:
    """Of a copy in which stand-ins are parameters and buffers: make them plain attributes, which are no inputs."""
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
        f"The forward reads {found.fqn}, a {kind} tensor, and the program takes dense ones.",
        found=described(tensor),
        hint=_HINTS[kind],
    )


def described(tensor: Tensor) -> str:
    shape = "" if tensor.is_nested else f"{tuple(tensor.shape)} "
    return f"{shape}{tensor.dtype}, {tensor.layout}"
