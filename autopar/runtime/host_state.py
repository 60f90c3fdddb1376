"""Optimizer state that the host keeps between the optimizer's steps.

The optimizer stays the user's own. A hook before its step runs that step on a few parameters at a time: their state is
fetched from the host, they step on the device, and the state goes back, so the device never holds more than one such
chunk of state. Each parameter gets bit for bit what one step over all of them would give it. Stepping on the host's
processor instead (Ren et al., ZeRO-Offload, 2021) moves less data, but computes elsewhere and with slower kernels.

This works for optimizers that treat each parameter alone, as torch's do. For any other, all of the state is fetched
before the step and sent back after it.
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

PER_PARAMETER = (
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
"""Optimizers of bitsandbytes that do the same; their quantization blocks are then blocks of a shard."""

Parameters = Sequence[nn.Parameter]


def keep_state_on_host(parameter: nn.Parameter, rank: Rank) -> None:
    """Make the host keep the optimizer state of ``parameter`` from now on."""
    parameter._autopar_state_rank = rank  # type: ignore[attr-defined]
    _watch()


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_prepare)


_hooked: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()


def _prepare(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Register our hook as the optimizer's last pre-step hook; its own hooks run after global ones, such as this."""
    if not any(map(has_host_state, _parameters(optimizer))):
        return
    if optimizer in _hooked:
        _hooked[optimizer].remove()
    else:
        optimizer.register_step_post_hook(_after_step)
        optimizer.register_load_state_dict_post_hook(_send_all)
    _hooked[optimizer] = optimizer.register_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Step the parameters whose state is on the host, and leave the others to the step that was called."""
    step = step_below_hooks(optimizer)
    if step is None:
        _warn_of_all(type(optimizer).__name__)
        _fetch(optimizer, _stepping(_parameters(optimizer)))
        return None
    args, kwargs = with_closure_run(args, kwargs)
    most = _chunk_bytes(optimizer)
    for group in optimizer.param_groups:
        for chunk in _chunks(_stepping(group["params"]), most):
            _fetch(optimizer, chunk)
            try:
                step(with_groups(optimizer, [{**group, "params": chunk}]))
            finally:
                _send(optimizer, chunk)
    others = [{**g, "params": [p for p in g["params"] if not has_host_state(p)]} for g in optimizer.param_groups]
    return (with_groups(optimizer, others), *args[1:]), kwargs


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if step_below_hooks(optimizer) is None:
        _send_all(optimizer)


def _send_all(optimizer: Optimizer) -> None:
    for chunk in _chunks([p for p in _parameters(optimizer) if has_host_state(p)], _chunk_bytes(optimizer)):
        _send(optimizer, chunk)


def _chunk_bytes(optimizer: Optimizer) -> int:
    """Return how many bytes of parameters step together, which is also what the plan assumes."""
    return optimizer_chunk_bytes(sum(_local(p).nbytes for p in _parameters(optimizer) if has_host_state(p)))


def step_below_hooks(optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
    """Return the optimizer's step without its hooks; None if it may look at several parameters together."""
    step: Any = type(optimizer).step
    if any(step is kind.step for kind in PER_PARAMETER):
        return step.__wrapped__  # type: ignore[no-any-return]
    kind = type(optimizer)
    below = f"{kind.__module__}.".startswith("bitsandbytes.") and kind.__name__ in BLOCKWISE
    return getattr(step, "__wrapped__", None) if below else None


@cache
def _warn_of_all(name: str) -> None:
    warnings.warn(
        f"The plan keeps optimizer state on the host, but {name} may look at several parameters together, so all its "
        "state is on the device during its step, which is more than was planned.",
        stacklevel=5,
    )


def with_closure_run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run a step's closure, and put its result in the closure's place: gradients must exist before any step."""
    named = dict(kwargs)
    closure = named.pop("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return args, dict(kwargs)
    with torch.enable_grad():
        loss = closure()
    return (args[0], lambda: loss, *args[2:]), named


def with_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer that shares everything with ``optimizer`` but its groups."""
    twin = object.__new__(type(optimizer))
    twin.__dict__ = {**optimizer.__dict__, "param_groups": groups}
    return twin


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def has_host_state(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "_autopar_state_rank")


def _stepping(parameters: Parameters) -> list[nn.Parameter]:
    return [p for p in parameters if has_host_state(p) and p.grad is not None]


def _chunks(parameters: Parameters, most: int) -> Iterator[list[nn.Parameter]]:
    """Yield parameters in order, in chunks of up to ``most`` bytes."""
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
    """Move the state of ``parameters`` that is on the host to the device."""
    under_way = [
        (p, key, value, fetch(_rank(p), HostTensor(_local(value))))
        for p in parameters
        for key, value in _states(optimizer, p)
        if _on_host(p, value)
    ]
    for p, key, value, transfer in under_way:
        state: Any = _like(arrived(transfer), value)
        # The same host memory is reused when the state goes back.
        state._autopar_host = value
        optimizer.state[p][key] = state


def _send(optimizer: Optimizer, parameters: Parameters) -> None:
    """Move the state of ``parameters`` that is on the device to the host."""
    under_way = []
    for p in parameters:
        for key, value in _states(optimizer, p):
            if not _on_host(p, value):
                old = getattr(value, "_autopar_host", None)
                into = HostTensor(_local(old)) if old is not None and _alike(old, value) else None
                under_way.append((p, key, value, old if into else None, offload(_rank(p), _local(value), into)))
    for p, key, value, old, transfer in under_way:
        # As in FSDP2, a DTensor whose shard is on the host stands for the state, which checkpoints can save.
        held: Any = _like(arrived(transfer).tensor, value) if old is None else old
        held._autopar_on_host = True
        optimizer.state[p][key] = held


def _like(local: Tensor, value: Tensor) -> Tensor:
    return _torch.dtensor_like(local, value) if isinstance(value, DTensor) else local


def _states(optimizer: Optimizer, parameter: nn.Parameter) -> list[tuple[Any, Tensor]]:
    """Return the parts of a parameter's state that move: its tensors on the device or host, but not its counters."""
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
    return elsewhere or is_kept_on_host(value)


def is_kept_on_host(value: Tensor) -> bool:
    """Whether optimizer state stands for what ``keep_state_on_host`` took to the host, which may be the CPU's own
    memory."""
    return getattr(value, "_autopar_on_host", False)


def _alike(a: Tensor, b: Tensor) -> bool:
    a, b = _local(a), _local(b)
    return a.shape == b.shape and a.dtype == b.dtype


def _local(tensor: Tensor) -> Tensor:
    with host_memory():  # may view memory that is on the host
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _rank(parameter: nn.Parameter) -> Rank:
    rank: Rank = parameter._autopar_state_rank  # type: ignore[attr-defined]
    return rank
