"""Optimizer state that the host keeps between the optimizer's steps.

The optimizer stays the user's own. A hook before its step runs that step on a few parameters at a time: their state
comes from the host, they step on the device, and the state goes back, so the device never holds more than one such
chunk of it. Each parameter gets what one step over all of them would have given it, bit for bit. Stepping on the host's
processor instead (Ren et al., ZeRO-Offload, 2021) moves less, but computes elsewhere and on slower kernels.

That holds for optimizers that treat each parameter alone, as torch's do. For any other, all of the state comes before
the step and goes after it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autopar import _torch
from autopar.cost_models import optimizer_chunk_bytes
from autopar.spmd import HostTensor, Rank, arrived, fetch, host_memory, offload

_optim = torch.optim

ALONE = (
    _optim.SGD,
    _optim.Adam,
    _optim.AdamW,
    _optim.Adagrad,
    _optim.RMSprop,
    _optim.NAdam,
    _optim.RAdam,
    _optim.Adamax,
    _optim.Adadelta,
    _optim.ASGD,
)
"""Optimizers whose step treats each parameter alone."""

BLOCKWISE = ("Adam8bit", "AdamW8bit")
"""Those of bitsandbytes that do, whose blocks are then those of a shard."""

Parameters = Sequence[nn.Parameter]


def keep_state_on_host(parameter: nn.Parameter, rank: Rank) -> None:
    """From now on the host keeps the state that optimizers have for ``parameter``."""
    parameter._autopar_state_rank = rank  # type: ignore[attr-defined]
    _watch()


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_prepare)


_hooked: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()


def _prepare(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The optimizer's own hooks run after those that are for all: ours comes last of them, right before the step."""
    if not any(map(is_away, _parameters(optimizer))):
        return
    if optimizer in _hooked:
        _hooked[optimizer].remove()
    else:
        optimizer.register_step_post_hook(_after_step)
        optimizer.register_load_state_dict_post_hook(_send_all)
    _hooked[optimizer] = optimizer.register_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Step the parameters whose state is away, and leave the others to the step that was called."""
    step = step_below_hooks(optimizer)
    if step is None:
        _warn_of_all(type(optimizer).__name__)
        _fetch(optimizer, _stepping(_parameters(optimizer)))
        return None
    args, kwargs = evaluated(args, kwargs)
    most = _chunk_bytes(optimizer)
    for group in optimizer.param_groups:
        for chunk in _chunks(_stepping(group["params"]), most):
            _fetch(optimizer, chunk)
            try:
                step(on_groups(optimizer, [{**group, "params": chunk}]))
            finally:
                _send(optimizer, chunk)
    others = [{**g, "params": [p for p in g["params"] if not is_away(p)]} for g in optimizer.param_groups]
    return (on_groups(optimizer, others), *args[1:]), kwargs


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if step_below_hooks(optimizer) is None:
        _send_all(optimizer)


def _send_all(optimizer: Optimizer) -> None:
    for chunk in _chunks([p for p in _parameters(optimizer) if is_away(p)], _chunk_bytes(optimizer)):
        _send(optimizer, chunk)


def _chunk_bytes(optimizer: Optimizer) -> int:
    """Bytes of parameters that step together, as the plan counts their state."""
    return optimizer_chunk_bytes(sum(_local(p).nbytes for p in _parameters(optimizer) if is_away(p)))


def step_below_hooks(optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
    """The optimizer's step below its hooks; None where it may look at several parameters together."""
    step: Any = type(optimizer).step
    if any(step is kind.step for kind in ALONE):
        return step.__wrapped__  # type: ignore[no-any-return]
    kind = type(optimizer)
    below = f"{kind.__module__}.".startswith("bitsandbytes.") and kind.__name__ in BLOCKWISE
    return getattr(step, "__wrapped__", None) if below else None


