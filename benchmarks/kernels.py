"""Compare the Triton kernels on this machine's GPU with eager code, Inductor, and a copy timed in the same run.

    python benchmarks/kernels.py [--json FILE] [--quick]

Each row has the bytes that the kernel must move (docs/kernels.md has the formulas), the seconds of the kernel, of eager
PyTorch and of torch.compile, and the bandwidth as a share of a plain copy's. The last rows compare a matrix product
with the peak of large ones. Times are medians of alternating runs on a warm device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

ROUNDS = 20


@dataclass(frozen=True)
class Case:
    """One kernel at one size: what it has to move, and three ways to do it."""

    name: str
    nbytes: int
    ours: Callable[[], Any]
    eager: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Row:
    name: str
    nbytes: int
    ours_s: float
    eager_s: float
    inductor_s: float
    share_of_copy: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the rows here too")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        why = "is built without CUDA" if not torch.backends.cuda.is_built() else "sees no CUDA device"
        print(f"benchmarks/kernels.py needs a GPU: this torch ({torch.__version__}) {why}. Nothing was measured.")
        return 0
    copy_rate = copied_bytes_per_s(2**22 if options.quick else 2**28)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a copy moves {copy_rate / 1e9:,.0f} GB/s")
    rows = []
    print(f"{'kernel':34} {'MB':>8} {'ours us':>9} {'eager us':>9} {'inductor us':>11} {'of copy':>8} {'vs best':>8}")
    for case in cases(512, 256, 2048) if options.quick else cases(8192, 4096, 128256 // 8):
        row = measured(case, copy_rate)
        rows.append(row)
        best = min(row.eager_s, row.inductor_s)
        print(
            f"{row.name:34} {row.nbytes / 1e6:8.1f} {row.ours_s * 1e6:9.1f} {row.eager_s * 1e6:9.1f} "
            f"{row.inductor_s * 1e6:11.1f} {row.share_of_copy:8.1%} {best / row.ours_s:7.2f}x"
        )
    products = matmul_rates(options.quick)
    for name, rate in products.items():
        print(f"{name:34} {rate / 1e12:8.1f} TFLOP/s")
    if options.json:
        found = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "copy_bytes_per_s": copy_rate,
            "rows": [asdict(r) for r in rows],
            "matmul_flops_per_s": products,
        }
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


def cases(tokens: int, d: int, v: int, device: str = "cuda") -> list[Case]:
    """Return the cases for tokens of width ``d`` and a rank's part ``v`` of a vocabulary cut over eight ranks."""
    from autopar import kernels
    from autopar.ops.linear_nll import _linear_nll

    half, run = torch.bfloat16, kernels.run

    def randn(*shape: int, dtype: torch.dtype = half) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)

    x = randn(1, tokens, d)
    wide, size = randn(1, tokens, d, dtype=torch.float32), tokens * d
    table, index = randn(v, d), torch.randint(0, 8 * v, (1, tokens), device=device)
    logits, target = randn(tokens, v), torch.randint(0, 8 * v, (tokens,), device=device)
    m, weight, bias = logits.amax(-1), randn(d), randn(d)
    total = torch.exp(logits.float() - m.float()[:, None]).sum(-1)
    lse, grad = m.float() + total.log(), torch.rand(tokens, device=device)
    loss = {"ignore_index": -100, "offset": 0}
    layer = {"eps": 1e-5, "centred": True, "results": ["total", "out"]}
    rms = {"eps": 1e-5, "centred": False, "results": ["total", "out"]}
    gradients = {"results": ["input_gradient", "weight_gradient", "bias_gradient"]}
    y, mean, rstd = run("add_norm", x, x, weight, bias, **{**layer, "results": ["total", "mean", "rstd"]})
    packed = run("pack", x, 2, 8)
    here = (index >= 0) & (index < v)
    found = int(here.sum())
    return [
        Case("pack, dim 2 of 3", 4 * size, lambda: run("pack", x, 2, 8), pack, (x,)),
        Case("pack, cast from float32", 6 * size, lambda: run("pack", wide, 2, 8, half), pack_cast, (wide,)),
        Case("pack, heads before tokens", 4 * size, lambda: run("pack", heads(x), 2, 8), pack_heads, (x,)),
        Case("unpack, dim 2 of 3", 4 * size, lambda: run("unpack", packed, 2, d), unpack, (packed,)),
        Case(
            "unpack, cast to float32",
            6 * size,
            lambda: run("unpack", packed, 2, d, torch.float32),
            unpack_cast,
            (packed,),
        ),
        Case(
            "lookup, 1/8 of the vocabulary",
            2 * found * d + 2 * size,
            lambda: run("lookup", table, index, offset=0),
            lookup,
            (table, index),
        ),
        Case(
            "its gradient",
            2 * found * d + 2 * v * d,
            lambda: run("lookup_backward", x, index, rows=v, offset=0, padding_idx=-1),
            lookup_backward,
            (x, index, v),
        ),
        Case(
            "maximum and sum of exponentials",
            2 * tokens * v,
            lambda: run("statistics", logits),
            statistics_of,
            (logits,),
        ),
        Case("sum of exponentials", 2 * tokens * v, lambda: run("sumexp", logits, m), sumexp, (logits, m)),
        Case(
            "gradient of cross-entropy",
            4 * tokens * v,
            lambda: run("nll_backward", grad, logits, lse, target, **loss),
            nll_backward,
            (grad, logits, lse, target),
        ),
        Case(
            "linear and loss, in chunks",
            2 * (tokens + v) * d,
            lambda: _linear_nll(x[0], table, None, target % v, ignore_index=-100)[0],
            linear_loss,
            (x[0], table, target % v),
        ),
        Case(
            "residual and layer norm",
            8 * size,
            lambda: run("add_norm", x, x, weight, bias, **layer),
            add_layer_norm,
            (x, x, weight, bias),
        ),
        Case(
            "residual and RMS norm",
            8 * size,
            lambda: run("add_norm", x, x, weight, None, **rms),
            add_rms_norm,
            (x, x, weight),
        ),
        Case(
            "gradient of a layer norm, plus",
            8 * size,
            lambda: run("norm_backward", x, y, mean, rstd, weight, x, **gradients),
            layer_norm_backward,
            (x, y, weight, bias, mean, rstd),
        ),
    ]


