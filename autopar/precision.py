"""Mixed precision: parameters, gradients and optimizer state stay as they are, and what autocast names computes lower.

The parameters are then the master weights, and gradients arrive and are reduced in their dtype.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from autopar.errors import AutoparError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def as_precision(mixed_precision: Any) -> str | None:
    """``"bf16"`` or ``"fp16"`` of one of these, or of a torch dtype; None stays None.

    Raises:
        AutoparError: it is none of these.
    """
    names = {dtype: name for name, dtype in DTYPES.items()} | {name: name for name in DTYPES}
    if mixed_precision is None:
        return None
    try:
        return names[mixed_precision]
    except (KeyError, TypeError):
        raise AutoparError(
            "mixed_precision names no precision.",
            found=repr(mixed_precision),
            hint='write "bf16" or "fp16"; for parameters in a lower precision convert the model: model.bfloat16().',
        ) from None


def computing_in(precision: str | None, device: str = "cpu") -> contextlib.AbstractContextManager[Any]:
    """Autocast to ``precision``; whatever surrounds it where that is None."""
    if precision is None:
        return contextlib.nullcontext()
    return torch.autocast(device, dtype=DTYPES[precision])
