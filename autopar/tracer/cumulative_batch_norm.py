"""Batch norm whose running statistics average all batches (``momentum=None``).

torch's own module takes the number of batches from a tensor as a Python number; a captured program divides by the
tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional


@contextlib.contextmanager
def cumulative_batch_norms() -> Iterator[None]:
    """Make such modules count batches in the program during an export."""
    ordinary = nn.modules.batchnorm._BatchNorm.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.momentum is not None or not self.training or self.num_batches_tracked is None:
            return ordinary(self, x)
        self._check_input_dim(x)
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        result = functional.batch_norm(x, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        self.num_batches_tracked.add_(1)
        share = 1.0 / self.num_batches_tracked.to(mean.dtype)
        self.running_mean.add_((mean - self.running_mean) * share)
        self.running_var.add_((variance - self.running_var) * share)
        return result

    with mock.patch.object(nn.modules.batchnorm._BatchNorm, "forward", forward):
        yield
