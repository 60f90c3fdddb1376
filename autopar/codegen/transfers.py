"""Copies to the host and back as ops that are opaque to a compiler.

For the compiler a launch returns a number, under which the ``Transfer`` waits for its second op. So the result is new
to the compiler, and nothing in flight can be read, written or freed before. The second op also takes the source, which
keeps it alive.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autopar import _torch, spmd
from autopar.mesh import Mesh
from autopar.ops.registration import define
from autopar.spmd import HostTensor, LocalRank, Transfer
from autopar.spmd.transfers import RECORDER, Held

autopar = torch.ops.autopar


class _InFlight(threading.local):
    """The transfers of this thread. A function waits for all transfers that it starts."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.transfers: dict[int, Transfer[Any]] = {}

    def start(self, transfer: Transfer[Any]) -> Tensor:
        number = next(self.numbers)
        self.transfers[number] = transfer
        return torch.tensor(number)

    def done(self, number: Tensor) -> Any:
        return spmd.arrived(self.transfers.pop(int(number)))


_IN_FLIGHT = _InFlight()


def _offload(x: Tensor) -> Tensor:
    return _IN_FLIGHT.start(spmd.offload(_on(x.device), x))


def _offloaded(x: Tensor, number: Tensor) -> Tensor:
    held: HostTensor = _IN_FLIGHT.done(number)
    return held.tensor


def _fetch(held: Tensor, device: torch.device) -> Tensor:
    return _IN_FLIGHT.start(spmd.fetch(_on(device), HostTensor(held)))


def _fetched(held: Tensor, number: Tensor, device: torch.device) -> Tensor:
    found: Tensor = _IN_FLIGHT.done(number)
    return found


def _on(device: torch.device) -> LocalRank:
    return LocalRank(Mesh((1,)), (0,), device)


def _number(*_: Any) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


define("offload(Tensor x) -> Tensor", _offload, _number)
define("offloaded(Tensor x, Tensor number) -> Tensor", _offloaded, lambda x, number: torch.empty_like(x, device="cpu"))
define("fetch(Tensor held, Device device) -> Tensor", _fetch, _number)
define(
    "fetched(Tensor held, Tensor number, Device device) -> Tensor",
    _fetched,
    lambda held, number, device: torch.empty_like(held, device=device),
)


class _Recorded(Transfer[Held]):
    """A transfer in a program that is being traced. Its end is an op, too."""

    end: Callable[[], Held]

    def __init__(self, source: Tensor | HostTensor, end: Callable[[], Held]) -> None:
        self.source = source
        self.end = end

    def wait(self) -> None:
        self.result = self.end()

    def __del__(self) -> None:
        """Do nothing, since nothing is in flight."""


class _Ops:
    """Transfers in a program that is being traced, as the ops above."""

    def offload(self, x: Tensor) -> Transfer[HostTensor]:
        number = autopar.offload(x)
        return _Recorded[HostTensor](x, lambda: HostTensor(autopar.offloaded(x, number)))

    def fetch(self, held: HostTensor, device: torch.device) -> Transfer[Tensor]:
        number = autopar.fetch(held.tensor, device)
        return _Recorded[Tensor](held, lambda: autopar.fetched(held.tensor, number, device))


@contextmanager
def recorded() -> Iterator[None]:
    """Record transfers as ops while a program is being traced."""
    _torch.realized_for(autopar.offload.default, autopar.offloaded.default)
    token = RECORDER.set(_Ops())
    try:
        yield
    finally:
        RECORDER.reset(token)


@contextmanager
def forgotten_on_error() -> Iterator[None]:
    """Drop the transfers in flight if a call fails."""
    try:
        yield
    except BaseException:
        _IN_FLIGHT.transfers.clear()
        raise
