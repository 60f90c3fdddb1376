"""Norms of gradients over all stages of a pipeline, in torch's own ``clip_grad_norm_`` too.

That function sees the gradients of one rank and would clip each stage by its own norm, without an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.runtime.pipeline.state import PipelineState

_PIPELINES: WeakSet[nn.Module] = WeakSet()


def norms_over_pipelines(model: nn.Module) -> None:
    """Let norms of the gradients of ``model`` be those of all its stages, from now on."""
    _PIPELINES.add(model)
    _torch.wrap_total_norm(_total_norm)


def pipeline_of(gradients: Sequence[Tensor]) -> tuple[PipelineState, list[Tensor]] | None:
    """Return the pipeline that some of ``gradients`` belong to, and those of them that count on this rank.

    A rank without gradients takes part for the pipeline whose backward ran last: there may be copies of it.
    """
    models: list[Any] = list(_PIPELINES)
    known = {id(g) for g in gradients} if models else set()
    for model in models:
        own = {id(p.grad): name for name, p in model.named_parameters() if p.grad is not None}
        if own.keys() & known:
            state: PipelineState = model._autopar
            return state, [g for g in gradients if id(g) not in own or state.counts(own[id(g)])]
    states: list[PipelineState] = [vars(model)["_autopar"] for model in models if "_autopar" in vars(model)]
    if not gradients and states:
        return max(states, key=lambda state: state.delivered), []
    return None


def over_stages(total: Tensor, state: PipelineState, norm_type: float) -> Tensor:
    """Return the sum of ``norm_type``-th powers, or the largest element, over the stages."""
    total = total.to(state.device)
    dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=state.group)
    return total


def _total_norm(
    original: Callable[..., Tensor],
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    found = pipeline_of(gradients)
    if found is None:
        return original(gradients, norm_type, error_if_nonfinite, foreach)
    state, counted = found
    norm_type = float(norm_type)
    norm: Any = original(counted, norm_type, False, foreach) if counted else torch.zeros((), device=state.device)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    powers = norm.double() if math.isinf(norm_type) else norm.double() ** norm_type
    total = over_stages(powers, state, norm_type)
    total = (total if math.isinf(norm_type) else total ** (1.0 / norm_type)).to(norm.dtype)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    return total
