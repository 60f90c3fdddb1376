"""States of parallel models and of their optimizers as whole tensors, for programs that know of no shards."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from autopar import _torch
from autopar.runtime.agreement import this_rank, together
from autopar.runtime.shard_step import is_marked
from autopar.runtime.waiting import roll_call

EVERY_RANK = "call it on every rank, outside of `if rank == 0`: each holds a part. Rank 0 may write what it gives."


def is_parallel(parameters: Iterable[Any]) -> bool:
    """Whether some of these are parameters of parallel models."""
    return any(map(is_marked, parameters))


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, whose shard may lie on the host; a plain tensor as it is. All ranks ask at once."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    local = tensor.to_local().detach()
    return (
        DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        .redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        .to_local()
    )


def ask_before_full_tensor(device_mesh: DeviceMesh) -> None:
    """From now on ``full_tensor`` on this mesh raises where some ranks do not call it."""
    _meshes.add(device_mesh)
    _torch.before_full_tensor(_ask)


_meshes: WeakSet[DeviceMesh] = WeakSet()


def _ask(tensor: DTensor) -> None:
    whole = all(isinstance(p, Replicate) for p in tensor.placements)
    if whole or torch.compiler.is_compiling() or tensor.device_mesh not in _meshes:
        return
    roll_call(f"full_tensor of {tuple(tensor.shape)}", EVERY_RANK)


def gathered(state: Any, caller: str, *, keep: bool) -> Any:
    """``state``, dicts and lists that hold tensors, with whole tensors on the host; tied ones stay one.

    One tensor at a time is whole on the device.

    Args:
        caller: what the user called, for the error where ranks do not all come here.
        keep: whether this rank wants them; where not, empty tensors take their place.

    Raises:
        RankError: some ranks do not call it.
    """
    roll_call(caller, EVERY_RANK)
    found: dict[Any, Tensor] = {}

    def gather(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        key = _identity(value)
        if key not in found:
            tensor = whole(value)
            found[key] = tensor.cpu().contiguous() if keep else torch.empty(0, dtype=value.dtype)
        return found[key]

    return tree_map(gather, state)


def _identity(tensor: DTensor) -> Any:
    """Equal for what shares its memory, as tied parameters do in a state dict."""
    local = tensor.to_local()
    return (local.data_ptr(), tuple(tensor.shape), tensor.placements) if local.numel() else id(tensor)


def gathered_optimizer(optimizer: Any, caller: str, *, keep: bool) -> Any:
    """What stands for ``optimizer`` where its state is written: its ``state_dict`` has whole tensors."""
    state = gathered(optimizer.state_dict(), caller, keep=keep)
    return SimpleNamespace(state_dict=lambda: state)


def saving(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """``save_pretrained`` of a parallel ``kind``, where that has one: every rank calls it, and rank 0 writes."""
    original: Callable[..., Any] | None = getattr(kind, "save_pretrained", None)
    if original is None:
        return {}
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        state = given.get("state_dict")
        if state is not None and not _has_shards(state):
            return _as(kind, self, state, lambda: original(self, *args, **kwargs))
        first = this_rank() == 0 and given.get("is_main_process", True)
        made = gathered(self.state_dict() if state is None else state, "save_pretrained", keep=first)
        if state is not None:
            kwargs, args = {n: v for n, v in given.items() if n != next(iter(signature.parameters))}, ()
            kwargs["state_dict"] = made
        return together(lambda: _as(kind, self, made, lambda: original(self, *args, **kwargs)) if first else None)

    return {"save_pretrained": save_pretrained}


def _has_shards(state: Any) -> bool:
    return any(isinstance(t, DTensor) for t in tree_leaves(state))


def _as(kind: type[nn.Module], model: nn.Module, state: Any, write: Callable[[], Any]) -> Any:
    """Run ``write`` while ``model`` is one of ``kind`` by name, as files are to say, and its state is ``state``."""

    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return state

    parallel = type(model)
    plain = {"state_dict": state_dict, "__module__": kind.__module__, "__doc__": kind.__doc__}
    model.__class__ = type(kind.__name__, (kind,), plain)
    try:
        return write()
    finally:
        model.__class__ = parallel
