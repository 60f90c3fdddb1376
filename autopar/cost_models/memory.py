"""Bytes of optimizer state, and of an optimizer step's temporaries."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from autopar.errors import AutoparError
from autopar.ir import ITEMSIZE


@dataclass(frozen=True)
class OptimizerState:
    """The state that an optimizer holds for a parameter, and the temporaries of its step.

    Args:
        tensors: number of state tensors of the parameter's size and dtype.
        options: (option, number of further state tensors that it adds).
        bytes_per_element: bytes of state whose width does not follow the parameter's dtype.
        block: elements that share one float32 scale for each of ``bytes_per_element``; 0 for no scales.
        narrow_from: parameters with fewer elements than this have float32 state instead.
        tables: bytes of the code tables that all narrow state shares.
        factored: whether there is a second moment, factored into row and column sums if the parameter is a matrix.
        scalars: number of 0-dim float32 state tensors.
        foreach: temporaries of a foreach step, in multiples of each parameter's size.
        loop: temporaries of a for-loop step, in multiples of this parameter's size and of the previous one's, which
            Python variables still hold.
        begins: the same when a parameter's first temporary is created, if that may be more.
        decay: additional temporaries if weight decay is added to the gradient, for foreach and for-loop steps.
        largest: temporaries of a foreach step, in multiples of the largest parameter's size.
    """

    tensors: int = 0
    options: tuple[tuple[str, int], ...] = ()
    bytes_per_element: int = 0
    block: int = 0
    narrow_from: int = 0
    tables: int = 0
    factored: bool = False
    scalars: int = 1
    foreach: float = 1
    loop: tuple[float, float] = (1, 0)
    begins: tuple[float, float] = (0, 0)
    decay: tuple[int, int] = (0, 1)
    largest: float = 0


_ADAM = OptimizerState(2, (("amsgrad", 1),), loop=(2, 1))
_EIGHT_BIT = OptimizerState(
    bytes_per_element=2, block=256, narrow_from=4096, tables=2048, scalars=0, foreach=0, loop=(1, 0)
)

OPTIMIZERS: Mapping[str, OptimizerState] = {
    "adam": _ADAM,
    "adamw": replace(_ADAM, decay=(0, 0)),
    "nadam": OptimizerState(2, scalars=2, loop=(2, 1), decay=(1, 1)),
    "radam": OptimizerState(2, loop=(5, 0)),
    "adamax": OptimizerState(2),
    "adadelta": OptimizerState(2, foreach=2, loop=(2, 1), begins=(1, 2), decay=(1, 1)),
    "adagrad": OptimizerState(1, foreach=2, loop=(1, 1)),
    "adafactor": OptimizerState(factored=True, loop=(1, 1), decay=(0, 0)),
    "adam8bit": _EIGHT_BIT,
    "adamw8bit": _EIGHT_BIT,
    "asgd": OptimizerState(1, scalars=3, loop=(0, 0)),
    "lion": OptimizerState(1, scalars=0, foreach=2, loop=(2, 1), decay=(0, 0)),
    "muon": OptimizerState(1, scalars=0, foreach=3, loop=(3, 1), decay=(0, 0)),
    "rmsprop": OptimizerState(1, (("momentum", 1), ("centered", 1)), loop=(1, 1), decay=(1, 1)),
    "rprop": OptimizerState(2, foreach=1, largest=1.25, loop=(3, 0), decay=(0, 0)),
    "sgd": OptimizerState(0, (("momentum", 1),), scalars=0, foreach=0, loop=(0, 0), decay=(1, 1)),
    "sgdmomentum": OptimizerState(1, scalars=0, foreach=0, loop=(0, 0), decay=(1, 1)),
}
"""Optimizers by lower-case name without punctuation; a leading ``8bit`` moves to the end. Steps are those of torch."""

STEPPED_ALONE = (
    "adam",
    "adamw",
    "nadam",
    "radam",
    "adamax",
    "adadelta",
    "adagrad",
    "asgd",
    "rmsprop",
    "sgd",
    "sgdmomentum",
)
"""Optimizers whose step treats each parameter independently."""

TAKES_WHOLE: Mapping[str, tuple[str, ...]] = {
    "adafactor": (),
    "rprop": (),
    "sgd": ("fused",),
    "sgdmomentum": ("fused",),
    "adagrad": ("fused",),
}
"""Optimizers whose step needs whole parameters on every rank, always (()) or in these modes; see
`runtime.optimizers`."""

MODES = ("foreach", "fused", "forloop")
"""How a step processes the parameters: all at once op by op, in fused kernels, or one parameter after the other."""

FLAGS = ("amsgrad", "centered", "nesterov", "weightdecay")
"""Options that may follow an optimizer's name, as in ``"adam amsgrad foreach"``, besides momentum."""


