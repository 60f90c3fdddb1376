"""Decide where kernels run: on CUDA devices with triton, for supported dtypes. Everything else runs eagerly."""

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
from autopar.kernels.devices import config_size, launch_seconds, takes
from autopar.kernels.registry import KERNELS, Config, Kernel
from autopar.kernels.tuning import Tuning

_forced: ContextVar[bool] = ContextVar("kernels_forced", default=False)


@contextlib.contextmanager
def forced() -> Iterator[None]:
    """Run kernels on any device. On a CPU triton's interpreter runs them, as in tests (``TRITON_INTERPRET=1``)."""
    token = _forced.set(True)
    try:
        yield
    finally:
        _forced.reset(token)


def enabled(*tensors: Tensor, integers: bool = False) -> bool:
    """Whether a kernel runs on these tensors.

    Args:
        integers: whether it only copies, and so supports integers too.
    """
    if torch.compiler.is_compiling() or not (tensors[0].is_cuda or _forced.get()):
        return False
    if any(isinstance(t, FakeTensor) for t in tensors):
        return False
    return _installed() and takes(tensors, integers=integers)


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
    size = " ".join(config_size(args[i]) for i in kernel.size)
    return _tuning(first.device.index or 0).best(
        kernel,
        size,
        (lambda config: launch_seconds(kernel.launch, args, {**kwargs, **config})) if measuring else None,
        lambda: torch.cuda.synchronize(first.device),
    )


@cache
def _tuning(device: int) -> Tuning:
    return Tuning(torch.cuda.get_device_name(device))
