"""Runs the optimizer's step on this rank's shards directly, without DTensor in between.

DTensor decides for each op on each parameter what it means for shards. An optimizer that treats every element alone
does the same to a shard as to the whole, so a hook before its step runs that step on the shards, with the shards of
gradients and state. Outside the step the state consists of DTensors, placed like their parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autopar import _torch
from autopar.runtime.host_state import has_host_state, step_below_hooks, with_closure_run, with_groups

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""Keys of optimizer state that does not belong to single elements."""

UNSUPPORTED_OPTIONS = ("fused", "capturable", "differentiable")
"""Options of a parameter group with which the step is left as it is."""


@cache
def step_on_shards() -> None:
    """Make optimizers step on the shards of parallel models from now on."""
    register_optimizer_step_pre_hook(_prepare)


def is_marked(parameter: Tensor) -> bool:
    """Whether a parameter belongs to a parallel model."""
    return bool(getattr(parameter, "_autopar", False))


_hooked: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()


def _prepare(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Register our hook as the optimizer's last pre-step hook; its own hooks run after global ones, such as this."""
    if optimizer in _hooked:
        _hooked.pop(optimizer).remove()
    if _applies(optimizer):
        _hooked[optimizer] = optimizer.register_step_pre_hook(_step)


def _applies(optimizer: Optimizer) -> bool:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    unsupported = any(group.get(mode) for group in optimizer.param_groups for mode in UNSUPPORTED_OPTIONS)
    return (
        step_below_hooks(optimizer) is not None
        and not unsupported
        and not any(map(has_host_state, parameters))
        and any(map(is_marked, parameters))
    )


def _step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Step the parameters that are sharded like their gradients, and leave the others to the step that was called."""
    step = step_below_hooks(optimizer)
    assert step is not None
    args, kwargs = with_closure_run(args, kwargs)
    stepped = [[p for p in group["params"] if _is_sharded_like_its_gradient(p)] for group in optimizer.param_groups]
    with torch.no_grad():
        for group, parameters in zip(optimizer.param_groups, stepped, strict=True):
            if parameters:
                _step_group(optimizer, step, group, parameters)
    stepped_ids = {id(p) for parameters in stepped for p in parameters}
    others = [{**g, "params": [p for p in g["params"] if id(p) not in stepped_ids]} for g in optimizer.param_groups]
    return (with_groups(optimizer, others), *args[1:]), kwargs


def _is_sharded_like_its_gradient(p: nn.Parameter) -> bool:
    grad: Any = p.grad
    return is_marked(p) and isinstance(p, DTensor) and isinstance(grad, DTensor) and grad.placements == p.placements


def _step_group(optimizer: Optimizer, step: Any, group: Mapping[str, Any], parameters: Sequence[Any]) -> None:
    shards = [p.to_local() for p in parameters]
    # As with DTensors: one parameter at a time unless the user asks unsupported, which is what the plan assumes.
    own = {**group, "params": shards, "foreach": bool(group["foreach"])} if "foreach" in group else group
    twin = with_groups(optimizer, [{**own, "params": shards}])
    twin.state = defaultdict(dict)
    for p, shard in zip(parameters, shards, strict=True):
        shard.grad = _torch.shard_of(p.grad)
        if p in optimizer.state:
            twin.state[shard] = dict(_shards_of(optimizer.state[p]))
    try:
        step(twin)
    finally:
        for p, shard in zip(parameters, shards, strict=True):
            shard.grad = None
            _store_new_state(optimizer.state[p], twin.state[shard], p, shard)
    _torch.bump_versions(parameters)


def _shards_of(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, _torch.shard_of(value)) for key, value in state.items())


def _store_new_state(state: dict[str, Any], made: Mapping[str, Any], p: Any, shard: Tensor) -> None:
    """Store new state that the step created; what it changed in place is already stored."""
    for key, value in made.items():
        held = state.get(key)
        if value is _torch.shard_of(held) and key in state:
            continue
        of_elements = isinstance(value, Tensor) and value.shape == shard.shape and key not in SCALARS
        state[key] = _torch.dtensor_like(value, p) if of_elements else value
