"""Keeps CPU-only ops out of captured programs, which are captured on the CPU for any kind of device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

from autopar._torch import backported_fixes, grouped_products


@contextlib.contextmanager
def device_neutral_ops() -> Iterator[None]:
    """Keep oneDNN's ops, which only CPUs have, out of the trace; an LSTM becomes matrix products."""
    flags = torch.backends.mkldnn.flags(enabled=False)
    with _without_tf32_warning():
        flags.__enter__()
    try:
        with grouped_products(), backported_fixes():
            yield
    finally:
        with _without_tf32_warning():
            flags.__exit__(None, None, None)


@contextlib.contextmanager
def _without_tf32_warning() -> Iterator[None]:
    """Suppress a warning: setting oneDNN's flags also sets those of Intel GPUs, and warns if there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration")
        yield
