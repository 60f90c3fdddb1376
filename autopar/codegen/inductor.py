"""The local program compiled by Inductor, collectives included."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from autopar import _torch
from autopar.codegen.decompositions import DECOMPOSITIONS

Program = Callable[[Any, list[Any]], tuple[Any, ...]]


def compiled(function: Program) -> Program:
    """``function(rank, inputs)``, compiled when it is first called with inputs of these shapes and strides.

    What is offloaded to the host between forward and backward is no tensor of the device: a function that takes or
    makes such runs as it is.
    """
    made: dict[Any, Callable[[list[Any]], Any]] = {}

    @functools.wraps(function)
    def run(rank: Any, inputs: list[Any]) -> tuple[Any, ...]:
        if not all(isinstance(x, Tensor) for x in inputs):
            return function(rank, inputs)
        key = tuple((tuple(x.shape), x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0) for x in inputs)
        if key not in made:
            made[key] = _compiled(function, rank, inputs)
        return tuple(made[key](inputs))

    return run


def _compiled(function: Program, rank: Any, inputs: list[Any]) -> Callable[[list[Any]], Any]:
    def flat(*tensors: Tensor) -> tuple[Any, ...]:
        results = function(rank, list(tensors))
        if not all(isinstance(r, Tensor) for r in results):
            raise _NotOfTheDevice
        return results

    try:
        return _torch.inductor(flat, inputs, DECOMPOSITIONS)
    except _NotOfTheDevice:
        return functools.partial(function, rank)


class _NotOfTheDevice(Exception):  # noqa: N818  it is a finding, no error
    """A program offloads: its results are not all tensors of the device."""

