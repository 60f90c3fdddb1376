"""Ops on plain tensors and devices that have no public name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def as_tensor(x: Any) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)
    return x


def keep_gpu_busy(seconds: float) -> None:
    """Keep the GPU busy for about ``seconds``, so that ops launched meanwhile run without gaps and can be timed."""
    torch.cuda._sleep(int(seconds * 1.5e9))  # type: ignore[no-untyped-call]  # takes cycles


def profiler_is_running() -> bool:
    """Whether a profiler records in this thread; opening a range costs microseconds even if nobody records it."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def copy_each(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy each value to its target in one call, which has no public name."""
    torch._foreach_copy_(list(targets), list(values))


def bump_versions(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd that ``tensors`` were changed in place, which it cannot see for a DTensor's shard."""
    versions = [t._version + 1 for t in tensors]
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))
