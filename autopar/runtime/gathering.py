"""Gathers states of parallel models and their optimizers into whole tensors, for programs unaware of shards."""

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
from autopar.errors import AutoparError
from autopar.runtime.agreement import on_all_ranks, this_rank
from autopar.runtime.shard_step import is_marked
from autopar.runtime.waiting import roll_call

STAGED = "_autopar_staged"
"""Attribute of the parameters of a pipeline."""
EVERY_RANK = "call it on every rank, outside of `if rank == 0`: each rank holds a part. Rank 0 may write the result."


def is_parallel(parameters: Iterable[Any]) -> bool:
    """Whether any of these is a parameter of a parallel model."""
    return any(map(is_marked, parameters))


def gather_whole(tensor: Tensor) -> Tensor:
    """Gather a DTensor, whose shard may be on the host; return a plain tensor as it is. All ranks must call it."""
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


def check_callers_of_full_tensor(device_mesh: DeviceMesh) -> None:
    """Make ``full_tensor`` on this mesh raise, from now on, if some ranks do not call it."""
    _meshes.add(device_mesh)
    _torch.before_full_tensor(_check_callers)


_meshes: WeakSet[DeviceMesh] = WeakSet()


def _check_callers(tensor: DTensor) -> None:
    whole = all(isinstance(p, Replicate) for p in tensor.placements)
    if whole or torch.compiler.is_compiling() or tensor.device_mesh not in _meshes:
        return
    roll_call(f"full_tensor of {tuple(tensor.shape)}", EVERY_RANK)


def gather_state(state: Any, caller: str, *, keep: bool) -> Any:
    """Return ``state``, nested dicts and lists, with whole tensors on the host; tied tensors stay tied.

    Only one tensor at a time is whole on the device.

    Args:
        caller: the function that the user called, for the error if some ranks do not call it.
        keep: whether this rank keeps the tensors; if not, it gets empty tensors instead.

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
            tensor = gather_whole(value)
            found[key] = tensor.cpu().contiguous() if keep else torch.empty(0, dtype=value.dtype)
        return found[key]

    return tree_map(gather, state)


def gathered_model(model: nn.Module, caller: str, *, keep: bool) -> Any:
    """Return the state of a parallel model with whole tensors; all ranks must call it, ``keep`` as for
    ``gather_state``."""
    gather: Callable[..., Any] | None = getattr(model, "gathered_state", None)
    return gather_state(model.state_dict(), caller, keep=keep) if gather is None else gather(caller, keep=keep)


def _identity(tensor: DTensor) -> Any:
    """Return a key that is equal for tensors that share memory, such as tied parameters in a state dict."""
    local = tensor.to_local()
    return (local.data_ptr(), tuple(tensor.shape), tensor.placements) if local.numel() else id(tensor)


def gathered_optimizer(optimizer: Any, caller: str, *, keep: bool) -> Any:
    """Return a stand-in for ``optimizer`` whose ``state_dict`` has whole tensors, for code that writes its state."""
    if any(getattr(p, STAGED, False) for group in optimizer.param_groups for p in group["params"]):
        raise AutoparError(
            "The optimizer's state is spread over the stages of a pipeline, so no rank can write it whole.",
            found=f"{caller} of {type(optimizer).__name__}",
            hint="save it with torch.distributed.checkpoint.save, which writes each rank's part.",
        )
    state = gather_state(optimizer.state_dict(), caller, keep=keep)
    return SimpleNamespace(state_dict=lambda: state)


def save_pretrained_method(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Return a ``save_pretrained`` for a parallel ``kind`` that has one: every rank calls it, and rank 0 writes."""
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
            return _write_as(kind, self, state, lambda: original(self, *args, **kwargs))
        first = this_rank() == 0 and given.get("is_main_process", True)
        if state is None:
            made = gathered_model(self, "save_pretrained", keep=first)
        else:
            made = gather_state(state, "save_pretrained", keep=first)
        if state is not None:
            kwargs, args = {n: v for n, v in given.items() if n != next(iter(signature.parameters))}, ()
            kwargs["state_dict"] = made
        return on_all_ranks(
            lambda: _write_as(kind, self, made, lambda: original(self, *args, **kwargs)) if first else None
        )

    return {"save_pretrained": save_pretrained}


def _has_shards(state: Any) -> bool:
    return any(isinstance(t, DTensor) for t in tree_leaves(state))


def _write_as(kind: type[nn.Module], model: nn.Module, state: Any, write: Callable[[], Any]) -> Any:
    """Run ``write`` while ``model`` has the class name of ``kind``, which files record, and the state ``state``."""

    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return state

    parallel = type(model)
    plain = {"state_dict": state_dict, "__module__": kind.__module__, "__doc__": kind.__doc__}
    model.__class__ = type(kind.__name__, (kind,), plain)
    try:
        return write()
    finally:
        model.__class__ = parallel
