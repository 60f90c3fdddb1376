"""Hugging Face's mixtures of experts, computed token by token.

Their implementations sort the rows of the whole batch by expert, so that a rank would need all tokens, or loop over the
experts that were hit, which depends on values. During an export, both become products in which each token names its
experts (``autopar.ops.experts``), so that tokens can be cut as they can outside of experts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.tracer.flat import Flat, materialize
from autopar.tracer.functions import LIBRARY
from autopar.tracer.replacements import Operand, replaces

Forward = Callable[..., Tensor]


@contextlib.contextmanager
def experts_by_token() -> Iterator[None]:
    """Compute Hugging Face's experts as products of tokens during an export, if they follow its interface."""
    moe = _module()
    if moe is None:
        yield
        return
    ordinary = moe.ExpertsInterface.get_interface

    def interface(self: Any, implementation: str, default: Forward) -> Forward:
        found: Forward = ordinary(self, implementation, default)
        if found is default or found is getattr(moe, "grouped_mm_experts_forward", None):
            return functools.partial(_forward, found, found is default)
        return found

    with mock.patch.object(moe.ExpertsInterface, "get_interface", interface):
        yield


def _module() -> types.ModuleType | None:
    """Return the module of experts; None if the model cannot contain any."""
    if "transformers" not in sys.modules:
        return None
    try:
        moe = importlib.import_module("transformers.integrations.moe")
    except ImportError:
        return None
    return moe if hasattr(getattr(moe, "ExpertsInterface", None), "get_interface") else None


def _forward(original: Forward, autocast: bool, *args: Any, **kwargs: Any) -> Tensor:
    """Return what ``original``, the forward of a module of experts, returns."""
    try:
        given = tuple(inspect.signature(original).bind(*args, **kwargs).arguments.values())
    except TypeError:
        given = ()
    if len(given) != 4 or not _is_known(*given):
        return original(*args, **kwargs)
    return _by_token(*given, autocast=autocast)


def _is_known(module: nn.Module, hidden: Any, ids: Any, scale: Any) -> bool:
    """Whether this process has all tokens and experts, and each token equally many: not so in expert parallelism."""
    if not all(isinstance(t, Tensor) and t.dim() == 2 for t in (hidden, ids, scale)) or ids.shape != scale.shape:
        return False
    has_options = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))
    if not has_options or getattr(module, "_is_expert_parallel", False):
        return False
    matrices = [getattr(module, name, None) for name in (_first_name(module), "down_proj")]
    return all(isinstance(w, Tensor) and w.dim() == 3 and w.is_floating_point() for w in matrices)


def _first_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _by_token(module: Any, hidden: Tensor, ids: Tensor, scale: Tensor, *, autocast: bool) -> Tensor:
    """[t, h] tokens, [t, k] numbers of experts and their weights -> [t, h]"""
    ids, scale = (torch.ops.autopar_capture.alongside(t, hidden) for t in (ids, scale))
    made = _linear(module, _first_name(module), hidden, ids, autocast)
    made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
    made = _linear(module, "down_proj", made, ids, autocast)
    if getattr(module, "has_post_expert_norm", False):
        made = module.post_expert_norm(made)
    return (made * scale.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)


def _linear(module: Any, name: str, x: Tensor, ids: Tensor, autocast: bool) -> Tensor:
    """Multiply as the loop does, under autocast, or in the weights' dtype as the grouped product does."""
    weight: Tensor = getattr(module, name)
    dtype = (autocast_dtype(weight) if autocast else None) or weight.dtype
    made: Tensor = torch.ops.autopar.experts_mm(x.to(dtype), weight.to(dtype), ids, transposed=not module.is_transposed)
    if not module.has_bias:
        return made
    made = made + functional.embedding(ids, getattr(module, f"{name}_bias"))
    return made if autocast else made.to(dtype)


def autocast_dtype(weight: Tensor) -> torch.dtype | None:
    if weight.dtype == torch.float64:
        return None
    device = next((d for d in ("cuda", "cpu") if torch.is_autocast_enabled(d)), None)
    return None if device is None else torch.get_autocast_dtype(device)


def _no_backward(ctx: Any, *_: Any) -> None:
    raise AssertionError("the op exists in exported graphs only")


LIBRARY.define("alongside(Tensor x, Tensor like) -> Tensor")
torch.library.register_fake("autopar_capture::alongside", lambda x, like: torch.empty_like(x), lib=LIBRARY)
torch.library.register_autograd("autopar_capture::alongside", _no_backward, lib=LIBRARY)


@replaces(torch.ops.autopar_capture.alongside.default)
def _alongside(tracer: Any, x: Operand, like: Operand) -> Operand:
    """Return ``x`` with its leading dims kept apart as in ``like``, a tensor of equally many rows."""
    if not isinstance(like, Flat) or (isinstance(x, Flat) and x.lead_shape == like.lead_shape):
        return x
    whole: Tensor = materialize(x)
    return Flat(whole.reshape((*like.lead_shape, *whole.shape[1:])), like.lead)


@replaces(torch.ops.autopar.experts_mm.default)
def _experts_mm(tracer: Any, rows: Operand, weight: Tensor, ids: Operand, **options: Any) -> Operand:
    experts_mm = torch.ops.autopar.experts_mm
    if isinstance(rows, Flat) and isinstance(ids, Flat) and rows.lead_shape == ids.lead_shape:
        return Flat(experts_mm(rows.base, materialize(weight), ids.base, **options), rows.lead)
    made: Tensor = experts_mm(*materialize((rows, weight, ids)), **options)
    return made