@cache
def _warn_of_all(name: str) -> None:
    warnings.warn(
        f"The plan keeps optimizer state on the host, but {name} may look at several parameters together: all of its "
        "state comes to the device for its step, more than was planned.",
        stacklevel=5,
    )


def evaluated(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step with the closure's result in the closure's place: gradients come before any step."""
    named = dict(kwargs)
    closure = named.pop("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return args, dict(kwargs)
    with torch.enable_grad():
        loss = closure()
    return (args[0], lambda: loss, *args[2:]), named


def on_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """The same optimizer with the same state, on other groups."""
    twin = object.__new__(type(optimizer))
    twin.__dict__ = {**optimizer.__dict__, "param_groups": groups}
    return twin


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def is_away(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "_autopar_state_rank")


def _stepping(parameters: Parameters) -> list[nn.Parameter]:
    return [p for p in parameters if is_away(p) and p.grad is not None]


def _chunks(parameters: Parameters, most: int) -> Iterator[list[nn.Parameter]]:
    """Parameters in order, up to ``most`` bytes of them at a time."""
    chunk: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        size = _local(parameter).nbytes
        if chunk and held + size > most:
            yield chunk
            chunk, held = [], 0
        chunk.append(parameter)
        held += size
    if chunk:
        yield chunk


def _fetch(optimizer: Optimizer, parameters: Parameters) -> None:
    """Bring the state of ``parameters`` to the device; what is there stays."""
    under_way = [
        (p, key, value, fetch(_rank(p), HostTensor(_local(value))))
        for p in parameters
        for key, value in _states(optimizer, p)
        if _on_host(p, value)
    ]
    for p, key, value, transfer in under_way:
        state: Any = _like(arrived(transfer), value)
        # The same memory of the host is written again when the state goes back.
        state._autopar_host = value
        optimizer.state[p][key] = state


def _send(optimizer: Optimizer, parameters: Parameters) -> None:
    """Bring the state of ``parameters`` to the host; what is there stays."""
    under_way = []
    for p in parameters:
        for key, value in _states(optimizer, p):
            if not _on_host(p, value):
                old = getattr(value, "_autopar_host", None)
                into = HostTensor(_local(old)) if old is not None and _alike(old, value) else None
                under_way.append((p, key, value, old if into else None, offload(_rank(p), _local(value), into)))
    for p, key, value, old, transfer in under_way:
        # A DTensor whose shard lies on the host stands for the state, as FSDP2 has them: checkpoints take it.
        held: Any = _like(arrived(transfer).tensor, value) if old is None else old
        held._autopar_on_host = True
        optimizer.state[p][key] = held


def _like(local: Tensor, value: Tensor) -> Tensor:
    return _torch.dtensor_like(local, value) if isinstance(value, DTensor) else local


def _states(optimizer: Optimizer, parameter: nn.Parameter) -> list[tuple[Any, Tensor]]:
    """What of a parameter's state moves: tensors of its device and the host's twins, but not counters."""
    device = _local(parameter).device.type
    return [
        (key, value)
        for key, value in optimizer.state.get(parameter, {}).items()
        if type(value) in (Tensor, DTensor)
        and type(_local(value)) is Tensor
        and (isinstance(value, DTensor) or (value.numel() > 1 and value.device.type in (device, "cpu")))
    ]


def _on_host(parameter: nn.Parameter, value: Tensor) -> bool:
    elsewhere = _local(value).device.type != _local(parameter).device.type
    return elsewhere or getattr(value, "_autopar_on_host", False)


def _alike(a: Tensor, b: Tensor) -> bool:
    a, b = _local(a), _local(b)
    return a.shape == b.shape and a.dtype == b.dtype


def _local(tensor: Tensor) -> Tensor:
    with host_memory():  # a view of what the host may hold
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _rank(parameter: nn.Parameter) -> Rank:
    rank: Rank = parameter._autopar_state_rank  # type: ignore[attr-defined]
    return rank
