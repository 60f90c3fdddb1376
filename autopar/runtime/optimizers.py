"""Marks the parameters of parallel models, for optimizers that do not work on shards and for assignments of ``data``.

An optimizer that does not work on shards raises an error at its first step.
"""

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
"""torch optimizers that fail on sharded parameters: the reason, and what to use instead."""

UNFUSED = (_optim.SGD, _optim.Adagrad)
"""Optimizers whose fused kernels DTensor does not support."""


def mark(parameter: torch.Tensor) -> None:
    """Mark a parameter as one of a parallel model, for the checks before an optimizer's step."""
    parameter._autopar = True  # type: ignore[attr-defined]
    _watch()


@functools.cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_check)
    register_optimizer_step_pre_hook(_cut_loaded)
    step_on_shards()
    _torch.intercept_data_assignment(put_data)
    _torch.share_overflow_findings()


def _cut_loaded(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Shard whole tensors that ``load_state_dict`` put beside one of our parameters."""
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
    unfused = ("DTensor does not support its fused kernel", f"{name}(fused=False)")
    why, instead = UNFIT[found] if found is not None else unfused
    raise AutoparError(
        f"{name} does not work on sharded parameters: {why}.",
        found=f"{cut} sharded parameters in {name}",
        hint=f"use {instead}, or keep its parameters whole with constraints.",
    )


def _is_cut(parameter: Any) -> bool:
    ours = isinstance(parameter, DTensor) and is_marked(parameter)
    return ours and not all(isinstance(p, Replicate) for p in parameter.placements)
