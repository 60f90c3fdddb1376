"""A check of lengths as the program runs: one device would make a tensor of another length where it fails."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ops.registration import define, without_gradient

aten = torch.ops.aten


def _checked(x: Tensor, longest: Tensor, *, steps: int, exact: bool) -> Tensor:
    """``x``. On a GPU nothing waits for the check: its error comes with the next synchronization."""
    if exact:
        holds, must = longest == steps, f"as long as the padded batch, {steps} steps: give pad_packed_sequence its"
    else:
        holds, must = longest <= steps, f"within its total_length, {steps} steps: give pad_packed_sequence a larger"
    aten._assert_async.msg(holds, f"The longest sequence that is packed must be {must} total_length.")
    return x.clone(memory_format=torch.contiguous_format)


def _checked_fake(x: Tensor, longest: Tensor, *, steps: int, exact: bool) -> Tensor:
    return x.new_empty(x.shape)


define("checked_length(Tensor x, Tensor longest, *, SymInt steps, bool exact) -> Tensor", _checked, _checked_fake)
without_gradient("checked_length")
