from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.errors import AutoparError

# A fragment, so that a user's own library of this name (or a kernel for another device) can add to it.
LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
"""What each op runs, by its qualified name, for those who look inside."""


def define(schema: str, eager: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Add ``autopar::<schema>`` with one implementation for every device.

    ``fake`` gives outputs whose shape, dtype and strides are the real ones; every op returns new contiguous tensors,
    so that a captured graph and the local program agree on strides whatever the inputs' are.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    IMPLEMENTATIONS[f"autopar::{name}"] = eager
    LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{name}", fake, lib=LIBRARY)


def differentiate(name: str, backward: Callable[..., Any], setup_context: Callable[..., None] | None = None) -> None:
    torch.library.register_autograd(f"autopar::{name}", backward, setup_context=setup_context, lib=LIBRARY)


def once_differentiable(name: str) -> None:
    """Second derivatives through ``autopar::<name>``, the gradient of another op, are refused rather than lost."""

    def backward(ctx: Any, *_: Any) -> None:
        raise AutoparError(
            "The ops of autopar have first derivatives only.",
            found=f"a gradient through autopar::{name}",
            hint="Compute second derivatives (create_graph=True) with the model as it was before autoparallelize.",
        )

    differentiate(name, backward)


def without_gradient(name: str) -> None:
    """Results of ``autopar::<name>`` count as constants: whoever uses them accounts for what they depend on."""

    def backward(ctx: Any, *_: Any) -> None:
        raise AssertionError(f"autopar::{name} has no gradient")

    def constant(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))

    differentiate(name, backward, constant)


HALF = (torch.float16, torch.bfloat16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums over float16 and bfloat16 run in float32, as in torch's own kernels."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def layer_statistics_dtype(x: torch.Tensor, like: torch.dtype, weight: torch.Tensor | None) -> torch.dtype:
    """The dtype of a layer norm's statistics on the device of ``x``. torch's gradient may be what reads them, and on
    CPUs takes only what torch's layer norm makes there: that of the weight, or of what is normed where there is none.
    """
    if x.device.type == "cpu":
        return like if weight is None else weight.dtype
    return accumulation_dtype(like)
