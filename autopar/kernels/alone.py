"""Kernels in a standalone file: emitted programs hold a copy of this module, and of the kernels that they use.

They run on CUDA devices if triton is installed, and on a CPU with triton's interpreter (``TRITON_INTERPRET=1``). A
single process uses the fastest configuration. The ranks of a job all use the first one: sums in another order round
differently, and replicas would diverge.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.kernels.devices import config_size, launch_seconds, takes

TABLE: dict[str, tuple[Callable[[], Mapping[str, Any]], tuple[Mapping[str, int], ...], tuple[int, ...]]] = {}
"""For each kernel: a function that returns the launchers, its configurations, and the arguments whose sizes decide."""

FASTEST: dict[tuple[str, ...], Mapping[str, int]] = {}


def enabled(*tensors: Tensor, integers: bool = False) -> bool:
    """Whether a kernel runs on these tensors."""
    here = tensors[0].is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return here and importlib.util.find_spec("triton") is not None and takes(tensors, integers=integers)


def run(name: str, *args: Any, **kwargs: Any) -> Any:
    """Launch a kernel with the configuration that was fastest for tensors of these sizes."""
    make, configs, positions = TABLE[name]
    launch = make()[name]
    in_a_job = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if in_a_job or not args[0].is_cuda or torch.cuda.is_current_stream_capturing():
        return launch(*args, **kwargs, **configs[0])
    size = (name, *(config_size(args[i]) for i in positions))
    if size not in FASTEST:
        FASTEST[size] = min(configs, key=lambda c: launch_seconds(launch, args, {**kwargs, **c}))
    return launch(*args, **kwargs, **FASTEST[size])
