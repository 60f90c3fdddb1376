"""Compile the local program with Inductor, including its collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar import _torch
from autopar.codegen.decompositions import DECOMPOSITIONS
from autopar.codegen.transfers import forgotten_on_error, recorded
from autopar.spmd import HostTensor

Program = Callable[[Any, list[Any]], tuple[Any, ...]]


def compiled(function: Program) -> Program:
    """Return ``function(rank, inputs)``, compiled on the first call for each set of shapes and strides.

    Copies to and from the host are opaque calls in compiled code, and host tensors go in and out as without
    compilation. A program with its own transfers, such as an emitted file, is not compiled if it offloads.
    """
    made: dict[Any, Program] = {}
    placed: set[Any] = set()  # programs that depend on the number of the micro-batch, which is compiled in

    @functools.wraps(function)
    def run(rank: Any, inputs: list[Any]) -> tuple[Any, ...]:
        key: tuple[Any, ...] = tuple(map(_kind, inputs))
        if None in key:
            return function(rank, inputs)
        at = (key, rank.micro_batch if key in placed else None)
        if at not in made:
            watched = _Watched(rank)
            program = _compiled(function, watched, inputs)
            if watched.asked:
                placed.add(key)
                at = (key, rank.micro_batch)
            made[at] = program
        return made[at](rank, inputs)

    return run


class _Watched:
    """A rank that remembers whether it was asked which micro-batch it runs."""

    def __init__(self, rank: Any) -> None:
        self.rank, self.asked = rank, False

    @property
    def micro_batch(self) -> int:
        self.asked = True
        number: int = self.rank.micro_batch
        return number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rank, name)


def _known(values: Sequence[Any]) -> bool:
    return all(isinstance(x, (Tensor, HostTensor)) for x in values)


def _kind(x: Any) -> tuple[Any, ...] | None:
    """Return the properties that compiled code depends on, or None for an unknown type."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0
    return (HostTensor, _kind(x.tensor)) if isinstance(x, HostTensor) else None


def _compiled(function: Program, rank: Any, inputs: list[Any]) -> Program:
    given = [isinstance(x, HostTensor) for x in inputs]
    returned: list[bool] = []

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        results = function(rank, [HostTensor(x) if h else x for x, h in zip(tensors, given, strict=True)])
        if not _known(results):
            raise _OtherTransfers
        returned[:] = [isinstance(r, HostTensor) for r in results]
        return _plain(results)

    try:
        with recorded():
            made = _torch.inductor(flat, _plain(inputs), {**DECOMPOSITIONS, torch.ops.aten.view.dtype: _view})
    except _OtherTransfers:
        return function
    if not any(given) and not any(returned):
        return lambda _, tensors: tuple(made(tensors))

    def run(_: Any, tensors: list[Any]) -> tuple[Any, ...]:
        tensors[:] = _plain(tensors)
        with forgotten_on_error():
            results = made(tensors)
        return tuple(HostTensor(r) if h else r for r, h in zip(results, returned, strict=True))

    return run


def _plain(values: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(x.tensor if isinstance(x, HostTensor) else x for x in values)


def _view(x: Tensor, dtype: torch.dtype) -> Any:
    """Cast instead of viewing booleans as bytes or back, as they are sent: Inductor's code for the view fails."""
    return x.to(dtype) if {x.dtype, dtype} == {torch.bool, torch.uint8} else NotImplemented


class _OtherTransfers(Exception):  # noqa: N818  signals a finding, not an error
    """Raised if a program's results are neither device tensors nor autopar's host tensors."""
