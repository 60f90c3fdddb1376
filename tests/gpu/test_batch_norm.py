"""Batch norm on a GPU: its results against float64 on the CPU, and what it holds against what is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("pulp", reason="the planner needs pulp, which this Python lacks")

import autopar.ops  # noqa: F401  registers batch norm
from autopar.mesh import Mesh
from autopar.planner.footprint import transients_of_norms as counted
from autopar.planner.footprint.local_op import LocalOp
from autopar.sharding import Strategy
from tests.gpu.test_attention_memory import MIB, held, layout

OPS = torch.ops.autopar
SMALL = [(8, 16), (8, 16, 33), (8, 16, 7, 9), (2, 16, 7, 9), (5, 6, 3, 5, 7), (3000, 8, 4), (1, 3, 1, 1), (4096, 40)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def operands(shape: tuple[int, ...], dtype: torch.dtype, affine: bool, channels_last: bool) -> list[Any]:
    """Return x, the gradient of the result, weight and bias."""
    x, grad = ((torch.randn(shape, device="cuda") * 2 + 3).to(dtype) for _ in range(2))
    if channels_last and len(shape) == 4:
        x, grad = (t.to(memory_format=torch.channels_last) for t in (x, grad))
    return [x, grad, *(torch.randn(shape[1], device="cuda").to(dtype) if affine else None for _ in range(2))]


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_the_parts_of_a_batch_norm_are_exact(shape, dtype, affine, channels_last) -> None:
    x, grad, weight, bias = operands(shape, dtype, affine, channels_last)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    variance, mean = OPS.batch_var_mean(x)
    rstd, n = (variance + 1e-5).rsqrt(), x.numel() // shape[1]
    sums = OPS.batch_norm_backward_reduce(grad, x, mean, rstd)
    found = {
        "moments": OPS.batch_moments(x),
        "variance": variance,
        "mean": mean,
        "sum": sums[0],
        "weighted sum": sums[1],
        "result": OPS.batch_norm(x, weight, bias, mean, rstd, count=n),
        "gradient": OPS.batch_norm_backward_input(grad, x, weight, mean, rstd, *sums, count=n),
    }
    x, grad, weight, bias, center, scale = (
        None if t is None else t.double().cpu() for t in (x, grad, weight, bias, mean, rstd)
    )
    dims, shown = [d for d in range(x.dim()) if d != 1], [1, -1, *[1] * (x.dim() - 2)]
    xhat = (x - center.view(shown)) * scale.view(shown)
    slope = scale.view(shown) * (1 if weight is None else weight.view(shown))
    expected = {
        "moments": torch.stack([x.mean(dims), (x - x.mean(dims, keepdim=True)).square().sum(dims)]),
        "variance": x.var(dims, correction=0),
        "mean": x.mean(dims),
        "sum": grad.sum(dims),
        "weighted sum": (grad * xhat).sum(dims),
        "result": xhat * (1 if weight is None else weight.view(shown)) + (0 if bias is None else bias.view(shown)),
        "gradient": slope * (grad - grad.mean(dims, keepdim=True) - xhat * (grad * xhat).mean(dims, keepdim=True)),
    }
    for name, made in found.items():
        vector = name not in ("result", "gradient")
        assert made.is_contiguous(), name
        assert made.dtype == (wide if vector else dtype), name
        tolerance = TOLERANCE[wide if vector else dtype]
        most = float(expected[name].abs().max()) if expected[name].numel() else 0.0
        if name == "weighted sum":  # which may cancel
            most = float((grad * xhat).abs().sum(dims).max())
        difference = float((made.double().cpu() - expected[name]).abs().max())
        assert difference <= tolerance * max(most, 1.0), f"{name}: {difference} of {most}"


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(32, 256, 56, 56), (8, 64, 112, 112), (2, 64, 256, 256), (65536, 512)], ids=str)
def test_they_hold_what_is_counted(shape, dtype, channels_last) -> None:
    x, grad, weight, bias = operands(shape, dtype, True, channels_last)
    variance, mean = OPS.batch_var_mean(x)
    sums, n = OPS.batch_norm_backward_reduce(grad, x, mean, variance), x.numel() // shape[1]
    for op, args, options in (
        ("batch_var_mean", (x,), {}),
        ("batch_norm", (x, weight, bias, mean, variance), {"count": n}),
        ("batch_norm_backward_reduce", (grad, x, mean, variance), {}),
        ("batch_norm_backward_input", (grad, x, weight, mean, variance, *sums), {"count": n}),
    ):

        def call(op: str = op, args: Any = args, options: Any = options) -> Any:
            made = getattr(OPS, op)(*args, **options)
            return made if isinstance(made, tuple) else (made,)

        call()
        found, results = held(call)
        rest: Any = (Strategy((), ()), Mesh((1,)), (0,))
        local = LocalOp(None, (), tuple(map(layout, args)), tuple(map(layout, results)), "cuda", *rest)  # type: ignore[arg-type]
        predicted = counted.FORMULAS[f"autopar.{op}"](local)
        assert found <= predicted + MIB, op
        assert predicted <= found + 0.1 * x.numel() * x.element_size() + MIB, op
