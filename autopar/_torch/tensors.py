"""Ops on plain tensors and devices that have no public name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def as_tensor(x: Any) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)
    return x


def keep_gpu_busy(seconds: float) -> None:
    """Let the GPU do nothing for about so long: what is launched meanwhile then runs without gaps, and can be timed."""
    torch.cuda._sleep(int(seconds * 1.5e9))  # type: ignore[no-untyped-call]  # cycles


def profiler_is_running() -> bool:
    """Whether ranges are recorded in this thread; to open one costs microseconds even where nobody looks."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def copy_each(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy each value to its target: one call for all of them, which has no public name."""
    torch._foreach_copy_(list(targets), list(values))


def count_as_changed(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd that ``tensors`` were changed in place: it cannot see what is done to a DTensor's shard."""
    versions = [t._version + 1 for t in tensors]
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))
