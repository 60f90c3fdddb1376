"""Hands over to the DTensors what a script attached to the parameters before: optimizers with state, and gradients.

Only the script knows its optimizers, so they are found among all live objects."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from autopar.errors import AutoparError, RankError
from autopar.runtime.agreement import differing, on_all_ranks
from autopar.runtime.loading import shard_like, state_like

_GRAD: Any = Tensor.grad
"""The descriptor behind ``Tensor.grad``."""


def optimizers_of(parameters: Iterable[Tensor]) -> list[Optimizer]:
    """Return every optimizer whose own groups contain one of ``parameters``."""
    known, kinds = {id(p) for p in parameters}, set(_subclasses(Optimizer))
    # A process has millions of objects, so they are gone through without a line of Python for each.
    objects = gc.get_objects()
    alive = compress(objects, map(kinds.__contains__, map(type, objects)))
    return [o for o in alive if any(id(p) in known for p in _members(o))]


def _subclasses(kind: type[Optimizer]) -> Iterator[type[Optimizer]]:
    """Yield a class and all that are derived from it."""
    yield kind
    for derived in kind.__subclasses__():
        yield from _subclasses(derived)


def refuse_unfit_state(named: Mapping[str, Tensor]) -> list[Optimizer]:
    """Return the optimizers of these parameters, after checking that all of their state can be sharded.

    Args:
        named: parameters that are about to be replaced.

    Raises:
        AutoparError: some state cannot be sharded, or has no values; raised on every rank.
        RankError: ranks have different state, for example because only one of them has loaded a checkpoint.
    """
    found = on_all_ranks(lambda: _checked(optimizers_of(named.values()), named))
    digests = [_digest(p, found) for p in named.values()]
    name = next((n for n, differ in zip(named, differing(digests), strict=True) if differ), None)
    if name is not None:
        raise RankError(
            f"Ranks have different optimizer state or gradients of {name}.",
            found=f"state of {', '.join(sorted({type(o).__name__ for o in found})) or 'no optimizer'} on this rank",
            hint="load the same checkpoint on every rank, or load the optimizer's state after autoparallelize.",
        )
    return found


def hand_over(
    replaced: Sequence[tuple[str, Tensor, Tensor | None]], optimizers: Iterable[Optimizer], *, cast: bool
) -> None:
    """Give ``optimizers`` the new parameters, with state and gradients sharded like them.

    Reading the gradient of an old parameter raises an error from then on.

    Args:
        replaced: name, old and new parameter of each; None where other ranks hold the new one, which the optimizers
            lose.
        cast: whether state in an old parameter's dtype is converted to that of the new one.
    """
    new = {id(old): made for _, old, made in replaced}
    for optimizer in optimizers:
        _replace_parameters(optimizer, new, cast=cast)
    for name, old, made in replaced:
        if made is None:
            old.grad = None
        elif old.grad is not None and isinstance(made, DTensor) and not old.grad.is_meta:
            made.grad = shard_like(old.grad.to_dense().to(made.dtype), made)
            old.grad = None
        _mark_as_replaced(old, name)


def _members(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of an optimizer's own groups; a wrapper, whose groups are another's, has none."""
    return (p for group in vars(optimizer).get("param_groups", ()) for p in group["params"])


def _state(optimizer: Optimizer) -> Any:
    return vars(optimizer).get("state", {})


def _checked(optimizers: list[Optimizer], named: Mapping[str, Tensor]) -> list[Optimizer]:
    for optimizer in optimizers:
        for name, parameter in named.items():
            for key, value in _state(optimizer).get(parameter, {}).items():
                _check(optimizer, f"{key} of {name}", value, parameter)
    return optimizers


def _check(optimizer: Optimizer, name: str, value: Any, parameter: Tensor) -> None:
    kind = type(optimizer).__name__
    tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    if any(t.is_meta for t in tensors):
        raise AutoparError(
            "The optimizer's state is on the meta device, so it has no values.",
            found=f"{name} in {kind}",
            hint="create the optimizer from model.parameters() after the model is made parallel.",
        )
    unshardable = [t for t in tensors if t.numel() > 1 and (t is not value or t.shape != parameter.shape)]
    if unshardable:
        raise AutoparError(
            "The optimizer has state that cannot be sharded like its parameter.",
            found=f"{name} in {kind}, {tuple(unshardable[0].shape)} for a parameter {tuple(parameter.shape)}",
            hint="create the optimizer from model.parameters() after the model is made parallel.",
        )


def _digest(parameter: Tensor, optimizers: Iterable[Optimizer]) -> int:
    """Return a digest of a parameter's gradient and state, which does not depend on the order of the optimizers."""
    found = [o for o in optimizers if parameter in _state(o)]
    held = [("grad", parameter.grad), *(item for o in found for item in _state(o)[parameter].items())]
    return sum(zlib.crc32(_bytes(value), zlib.crc32(key.encode())) for key, value in held if value is not None)


def _bytes(value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return repr(value).encode() if isinstance(value, (bool, int, float, str)) else b""
    flat = value.detach().to_dense().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def _replace_parameters(optimizer: Optimizer, new: Mapping[int, Tensor | None], *, cast: bool) -> None:
    """Replace parameters in the optimizer's existing lists and dict, which other objects may hold too."""
    held = _state(optimizer)
    for group in vars(optimizer)["param_groups"]:
        gone = [p for p in group["params"] if id(p) in new and new[id(p)] is None]
        for p in gone:
            held.pop(p, None)
        if gone:
            group["params"][:] = [p for p in group["params"] if new.get(id(p), p) is not None]
        for i, old in enumerate(group["params"]):
            made = new.get(id(old))
            if made is None:
                continue
            group["params"][i] = made
            if old in held:
                held[made] = {k: _converted_state(k, v, old, made, group, cast=cast) for k, v in held.pop(old).items()}


def _converted_state(key: str, value: Any, old: Tensor, made: Tensor, group: Mapping[str, Any], *, cast: bool) -> Any:
    value = state_like(key, value, made)
    if isinstance(value, DTensor):
        return value.to(made.dtype) if cast and value.dtype == old.dtype else value
    on_device = isinstance(value, Tensor) and (group.get("fused") or group.get("capturable"))
    return value.to(made.device) if on_device else value


class Replaced(nn.Parameter):
    """A parameter that a DTensor has replaced, and that no backward reaches any more."""

    @property
    def grad(self) -> Tensor | None:
        gradient: Tensor | None = _GRAD.__get__(self)
        if gradient is None:
            raise AutoparError(
                "This parameter no longer receives gradients: a DTensor has replaced it in the parallel model.",
                found=f"{vars(self).get('_autopar_name', 'a parameter')} as it was before autoparallelize",
                hint="build lists of parameters, and optimizers not derived from torch's, after autoparallelize.",
            )
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)


@cache
def _replaced_class(kind: type[Any]) -> type[Any]:
    return Replaced if kind is nn.Parameter else type(kind.__name__, (Replaced, kind), {})


def _mark_as_replaced(old: Tensor, name: str) -> None:
    if not isinstance(old, DTensor):
        old._autopar_name = name  # type: ignore[attr-defined]
        old.__class__ = _replaced_class(type(old))
