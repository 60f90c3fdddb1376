"""Bytes of optimizer state, and of what an optimizer's step needs besides."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from autopar.errors import AutoparError
from autopar.ir import ITEMSIZE


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer holds for a parameter.

    Args:
        tensors: state tensors as large as the parameter, in its dtype.
        options: further ones by the option that asks for them.
        bytes_per_element: of state whose width does not follow the parameter's dtype.
        block: elements that share one float32 scale for each of ``bytes_per_element``; 0 for none.
        factored: one more second moment, kept as the sums of rows and columns where the parameter is a matrix.
        temporaries: tensors as large as the parameter that the step holds at its peak, besides the state.
    """

    tensors: int = 0
    options: tuple[tuple[str, int], ...] = ()
    bytes_per_element: int = 0
    block: int = 0
    factored: bool = False
    temporaries: int = 1


_ADAM = OptimizerState(2, (("amsgrad", 1),))
_EIGHT_BIT = OptimizerState(bytes_per_element=2, block=256)

OPTIMIZERS: Mapping[str, OptimizerState] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "nadam": OptimizerState(2, temporaries=2),
    "radam": OptimizerState(2),
    "adamax": OptimizerState(2),
    "adadelta": OptimizerState(2, temporaries=3),
    "adagrad": OptimizerState(1, temporaries=2),
    "adafactor": OptimizerState(factored=True),
    "adam8bit": _EIGHT_BIT,
    "adamw8bit": _EIGHT_BIT,
    "asgd": OptimizerState(1),
    "lion": OptimizerState(1, temporaries=2),
    "muon": OptimizerState(1, temporaries=3),
    "rmsprop": OptimizerState(1, (("momentum", 1), ("centered", 1)), temporaries=2),
    "rprop": OptimizerState(2, temporaries=2),
    "sgd": OptimizerState(0, (("momentum", 1),)),
    "sgdmomentum": OptimizerState(1),
}
"""By name in lower case without punctuation; names that put ``8bit`` first are turned round."""


def optimizer_state_bytes(
    optimizer: Any, numel: int, param_dtype: str, *, master_dtype: str | None = None, shape: tuple[int, ...] = ()
) -> int:
    """Bytes of the state that an optimizer keeps for ``numel`` elements of one parameter (or of one shard of it).

    Args:
        optimizer: a name ("adamw", "sgd", "sgd momentum", "8-bit adam", ...), an optimizer class or instance, a
            ``functools.partial`` of a class, or the number of bytes for each element, master copy included.
        numel: elements of the parameter.
        param_dtype: of the parameter, which torch's optimizers keep their state in.
        master_dtype: of the copy that the optimizer steps on where it isn't the parameter itself; it is counted
            here, and the state then is in this dtype.
        shape: of the parameter, for Adafactor. Without it the answer for Adafactor is an upper estimate, that of a
            vector, since the row and column sums of an unknown matrix may be as many as its elements.

    Raises:
        AutoparError: no such optimizer; the hint lists those known.
    """
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        if not 0 <= optimizer < math.inf:
            raise AutoparError(
                "An optimizer's bytes per element cannot be negative or infinite.",
                found=repr(optimizer),
                hint="optimizer=8 for two float32 states.",
            )
        return math.ceil(optimizer * numel)
    state, options = _find(optimizer)
    dtype = master_dtype or param_dtype
    tensors = state.tensors + sum(count for option, count in state.options if options.get(option))
    total = tensors * numel * ITEMSIZE[dtype] + state.bytes_per_element * numel
    if state.block:
        total += state.bytes_per_element * 4 * math.ceil(numel / state.block)
    if state.factored:
        total += _factored_numel(numel, shape) * ITEMSIZE[dtype]
    if master_dtype and master_dtype != param_dtype:
        total += numel * ITEMSIZE[master_dtype]
    return total


def optimizer_step_bytes(optimizer: Any, numel: int, param_dtype: str, *, master_dtype: str | None = None) -> int:
    """Upper estimate of the bytes that a step needs besides parameters, gradients and state.

    Pass the elements of all parameters on the device for ``foreach`` implementations, torch's default on
    accelerators, and those of the largest parameter for ``foreach=False`` and Muon. Weight decay is taken to be
    added to the gradient, as most torch optimizers do. Instances with ``fused=True`` need nothing; an optimizer given
    as bytes for each element is taken to need one parameter's worth.

    Raises:
        AutoparError: no such optimizer.
    """
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        temporaries = 1
    else:
        state, options = _find(optimizer)
        temporaries = 0 if options.get("fused") else state.temporaries
    return temporaries * numel * ITEMSIZE[master_dtype or param_dtype]


def _factored_numel(numel: int, shape: tuple[int, ...]) -> int:
    if len(shape) < 2:
        return numel + 1
    batch = math.prod(shape[:-2])
    return batch * (shape[-2] + shape[-1])


def _find(optimizer: Any) -> tuple[OptimizerState, Mapping[str, Any]]:
    """The entry of ``OPTIMIZERS``, and the options that it was made with."""
    options: Mapping[str, Any] = {}
    if isinstance(optimizer, partial):
        optimizer, options = optimizer.func, optimizer.keywords
    if not isinstance(optimizer, type) and hasattr(optimizer, "param_groups"):
        optimizer, options = type(optimizer), getattr(optimizer, "defaults", {})
    names = [cls.__name__ for cls in optimizer.__mro__] if isinstance(optimizer, type) else [str(optimizer)]
    for name in map(_normalise, names):
        if name in OPTIMIZERS:
            return OPTIMIZERS[name], options
    raise AutoparError(
        "The state of this optimizer is not known.",
        found=names[0],
        hint=f"one of {', '.join(sorted(OPTIMIZERS))}, a class of one of these names, or bytes per parameter element.",
    )


def _normalise(name: str) -> str:
    name = re.sub(r"[^a-z0-9]", "", name.lower())
    if name.startswith("8bit"):
        name = name.removeprefix("8bit") + "8bit"
    return {"sgdm": "sgdmomentum", "sgdwithmomentum": "sgdmomentum", "momentum": "sgdmomentum"}.get(name, name)
