"""Compile every Triton kernel without a GPU: ``python -m tests.kernel_compilation [--quick]``.

The interpreter runs kernels as Python, but a compiler refuses more: types that change in a loop, shapes that do not
broadcast, more shared memory than there is. Launching functions get tensors on the CPU and a driver that claims to be
a GPU's, and each launch compiles to a cubin in every configuration. At least one configuration must keep nearly
everything in registers, since spills move the bytes that the kernel should save.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from autopar.kernels import KERNELS
from autopar.planner.graphs.kernel_patterns import MAX_DIM, MAX_DIM_BACKWARD

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SHARED_BYTES = 227 * 1024
"""Shared memory of one block on an H100, in bytes."""

SPILLED_BYTES = 128
"""Largest number of bytes per thread that may spill: a small part of what a thread reads of a row."""


class _Absent:
    """A driver that answers what a launch asks before anything runs."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Makes launches compile without running, and collects the compiled kernels."""

    def __init__(self, capability: int = 90) -> None:
        self.kernels: list[Any] = []
        driver.set_active(_Absent(capability))
        made = self.kernels

        def launch(self: JITFunction[Any], grid: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> None:
                assert all(n < 2**31 if i == 0 else n < 2**16 for i, n in enumerate(grid)), f"grid {grid}"
                kernel = self.run(*args, grid=grid, warmup=True, **kwargs)
                made.append(getattr(kernel, "result", lambda k=kernel: k)())

            return call

        JITFunction.__getitem__ = launch  # type: ignore[method-assign, assignment]


def smallest(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Yield calls with sizes and strides of 1, which the compiler treats as constants."""
    x, row, index = torch.zeros(1, 1, dtype=dtype), torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    loss = {"ignore_index": -100, "offset": 0}
    yield "pack", (x, 1, 1), {}
    yield "unpack", (x.view(1, 1, 1), 0, 1), {}
    yield "lookup", (x, index), {"offset": 0}
    yield "lookup_backward", (x, index), {"rows": 1, "offset": 0}
    yield "statistics", (x,), {}
    yield "sumexp", (x, x[0]), {}
    yield "nll", (x, row, index), loss
    yield "nll_backward", (row, x, row, index), loss
    yield "nll_backward", (row, x, row, index, row, row), loss
    yield "add_norm", (x, x, x[0], x[0]), {"eps": 1e-5, "centred": True, "results": ["out"]}
    yield "norm_backward", (x, x, row, row, x[0], x), {"results": ["input_gradient"]}


def launches(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Yield calls of each kernel's launching function, one for each way in which it is specialized."""
    rows, d, v = 64, 1024, 5003
    x = torch.zeros(rows, d, dtype=dtype)
    wide = x.float()
    odd = torch.zeros(rows, v, dtype=dtype)
    row, mean = torch.zeros(rows), torch.zeros(rows, 1)
    loss = {"ignore_index": -100, "offset": 7}
    for other in (dtype, torch.float32):
        yield "pack", (x.view(4, 16, d), 2, 8, other), {}
        yield "pack", (x.view(4, 16, d).transpose(1, 2), 0, 3, other), {}
        yield "unpack", (x.view(4, 16, d), 1, d, other), {}
        yield "unpack", (x.view(4, 16, d), 0, 61, other), {}
    for index in (torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int32)):
        yield "lookup", (x, index), {"offset": 5}
        yield "lookup_backward", (x, index), {"rows": 32, "offset": 5, "padding_idx": 6}
        for logits in (x, odd):
            yield "nll", (logits, row, index), loss
            yield "nll_backward", (row, logits, row, index), loss
            yield "nll_backward", (row, logits, row, index, row, logits[0].float()), loss
    for logits in (x, odd):
        yield "statistics", (logits,), {}
        yield "sumexp", (logits, row.to(dtype)), {}
    for centred, scaled in itertools.product((True, False), repeat=2):
        weight, options = x[0] if scaled else None, {"eps": 1e-5, "centred": centred}
        names = ["input_gradient", "weight_gradient", "bias_gradient"]
        for residual in (None, x):
            arriving, given = (x, x) if residual is None else (wide, wide)
            for results in (["total", "out", "rstd"], ["out", "wide", "hat"]):
                bias = weight if centred else None
                yield "add_norm", (arriving, residual, weight, bias), {**options, "results": results}
            rows = mean if centred else None
            yield "norm_backward", (x, given, rows, mean, weight, residual), {"results": names}
    widest = torch.zeros(2, MAX_DIM, dtype=dtype)
    options = {"eps": 1e-5, "centred": True, "results": ["total", "out"]}
    yield "add_norm", (widest, widest, widest[0], widest[0]), options
    x = widest[:, :MAX_DIM_BACKWARD]
    yield "norm_backward", (x, x, mean[:2], mean[:2], x[0], x), {"results": ["input_gradient", "bias_gradient"]}


def spilled_bytes(cubin: bytes) -> int:
    """Return the bytes that each thread spills: the size of its stack, which kernels use for nothing else."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"STACK:(\d+)", said)[0])


def scalar_copies(compiled: Compiled) -> int:
    """Return the number of kernels that read or write single elements where all sizes are multiples of 16."""
    before = len(compiled.kernels)
    x = torch.zeros(4, 64, 1024, dtype=torch.bfloat16)
    for name, args in (("pack", (x, 2, 4)), ("unpack", (x, 1, 4096))):
        KERNELS[name].launch(*args)
    texts = [k.asm["ptx"] for k in compiled.kernels[before:]]
    return sum(not {"ld", "st"} <= set(re.findall(r"(ld|st)\.global\.v\d", text)) for text in texts)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument(
        "--quick", action="store_true", help="one dtype, and of each kernel one call in one configuration"
    )
    options = parser.parse_args()
    compiled, failed = Compiled(options.capability), 0
    for dtype in FLOATS[-1:] if options.quick else FLOATS:
        calls = (*launches(dtype), *smallest(dtype))
        first = {name: (name, args, kwargs) for name, args, kwargs in reversed(calls)}
        for name, args, kwargs in first.values() if options.quick else calls:
            spilled = []
            for config in KERNELS[name].configs[: 1 if options.quick else None]:
                before = len(compiled.kernels)
                try:
                    KERNELS[name].launch(*args, **kwargs, **config)
                except Exception as error:  # noqa: BLE001  told and counted
                    failed += 1
                    say(f"{name} {dtype} {dict(config)}: {type(error).__name__} {str(error)[-600:]}")
                    continue
                made = compiled.kernels[before:]
                if any("cubin" not in k.asm or k.metadata.shared > SHARED_BYTES for k in made):
                    failed += 1
                    say(f"{name} {dtype} {dict(config)}: {[k.metadata.shared for k in made]} bytes of shared memory")
                elif min(spilled, default=1):  # one configuration without spills is enough
                    spilled.append(max((spilled_bytes(k.asm["cubin"]) for k in made), default=0))
            if min(spilled, default=0) > SPILLED_BYTES:
                failed += 1
                shapes = [list(t.shape) for t in args if isinstance(t, torch.Tensor)]
                say(f"{name} {dtype} {shapes}: {min(spilled)} bytes a thread spilled in every configuration")
    if scalar := scalar_copies(compiled):
        failed += scalar
        say(f"{scalar} copies of even sizes are not vectorized")
    texts = {k.asm["ptx"] for k in compiled.kernels}
    say(f"triton {triton.__version__}, sm_{options.capability}: {len(texts)} kernels compiled, {failed} failed")
    return 1 if failed or not texts else 0


if __name__ == "__main__":
    sys.exit(main())
