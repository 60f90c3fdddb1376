"""Mixed precision: the dtypes of stored parameters, of ops, of reduced gradients and of the optimizer's step.

``"bf16"`` and ``"fp16"`` mean autocast: parameters, gradients and optimizer state keep their dtypes, and the parameters
are the master weights. A ``MixedPrecision`` sets each dtype separately.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float": "float32",
    "float32": "float32",
    "float64": "float64",
    "double": "float64",
}
_SHORT = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a training step; each is a name such as ``"bf16"``, a torch dtype, or None.

    Args:
        parameter: the dtype in which parameters are stored, converted when the model is made parallel; None keeps
            theirs.
        compute: the autocast dtype of every call; None means ``parameter`` if that has 16 bits, else no autocast.
        reduce: the dtype in which gradients are summed over micro-batches and ranks; None means the gradient's own.
        master: the dtype of the weights that the optimizer steps on, which ``autopar.training.MasterWeights`` keeps
            beside the parameters; None steps on the parameters.

    Raises:
        AutoparError: a dtype is not allowed for its purpose.
    """

    parameter: str | None = None
    compute: str | None = None
    reduce: str | None = None
    master: str | None = None

    def __post_init__(self) -> None:
        for name in ("parameter", "compute", "reduce", "master"):
            object.__setattr__(self, name, _dtype_name(name, getattr(self, name)))
        if self.compute is None and self.parameter in _SHORT:
            object.__setattr__(self, "compute", self.parameter)
        allowed = {
            "parameter": ("bfloat16", "float32", "float64"),
            "compute": ("bfloat16", "float16"),
            "reduce": ("bfloat16", "float32", "float64"),
            "master": ("float32", "float64"),
        }
        for name, dtypes in allowed.items():
            if getattr(self, name) not in (None, *dtypes):
                raise AutoparError(
                    f"MixedPrecision does not support this dtype for {name}.",
                    found=f"{name}={getattr(self, name)}",
                    hint=f"use one of {', '.join(dtypes)}."
                    + (' For fp16 pass mixed_precision="fp16".' if name == "parameter" else ""),
                )

    def __str__(self) -> str:
        """Return ``"bf16"`` for autocast alone, else ``"parameter=bfloat16,compute=bfloat16"``, for ``parse``."""
        given = {name: dtype for name, dtype in asdict(self).items() if dtype is not None}
        return _SHORT[given["compute"]] if set(given) == {"compute"} else ",".join(f"{k}={v}" for k, v in given.items())

    @staticmethod
    def parse(text: str) -> MixedPrecision:
        if "=" not in text:
            return MixedPrecision(compute=text)
        return _of_mapping(dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part))


_HINT = 'use "bf16", "fp16" or autopar.MixedPrecision(parameter="bf16", reduce="fp32", master="fp32").'


def _dtype_name(place: str, dtype: Any) -> str | None:
    if dtype is None:
        return None
    known = _NAMES.get(str(dtype).removeprefix("torch."))
    if known is None:
        raise AutoparError("mixed_precision is not a known precision.", found=f"{place}={dtype!r}", hint=_HINT)
    return known


def _of_mapping(dtypes: Mapping[str, Any]) -> MixedPrecision:
    unknown = set(dtypes) - set(MixedPrecision.__dataclass_fields__)
    if unknown:
        raise AutoparError("mixed_precision is not a known precision.", found=f"{sorted(unknown)}", hint=_HINT)
    return MixedPrecision(**dtypes)


def as_precision(mixed_precision: Any) -> str | None:
    """Return the text form of a precision.

    Args:
        mixed_precision: a ``MixedPrecision``, a dict of its arguments, FSDP2's ``MixedPrecisionPolicy``, or an autocast
            dtype: ``"bf16"``, ``"fp16"`` or a torch dtype. None stays None.

    Raises:
        AutoparError: it is none of these.
    """
    if mixed_precision is None:
        return None
    if isinstance(mixed_precision, MixedPrecision):
        return str(mixed_precision) or None
    if isinstance(mixed_precision, Mapping):
        return str(_of_mapping(mixed_precision)) or None
    if hasattr(mixed_precision, "param_dtype") and hasattr(mixed_precision, "reduce_dtype"):
        # FSDP2 stores parameters in their own dtype and casts them for computing.
        policy = MixedPrecision(compute=mixed_precision.param_dtype, reduce=mixed_precision.reduce_dtype)
        return str(policy) or None
    try:
        return str(MixedPrecision.parse(mixed_precision.removeprefix("torch.")))
    except AttributeError:
        pass
    if mixed_precision in DTYPES.values():
        return str(MixedPrecision(compute=mixed_precision))
    raise AutoparError("mixed_precision is not a known precision.", found=repr(mixed_precision), hint=_HINT)


@lru_cache(maxsize=64)
def policy_of(precision: str | None) -> MixedPrecision:
    return MixedPrecision() if precision is None else MixedPrecision.parse(precision)


def computing_in(precision: str | None, device: str = "cpu") -> contextlib.AbstractContextManager[Any]:
    """Return an autocast context for ``precision``; one that changes nothing if it sets no compute dtype."""
    compute = policy_of(precision).compute
    if compute is None:
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=getattr(torch, compute))


def stored_dtype(tensor: torch.Tensor, precision: str | None) -> torch.dtype:
    """Return the dtype in which a parallel model stores ``tensor``."""
    parameter = policy_of(precision).parameter
    if parameter is None or not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        return tensor.dtype
    return getattr(torch, parameter)  # type: ignore[no-any-return]