# The baselines, as a model's author would write them.


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], -1, 128).transpose(1, 2)


def pack(x: Tensor) -> Tensor:
    return torch.stack(x.chunk(8, -1))


def pack_cast(x: Tensor) -> Tensor:
    return torch.stack(x.bfloat16().chunk(8, -1))


def pack_heads(x: Tensor) -> Tensor:
    return torch.stack(heads(x).chunk(8, 2))


def unpack(rows: Tensor) -> Tensor:
    return torch.cat(rows.unbind(), -1)


def unpack_cast(rows: Tensor) -> Tensor:
    return torch.cat(rows.unbind(), -1).float()


def lookup(table: Tensor, index: Tensor) -> Tensor:
    here = index < len(table)
    return torch.nn.functional.embedding(index.where(here, 0), table) * here.unsqueeze(-1)


def lookup_backward(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    here = index < rows
    masked = (grad * here.unsqueeze(-1)).float()
    return torch.ops.aten.embedding_dense_backward(masked, index.where(here, 0), rows, -1, False).to(grad.dtype)


def statistics_of(x: Tensor) -> tuple[Tensor, Tensor]:
    m = x.amax(-1)
    return m, torch.exp(x.float() - m.float()[:, None]).sum(-1)


def sumexp(x: Tensor, m: Tensor) -> Tensor:
    return torch.exp(x.float() - m.float()[:, None]).sum(-1)


def linear_loss(x: Tensor, table: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy((x @ table.t()).float(), target, reduction="none")


def nll_backward(grad: Tensor, x: Tensor, lse: Tensor, target: Tensor) -> Tensor:
    here = target < x.shape[-1]
    part = torch.exp(x.float() - lse[:, None])
    hot = torch.nn.functional.one_hot(target.where(here, 0), x.shape[-1]) * here[:, None]
    return ((part - hot) * grad[:, None]).to(x.dtype)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    y = x + residual
    return y, torch.nn.functional.layer_norm(y, y.shape[-1:], weight, bias, 1e-5)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = x + residual
    wide = y.float()
    return y, weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(y.dtype)


def layer_norm_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.ops.aten.native_layer_norm_backward(
        grad, y, y.shape[-1:], mean, rstd, weight, bias, [True, True, True]
    )
    return made[0] + grad, made[1], made[2]


# Timing.


def measured(case: Case, copy_rate: float) -> Row:
    """Return medians of alternating runs, so that all see the same device clock."""
    compiled = torch.compile(case.eager, dynamic=False)
    ways = [case.ours, lambda: case.eager(*case.args), lambda: compiled(*case.args)]
    for way in ways * 3:
        way()
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(ROUNDS):
        for found, way in zip(times, ways, strict=True):
            found.append(seconds(way))
    ours, eager, inductor = map(statistics.median, times)
    return Row(case.name, case.nbytes, ours, eager, inductor, case.nbytes / ours / copy_rate)


def seconds(way: Callable[[], Any], repeat: int = 5) -> float:
    """Time one run on the device; the host gets a head start, since it launches more slowly than small kernels run."""
    from autopar._torch import keep_gpu_busy

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    keep_gpu_busy(5e-3)
    start.record()
    for _ in range(repeat):
        way()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeat


def copied_bytes_per_s(numel: int) -> float:
    """Return the bytes that a copy of ``numel`` bfloat16 elements reads and writes each second."""
    x = torch.empty(numel, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    for _ in range(3):
        y.copy_(x)
    return 4 * numel / statistics.median(seconds(lambda: y.copy_(x)) for _ in range(ROUNDS))


def matmul_rates(quick: bool) -> dict[str, float]:
    """Return the FLOP/s of a large product, and of one split over eight ranks as in `spmd.gather_product`."""
    n = 1024 if quick else 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    whole = lambda: a @ b  # noqa: E731
    parts = lambda: [p @ b for p in a.chunk(8)]  # noqa: E731
    for way in (whole, parts):
        way()
    rates = {}
    for name, way in (("matrix product, whole", whole), ("matrix product, in eight parts", parts)):
        rates[name] = 2 * n**3 / statistics.median(seconds(way) for _ in range(ROUNDS))
    return rates


if __name__ == "__main__":
    sys.exit(main())
