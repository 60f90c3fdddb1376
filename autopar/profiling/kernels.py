"""The kernels whose times a cluster file holds, and how each is called at a size.

Each is called as an emitted program calls it, through the op itself. A size is the number of elements of the tensor
that an op streams, or the length of a side of what it multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import autopar.ops  # noqa: F401  registers the ops that are timed
from autopar.mesh import KernelTimes, rising
from autopar.profiling.timing import Stopwatch

aten = torch.ops.aten
own = torch.ops.autopar

COLUMNS = 256
Call = Callable[[], object]
Made = tuple[Call, float]
"""What runs a kernel, and its amount: FLOPs, or bytes read and written."""


@dataclass(frozen=True)
class Kernel:
    """One curve to measure: ``make(size, dtype, device)`` gives what runs it and its amount."""

    kind: str
    unit: str
    make: Callable[[int, torch.dtype, torch.device], Made]
    sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)


def _bytes(*tensors: Tensor) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors))


def _streaming(op: Callable[..., object], operands: int = 1, written: float = 1.0) -> Callable[..., Made]:
    """An op over ``operands`` matrices of a size, which writes ``written`` times as much as one of them."""

    def make(size: int, dtype: torch.dtype, device: torch.device) -> Made:
        x = [torch.rand((size // COLUMNS, COLUMNS), device=device).to(dtype) for _ in range(operands)]
        return lambda: op(*x), _bytes(*x) + written * _bytes(x[0])

    return make


def _matmul(n: int, dtype: torch.dtype, device: torch.device) -> Made:
    a, b = (torch.rand((n, n), device=device).to(dtype) for _ in range(2))
    return lambda: own.contract(a, b, "mk,nk->mn"), 2.0 * n**3


HEADS, WIDTH = 4, 64


def _attention_operands(length: int, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], float]:
    operands = [torch.rand((1, HEADS, length, WIDTH), device=device).to(dtype) for _ in range(4)]
    return operands, 4.0 * HEADS * length**2 * WIDTH


def _options(length: int) -> dict[str, object]:
    """Of an attention without mask and dropout."""
    place = {"global_shape": [1, HEADS, length, length], "offset": [0] * 4}
    return {"is_causal": False, "scale": WIDTH**-0.5, "dropout_p": 0.0, "site": 0, **place}


def _attention(length: int, dtype: torch.dtype, device: torch.device) -> Made:
    (q, k, v, _), flops = _attention_operands(length, dtype, device)
    return lambda: own.attention(q, k, v, None, None, **_options(length)), flops


def _attention_backward(length: int, dtype: torch.dtype, device: torch.device) -> Made:
    (q, k, v, grad), flops = _attention_operands(length, dtype, device)
    options = _options(length)
    out, lse = own.attention(q, k, v, None, None, **options)
    return lambda: own.attention_backward(grad, q, k, v, None, out, lse, None, **options), 2.5 * flops


IMAGES, SIDE = 4, 28


def _convolution_operands(channels: int, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], float]:
    shapes = ((IMAGES, channels, SIDE, SIDE), (channels, channels, 3, 3), (IMAGES, channels, SIDE, SIDE))
    operands = [torch.rand(shape, device=device).to(dtype) for shape in shapes]
    return operands, 2.0 * IMAGES * SIDE**2 * channels**2 * 9


def _convolution(channels: int, dtype: torch.dtype, device: torch.device) -> Made:
    (x, w, _), flops = _convolution_operands(channels, dtype, device)
    return lambda: aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), flops


def _convolution_backward(channels: int, dtype: torch.dtype, device: torch.device) -> Made:
    (x, w, grad), flops = _convolution_operands(channels, dtype, device)
    fixed = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    return lambda: aten.convolution_backward(grad, x, w, None, *fixed), 2 * flops


def _layer_norm(size: int, dtype: torch.dtype, device: torch.device) -> Made:
    x = torch.rand((size // COLUMNS, COLUMNS), device=device).to(dtype)
    w = torch.ones(COLUMNS, device=device, dtype=dtype)
    return lambda: aten.native_layer_norm(x, [COLUMNS], w, w, 1e-5), 2 * _bytes(x)


def _layer_norm_backward(size: int, dtype: torch.dtype, device: torch.device) -> Made:
    x = torch.rand((size // COLUMNS, COLUMNS), device=device).to(dtype)
    w = torch.ones(COLUMNS, device=device, dtype=dtype)
    _, mean, rstd = aten.native_layer_norm(x, [COLUMNS], w, w, 1e-5)
    mask = [True, True, True]
    return lambda: aten.native_layer_norm_backward(x, x, [COLUMNS], mean, rstd, w, w, mask), 3 * _bytes(x)


STREAMED = tuple(2**k for k in (8, 12, 15, 18, 20, 22))
SIDES = (8, 32, 64, 128, 256, 512, 1024)

KERNELS: tuple[Kernel, ...] = (
    Kernel("matmul", "flops", _matmul, SIDES, (torch.float32, torch.bfloat16, torch.float64)),
    Kernel("attention", "flops", _attention, (16, 64, 256, 1024)),
    Kernel("autopar.attention_backward", "flops", _attention_backward, (16, 64, 256, 1024)),
    Kernel("aten.convolution", "flops", _convolution, (4, 16, 64, 128)),
    Kernel("aten.convolution_backward", "flops", _convolution_backward, (4, 16, 64, 128)),
    Kernel("memory", "bytes", _streaming(aten.add.Tensor, 2), (*STREAMED, 2**24)),
    Kernel("aten.sum", "bytes", _streaming(lambda x: aten.sum.dim_IntList(x, [0]), 1, 0.0), STREAMED),
    Kernel("aten.amax", "bytes", _streaming(lambda x: aten.amax.default(x, [1], True), 1, 0.0), STREAMED),
    Kernel("aten.pow", "bytes", _streaming(lambda x: aten.pow.Tensor_Scalar(x, 3.0)), STREAMED),
    Kernel("aten.tanh", "bytes", _streaming(aten.tanh.default), STREAMED),
    Kernel("aten.tanh_backward", "bytes", _streaming(aten.tanh_backward.default, 2), STREAMED),
    Kernel("aten.gelu", "bytes", _streaming(aten.gelu.default), STREAMED),
    Kernel("aten.gelu_backward", "bytes", _streaming(aten.gelu_backward.default, 2), STREAMED),
    Kernel("aten.silu", "bytes", _streaming(aten.silu.default), STREAMED),
    Kernel("aten.silu_backward", "bytes", _streaming(aten.silu_backward.default, 2), STREAMED),
    Kernel("aten.exp", "bytes", _streaming(aten.exp.default), STREAMED),
    Kernel("aten._softmax", "bytes", _streaming(lambda x: aten._softmax.default(x, -1, False)), STREAMED),
    Kernel("aten.native_layer_norm", "bytes", _layer_norm, STREAMED),
    Kernel("aten.native_layer_norm_backward", "bytes", _layer_norm_backward, STREAMED),
)


@dataclass(frozen=True)
class Run:
    """One kernel at one size and dtype, to be timed."""

    kernel: Kernel
    dtype: torch.dtype
    size: int


def runs(device: torch.device, largest: int) -> Iterator[Run]:
    """Every kernel at every size and dtype, sizes up to ``largest`` elements."""
    on_gpu = device.type == "cuda"
    for kernel in KERNELS:
        matmul = kernel.kind == "matmul"
        halves = (torch.float16,) if on_gpu and matmul else ()
        sizes = (*kernel.sizes, 2048, 4096, 8192) if on_gpu and matmul else kernel.sizes
        elements = 2 if matmul else 1
        for dtype in (*kernel.dtypes, *halves):
            yield from (Run(kernel, dtype, size) for size in sizes if size**elements <= largest)


def timed_kernels(
    device: torch.device, planned: Sequence[Run], watch: Stopwatch, step: Callable[[str], None]
) -> tuple[KernelTimes, ...]:
    """Curves of all kernels, every rank running them at the same time."""
    found: dict[tuple[str, str, str], list[tuple[float, float, float]]] = {}
    for run in planned:
        call, amount = run.kernel.make(run.size, run.dtype, device)
        timing = watch.time(call)
        name = str(run.dtype).removeprefix("torch.")
        found.setdefault((run.kernel.kind, name, run.kernel.unit), []).append((amount, timing.seconds, timing.spread))
        step(f"{run.kernel.kind} {name} {run.size:,}")
    out = []
    for (kind, dtype, unit), points in found.items():
        amounts, seconds, spreads = zip(*sorted(points), strict=True)
        out.append(KernelTimes(kind, dtype, unit, rising(amounts, seconds), sorted(spreads)[len(spreads) // 2]))
    return tuple(out)


def call_seconds(device: torch.device, watch: Stopwatch) -> float:
    """What a view costs the calling program, where the device does not work on while it is made."""
    if device.type == "cuda":
        return 0.0
    x = torch.ones((math.prod((4, 4)),), device=device)
    return watch.time(lambda: aten.view.default(x, [4, 4])).seconds
