"""Writes to masked selections: ``x[mask] = values``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.tracer.flat import Flat, materialize
from autopar.tracer.masked import Masked, is_masked, mask_in, spread, unflattened
from autopar.tracer.replacements import Operand, replaces

aten = torch.ops.aten


@replaces(aten.index_put_.default)
def put(tracer: Any, given: Operand, indices: Sequence[Operand | None], values: Any, accumulate: bool = False) -> Any:
    """Write ``x[mask] = token``, ``x[mask] = rows``, or results of ``x[mask]`` by the same mask.

    There must be as many rows as the mask selects, which is a check of values and assumed to pass.
    """
    x, indices = unflattened(given, indices)
    mask, lead = mask_in(indices)
    if mask is None:
        return NotImplemented
    place = Masked(x, mask, lead, mask._version)
    new = _extended(values, place)
    if new is None:
        return NotImplemented
    new = new.to(x.dtype)
    written = x.copy_(torch.where(spread(mask, place.rest), x + new if accumulate else new, x))
    return given if isinstance(given, Flat) and x is given.base else written


@replaces(aten.index_put.default)
def put_in_copy(
    tracer: Any, given: Operand, indices: Sequence[Operand | None], values: Any, accumulate: bool = False
) -> Any:
    """Write as in ``x.clone()[mask] = values``."""
    if mask_in(materialize(list(indices)))[0] is None:
        return NotImplemented
    return put(tracer, materialize(given).clone(), indices, values, accumulate)


def _extended(values: Any, place: Masked) -> Tensor | None:
    """Extend ``values``, which are written where ``place`` selects, to all elements of ``place``.

    Return None if the result could depend on the number of selected elements.
    """
    if is_masked(values):
        whole = values.whole
        while whole.ndim > place.whole.ndim and whole.shape[0] == 1:
            whole = whole.squeeze(0)
        return whole if values.matches_after_mask(place) and whole.ndim <= place.whole.ndim else None
    found: Tensor = materialize(values)
    while found.ndim > place.rest and found.shape[0] == 1:
        found = found.squeeze(0)
    if place.broadcasts(found):
        return place.with_mask_dims(found)
    at = found.ndim - place.rest - 1  # the dim of the rows
    rows = found.shape[at]
    return found[(slice(None),) * at + (_positions_among_selected(place.mask).clamp(0, rows - 1),)] if rows else None


def _positions_among_selected(mask: Tensor) -> Tensor:
    """Return each selected element's position among the selected ones; for the others, that of the one before."""
    return (mask.reshape(-1).cumsum(0) - 1).reshape(mask.shape)
