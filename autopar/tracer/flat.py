"""Tensors whose leading dims a model flattened, kept unflattened.

Models write ``x.view(-1, d) @ w`` and ``logits.view(-1, v)``: batch and sequence become one dim, of which only the
outer part can be cut. A ``Flat`` keeps the tensor from before the view, and ops that treat leading dims alike run on
that, so batch and sequence remain separate dims, and either can be cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten


class Deferred:
    """A tensor that is materialized only if an op needs it."""

    def materialize(self) -> torch.Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Flat(Deferred):
    """``base`` seen with its first ``lead`` dims flattened into one."""

    base: torch.Tensor
    lead: int

    @property
    def lead_shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape[: self.lead])

    @property
    def rest(self) -> tuple[int, ...]:
        return tuple(self.base.shape[self.lead :])

    @property
    def shape(self) -> tuple[int, ...]:
        return (math.prod(self.lead_shape), *self.rest)

    def materialize(self) -> torch.Tensor:
        return self.base.reshape(self.shape)


def materialize(tree: Any) -> Any:
    """Return ``tree`` with every deferred tensor in it materialized."""
    return tree_map(lambda x: x.materialize() if isinstance(x, Deferred) else x, tree, is_leaf=_is_deferred)


def has_flat(tree: Any) -> bool:
    return any(isinstance(x, Flat) for x in tree_flatten(tree, is_leaf=_is_flat)[0])


def _is_flat(x: Any) -> bool:
    return isinstance(x, Flat)


def _is_deferred(x: Any) -> bool:
    return isinstance(x, Deferred)


def _resolve(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    known = math.prod(n for n in shape if n != -1)
    return tuple(numel // known if n == -1 else int(n) for n in shape)


def view(x: torch.Tensor | Flat, shape: Sequence[int]) -> Any:
    """Return what ``x.view(shape)`` becomes: a Flat if it merges leading dims, the base if it undoes that."""
    base = x.base if isinstance(x, Flat) else x
    if base.numel() == 0:
        return NotImplemented
    target = _resolve(shape, base.numel())
    if isinstance(x, Flat):
        if target[: x.lead] == x.lead_shape and math.prod(target[x.lead :]) == math.prod(x.rest):
            return base.reshape(target)
        if target and target[0] == x.shape[0]:
            return Flat(base.reshape((*x.lead_shape, *target[1:])), x.lead)
        return NotImplemented
    for lead in range(2, base.ndim + 1):
        if target == (math.prod(base.shape[:lead]), *base.shape[lead:]):
            return Flat(base, lead)
    for lead in range(2, base.ndim if len(target) > 1 else 0):
        if target[0] == math.prod(base.shape[:lead]):  # the same view merges heads, as in torch's own attention
            return Flat(base.reshape((*base.shape[:lead], *target[1:])), lead)
    return NotImplemented


def copied(x: torch.Tensor | Flat, shape: Sequence[int]) -> torch.Tensor | Flat:
    """Return a copy of ``x`` if reshaping copies: in-place changes of one must not affect the other."""
    if isinstance(x, Flat) or x.is_contiguous():
        return x
    try:
        x.detach().view(_resolve(shape, x.numel()))
    except (RuntimeError, ValueError):  # its strides allow no view
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _lead_of(flats: Sequence[Flat]) -> tuple[int, ...] | None:
    shapes = {f.lead_shape for f in flats}
    return shapes.pop() if len(shapes) == 1 else None


def pointwise(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a pointwise op on the bases if every other operand broadcasts over the flattened dim."""
    leaves, _ = tree_flatten((args, kwargs), is_leaf=_is_flat)
    flats = [x for x in leaves if isinstance(x, Flat)]
    lead = _lead_of(flats)
    rest_ndim = max(len(f.rest) for f in flats)
    if lead is None or any(len(f.rest) != rest_ndim for f in flats):
        return NotImplemented
    if any(isinstance(x, torch.Tensor) and x.ndim > rest_ndim for x in leaves):
        return NotImplemented
    base_args, base_kwargs = tree_map(lambda x: x.base if _is_flat(x) else x, (args, kwargs), is_leaf=_is_flat)
    return Flat(target(*base_args, **base_kwargs), len(lead))


def trailing(target: Callable[..., Any], x: Flat, *args: Any, **kwargs: Any) -> Flat:
    """Run an op that works on the dims after the flattened one."""
    return Flat(target(x.base, *args, **kwargs), x.lead)


_DIM: dict[Callable[..., Any], int] = {
    aten.chunk.default: 2,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.slice.Tensor: 1,
    aten.unsqueeze.default: 1,
    aten.sum.dim_IntList: 1,
}
"""Ops along some dims that leave the others as they are, with the position of the argument that names the dims."""


def along_rest(target: Callable[..., Any], x: Flat, args: Sequence[Any], kwargs: Any) -> Any:
    """Run an op along dims after the flattened one; ``args`` count that as one dim."""
    at = _DIM.get(target)
    if at is None or at > len(args) or args[at - 1] is None:
        return NotImplemented
    dims = [args[at - 1]] if isinstance(args[at - 1], int) else args[at - 1]
    ndim = len(x.shape) + (target is aten.unsqueeze.default)
    if not dims or any(not -ndim < d < ndim or d % ndim == 0 for d in dims):
        return NotImplemented
    moved: Any = [d % ndim + x.lead - 1 for d in dims]
    moved = moved[0] if isinstance(args[at - 1], int) else moved
    made = target(x.base, *args[: at - 1], moved, *args[at:], **kwargs)
    return tree_map(lambda t: Flat(t, x.lead), made)
