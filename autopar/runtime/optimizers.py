"""Parameters of parallel models are known as such: to optimizers, which say at their first step where they do not work
on shards, and to assignments of data."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar import _torch
from autopar.errors import AutoparError
from autopar.runtime.loading import put_data, shard_like
from autopar.runtime.shard_step import is_marked, step_on_shards

_optim = torch.optim

UNFIT: dict[type[torch.optim.Optimizer], tuple[str, str]] = {
    _optim.Adafactor: ("its row and column means are not those of a shard", "AdamW, or SGD with momentum"),
    _optim.Rprop: ("it assigns by masks, which DTensor cannot", "RMSprop or Adam"),
    _optim.LBFGS: ("it flattens all parameters into one vector", "AdamW"),
    _optim.SparseAdam: ("gradients of a parallel model are dense", "Adam"),
}
"""Optimizers of torch that fail on cut parameters: why, and what to take instead."""

UNFUSED = (_optim.SGD, _optim.Adagrad)
"""Optimizers whose fused kernels DTensor does not know."""


def mark(parameter: torch.Tensor) -> None:
    """Remember that this parameter is ours, for the checks before an optimizer's step."""
    parameter._autopar = True  # type: ignore[attr-defined]
    _watch()


@functools.cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_check)
    register_optimizer_step_pre_hook(_cut_loaded)
    step_on_shards()
    _torch.route_data(put_data)
    _torch.find_overflow_in_every_gradient()


def _cut_loaded(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Whole tensors that ``load_state_dict`` put beside a parameter of ours are cut as that is."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, DTensor) and is_marked(parameter):
            loaded = {n: v for n, v in state.items() if type(v) is Tensor and v.ndim and v.shape == parameter.shape}
            state |= {name: shard_like(value, parameter) for name, value in loaded.items()}


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    found = next((kind for kind in UNFIT if isinstance(optimizer, kind)), None)
    fused = isinstance(optimizer, UNFUSED) and any(group.get("fused") for group in optimizer.param_groups)
    if found is None and not fused:
        return
    cut = sum(_is_cut(p) for group in optimizer.param_groups for p in group["params"])
    if not cut:
        return
    name = type(optimizer).__name__
    unfused = ("DTensor does not know its fused kernel", f"{name}(fused=False)")
    why, instead = UNFIT[found] if found is not None else unfused
    raise AutoparError(
        f"{name} does not work on sharded parameters: {why}.",
        found=f"{cut} sharded parameters in {name}",
        hint=f"use {instead}, or keep its parameters whole with constraints.",
    )


def _is_cut(parameter: Any) -> bool:
    ours = isinstance(parameter, DTensor) and is_marked(parameter)
    return ours and not all(isinstance(p, Replicate) for p in parameter.placements)
