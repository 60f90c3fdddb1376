"""Which tensors kernels support, and how long a launch takes. Used here and in emitted files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar._torch import keep_gpu_busy

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})

REPEATS = 10
"""Number of launches of a configuration that are timed together."""

AHEAD_S = 2e-3
"""Seconds for which the GPU is kept busy while the host launches them."""


def takes(tensors: Sequence[Tensor], *, integers: bool = False) -> bool:
    """Whether kernels support these dtypes, and nothing is being traced.

    Args:
        integers: whether the kernel only copies, and so supports integers too.
    """
    known = DTYPES | INTEGERS if integers else DTYPES
    return not torch.compiler.is_compiling() and all(t.dtype in known for t in tensors)


def config_size(x: Tensor) -> str:
    """Return rows rounded up to a power of two, row length and dtype. Equal values share a configuration."""
    last = x.shape[-1] if x.ndim else 1
    rows = x.numel() // max(last, 1)
    return f"2^{max(rows - 1, 0).bit_length()}x{last} {x.dtype}"


def launch_seconds(launch: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the device time of a launch in seconds. The host, which may be slower, runs ahead.

    Returns infinity for a configuration that the device cannot run.
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
    except Exception:  # noqa: BLE001  out of shared memory, registers or compile time, as many exception types
        return float("inf")
    return float(start.elapsed_time(end)) / 1e3 / REPEATS
