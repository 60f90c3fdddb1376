"""What autopar finds on this machine, and what does not work here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

LEAST_TORCH = (2, 11)
"""Oldest supported release of torch."""

OPTIONAL = {
    "transformers": "Hugging Face models by name or config on the command line",
    "safetensors": "reading and writing safetensors",
    "triton": "fused kernels on GPUs",
    "matplotlib": "plan.figures",
    "tensorboard": "the TensorBoard example",
    "accelerate": "Hugging Face Trainer and Accelerate",
    "lightning": "PyTorch Lightning",
}
"""Optional packages, and what they are for."""


class Finding(NamedTuple):
    """One line of the list. ``works`` is None if the line is only information."""

    topic: str
    text: str
    works: bool | None = None


def findings() -> Iterator[Finding]:
    """Yield the findings, most important first."""
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield _torch()
    yield from _solvers()
    yield from _devices()
    yield from _links()
    for name, purpose in OPTIONAL.items():
        yield Finding("optional", f"{name} {_version(name)}: {purpose}", works=_installed(name))


def _torch() -> Finding:
    release = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    fits = release >= LEAST_TORCH
    wanted = "" if fits else f"; autopar needs {'.'.join(map(str, LEAST_TORCH))} or later"
    return Finding("torch", f"{torch.__version__}{wanted}", works=fits)


def _solvers() -> Iterator[Finding]:
    highs = _installed("highspy")
    better = "" if highs else ": pip install highspy, which is much faster than CBC"
    yield Finding("solver", f"HiGHS {_version('highspy')}{better}", works=highs)
    import pulp

    cbc = bool(pulp.PULP_CBC_CMD(msg=False).available())
    yield Finding("solver", f"CBC through PuLP {_version('pulp')}", works=cbc)


def _devices() -> Iterator[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    yield Finding("device", f"CPU with {os.cpu_count()} cores, {memory / 2**30:.1f} GiB of memory", works=True)
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None or torch.version.hip is not None
        why = "torch finds none" if built else "this torch is built without CUDA"
        yield Finding("device", f"no GPU ({why}): you can plan for any GPU, and programs run on the CPU", works=False)
        return
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        yield Finding("device", f"GPU {i}: {p.name}, {p.total_memory / 2**30:.1f} GiB", works=True)


def _links() -> Iterator[Finding]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    if pairs:
        direct = sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
        said = f"{direct} of {len(pairs)} pairs of GPUs have direct access to each other"
        yield Finding("links", said, works=direct == len(pairs))
    yield Finding("links", "gloo, for processes on CPUs", works=dist.is_available() and dist.is_gloo_available())
    yield Finding("links", "NCCL, for GPUs", works=dist.is_available() and dist.is_nccl_available())


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


MARKS = {True: "yes", False: "no", None: ""}


def text() -> str:
    """Return the findings as lines of text."""
    return "\n".join(f"{f.topic:<9} {MARKS[f.works]:<4} {f.text}".rstrip() for f in findings())
