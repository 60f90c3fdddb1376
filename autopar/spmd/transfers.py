"""Copies between a device and its host's memory, beside what the device computes.

A copy is launched and returns a ``Transfer``; ``arrived`` makes the compute stream wait for it. A transfer keeps what
it reads and what it writes alive, and the caller drops it after ``arrived``: the memory then goes back to the stream
that it was taken from, which has waited for the copy, so no allocation hangs on when a copy happens to be done.

On a CPU, whose memory is the host's already, a transfer is a plain copy: the same programs run, on other tensors.
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
    """A tensor in the host's memory. A type of its own, so that it is never taken for one on the device: programs do
    not compute with it, and who counts the device's bytes does not count it."""

    tensor: Tensor


@dataclass(eq=False)
class Transfer(Generic[Held]):
    """A copy under way.

    Args:
        source: what is copied.
        result: where to; not to be read before ``arrived``.
        done: reached on the host stream when the copy is.
    """

    source: Tensor | HostTensor
    result: Held
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """The device's current stream goes on when the copy is done; the process does not stand still."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
            self.done = None

    def __del__(self) -> None:
        """What was launched and, after an error, never waited for must not write into memory that others were given."""
        self.wait()


class Recorder(Protocol):
    """Who writes down what transfers a program starts and waits for, where that is all it is run for."""

    def offload(self, x: Tensor) -> Transfer[HostTensor]: ...
    def fetch(self, held: HostTensor, device: torch.device) -> Transfer[Tensor]: ...


RECORDER: ContextVar[Recorder | None] = ContextVar("autopar_recorder", default=None)


def offload(rank: Rank, x: Tensor, into: HostTensor | None = None) -> Transfer[HostTensor]:
    """Start to copy ``x`` to pinned memory of the host, with its strides where it is dense.

    Args:
        into: what of the host's memory to write again, of the shape and dtype of ``x``.
    """
    if (recorder := RECORDER.get()) is not None:
        return recorder.offload(x)
    with host_memory():
        if not _is_apart(x.device):
            return Transfer(x, HostTensor(into.tensor.copy_(x) if into else x.clone()))
        host = into.tensor if into else _pinned_like(x)
        return Transfer(x, HostTensor(host), _copied_beside(x, host, x.device))


def fetch(rank: Rank, held: HostTensor) -> Transfer[Tensor]:
    """Start to copy back to the rank's device what ``offload`` copied away."""
    if (recorder := RECORDER.get()) is not None:
        return recorder.fetch(held, rank.device)
    if not _is_apart(rank.device):
        return Transfer(held, held.tensor.clone())
    # Taken from the compute stream's memory, of which the copy must wait for earlier readers.
    result = torch.empty_like(held.tensor, device=rank.device)
    return Transfer(held, result, _copied_beside(held.tensor, result, rank.device))


def arrived(transfer: Transfer[Held]) -> Held:
    """The copy, once it is done."""
    transfer.wait()
    result: Held = transfer.result
    return result


def allocating_on_host() -> bool:
    """Whether ``host_memory`` is on, also on a CPU that plays the device: who counts the device's bytes asks."""
    return _ON_HOST.get()


@contextmanager
def host_memory() -> Iterator[None]:
    """While what is made lies in the host's memory, or is a view of what does."""
    token = _ON_HOST.set(True)
    try:
        yield
    finally:
        _ON_HOST.reset(token)


def _is_apart(device: torch.device) -> bool:
    """Whether a device's memory is not the host's."""
    return device.type == "cuda"


def _pinned_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=True)


@cache
def _host_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _copied_beside(source: Tensor, target: Tensor, device: torch.device) -> torch.cuda.Event:
    """Copy on the host stream, after what the current stream has been given so far."""
    stream = _host_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        done: torch.cuda.Event = stream.record_event()
    return done
