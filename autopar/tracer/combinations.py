"""Combinations of elements: torch's own version selects them by a mask, so their number depends on values."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

_ordinary = torch.combinations


@contextlib.contextmanager
def combinations_by_index() -> Iterator[None]:
    """Select combinations by constant indices during an export: they depend only on the number of elements."""
    with mock.patch.object(torch, "combinations", _combinations):
        yield


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:  # noqa: A002
    if input.ndim != 1 or r < 1:
        return _ordinary(input, r, with_replacement)
    if r == 2:
        return input[torch.triu_indices(len(input), len(input), 0 if with_replacement else 1, device=input.device).mT]
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    chosen = torch.tensor(list(choose(range(len(input)), r)), dtype=torch.int64, device=input.device)
    return input.index_select(0, chosen.reshape(-1)).reshape(-1, r)
