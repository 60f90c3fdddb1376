"""This process's position in the job, and the few collectives of a training script; without a job they do nothing."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

T = TypeVar("T")
Group = Any


class Plugin(Protocol):
    """What the collectives need of a plugin: the ranks that hold different data."""

    @property
    def dp_group(self) -> Group: ...
    @property
    def dp_size(self) -> int: ...


def is_rank_0() -> bool:
    """Whether this process is the first of the job; true if there is no process group."""
    return not dist.is_initialized() or dist.get_rank() == 0


def to_device(x: Any, device: torch.device | str) -> Any:
    """Return ``x`` with every tensor in it, however nested, moved to ``device``."""
    return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, x)


def all_reduce_sum(tensor: Tensor, plugin: Plugin | None = None) -> Tensor:
    """Sum ``tensor`` in place over all ranks, or over the plugin's data-parallel ranks."""
    if _size(plugin) > 1:
        dist.all_reduce(tensor, group=_group(plugin))
    return tensor


def all_reduce_mean(tensor: Tensor, plugin: Plugin | None = None) -> Tensor:
    """Average ``tensor`` in place over all ranks, or over the plugin's data-parallel ranks."""
    if _size(plugin) > 1:
        all_reduce_sum(tensor, plugin).div_(_size(plugin))
    return tensor


def all_gather_tensors(local_tensor_list: list[Tensor] | Tensor, plugin: Plugin | None = None) -> list[Tensor]:
    """Concatenate the lists of all ranks in rank order; shapes and lengths may differ. A tensor is a list of one."""
    if isinstance(local_tensor_list, Tensor):
        local_tensor_list = [local_tensor_list]
    if _size(plugin) == 1:
        return list(local_tensor_list)
    lists: list[Any] = [None] * _size(plugin)
    dist.all_gather_object(lists, list(local_tensor_list), group=_group(plugin))
    gathered = [tensor for each in lists for tensor in each]
    # A tensor of another rank arrives on that rank's device.
    return to_device(gathered, local_tensor_list[0].device) if local_tensor_list else gathered


def _group(plugin: Plugin | None) -> Group:
    return None if plugin is None else plugin.dp_group


def _size(plugin: Plugin | None) -> int:
    if not dist.is_initialized():
        return 1
    return dist.get_world_size() if plugin is None else plugin.dp_size


@contextlib.contextmanager
def priority_execution(executor_rank: int = 0, process_group: Group = None) -> Iterator[None]:
    """Run the body on ``executor_rank`` first and then on the others, for example for a shared download.

        with priority_execution():
            dataset = load_or_download()

    If the first rank fails, the others still run the body and meet the error themselves.
    """
    first = not dist.is_initialized() or dist.get_rank(process_group) == executor_rank
    if not first:
        dist.barrier(process_group)
    try:
        yield
    finally:
        if first and dist.is_initialized():
            dist.barrier(process_group)


class DistCoordinator:
    """This process's position in the job, with or without a process group.

    A ``process_group`` of None is the whole job.
    """

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def local_rank(self) -> int:
        """Index among the processes of this machine, as the launcher sets it."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def is_master(self, process_group: Group = None) -> bool:
        """Whether this process is the first of the group."""
        return not dist.is_initialized() or dist.get_rank(process_group) == 0

    def is_node_master(self) -> bool:
        """Whether this process is the first of its machine."""
        return self.local_rank == 0

    def is_last_process(self, process_group: Group = None) -> bool:
        """Whether this process is the last of the group."""
        last = dist.get_world_size(process_group) - 1 if dist.is_initialized() else 0
        return not dist.is_initialized() or dist.get_rank(process_group) == last

    def print_on_master(self, msg: str, process_group: Group = None) -> None:
        if self.is_master(process_group):
            print(msg, flush=True)  # noqa: T201  printing is what it is for

    def print_on_node_master(self, msg: str) -> None:
        if self.is_node_master():
            print(msg, flush=True)  # noqa: T201  likewise

    def priority_execution(
        self, executor_rank: int = 0, process_group: Group = None
    ) -> contextlib.AbstractContextManager[None]:
        """Run the body as the function ``priority_execution`` does."""
        return priority_execution(executor_rank, process_group)

    def block_all(self, process_group: Group = None) -> None:
        """Wait until every process of the group arrives."""
        if dist.is_initialized():
            dist.barrier(process_group)

    def on_master_only(self, process_group: Group = None) -> Callable[[Callable[..., T]], Callable[..., T | None]]:
        """Decorate a function to run on the first process of the group only, and to return None on the others."""

        def decorate(function: Callable[..., T]) -> Callable[..., T | None]:
            @functools.wraps(function)
            def on_master(*args: Any, **kwargs: Any) -> T | None:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return on_master

        return decorate

    def destroy(self, process_group: Group = None) -> None:
        """Leave the job by destroying the process group."""
        if dist.is_initialized():
            dist.destroy_process_group(process_group)
