import itertools

import pytest
import torch
from torch.nn import functional

import autopar.ops  # noqa: F401

OPS = torch.ops.autopar
EPS = 1e-5


def _statistics(shards, c, dtype):
    """As ranks that hold parts of the batch compute them: mean and rstd [c], and the elements a channel."""
    counts = [s.numel() // c for s in shards]
    told = torch.stack([OPS.batch_moments(s.detach()) for s in shards])
    variance, mean = OPS.var_mean_of_moments(told, counts, 0.0, False, [c], dtype)
    if len(shards) == 1:
        torch.testing.assert_close(OPS.batch_var_mean(shards[0].detach()), (variance, mean))
    count = sum(counts)
    return mean, (variance + EPS).rsqrt(), count


@pytest.mark.parametrize("shape", [(8, 3), (6, 3, 5), (4, 3, 5, 2), (2, 3, 2, 2, 3)])
@pytest.mark.parametrize("affine", [True, False])
def test_the_whole_batch_is_torchs_batch_norm_in_training(shape, affine):
    x = (torch.randn(shape, dtype=torch.float64) * 3 + 2).requires_grad_()
    parameters = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2)] if affine else []
    weight, bias = parameters or (None, None)
    mean, rstd, count = _statistics([x], 3, torch.float64)
    found = OPS.batch_norm(x, weight, bias, mean, rstd, count=count)
    expected = functional.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(found, [x, *parameters], grad),
        torch.autograd.grad(expected, [x, *parameters], grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("sizes", [(4, 4), (5, 2, 1), (8, 0)])
def test_shards_of_the_batch_with_reduced_sums_are_the_whole(sizes):
    x, weight = torch.randn(8, 3, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    grad = torch.randn_like(x)
    whole = x.clone().requires_grad_()
    expected = functional.batch_norm(whole, None, None, weight, None, training=True, eps=EPS)
    shards, grads = x.split(sizes), grad.split(sizes)
    mean, rstd, count = _statistics(shards, 3, torch.float64)
    found = torch.cat([OPS.batch_norm(s, weight, None, mean, rstd, count=count) for s in shards])
    sums = [OPS.batch_norm_backward_reduce(g, s, mean, rstd) for g, s in zip(grads, shards, strict=True)]
    sum_grad, sum_grad_xhat = (sum(parts) for parts in zip(*sums, strict=True))
    dx = [
        OPS.batch_norm_backward_input(g, s, weight, mean, rstd, sum_grad, sum_grad_xhat, count=count)
        for g, s in zip(grads, shards, strict=True)
    ]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (expected_dx,) = torch.autograd.grad(expected, whole, grad)
    torch.testing.assert_close(torch.cat(dx), expected_dx, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameter_dtype", [None, torch.float32])
def test_low_precision_has_float32_statistics_and_gradients_of_each_operands_dtype(dtype, parameter_dtype):
    x = (torch.randn(16, 3, 8, 8) + 1).to(dtype).requires_grad_()
    weight, bias = (torch.rand(3, dtype=parameter_dtype or dtype, requires_grad=True) for _ in range(2))
    mean, rstd, count = _statistics([x], 3, torch.float32)
    assert mean.dtype == rstd.dtype == torch.float32
    found = OPS.batch_norm(x, weight, bias, mean, rstd, count=count)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = functional.batch_norm(exact[0], None, None, exact[1], exact[2], training=True, eps=EPS)
    grad = torch.randn(x.shape).to(dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    found_grads = torch.autograd.grad(found, (x, weight, bias), grad)
    expected_grads = torch.autograd.grad(expected, exact, grad.double())
    for operand, a, b in zip((x, weight, bias), found_grads, expected_grads, strict=True):
        assert a.dtype == operand.dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("strided", ["x", "grad", "both"])
def test_the_layout_in_memory_changes_no_value(strided):
    x, grad = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(2, 3, 4, 5, dtype=torch.float64)
    mean, rstd, count = _statistics([x], 3, torch.float64)
    expected = _forward_and_backward(x, grad, mean, rstd, count)
    x = x if strided == "grad" else x.to(memory_format=torch.channels_last)
    grad = grad if strided == "x" else grad.to(memory_format=torch.channels_last)
    for a, b in zip(_forward_and_backward(x, grad, mean, rstd, count), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def _forward_and_backward(x, grad, mean, rstd, count):
    sums = OPS.batch_norm_backward_reduce(grad, x, mean, rstd)
    dx = OPS.batch_norm_backward_input(grad, x, None, mean, rstd, *sums, count=count)
    return OPS.batch_norm(x, None, None, mean, rstd, count=count), *sums, dx


def test_sums_of_the_gradient_do_not_hang_on_strides() -> None:
    """torch's kernel is wrong for tensors whose strides fit contiguous and channels-last alike."""
    torch.manual_seed(0)
    for shape in [(1, 2, 16, 3), (1, 16, 16, 1), (17, 5, 3, 1), (3, 5, 1, 2), (2, 3, 4, 5), (1, 8, 3, 1)]:
        for x_order, grad_order in itertools.product(itertools.permutations(range(4)), repeat=2):
            x, grad = (_laid_out(shape, order) for order in (x_order, grad_order))
            mean, rstd = torch.randn(shape[1], dtype=torch.float64), torch.rand(shape[1], dtype=torch.float64)
            sum_grad, sum_grad_xhat = torch.ops.autopar.batch_norm_backward_reduce(grad, x, mean, rstd)
            centred = x - mean[:, None, None]
            torch.testing.assert_close(sum_grad, grad.sum((0, 2, 3)))
            torch.testing.assert_close(sum_grad_xhat, (centred * grad).sum((0, 2, 3)) * rstd)


def _laid_out(shape, order):
    """A random tensor whose dims lie in memory in ``order``."""
    return torch.randn([shape[i] for i in order], dtype=torch.float64).permute([order.index(i) for i in range(4)])
