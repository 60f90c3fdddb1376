"""torch.distributed: process groups, their store, and functional collectives."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch.tensors import as_tensor
from autopar._torch.tracing import active_fake_mode


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name by which functional collectives find a process group."""
    return group.group_name


def whole_group(device_mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of all ranks of a mesh; every process of the job must call this at the same time."""
    if device_mesh.ndim == 1:
        return device_mesh.get_group(0)
    ranks = sorted(device_mesh.mesh.flatten().tolist())
    if ranks == list(range(dist.get_world_size())):
        world = dist.group.WORLD
        assert world is not None
        return world
    return device_mesh._flatten().get_group()


IN_ORDER = "gloo_in_order"
"""Name of the backend that ``in_order`` registers."""


_in_order: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups made by ``in_order``: by the job's group, and then by their ranks."""


def in_order(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same processes on which any number of collectives may be in flight at once.

    For gloo this is a separate group with a single thread: the two threads that a group has by default both assign to
    one unguarded string of the group (the name of the work that ended last), which can corrupt the heap. Collectives
    that are waited for before the next is launched, such as DTensor's own, may use any group. Every process of the
    group must call this at the same time.
    """
    device = torch.device("cpu")
    world = dist.group.WORLD
    if world is None or device not in group._device_types or group.size() == 1 or not dist.is_gloo_available():
        return group
    backend = group._get_backend(device)
    if not isinstance(backend, dist.ProcessGroupGloo):
        return group
    made, ranks = _in_order.setdefault(world, {}), tuple(dist.get_process_group_ranks(group))
    if ranks not in made:
        if IN_ORDER.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(IN_ORDER, _gloo_in_order, devices=["cpu"])
        timeout = backend.options._timeout
        made[ranks] = dist.new_group(list(ranks), timeout, IN_ORDER, use_local_synchronization=True)
    return made[ranks]


def _gloo_in_order(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options() if hasattr(gloo, "_Options") else gloo.Options()
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
    options._threads = 1
    options._timeout = timeout
    made: dist.ProcessGroupGloo = gloo(store, rank, size, options)
    return made


@cache
def idle_gloo_at_exit() -> None:
    """Let gloo's threads finish before the interpreter exits; calling this again does nothing.

    A gloo thread releases a collective's tensors a moment after it has reported the collective as done. If the
    interpreter is shutting down by then, the thread waits for the GIL in vain and the process aborts, even after
    ``destroy_process_group``: device meshes in DTensor's caches keep groups, and so threads, alive.
    https://github.com/pytorch/pytorch/pull/179291
    """
    atexit.register(idle_gloo)


def idle_gloo(limit_s: float = 2.0) -> None:
    """Wait at most ``limit_s`` seconds until all threads that run gloo's collectives are idle (Linux only)."""
    end, calm = time.monotonic() + limit_s, 0
    while calm < 2 and time.monotonic() < end:
        calm = 0 if any(state == "R" for state in _gloo_states()) else calm + 1
        time.sleep(0.0005)


def _gloo_states() -> Iterator[str]:
    for status in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            name, _, rest = status.read_text().rpartition(") ")
            if "gloo_runloop" in name:
                yield rest[0]


def store(name: str) -> Any:
    """Return a section of the store through which the job's processes met; no public function returns that store."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    return PrefixStore(name, _get_default_store())


def all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Start concatenating ``x`` of the ``size`` ranks of ``group`` along dim 0."""
    return as_tensor(torch.ops._c10d_functional.all_gather_into_tensor(x, size, group))


def all_reduce(x: torch.Tensor, reduction: str, group: str, *, in_place: bool = False) -> torch.Tensor:
    """Start reducing ``x`` by sum, max or min; ``in_place`` allows ``x`` to be overwritten."""
    tracing = torch.compiler.is_compiling() or active_fake_mode() is not None
    if in_place and not tracing:  # Inductor decides by itself what to do in place
        return as_tensor(torch.ops._c10d_functional.all_reduce_(x, reduction, group))
    return as_tensor(torch.ops._c10d_functional.all_reduce(x, reduction, group))


def reduce_scatter(x: torch.Tensor, reduction: str, size: int, group: str) -> torch.Tensor:
    """Start reducing ``x`` and splitting it evenly along dim 0."""
    return as_tensor(torch.ops._c10d_functional.reduce_scatter_tensor(x, reduction, size, group))


def all_to_all(
    x: torch.Tensor, size: int, group: str, parts: tuple[Sequence[int], Sequence[int]] | None = None
) -> torch.Tensor:
    """Start sending a part of dim 0 to each of the ``size`` ranks: an even chunk, or parts of unequal length.

    Args:
        parts: the rows that this rank sends to each rank, and those that it receives from each.
    """
    sent, received = parts or ([x.shape[0] // size] * size,) * 2
    return as_tensor(torch.ops._c10d_functional.all_to_all_single(x, list(received), list(sent), group))


def permute(x: torch.Tensor, sources: Sequence[int], here: int, shape: Sequence[int], group: str) -> torch.Tensor:
    """Start sending ``x`` to the rank whose source is ``here``, and receiving ``shape`` from ``sources[here]``."""
    sent, received = [0] * len(sources), [0] * len(sources)
    sent[list(sources).index(here)] = x.numel()
    received[sources[here]] = math.prod(shape)
    return as_tensor(torch.ops._c10d_functional.all_to_all_single(x.flatten(), received, sent, group))


def wait(x: torch.Tensor) -> torch.Tensor:
    """Block the stream (on CPU: the thread) until ``x`` has arrived."""
    return as_tensor(torch.ops._c10d_functional.wait_tensor(x))


@cache
def symmetric_group(group: dist.ProcessGroup) -> str:
    """Return the name of ``group`` after setting up its symmetric memory, or an empty text if that is not possible.

    It is possible if all ranks are GPUs of one host that can access each other's memory. All ranks get the same answer.
    """
    ranks, here = dist.get_process_group_ranks(group), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not torch.cuda.is_available() or len({r // here for r in ranks}) > 1 or len(ranks) > torch.cuda.device_count():
        return ""
    devices = range(torch.cuda.device_count())
    if not all(torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a != b):
        return ""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():  # newer versions of torch do this by themselves and warn
        warnings.simplefilter("ignore")
        enable_symm_mem_for_group(group.group_name)
    return group.group_name


def fused_gather_product(
    x: torch.Tensor, matrix: torch.Tensor, dim: int, group: str, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``gathered @ matrix`` and, with ``keep``, the gathered ``x`` of all ranks, concatenated along ``dim``."""
    gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(x, [matrix], dim, group, return_A=keep)
    return as_tensor(products[0]).contiguous(), as_tensor(gathered).contiguous() if keep else None


def fused_product_scatter(x: torch.Tensor, matrix: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """Return this rank's part along ``dim`` of the sum over ranks of ``x @ matrix``."""
    return as_tensor(torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", dim, group)).contiguous()


def close_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Close the connections of process groups, so that ranks that wait for this one in them raise an error.

    Gloo closes them when the last reference to a group is gone, and so its owner must let go of all work on it. NCCL
    aborts.
    """
    for group in groups:
        for known in _in_order.values():
            for ranks in [r for r, made in known.items() if made is group]:
                del known[ranks]
        with contextlib.suppress(Exception):  # it may be broken already
            backend = group._get_backend(torch.device("cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"))
            if "nccl" in str(dist.get_backend(group)):
                backend.abort()
            del backend
            dist.destroy_process_group(group)


def group_called(name: str) -> dist.ProcessGroup:
    """Return the process group by the name that ``group_name`` gives."""
    found: dist.ProcessGroup = torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return found
