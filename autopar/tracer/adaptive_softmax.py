"""``AdaptiveLogSoftmaxWithLoss`` selects the samples of each cluster of classes, whose number depends on values.

During an export, every cluster is computed for all samples, and samples of other clusters are ignored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100


@contextlib.contextmanager
def clusters_of_all_samples() -> Iterator[None]:
    """Compute all clusters for all samples during an export; targets are assumed to be valid classes."""
    adaptive = nn.AdaptiveLogSoftmaxWithLoss
    ordinary = adaptive.forward

    def forward(self: Any, input_: Tensor, target_: Tensor) -> Any:
        if input_.dim() != 2 or target_.shape != input_.shape[:1]:
            return ordinary(self, input_, target_)
        places = target_
        output = torch.zeros((), dtype=input_.dtype)
        for i, (low, high) in enumerate(zip(self.cutoffs, self.cutoffs[1:], strict=False)):
            inside = (target_ >= low) & (target_ < high)
            places = places.masked_fill(inside, self.shortlist_size + i)
            own = (target_ - low).masked_fill(~inside, IGNORED)
            output = output - functional.cross_entropy(self.tail[i](input_), own, reduction="none")
        output = output - functional.cross_entropy(self.head(input_), places, reduction="none")
        return type_of_output(output, -output.mean())

    type_of_output = nn.modules.adaptive._ASMoutput
    with mock.patch.object(adaptive, "forward", forward):
        yield
