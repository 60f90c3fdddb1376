"""Copies between a device and host memory, concurrent with the device's computation.

Launching a copy returns a ``Transfer``, and ``arrived`` makes the compute stream wait for it. A transfer keeps its
source and target alive, and the caller drops it after ``arrived``. The memory then returns to the stream that allocated
it, which has waited for the copy, so no allocation depends on when a copy happens to finish.

On a CPU, whose memory is host memory, a transfer is a plain copy, so that the same programs run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from autopar.spmd.ranks import Rank

Held = TypeVar("Held", Tensor, "HostTensor")

_ON_HOST: ContextVar[bool] = ContextVar("autopar_on_host", default=False)


@dataclass(frozen=True, eq=False)
class HostTensor:
    """A tensor in host memory.

    It has its own type so that it is never mistaken for a device tensor: programs do not compute with it, and it does
    not count as device memory.
    """

    tensor: Tensor


@dataclass(eq=False)
class Transfer(Generic[Held]):
    """A copy in flight.

    Args:
        source: what is copied.
        result: the target, which must not be read before ``arrived``.
        done: event on the host stream after the copy.
    """

    source: Tensor | HostTensor
    result: Held
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Make the device's current stream wait for the copy. The process does not block."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
            self.done = None

    def __del__(self) -> None:
        """Wait, so that a copy that was abandoned after an error does not write into memory that was reused."""
        self.wait()


class Recorder(Protocol):
    """Records the transfers that a program starts and waits for, when it runs only to be traced."""

    def offload(self, x: Tensor) -> Transfer[HostTensor]: ...
    def fetch(self, held: HostTensor, device: torch.device) -> Transfer[Tensor]: ...


RECORDER: ContextVar[Recorder | None] = ContextVar("autopar_recorder", default=None)


def offload(rank: Rank, x: Tensor, into: HostTensor | None = None) -> Transfer[HostTensor]:
    """Start to copy ``x`` to pinned host memory, with the same strides if it is dense.

    Args:
        into: host tensor to reuse, with the shape and dtype of ``x``.
    """
    if (recorder := RECORDER.get()) is not None:
        return recorder.offload(x)
    with host_memory():
        if not _has_own_memory(x.device):
            return Transfer(x, HostTensor(into.tensor.copy_(x) if into else x.clone()))
        host = into.tensor if into else _pinned_like(x)
        return Transfer(x, HostTensor(host), _copy_on_host_stream(x, host, x.device))


def fetch(rank: Rank, held: HostTensor) -> Transfer[Tensor]:
    """Start to copy a tensor that was offloaded back to the rank's device."""
    if (recorder := RECORDER.get()) is not None:
        return recorder.fetch(held, rank.device)
    if not _has_own_memory(rank.device):
        return Transfer(held, held.tensor.clone())
    # Allocated on the compute stream, whose earlier readers of that memory the copy must wait for.
    result = torch.empty_like(held.tensor, device=rank.device)
    return Transfer(held, result, _copy_on_host_stream(held.tensor, result, rank.device))


def arrived(transfer: Transfer[Held]) -> Held:
    """Wait for the copy and return it."""
    transfer.wait()
    result: Held = transfer.result
    return result


def allocating_on_host() -> bool:
    """Whether ``host_memory`` is active. Memory counters ask, also if a CPU plays the device."""
    return _ON_HOST.get()


@contextmanager
def host_memory() -> Iterator[None]:
    """Mark that tensors created inside lie in host memory or are views of host tensors."""
    token = _ON_HOST.set(True)
    try:
        yield
    finally:
        _ON_HOST.reset(token)


def _has_own_memory(device: torch.device) -> bool:
    """Whether a device has its own memory."""
    return device.type == "cuda"


def _pinned_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=True)


@cache
def _host_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _copy_on_host_stream(source: Tensor, target: Tensor, device: torch.device) -> torch.cuda.Event:
    """Copy on the host stream, after everything that the current stream has been given so far."""
    stream = _host_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        done: torch.cuda.Event = stream.record_event()
    return done
