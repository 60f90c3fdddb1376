"""The kernels whose times a cluster file holds, and how to call each at a size.

Each is called like in an emitted program, through the op itself, on operands that it did not just read, and its results
are kept for a while: in a program, too, operands come from memory and results go to fresh memory, which makes a
pointwise op of a megabyte take half as long again as one that repeats in a cache.

A size is the number of elements of a streamed tensor, or the side of a multiplied matrix.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import autopar.ops  # noqa: F401  registers the ops that are timed
from autopar.mesh import KernelTimes, rising
from autopar.profiling.timing import Stopwatch, Timing

aten = torch.ops.aten
own = torch.ops.autopar

COLUMNS = 256
"""Columns of streamed matrices."""
Call = Callable[[], object]
Made = tuple[Call, float]
"""A function that runs a kernel, and its amount: FLOPs, or bytes read and written."""


@dataclass(frozen=True)
class Kernel:
    """One curve to measure. ``make(size, dtype, device)`` returns the call and its amount.

    Args:
        other_amount: for a kernel with curves over both amounts, a function of size and itemsize that returns the one
            that ``unit`` is not: bytes for FLOPs, and FLOPs for bytes.
    """

    kind: str
    unit: str
    make: Callable[[int, torch.dtype, torch.device], Made]
    sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    other_amount: Callable[[int, int], float] | None = None


TRAFFIC = ":traffic"
"""Suffix of a kind of kernel whose curve is over bytes of operands and results, measured with thin shapes."""


def _bytes(*tensors: Tensor) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors))


def _streaming(op: Callable[..., object], operands: int = 1, written: float = 1.0) -> Callable[..., Made]:
    """Return ``make`` of an op that reads ``operands`` matrices and writes ``written`` times the bytes of one."""

    def make(size: int, dtype: torch.dtype, device: torch.device) -> Made:
        x = [torch.rand((size // COLUMNS, COLUMNS), device=device).to(dtype) for _ in range(operands)]
        return lambda: op(*x), _bytes(*x) + written * _bytes(x[0])

    return make


def _matmul(n: int, dtype: torch.dtype, device: torch.device) -> Made:
    a, b = (torch.rand((n, n), device=device).to(dtype) for _ in range(2))
    return lambda: own.contract(a, b, "mk,nk->mn"), 2.0 * n**3


THIN = 4
"""Rows of a thin matrix."""


def _thin_matmul(n: int, dtype: torch.dtype, device: torch.device) -> Made:
    """Multiply a few rows by a square matrix, once as in a forward and once as in a backward."""
    x, w = (torch.rand((rows, n), device=device).to(dtype) for rows in (THIN, n))

    def call() -> object:
        return own.contract(x, w, "mk,nk->mn"), own.contract(x, w, "mk,kn->mn")

    return call, 2 * (2 * _bytes(x) + _bytes(w))


HEADS, WIDTH, SHORT = 4, 64, 16
"""Heads, their width, and the length of a short sequence, for attention."""


def _attention_operands(
    batch: int, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], dict[str, object], float]:
    """Return the operands, the options without mask and dropout, and the FLOPs of a forward."""
    operands = [torch.rand((batch, length, HEADS, WIDTH), device=device).to(dtype).transpose(1, 2) for _ in range(4)]
    place = {"global_shape": [batch, HEADS, length, length], "offset": [0] * 4}
    options = {"is_causal": False, "scale": WIDTH**-0.5, "dropout_p": 0.0, "site": 0, **place}
    return operands, options, 4.0 * batch * HEADS * length**2 * WIDTH


def _attention(length: int, dtype: torch.dtype, device: torch.device, batch: int = 1) -> Made:
    (q, k, v, _), options, flops = _attention_operands(batch, length, dtype, device)
    return lambda: own.attention(q, k, v, None, None, **options), flops


def _attention_backward(length: int, dtype: torch.dtype, device: torch.device, batch: int = 1) -> Made:
    (q, k, v, grad), options, flops = _attention_operands(batch, length, dtype, device)
    out, lse = own.attention(q, k, v, None, None, **options)
    return lambda: own.attention_backward(grad, q, k, v, None, out, lse, None, **options), 2.5 * flops


ROWS = HEADS * SHORT * WIDTH
"""Elements of one tensor of a sequence that is too short for products to dominate the time."""


def _short_attention(size: int, dtype: torch.dtype, device: torch.device) -> Made:
    batch = max(size // ROWS, 1)
    return _attention(SHORT, dtype, device, batch)[0], 4.0 * batch * ROWS * dtype.itemsize


def _short_attention_backward(size: int, dtype: torch.dtype, device: torch.device) -> Made:
    batch = max(size // ROWS, 1)
    return _attention_backward(SHORT, dtype, device, batch)[0], 8.0 * batch * ROWS * dtype.itemsize


IMAGES, SIDE = 4, 28
"""Number of images and their side in pixels, for convolutions."""


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


def _on_images(op: Callable[[Tensor, Tensor], object], read: int, written: float) -> Callable[..., Made]:
    """Return ``make`` of an op on images [n, c, h, w] and statistics [c], with traffic in multiples of the images."""

    def make(size: int, dtype: torch.dtype, device: torch.device) -> Made:
        x = torch.rand((size // (CHANNELS * PIXELS**2), CHANNELS, PIXELS, PIXELS), device=device).to(dtype)
        statistic = torch.ones(CHANNELS, device=device, dtype=dtype)
        return lambda: op(x, statistic), (read + written) * _bytes(x)

    return make


CHANNELS, PIXELS = 8, 8
"""Channels of images and their side in pixels, for batch norms and pooling."""


def _batch_var_mean(x: Tensor, _: Tensor) -> object:
    return own.batch_var_mean(x)


def _batch_norm(x: Tensor, s: Tensor) -> object:
    return own.batch_norm(x, s, s, s, s, count=x.numel() // CHANNELS)


def _norm_backward_reduce(x: Tensor, s: Tensor) -> object:
    return own.batch_norm_backward_reduce(x, x, s, s)


def _norm_backward_input(x: Tensor, s: Tensor) -> object:
    return own.batch_norm_backward_input(x, x, s, s, s, s, s, count=x.numel() // CHANNELS)


def _pooling(x: Tensor, _: Tensor) -> object:
    """Halve height and width. The results are float32 values and an int64 index for each pixel."""
    return aten.max_pool2d_with_indices.default(x, [3, 3], [2, 2], [1, 1])


def _on_scores(backward: bool) -> Callable[..., Made]:
    """Return ``make`` of the loss of rows of scores: the sums of exponentials, or the gradient of the scores."""

    def make(size: int, dtype: torch.dtype, device: torch.device) -> Made:
        x = torch.rand((size // COLUMNS, COLUMNS), device=device).to(dtype)
        row = torch.rand(size // COLUMNS, device=device).to(dtype)
        target = torch.zeros(size // COLUMNS, dtype=torch.int64, device=device)
        if backward:
            place = {"ignore_index": -100, "offset": 0}
            return lambda: own.nll_backward(row, x, row, target, **place), 2 * _bytes(x)
        return lambda: own.sumexp(x, row), _bytes(x)

    return make


STREAMED = tuple(2**k for k in (8, 12, 15, 18, 20, 22))
SIDES = (8, 32, 64, 128, 256, 512, 1024)
IMAGES_STREAMED = tuple(2**k for k in (9, 12, 15, 18, 20, 22))
SHORT_STREAMED = tuple(2**k for k in (9, 15, 18, 21))
LENGTHS = (16, 64, 256, 1024)
CONVOLVED = (4, 16, 64, 128)
LARGER: dict[tuple[int, ...], tuple[int, ...]] = {
    STREAMED: (2**24, 2**26),
    (*STREAMED, 2**24): (2**26,),
    IMAGES_STREAMED: (2**24, 2**26),
    SIDES: (2048, 4096, 8192),
    LENGTHS: (4096, 8192),
    CONVOLVED: (256, 512),
}
"""Further sizes for a GPU."""

FLOATS = (torch.float32, torch.bfloat16, torch.float64)
HALVES = (torch.bfloat16, torch.float16)


def _thin_flops(n: int, _: int) -> float:
    return 4.0 * THIN * n**2


def _attention_kernels(
    kind: str, long: Callable[..., Made], short: Callable[..., Made], flops: float, tensors: int
) -> tuple[Kernel, Kernel]:
    """Return curves over FLOPs and bytes of an attention that costs ``flops`` forwards and moves ``tensors``."""
    row = float(tensors * HEADS * WIDTH)
    return (
        Kernel(kind, "flops", long, LENGTHS, other_amount=lambda n, size: row * n * size),
        Kernel(
            kind + TRAFFIC,
            "bytes",
            short,
            SHORT_STREAMED,
            other_amount=lambda size, _: flops * 4.0 * max(size // ROWS, 1) * ROWS * SHORT,
        ),
    )


KERNELS: tuple[Kernel, ...] = (
    Kernel("matmul", "flops", _matmul, SIDES, FLOATS, lambda n, size: 3.0 * n**2 * size),
    Kernel("matmul" + TRAFFIC, "bytes", _thin_matmul, (16, 128, 512, 2048), other_amount=_thin_flops),
    *_attention_kernels("attention", _attention, _short_attention, 1.0, 4),
    *_attention_kernels("autopar.attention_backward", _attention_backward, _short_attention_backward, 2.5, 8),
    Kernel("aten.convolution", "flops", _convolution, CONVOLVED),
    Kernel("aten.convolution_backward", "flops", _convolution_backward, CONVOLVED),
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
    Kernel("autopar.sumexp", "bytes", _on_scores(backward=False), STREAMED),
    Kernel("autopar.nll_backward", "bytes", _on_scores(backward=True), STREAMED),
    Kernel("autopar.batch_var_mean", "bytes", _on_images(_batch_var_mean, 1, 0), IMAGES_STREAMED),
    Kernel("autopar.batch_norm", "bytes", _on_images(_batch_norm, 1, 1), IMAGES_STREAMED),
    Kernel("autopar.batch_norm_backward_reduce", "bytes", _on_images(_norm_backward_reduce, 2, 0), IMAGES_STREAMED),
    Kernel("autopar.batch_norm_backward_input", "bytes", _on_images(_norm_backward_input, 2, 1), IMAGES_STREAMED),
    Kernel("aten.max_pool2d_with_indices", "bytes", _on_images(_pooling, 1, 0.75), IMAGES_STREAMED),
)


@dataclass(frozen=True)
class Run:
    """One kernel to time at one size and dtype."""

    kernel: Kernel
    dtype: torch.dtype
    size: int


def runs(device: torch.device, largest: int) -> Iterator[Run]:
    """Yield every kernel at every size up to ``largest`` elements and every dtype.

    A GPU takes larger sizes too, since it computes the others within its latency, and half precision, which has other
    kernels for what contracts. It overlaps products with what they read and write, so no curve is separated into both.
    """
    on_gpu = device.type == "cuda"
    for kernel in KERNELS:
        if on_gpu and kernel.kind.endswith(TRAFFIC):
            continue
        halves = HALVES if on_gpu and kernel.unit == "flops" else ()
        sizes = (*kernel.sizes, *LARGER[kernel.sizes]) if on_gpu else kernel.sizes
        elements = 2 if kernel.kind.startswith("matmul") else 1
        for dtype in dict.fromkeys((*kernel.dtypes, *halves)):
            yield from (Run(kernel, dtype, size) for size in sizes if size**elements <= largest)


def rotated_bytes(device: torch.device) -> int:
    """Return the bytes of all sets of operands that a `Rotation` cycles through, beyond what the caches hold."""
    return 2**28 if device.type == "cuda" else 2**25


MOST_SETS = 32
"""Most sets of operands of a `Rotation`."""


@dataclass
class Rotation:
    """Calls that cycle through several sets of operands and keep the last few results.

    Together the sets exceed the caches next to a core, unless a set is so small that it would stay in a cache in a
    program too.
    """

    calls: deque[Call]
    kept: deque[object]

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Rotation:
        """Create one from calls on different operands. It keeps a quarter as many results."""
        return cls(deque(calls), deque(maxlen=max(len(calls) // 4, 1)))

    def __call__(self) -> None:
        self.kept.append(self.calls[0]())
        self.calls.rotate()


def rotation(run: Run, device: torch.device) -> Made:
    """Return a function that runs the kernel on cycling operands, and its amount."""
    first, amount = run.kernel.make(run.size, run.dtype, device)
    per_set = amount if run.kernel.unit == "bytes" else 8.0 * run.size**2
    sets = min(max(int(rotated_bytes(device) / per_set), 2), MOST_SETS)
    calls = [first, *(run.kernel.make(run.size, run.dtype, device)[0] for _ in range(sets - 1))]
    return Rotation.of(calls), amount


def among_others(device: torch.device, watch: Stopwatch) -> Callable[[Call], Timing]:
    """Return a function that times calls, on CPUs after a sum of matrices that evicts code and data from the caches.

    Called from Python, an op whose code is cached takes some microseconds, otherwise ten times as long.
    """
    if device.type == "cuda":
        return watch.time
    x, y = torch.ones(1024, 1024), torch.ones(1024, 1024)
    return partial(watch.time_among, lambda: aten.add.Tensor(x, y))


Points = dict[tuple[str, str, str], list[tuple[float, float, float]]]
"""Amount, seconds and spread at each size, by kind, dtype and unit."""


def timed_kernels(
    device: torch.device, planned: Sequence[Run], watch: Stopwatch, step: Callable[[str], None]
) -> tuple[KernelTimes, ...]:
    """Return the curves of all kernels. All ranks run them at the same time."""
    found: Points = {}
    time = among_others(device, watch)
    for run in planned:
        call, amount = rotation(run, device)
        timing = time(call)
        name = _name(run)
        found.setdefault((run.kernel.kind, name, run.kernel.unit), []).append((amount, timing.seconds, timing.spread))
        step(f"{run.kernel.kind} {name} {run.size:,}")
    return tuple(_curve(key, points) for key, points in separated(found, planned).items())


def _curve(key: tuple[str, str, str], points: Sequence[tuple[float, float, float]]) -> KernelTimes:
    amounts, seconds, spreads = zip(*sorted(points), strict=True)
    kind, dtype, unit = key
    return KernelTimes(kind, dtype, unit, rising(amounts, seconds), sorted(spreads)[len(spreads) // 2])


def separated(found: Points, planned: Sequence[Run]) -> Points:
    """Separate the curves over FLOPs and bytes of the same kernel, whose sum is its time.

    The time of FLOPs at the best rate of the other shapes is subtracted from thin shapes. What remains gives the time
    of bytes, which is subtracted from the other shapes.
    """
    made = dict(found)
    for thin in [key for key in found if key[0].endswith(TRAFFIC)]:
        kind, dtype = thin[0].removesuffix(TRAFFIC), thin[1]
        best = max(a / s for a, s, _ in found[kind, dtype, "flops"])
        made[thin] = _subtracted(found[thin], [flops / best for flops in _other_amounts(planned, *thin[:2])])
        traffic = _curve(thin, made[thin]).curve
        for key in [key for key in found if key[0] == kind]:
            moved = traffic.at(_other_amounts(planned, *key[:2])) - traffic.seconds[0]
            made[key] = _subtracted(found[key], moved.tolist())
    return made


def _other_amounts(planned: Sequence[Run], kind: str, dtype: str) -> list[float]:
    """Return the other amount at each size at which the kernel was timed."""
    runs = [r for r in planned if (r.kernel.kind, _name(r)) == (kind, dtype)]
    return [r.kernel.other_amount(r.size, r.dtype.itemsize) for r in runs if r.kernel.other_amount is not None]


def _name(run: Run) -> str:
    return str(run.dtype).removeprefix("torch.")


def _subtracted(
    points: Sequence[tuple[float, float, float]], seconds: Sequence[float]
) -> list[tuple[float, float, float]]:
    """Subtract ``seconds`` from the points, but leave at least half of each."""
    return [(a, max(s - less, s / 2), e) for (a, s, e), less in zip(points, seconds, strict=True)]


def call_seconds(device: torch.device, watch: Stopwatch) -> float:
    """Return the seconds of a view in the calling program; 0 if the device runs asynchronously."""
    if device.type == "cuda":
        return 0.0
    x = torch.ones((math.prod((4, 4)),), device=device)
    return among_others(device, watch)(lambda: aten.view.default(x, [4, 4])).seconds
