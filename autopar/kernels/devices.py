"""Which tensors kernels take, and how long a launch lasts: what runs here and in emitted files alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar._torch import keep_gpu_busy

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})

REPEATS = 10
"""Launches of a configuration that are timed together."""

AHEAD_S = 2e-3
"""In which the host launches them."""


def takes(tensors: Sequence[Tensor], *, integers: bool = False) -> bool:
    """Whether kernels know these dtypes, and are not being traced.

    Args:
        integers: whether the kernel copies only, and takes whole numbers too.
    """
    known = DTYPES | INTEGERS if integers else DTYPES
    return not torch.compiler.is_compiling() and all(t.dtype in known for t in tensors)


def config_size(x: Tensor) -> str:
    """Rows to the next power of two, the length of one, and the dtype: what shares a configuration."""
    last = x.shape[-1] if x.ndim else 1
    rows = x.numel() // max(last, 1)
    return f"2^{max(rows - 1, 0).bit_length()}x{last} {x.dtype}"


def launch_seconds(launch: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Of a launch, as the device sees it: the host, which takes longer, runs ahead.

    A configuration that the device cannot run takes for ever.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    try:
        launch(*args, **kwargs)
        keep_gpu_busy(AHEAD_S)
        start.record()
        for _ in range(REPEATS):
            launch(*args, **kwargs)
        end.record()
        end.synchronize()
    except Exception:  # noqa: BLE001  out of shared memory, registers or a compiler's patience, by many names
        return float("inf")
    return float(start.elapsed_time(end)) / 1e3 / REPEATS
