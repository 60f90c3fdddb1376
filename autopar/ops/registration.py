from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.errors import AutoparError

# A fragment, so that another library of this name (or a kernel for another device) can add to it.
LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
"""The implementation of each op by qualified name."""


def define(schema: str, eager: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register ``autopar::<schema>`` with one implementation for every device.

    ``fake`` returns outputs with the real shape, dtype and strides. Every op returns new tensors, contiguous but for
    those of attention, so that a captured graph and the local program agree on strides whatever those of the inputs
    are.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    IMPLEMENTATIONS[f"autopar::{name}"] = eager
    LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{name}", fake, lib=LIBRARY)


def differentiate(name: str, backward: Callable[..., Any], setup_context: Callable[..., None] | None = None) -> None:
    torch.library.register_autograd(f"autopar::{name}", backward, setup_context=setup_context, lib=LIBRARY)


def once_differentiable(name: str) -> None:
    """Make second derivatives through ``autopar::<name>``, the gradient of another op, raise instead of being lost."""

    def backward(ctx: Any, *_: Any) -> None:
        raise AutoparError(
            "Ops of autopar only have first derivatives.",
            found=f"a gradient through autopar::{name}",
            hint="compute second derivatives (create_graph=True) with the model from before autoparallelize.",
        )

    differentiate(name, backward)


def without_gradient(name: str) -> None:
    """Treat results of ``autopar::<name>`` as constants. The ops that use them account for their gradient."""

    def backward(ctx: Any, *_: Any) -> None:
        raise AssertionError(f"autopar::{name} has no gradient")

    def constant(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))

    differentiate(name, backward, constant)


HALF = (torch.float16, torch.bfloat16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32 for float16 and bfloat16, as in torch's own kernels."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def layer_statistics_dtype(x: torch.Tensor, like: torch.dtype, weight: torch.Tensor | None) -> torch.dtype:
    """Return the dtype of a layer norm's statistics on the device of ``x``.

    torch's gradient may read them, and on CPUs it only takes the dtype that torch's layer norm uses there: that of the
    weight, or of the normalized tensor without a weight.
    """
    if x.device.type == "cpu":
        return like if weight is None else weight.dtype
    return accumulation_dtype(like)
