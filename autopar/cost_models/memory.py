"""Bytes of optimizer state, and of what an optimizer's step needs besides."""

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
    """What an optimizer holds for a parameter, and what its step makes besides.

    Args:
        tensors: state tensors as large as the parameter, in its dtype.
        options: further ones by the option that asks for them.
        bytes_per_element: of state whose width does not follow the parameter's dtype.
        block: elements that share one float32 scale for each of ``bytes_per_element``; 0 for none.
        narrow_from: elements from which on state is as narrow as that; below it is float32.
        tables: bytes that all narrow state shares, of what its codes stand for.
        factored: one more second moment, kept as the sums of rows and columns where the parameter is a matrix.
        scalars: 0-dim float32 tensors of state.
        foreach: temporaries of the step that takes all parameters at once, in tensors as large as each.
        loop: temporaries of the step that takes one after the other: in tensors as large as this parameter, and
            as the one before, which Python's variables still hold.
        begins: the same while a parameter's first temporary is made, where that may be more.
        decay: what weight decay that is added to the gradient makes besides: ``foreach``, and in the loop.
        largest: temporaries of the step that takes all at once, in tensors as large as the largest parameter.
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
"""By name in lower case without punctuation; names that put ``8bit`` first are turned round. Steps are torch's."""

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
"""Those whose step treats each parameter alone."""

TAKES_WHOLE: Mapping[str, tuple[str, ...]] = {
    "adafactor": (),
    "rprop": (),
    "sgd": ("fused",),
    "sgdmomentum": ("fused",),
    "adagrad": ("fused",),
}
"""Those whose step needs each parameter whole on every rank, always or in these modes: see `runtime.optimizers`."""

MODES = ("foreach", "fused", "forloop")
"""How a step goes over the parameters: all at once, in one kernel each, or op by op one after the other."""

FLAGS = ("amsgrad", "centered", "nesterov", "weightdecay")
"""Options that may follow an optimizer's name, as in ``"adam amsgrad foreach"``; momentum is one too."""


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
    """Whether a step treats each parameter alone, so that a few may step at a time; of bytes for each element nobody
    knows."""
    if isinstance(optimizer, (int, float)):
        return False
    return any(_find(optimizer)[0] is OPTIMIZERS[name] for name in STEPPED_ALONE)


def optimizer_takes_whole(optimizer: Any) -> bool:
    """Whether a step works on whole parameters only, not on shards."""
    if isinstance(optimizer, (int, float)):
        return False
    state, options = _find(optimizer)
    modes = next((modes for name, modes in TAKES_WHOLE.items() if OPTIMIZERS[name] is state), None)
    return modes is not None and (not modes or any(options.get(mode) for mode in modes))


def optimizer_scalar_bytes(optimizer: Any) -> int:
    """Bytes of the 0-dim tensors that an optimizer keeps for one parameter, such as the number of its steps."""
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        return 0
    return 4 * _find(optimizer)[0].scalars


def optimizer_table_bytes(optimizer: Any, numels: Sequence[int]) -> int:
    """Bytes of state that parameters of ``numels`` elements share."""
    if isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool):
        return 0
    state = _find(optimizer)[0]
    return state.tables if any(n >= state.narrow_from for n in numels) else 0


def optimizer_mode(optimizer: Any, device: str = "cuda") -> str:
    """How the step goes over the parameters: one of ``MODES``. Torch's own choice hangs on the device: all at once on
    accelerators, one after the other on a CPU."""
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
    """Bytes that a step makes besides parameters, gradients and state.

    Args:
        optimizer: as in ``optimizer_state_bytes``; given as bytes for each element it makes one more parameter.
        numels: elements of each parameter, in the optimizer's order.
        param_dtype: of the parameters.
        master_dtype: of the copies that the optimizer steps on, where they are not the parameters.
        device: ``"cpu"`` or ``"cuda"``, for torch's default mode.
        shapes: of the parameters, for Adafactor, whose step is bounded without them.

    Raises:
        AutoparError: no such optimizer.
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
    """Elements that Adafactor's step makes for all parameters at once: the variances, and means of their rows' sums."""
    return sum(math.prod(shape) + math.prod(shape[:-2]) for shape in shapes) + 1


def _factored_loop(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements that Adafactor's step makes in a loop, whose variables still hold what the parameters before made: the
    last update, the last vector's squares, and the last matrix's means of rows and columns."""
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
    """The entry of ``OPTIMIZERS``, and the options that it was made with."""
    options: Mapping[str, Any] = {}
    if isinstance(optimizer, partial):
        optimizer, options = optimizer.func, optimizer.keywords
    if not isinstance(optimizer, type) and hasattr(optimizer, "param_groups"):
        optimizer, options = type(optimizer), getattr(optimizer, "defaults", {})
    names = [cls.__name__ for cls in optimizer.__mro__] if isinstance(optimizer, type) else [str(optimizer)]
    if isinstance(optimizer, str):
        names[0], options = _without_options(optimizer)
    for name in map(_normalise, names):
        if name in OPTIMIZERS:
            return OPTIMIZERS[name], options
    raise AutoparError(
        "The state of this optimizer is not known.",
        found=names[0],
        hint=f"one of {', '.join(sorted(OPTIMIZERS))}, a class of one of these names, or bytes per parameter element.",
    )


@lru_cache(maxsize=64)
def _without_options(text: str) -> tuple[str, Mapping[str, bool]]:
    """``"adam amsgrad foreach"`` as the name and the options that follow it."""
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


def _normalise(name: str) -> str:
    name = re.sub(r"[^a-z0-9]", "", name.lower())
    if name.startswith("8bit"):
        name = name.removeprefix("8bit") + "8bit"
    return {"sgdm": "sgdmomentum", "sgdwithmomentum": "sgdmomentum", "momentum": "sgdmomentum"}.get(name, name)