def optimizer_state_bytes(
    optimizer: Any, numel: int, param_dtype: str, *, master_dtype: str | None = None, shape: tuple[int, ...] = ()
) -> int:
    """Return the bytes of state that an optimizer keeps for ``numel`` elements of a parameter or of a shard of it.

    Args:
        optimizer: a name ("adamw", "sgd", "sgd momentum", "8-bit adam", ...), an optimizer class or instance, a
            ``functools.partial`` of a class, or the number of bytes per element, master copy included.
        numel: elements of the parameter.
        param_dtype: dtype of the parameter, in which torch's optimizers keep their state.
        master_dtype: dtype of the master copy that the optimizer steps on, if there is one. The copy is counted here,
            and the state has its dtype.
        shape: shape of the parameter, for Adafactor. Without it the result for Adafactor is an upper bound, that of a
            vector, since a matrix of unknown shape may have as many row and column sums as elements.

    Raises:
        AutoparError: if the optimizer is unknown; the hint lists the known ones.
    """
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        if not 0 <= optimizer < math.inf:
            raise AutoparError(
                "An optimizer's bytes per element cannot be negative or infinite.",
                found=repr(optimizer),
                hint="use, say, optimizer=8 for two float32 states.",
            )
        return math.ceil(optimizer * numel)
    state, options = _find(optimizer)
    dtype = master_dtype or param_dtype
    tensors = state.tensors + sum(count for option, count in state.options if options.get(option))
    total = tensors * numel * ITEMSIZE[dtype]
    if state.bytes_per_element and numel < state.narrow_from:
        total += state.bytes_per_element * 4 * numel
    elif state.block:
        total += state.bytes_per_element * (numel + 4 * math.ceil(numel / state.block))
    if state.factored:
        total += _factored_numel(numel, shape) * ITEMSIZE[dtype]
    if master_dtype and master_dtype != param_dtype:
        total += numel * ITEMSIZE[master_dtype]
    return total


def optimizer_steps_alone(optimizer: Any) -> bool:
    """Whether a step treats parameters independently, so that a few may step at a time.

    False for an optimizer given as bytes per element, about which nothing is known.
    """
    if isinstance(optimizer, (int, float)):
        return False
    return any(_find(optimizer)[0] is OPTIMIZERS[name] for name in STEPPED_ALONE)


def optimizer_takes_whole(optimizer: Any) -> bool:
    """Whether a step needs whole parameters instead of shards."""
    if isinstance(optimizer, (int, float)):
        return False
    state, options = _find(optimizer)
    modes = next((modes for name, modes in TAKES_WHOLE.items() if OPTIMIZERS[name] is state), None)
    return modes is not None and (not modes or any(options.get(mode) for mode in modes))


def optimizer_scalar_bytes(optimizer: Any) -> int:
    """Return the bytes of 0-dim tensors that an optimizer keeps per parameter, such as the step count."""
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        return 0
    return 4 * _find(optimizer)[0].scalars


def optimizer_table_bytes(optimizer: Any, numels: Sequence[int]) -> int:
    """Return the bytes of state that parameters of ``numels`` elements share."""
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        return 0
    state = _find(optimizer)[0]
    return state.tables if any(n >= state.narrow_from for n in numels) else 0


def optimizer_mode(optimizer: Any, device: str = "cuda") -> str:
    """Return how the step processes the parameters, one of ``MODES``.

    Torch's default depends on the device: foreach on accelerators, a for-loop on a CPU.
    """
    default = "forloop" if device == "cpu" else "foreach"
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        return "foreach"
    _, options = _find(optimizer)
    for mode in MODES:
        if options.get(mode):
            return mode
    return "forloop" if options.get("foreach") is False or options.get("forloop") else default


