"""Masked selections ``x[mask]``: the number of selected elements depends on values, so no graph can hold them.

Elementwise ops are computed for every element, and those that the mask did not select are dropped where the result is
written back (``h[mask] *= 2``) or reduced (``loss[mask].mean()``). Other operands may have any shape that does not
depend on the number of selected elements. Inputs are filled with ones where they are not selected, so that no gradient
flows back from there, not even the NaN of an op without a gradient there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from autopar.tracer.flat import Deferred, Flat, materialize
from autopar.tracer.replacements import Operand, replaces

aten = torch.ops.aten


@dataclass
class Masked(Deferred):
    """``whole[..., mask]``. In-place ops change ``whole``, which nothing else holds.

    Args:
        lead: number of dims of ``whole`` before those of the mask.
        version: version of the mask, which must not change before the result is written back.
        shared: whether it is a view of another selection, or another is a view of it: then neither may be changed.
    """

    whole: Tensor
    mask: Tensor
    lead: int
    version: int
    shared: bool = False

    @property
    def rest(self) -> int:
        """Number of dims of ``whole`` after those of the mask."""
        return self.whole.ndim - self.lead - self.mask.ndim

    def with_whole(self, whole: Tensor) -> Masked:
        return Masked(whole, self.mask, self.lead, self.version)

    def with_result(self, whole: Tensor) -> Masked:
        """Return the result of an op that keeps the dims after the mask, and may change those before it."""
        return Masked(whole, self.mask, whole.ndim - self.rest - self.mask.ndim, self.version)

    def _shares_mask(self, other: Masked) -> bool:
        """Whether the same mask selects both, and it has not changed."""
        return self.mask is other.mask and self.version == other.version == self.mask._version

    def matches_after_mask(self, other: Masked) -> bool:
        """Whether the same mask selects both, with equally many dims after it."""
        return self._shares_mask(other) and self.rest == other.rest

    def matches_before_mask(self, other: Masked) -> bool:
        """Whether the same mask selects both, with equally many dims before it."""
        return self._shares_mask(other) and self.lead == other.lead

    def matches(self, other: Masked) -> bool:
        """Whether the same mask selects both, element for element."""
        return self.matches_before_mask(other) and self.rest == other.rest

    @property
    def ndim(self) -> int:
        """Number of dims of the selection, in which those of the mask are one."""
        return self.lead + 1 + self.rest

    def dims_of(self, d: int) -> range:
        """Return the dims of ``whole`` that form dim ``d`` of the selection."""
        first = d + (self.mask.ndim - 1) * (d > self.lead)
        return range(first, first + (self.mask.ndim if d == self.lead else 1))

    def view(self, whole: Tensor) -> Masked:
        """Return a selection by the same mask from ``whole``, which shares its memory with this one's."""
        self.shared = True
        return replace(self, whole=whole)

    def broadcasts(self, x: Tensor) -> bool:
        """Whether ``x`` is the same for all selected elements, however many they are."""
        return x.ndim <= self.rest or x.shape[-self.rest - 1] == 1

    def with_mask_dims(self, x: Tensor) -> Tensor:
        """Return ``x``, which is the same for all selected elements, with a dim of size 1 for each dim of the mask."""
        if x.ndim <= self.rest:
            return x
        at = x.ndim - self.rest
        return x.reshape(*x.shape[: at - 1], *[1] * self.mask.ndim, *x.shape[at:])

    def filled(self, x: Tensor, value: float) -> Tensor:
        """Return ``x`` with ``value`` where it is not selected."""
        return x.masked_fill(~spread(self.mask, self.rest), value)

    def total(self) -> Tensor:
        """Return the number of selected elements."""
        before, behind = self.whole.shape[: self.lead], self.whole.shape[self.whole.ndim - self.rest :]
        count: Tensor = self.mask.sum() * math.prod((*before, *behind))
        return count

    def materialize(self) -> Tensor:
        """Select for real; if a graph cannot hold that, torch's own error names the line."""
        chosen: Tensor = aten.index.Tensor(self.whole, [*[None] * self.lead, self.mask])
        return chosen


@dataclass
class Count(Deferred):
    """The number of elements that a mask selects, which only shapes may use."""

    selection: Masked

    def materialize(self) -> Tensor:
        """Select for real; if a graph cannot hold that, torch's own error names the line."""
        return self.selection.materialize()


def spread(mask: Tensor, rest: int) -> Tensor:
    return mask.reshape(*mask.shape, *[1] * rest)


def is_masked(x: Any) -> bool:
    return isinstance(x, Masked)


def _is_selection(x: Any) -> bool:
    return isinstance(x, (Masked, Count))


def is_deferred(x: Any) -> bool:
    return isinstance(x, Deferred)


def has_masked(tree: Any) -> bool:
    return any(map(_is_selection, tree_flatten(tree, is_leaf=_is_selection)[0]))


def size(tracer: Any, x: Masked, dim: int) -> Any:
    d = dim % x.ndim
    return Count(x) if d == x.lead else x.whole.shape[x.dims_of(d)[0]]


def mask_in(indices: Sequence[Any]) -> tuple[Tensor | None, int]:
    """Return the only mask among indices and the number of full dims before it; None if there are other indices."""
    lead = next((i for i, index in enumerate(indices) if index is not None), 0)
    mask, *others = (*indices[lead:], None)
    alone = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim and all(o is None for o in others)
    return (mask if alone else None), lead


def unflattened(x: Operand, indices: Sequence[Operand | None]) -> tuple[Tensor, list[Tensor | None]]:
    """Unflatten a tensor and its mask if both have the same dims flattened."""
    mask = indices[0] if len(indices) == 1 else None
    if isinstance(x, Flat) and isinstance(mask, Flat) and x.lead_shape == mask.base.shape:
        return x.base, [mask.base]
    plain: tuple[Tensor, list[Tensor | None]] = materialize((x, list(indices)))
    return plain


@replaces(aten.index.Tensor)
def index(tracer: Any, given: Operand, indices: Sequence[Operand | None]) -> Any:
    x, indices = unflattened(given, indices)
    mask, lead = mask_in(indices)
    return NotImplemented if mask is None else _select(x, mask, lead)


@replaces(aten.masked_select.default)
def masked_select(tracer: Any, given: Operand, mask: Operand) -> Any:
    x, chosen = materialize((given, mask))
    if x.shape != chosen.shape:
        x, chosen = aten.broadcast_tensors.default([x, chosen])
    return _select(x, chosen, 0) if x.ndim else NotImplemented


def _select(x: Tensor, mask: Tensor, lead: int) -> Masked:
    whole = Masked(x, mask, lead, mask._version)
    return whole.with_whole(whole.filled(x, 1))
