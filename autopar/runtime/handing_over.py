"""What a script made of the parameters before they became DTensors goes over to these: optimizers with their state, and
gradients. Nobody but the script knows its optimizers, so they are looked for among all that is alive."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from autopar.errors import AutoparError, RankError
from autopar.runtime.agreement import differing, together
from autopar.runtime.loading import shard_like, state_like

_GRAD: Any = Tensor.grad
"""What reads and writes the attribute."""


def optimizers_of(parameters: Iterable[Tensor]) -> list[Optimizer]:
    """Every optimizer that has one of ``parameters`` in groups of its own."""
    known = {id(p) for p in parameters}
    alive = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
    return [o for o in alive if any(id(p) in known for p in _members(o))]


def refuse_unfit_state(named: Mapping[str, Tensor]) -> list[Optimizer]:
    """The optimizers of these parameters, all of whose state can be cut as they are.

    Args:
        named: parameters that are about to be replaced.

    Raises:
        AutoparError: some cannot, or has no values; on every rank.
        RankError: ranks have different state, as where one of them alone has loaded a checkpoint.
    """
    found = together(lambda: _checked(optimizers_of(named.values()), named))
    digests = [_digest(p, found) for p in named.values()]
    name = next((n for n, differ in zip(named, differing(digests), strict=True) if differ), None)
    if name is not None:
        raise RankError(
            f"Ranks have different optimizer state or gradients of {name}.",
            found=f"state of {', '.join(sorted({type(o).__name__ for o in found})) or 'no optimizer'} on this rank",
            hint="load the same checkpoint on every rank, or load the optimizer's state after autoparallelize.",
        )
    return found


def hand_over(replaced: Sequence[tuple[str, Tensor, Tensor]], optimizers: Iterable[Optimizer], *, cast: bool) -> None:
    """Give ``optimizers`` the new parameters, with state and gradients cut as these are; who still asks an old one for
    its gradient is told so.

    Args:
        replaced: name, old and new parameter of each.
        cast: whether state in an old parameter's dtype gets that of the new one.
    """
    new = {id(old): made for _, old, made in replaced}
    for optimizer in optimizers:
        _point(optimizer, new, cast=cast)
    for name, old, made in replaced:
        if old.grad is not None and isinstance(made, DTensor) and not old.grad.is_meta:
            made.grad = shard_like(old.grad.to_dense().to(made.dtype), made)
            old.grad = None
        _retire(old, name)


def _members(optimizer: Optimizer) -> Iterator[Tensor]:
    """Of a wrapper, whose groups are those of another, none."""
    return (p for group in vars(optimizer).get("param_groups", ()) for p in group["params"])


def _state(optimizer: Optimizer) -> Any:
    return vars(optimizer).get("state", {})


def _checked(optimizers: list[Optimizer], named: Mapping[str, Tensor]) -> list[Optimizer]:
    for optimizer in optimizers:
        for name, parameter in named.items():
            for key, value in _state(optimizer).get(parameter, {}).items():
                _check(optimizer, f"{key} of {name}", value, parameter)
    return optimizers


def _check(optimizer: Optimizer, what: str, value: Any, parameter: Tensor) -> None:
    kind = type(optimizer).__name__
    tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    if any(t.is_meta for t in tensors):
        raise AutoparError(
            "The optimizer has state on the meta device, which has no values.",
            found=f"{what} in {kind}",
            hint="make it after the model is parallel, of model.parameters().",
        )
    strange = [t for t in tensors if t.numel() > 1 and (t is not value or t.shape != parameter.shape)]
    if strange:
        raise AutoparError(
            "The optimizer has state that cannot be cut as its parameter is.",
            found=f"{what} in {kind}, {tuple(strange[0].shape)} for a parameter {tuple(parameter.shape)}",
            hint="make it after the model is parallel, of model.parameters().",
        )


def _digest(parameter: Tensor, optimizers: Iterable[Optimizer]) -> int:
    """Equal where ranks have the same gradient and state of a parameter, in whatever order their optimizers are."""
    found = [o for o in optimizers if parameter in _state(o)]
    held = [("grad", parameter.grad), *(item for o in found for item in _state(o)[parameter].items())]
    return sum(zlib.crc32(_bytes(value), zlib.crc32(key.encode())) for key, value in held if value is not None)


def _bytes(value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return repr(value).encode() if isinstance(value, (bool, int, float, str)) else b""
    flat = value.detach().to_dense().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def _point(optimizer: Optimizer, new: Mapping[int, Tensor], *, cast: bool) -> None:
    """In the lists and the dict that are there: others hold them too."""
    held = _state(optimizer)
    for group in vars(optimizer)["param_groups"]:
        for i, old in enumerate(group["params"]):
            made = new.get(id(old))
            if made is None:
                continue
            group["params"][i] = made
            if old in held:
                held[made] = {k: _moved(k, v, old, made, group, cast=cast) for k, v in held.pop(old).items()}


def _moved(key: str, value: Any, old: Tensor, made: Tensor, group: Mapping[str, Any], *, cast: bool) -> Any:
    value = state_like(key, value, made)
    if isinstance(value, DTensor):
        return value.to(made.dtype) if cast and value.dtype == old.dtype else value
    on_device = isinstance(value, Tensor) and (group.get("fused") or group.get("capturable"))
    return value.to(made.device) if on_device else value


class Replaced(nn.Parameter):
    """A parameter in whose place a DTensor is, and which no backward reaches any more."""

    @property
    def grad(self) -> Tensor | None:
        gradient: Tensor | None = _GRAD.__get__(self)
        if gradient is None:
            raise AutoparError(
                "This parameter gets no gradients any more: a DTensor has taken its place in the parallel model.",
                found=f"{vars(self).get('_autopar_name', 'a parameter')} as it was before autoparallelize",
                hint="make lists of parameters, and optimizers that are none of torch.optim's, after autoparallelize.",
            )
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)


@cache
def _replaced(kind: type[Any]) -> type[Any]:
    return Replaced if kind is nn.Parameter else type(kind.__name__, (Replaced, kind), {})


def _retire(old: Tensor, name: str) -> None:
    if not isinstance(old, DTensor):
        old._autopar_name = name  # type: ignore[attr-defined]
        old.__class__ = _replaced(type(old))
