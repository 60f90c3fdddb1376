"""Where kernels run: on CUDA devices where triton is installed, in dtypes that they know; all else runs eagerly."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar._torch import FakeTensor
from autopar.kernels.registry import KERNELS, Config, Kernel
from autopar.kernels.tuning import Tuning

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})

REPEATS = 5
"""Timings of a configuration, of which the least counts."""

_forced: ContextVar[bool] = ContextVar("kernels_forced", default=False)


@contextlib.contextmanager
def forced() -> Iterator[None]:
    """Run kernels wherever tensors are: on a CPU by triton's interpreter, which tests use (``TRITON_INTERPRET=1``)."""
    token = _forced.set(True)
    try:
        yield
    finally:
        _forced.reset(token)


def enabled(*tensors: Tensor, integers: bool = False) -> bool:
    """Whether a kernel takes these tensors.

    Args:
        integers: whether it copies only, and takes whole numbers too.
    """
    if torch.compiler.is_compiling() or not (tensors[0].is_cuda or _forced.get()):
        return False
    if any(isinstance(t, FakeTensor) for t in tensors):
        return False
    known = DTYPES | INTEGERS if integers else DTYPES
    return _installed() and all(t.dtype in known for t in tensors)


def run(name: str, *args: Any, **kwargs: Any) -> Any:
    """Launch a kernel with the configuration that is fastest on this device for tensors of these sizes."""
    kernel = KERNELS[name]
    return kernel.launch(*args, **kwargs, **_config(kernel, args, kwargs))


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _config(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Config:
    first: Tensor = args[0]
    if not first.is_cuda:
        return kernel.configs[0]
    measuring = not torch.cuda.is_current_stream_capturing()
    size = " ".join(f"{_size(args[i])} {args[i].dtype}" for i in kernel.size)
    return _tuning(first.device.index or 0).best(
        kernel, size, (lambda config: _seconds(kernel, args, {**kwargs, **config})) if measuring else None
    )


@cache
def _tuning(device: int) -> Tuning:
    return Tuning(torch.cuda.get_device_name(device))


def _size(x: Tensor) -> str:
    """Rows to the next power of two, and the length of one: sizes of the same text share a configuration."""
    last = x.shape[-1] if x.ndim else 1
    rows = x.numel() // max(last, 1)
    return f"2^{max(rows - 1, 0).bit_length()}x{last}"


def _seconds(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The least of a few timings; a configuration that the device cannot run takes for ever."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    best = float("inf")
    try:
        kernel.launch(*args, **kwargs)
        for _ in range(REPEATS):
            start.record()
            kernel.launch(*args, **kwargs)
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
    except Exception:  # noqa: BLE001  out of shared memory, registers or a compiler's patience, by many names
        return float("inf")
    return best