def optimizer_step_bytes(
    optimizer: Any,
    numels: Sequence[int],
    param_dtype: str,
    *,
    master_dtype: str | None = None,
    device: str = "cuda",
    shapes: Sequence[tuple[int, ...]] = (),
) -> int:
    """Return the bytes of a step's temporaries, besides parameters, gradients and state.

    Args:
        optimizer: as in ``optimizer_state_bytes``; bytes per element are assumed to need one temporary per parameter.
        numels: elements of each parameter, in the optimizer's order.
        param_dtype: dtype of the parameters.
        master_dtype: dtype of the master copies that the optimizer steps on, if there are any.
        device: ``"cpu"`` or ``"cuda"``, for torch's default mode.
        shapes: shapes of the parameters, for Adafactor, whose step is only bounded without them.

    Raises:
        AutoparError: if the optimizer is unknown.
    """
    itemsize = ITEMSIZE[master_dtype or param_dtype]
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        return sum(numels) * itemsize
    state, options = _find(optimizer)
    mode = optimizer_mode(optimizer, device)
    decays = 1 if options.get("weight_decay") or options.get("weightdecay") else 0
    nesterov = 1 if options.get("nesterov") else 0
    if mode == "fused":
        return 0
    if state.factored:
        known = shapes or [(n,) for n in numels]
        return itemsize * (_factored_foreach(known) if mode == "foreach" else _factored_loop(known))
    if mode == "foreach":
        together = (state.foreach + decays * state.decay[0]) * sum(numels) + state.largest * max(numels, default=0)
        return math.ceil(together * itemsize) + (itemsize if state.largest else 0)
    further = decays * state.decay[1] + nesterov
    most = 0.0
    for own, before in (state.loop, state.begins):
        pairs = zip(numels, (0, *numels), strict=False)
        most = max(most, *((own + further) * n + before * last for n, last in pairs), 0.0)
    return math.ceil(most * itemsize)


def _factored_foreach(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the elements that Adafactor's foreach step creates: variances, and means of the row sums."""
    return sum(math.prod(shape) + math.prod(shape[:-2]) for shape in shapes) + 1


def _factored_loop(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the peak elements of Adafactor's for-loop step.

    Its variables still hold what earlier parameters created: the last update, the squares of the last vector, and the
    row and column means of the last matrix.
    """
    most = update = squares = means = 0
    for shape in shapes:
        numel, before = math.prod(shape), update + squares + means
        if len(shape) > 1:
            fresh = _factored_numel(numel, shape)
            most = max(most, before + fresh)
            means = fresh
            most = max(most, update + squares + means + numel + math.prod(shape[:-2]))
        else:
            most = max(most, before + numel)
            squares = numel
            most = max(most, update + squares + means + numel)
        update = numel
    return most


def _factored_numel(numel: int, shape: tuple[int, ...]) -> int:
    if len(shape) < 2:
        return numel + 1
    batch = math.prod(shape[:-2])
    return batch * (shape[-2] + shape[-1])


def _find(optimizer: Any) -> tuple[OptimizerState, Mapping[str, Any]]:
    """Return the entry of ``OPTIMIZERS``, and the options that the optimizer was created with."""
    options: Mapping[str, Any] = {}
    if isinstance(optimizer, partial):
        optimizer, options = optimizer.func, optimizer.keywords
    if not isinstance(optimizer, type) and hasattr(optimizer, "param_groups"):
        optimizer, options = type(optimizer), getattr(optimizer, "defaults", {})
    names = [cls.__name__ for cls in optimizer.__mro__] if isinstance(optimizer, type) else [str(optimizer)]
    if isinstance(optimizer, str):
        names[0], options = _without_options(optimizer)
    for name in map(_canonical_name, names):
        if name in OPTIMIZERS:
            return OPTIMIZERS[name], options
    raise AutoparError(
        "The state of this optimizer is not known.",
        found=names[0],
        hint=f"use one of {', '.join(sorted(OPTIMIZERS))}, a class with such a name, or bytes per parameter element.",
    )


@lru_cache(maxsize=64)
def _without_options(text: str) -> tuple[str, Mapping[str, bool]]:
    """Split a text such as ``"adam amsgrad foreach"`` into the name and its options."""
    options: dict[str, bool] = {}
    name = text.lower().replace("for-loop", "forloop").replace("for loop", "forloop")
    name = name.replace("weight decay", "weightdecay").replace("weight_decay", "weightdecay")
    for word in (*MODES, *FLAGS):
        shorter = re.sub(rf"\b{word}\b", "", name)
        if shorter != name:
            name, options[word] = shorter, True
    base = re.sub(r"[^a-z0-9]", "", name).removesuffix("momentum")
    if "momentum" in name and ("momentum", 1) in OPTIMIZERS.get(base, OptimizerState()).options:
        name, options["momentum"] = base, True
    return name, options


def _canonical_name(name: str) -> str:
    name = re.sub(r"[^a-z0-9]", "", name.lower())
    if name.startswith("8bit"):
        name = name.removeprefix("8bit") + "8bit"
    return {"sgdm": "sgdmomentum", "sgdwithmomentum": "sgdmomentum", "momentum": "sgdmomentum"}.get(name, name)
