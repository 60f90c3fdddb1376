"""Check lengths at run time. If a check fails, the original model would compute a tensor of another length."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ops.registration import define, without_gradient

aten = torch.ops.aten


def _checked(x: Tensor, longest: Tensor, *, steps: int, exact: bool) -> Tensor:
    """Return ``x``. On a GPU nothing waits for the check: its error comes with the next synchronization."""
    if exact:
        holds, must = longest == steps, f"as long as the padded batch, {steps} steps: pass pad_packed_sequence its"
    else:
        holds, must = longest <= steps, f"within total_length, {steps} steps: pass pad_packed_sequence a larger"
    aten._assert_async.msg(holds, f"The longest packed sequence must be {must} total_length.")
    return x.clone(memory_format=torch.contiguous_format)


def _checked_fake(x: Tensor, longest: Tensor, *, steps: int, exact: bool) -> Tensor:
    return x.new_empty(x.shape)


define("checked_length(Tensor x, Tensor longest, *, SymInt steps, bool exact) -> Tensor", _checked, _checked_fake)
without_gradient("checked_length")
