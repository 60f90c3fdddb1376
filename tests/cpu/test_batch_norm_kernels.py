"""Batch norm by the kernels that torch has for GPUs alone. Here Python plays them on CPUs, and takes what they take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import autopar.ops  # noqa: F401  registers batch norm
from autopar.mesh import Mesh
from autopar.ops import batch_norm as module
from autopar.planner.footprint import transients_of_norms as counted
from autopar.planner.footprint.layouts import Layout
from autopar.planner.footprint.local_op import LocalOp
from autopar.runtime.meter import MemoryMeter
from autopar.sharding import Strategy
from tests.cpu.test_ops_batch_norm import OPS, _forward_and_backward

SHAPES = [(8, 3), (2, 3), (6, 3, 5), (4, 3, 5, 2), (5, 2, 2, 2, 3), (1, 3, 1, 1), (3, 2, 4, 4)]
CALLED: list[str] = []


def _dims(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _checked(name: str, x: torch.Tensor, vectors: list[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """Return operands in float64: x, and vectors to broadcast with it."""
    CALLED.append(name)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    assert x.is_contiguous()
    assert all(v is None or (v.dtype == wide and v.is_contiguous() and v.shape == x.shape[1:2]) for v in vectors)
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return x.double(), *(torch.ones(()).double() if v is None else v.double().view(shape) for v in vectors)


def _update_stats(x, running_mean, running_var, momentum):
    assert running_mean is running_var is None
    (wide,) = _checked("batch_norm_update_stats", x, [])
    assert x.shape[1:].numel() == x.shape[1]  # others give each channel to one block
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return wide.mean(_dims(x)).to(dtype), wide.var(_dims(x), correction=0).to(dtype)


def _elemt(x, weight, bias, mean, invstd, eps):
    wide, scale, shift, mean, invstd = _checked("batch_norm_elemt", x, [weight, bias, mean, invstd])
    return ((wide - mean) * invstd * scale + (0 if bias is None else shift)).to(x.dtype)


def _backward_reduce(grad, x, mean, invstd, weight, input_g, weight_g, bias_g):
    assert (input_g, weight_g, bias_g) == (True, False, False)
    assert grad.is_contiguous()
    assert grad.dtype == x.dtype
    assert x.shape[1:].numel() == x.shape[1]
    wide, center, _ = _checked("batch_norm_backward_reduce", x, [mean, invstd])
    sums = grad.double().sum(_dims(x)), ((wide - center) * grad).sum(_dims(x))
    return *(s.to(mean.dtype) for s in sums), mean.new_empty(0), mean.new_empty(0)


def _backward_elemt(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    assert grad.is_contiguous()
    assert grad.dtype == x.dtype
    assert count.dtype == torch.int32
    vectors = [mean, invstd, weight, sum_dy, sum_dy_xmu]
    wide, mean, invstd, weight, total, weighted = _checked("batch_norm_backward_elemt", x, vectors)
    n = count.double().sum()
    return ((grad - total / n - (wide - mean) * invstd.square() * weighted / n) * weight * invstd).to(x.dtype)


@pytest.fixture
def kernels(monkeypatch) -> Iterator[list[str]]:
    """The names of kernels that have run."""
    library = torch.library.Library("aten", "IMPL")
    for name, played in [
        ("batch_norm_update_stats", _update_stats),
        ("batch_norm_elemt", _elemt),
        ("batch_norm_backward_reduce", _backward_reduce),
        ("batch_norm_backward_elemt", _backward_elemt),
    ]:
        library.impl(name, played, "CPU", allow_override=True)
    CALLED.clear()
    monkeypatch.setattr(module, "KERNELS_ON", "cpu")
    yield CALLED
    library._destroy()


def _operands(shape, dtype, affine, layout):
    x, grad = ((torch.randn(shape) * 3 + 2).to(dtype) for _ in range(2))
    if layout == "channels last" and len(shape) == 4:
        x, grad = (t.to(memory_format=torch.channels_last) for t in (x, grad))
    parameters = [torch.randn(shape[1]).to(dtype) if affine else None for _ in range(2)]
    return x, grad, *parameters


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_are_given_what_they_take_and_agree_with_the_formulas(kernels, shape, dtype, affine, layout):
    x, grad, weight, bias = _operands(shape, dtype, affine, layout)
    exact = [None if t is None else t.double() for t in (x, grad, weight, bias)]
    variance, mean = OPS.batch_var_mean(x)
    rstd = (variance + 1e-5).rsqrt()
    n = x.numel() // shape[1]
    sums = OPS.batch_norm_backward_reduce(grad, x, mean, rstd)
    found = [
        *(OPS.batch_moments(x), variance, mean, *sums),
        OPS.batch_norm(x, weight, bias, mean, rstd, count=n),
        OPS.batch_norm_backward_input(grad, x, weight, mean, rstd, *sums, count=n),
    ]
    assert {"batch_norm_elemt", "batch_norm_backward_elemt"} <= set(kernels)
    summed = {"batch_norm_update_stats", "batch_norm_backward_reduce"} & set(kernels)
    assert len(summed) == (2 if shape[0] >= module.SAMPLES or n == shape[0] else 0)
    x, grad, weight, bias = exact
    dims, shown = _dims(x), [1, -1, *[1] * (x.dim() - 2)]
    deviation, wide_rstd = x - mean.double().view(shown), rstd.double()
    xhat = deviation * wide_rstd.view(shown)
    scale = torch.ones(()).double() if weight is None else weight.view(shown)
    expected = [
        torch.stack([x.mean(dims), (x - x.mean(dims, keepdim=True)).square().sum(dims)]),
        x.var(dims, correction=0),
        x.mean(dims),
        grad.sum(dims),
        (grad * xhat).sum(dims),
        xhat * scale + (0 if bias is None else bias.view(shown)),
        wide_rstd.view(shown) * scale * (grad - grad.mean(dims, keepdim=True) - xhat * (grad * xhat).mean(dims, True)),
    ]
    for a, b in zip(found, expected, strict=True):
        assert a.is_contiguous()
        assert a.stride() == torch.empty(a.shape).stride()
        tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(
            dtype if a.dim() > 2 or a.dtype == dtype else a.dtype, 2e-2
        )
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * max(1.0, float(b.abs().max())))


def test_other_dtypes_and_empty_shards_are_left_to_the_formulas(kernels):
    x, mean, rstd = torch.randn(8, 3, 4), torch.randn(3).double(), torch.rand(3).double()
    for t in (x, x.bfloat16(), x[:0]):
        _forward_and_backward(t, t, mean, rstd, 32)
    _forward_and_backward(x.bfloat16(), x, mean.float(), rstd.float(), 32)
    OPS.batch_var_mean(x[:0])
    assert set(kernels) == {"batch_norm_elemt"}


def _counted(op, operands, results):
    def layout(t):
        return Layout(tuple(t.shape), t.stride()), t.element_size()

    rest = (Strategy((), ()), Mesh((1,)), (0,))
    local = LocalOp(None, (), tuple(layout(t) for t in operands), tuple(layout(t) for t in results), "cuda", *rest)
    return counted.FORMULAS[f"autopar.{op}"](local)


@pytest.mark.parametrize(("dtype", "parameters"), [*itertools.product([torch.float32, torch.bfloat16], [True, False])])
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_they_hold_what_is_counted(kernels, dtype, parameters, layout):
    assert counted.SAMPLES == module.SAMPLES
    x, grad, weight, bias = _operands((8, 64, 6, 6), dtype, parameters, layout)
    variance, mean = OPS.batch_var_mean(x)
    given = [t for t in (weight, bias) if t is not None]
    sums = OPS.batch_norm_backward_reduce(grad, x, mean, variance)
    for op, args, operands, options in [
        ("batch_var_mean", (x,), [x], {}),
        ("batch_norm", (x, weight, bias, mean, variance), [x, *given, mean, variance], {"count": 288}),
        ("batch_norm_backward_reduce", (grad, x, mean, variance), [grad, x, mean, variance], {}),
        (
            "batch_norm_backward_input",
            (grad, x, weight, mean, variance, *sums),
            [grad, x, *given[:1], mean, variance, *sums],
            {"count": 288},
        ),
    ]:
        meter = MemoryMeter()
        meter.hold(operands)
        before = meter.held
        with meter:
            made = getattr(OPS, op)(*args, **options)
        results = made if isinstance(made, tuple) else (made,)
        predicted = _counted(op, operands, results) + sum(t.nbytes for t in results)
        measured = meter.peak - before
        assert measured <= predicted <= measured + 3 * mean.nbytes, op
