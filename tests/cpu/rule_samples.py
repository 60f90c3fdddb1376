"""A sample of every op that has a rule. Small whole numbers in float64, so that results are exact where they can be.

Sizes 4 and 6 divide evenly on meshes of two ranks; 5 and 7 do not, and are cut unevenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from autopar import ops  # noqa: F401  registers torch.ops.autopar
from tests.cpu.rule_simulation import Sample, sample

aten, autopar = torch.ops.aten, torch.ops.autopar


def x(*shape: int) -> Tensor:
    """Small whole numbers."""
    return torch.randint(-4, 5, shape).to(torch.float64)


def positive(*shape: int) -> Tensor:
    return torch.randint(1, 6, shape).to(torch.float64)


def unit(*shape: int) -> Tensor:
    """Strictly between 0 and 1."""
    return torch.rand(shape, dtype=torch.float64) * 0.9 + 0.05


def index(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape)


def mask(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.5


def distinct(*shape: int) -> Tensor:
    """Without ties, so that the position of a maximum is defined."""
    n = torch.Size(shape).numel()
    return torch.randperm(n).to(torch.float64).reshape(shape)


def contraction() -> Iterator[Sample]:
    yield sample(aten.mm.default, x(4, 5), x(5, 6))
    yield sample(aten.bmm.default, x(2, 4, 5), x(2, 5, 3))
    yield sample(aten.mv.default, x(4, 5), x(5))
    yield sample(aten.dot.default, x(5), x(5))
    yield sample(aten.vdot.default, x(5), x(5))
    yield sample(aten.outer.default, x(5), x(4))
    yield sample(aten.linear.default, x(2, 3, 5), x(4, 5))
    yield sample(aten.linear.default, x(4, 5), x(4, 5), x(4))
    for left, right in (((5,), (5,)), ((4, 5), (5,)), ((5,), (5, 4)), ((4, 5), (5, 6)), ((2, 4, 5), (5, 3)),
                        ((2, 4, 5), (2, 5, 3)), ((2, 4, 5), (5,)), ((5,), (2, 5, 3)), ((2, 1, 4, 5), (3, 5, 4))):  # fmt: skip
        yield sample(aten.matmul.default, x(*left), x(*right))
    for bias in ((6,), (4, 6), (4, 1), ()):
        yield sample(aten.addmm.default, x(*bias), x(4, 5), x(5, 6))
    yield sample(aten.addmm.default, x(6), x(4, 5), x(5, 6), beta=2, alpha=3)
    yield sample(aten.baddbmm.default, x(2, 1, 3), x(2, 4, 5), x(2, 5, 3))
    yield sample(aten.addmv.default, x(4), x(4, 5), x(5))


UNARY = """
    abs acos angle asin asinh atan ceil celu cos cosh digamma elu erf erfc exp exp2 expm1 floor frac gelu hardshrink
    hardsigmoid hardswish hardtanh isfinite isinf isnan isneginf isposinf leaky_relu logical_not mish nan_to_num
    relu relu6 round selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_erfcx special_i0
    special_i0e special_i1 special_i1e square tan tanh trunc i0 alias clone conj detach lift_fresh_copy neg positive
    deg2rad rad2deg zeros_like ones_like
"""
UNARY_POSITIVE = "acosh lgamma log log10 log1p log2 reciprocal rsqrt special_entr sqrt"
UNARY_UNIT = "atanh erfinv logit special_ndtri"
BINARY = """
    atan2 copysign eq fmax fmin fmod ge gt heaviside hypot le logaddexp logaddexp2 logical_and logical_or logical_xor lt
    maximum minimum ne nextafter remainder floor_divide add sub mul div true_divide rsub _prelu_kernel
"""
BINARY_POSITIVE = "pow xlogy special_xlog1py"
BINARY_INTEGER = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd"
SCALAR = "eq ge gt le lt ne add sub mul div true_divide rsub remainder fmod leaky_relu".split()
GRADIENT_AND_INPUT = """
    silu_backward tanh_backward sigmoid_backward hardsigmoid_backward hardswish_backward mish_backward gelu_backward
"""


def overload(name: str, *preferred: str) -> Any:
    packet = getattr(aten, name)
    return getattr(packet, next(o for o in (*preferred, "default", "Tensor", *packet.overloads()) if o in packet.overloads()))


def pointwise() -> Iterator[Sample]:
    for values, ops in ((x, UNARY), (positive, UNARY_POSITIVE), (unit, UNARY_UNIT)):
        for name in ops.split():
            yield sample(overload(name), values(4, 5))
    for values, ops in ((x, BINARY), (positive, BINARY_POSITIVE)):
        for name in ops.split():
            op = overload(name, "Tensor", "Tensor_Tensor")
            yield sample(op, values(4, 5), positive(4, 5))
            if name != "_prelu_kernel":  # torch itself warns where its operands broadcast
                yield sample(op, values(3, 1, 5), positive(4, 1))
    for name in BINARY_INTEGER.split():
        yield sample(overload(name, "Tensor"), index(4, 4, 5), index(4, 4, 5) + 1)
    for name in SCALAR:
        yield sample(overload(name, "Scalar", "Tensor_Scalar"), x(4, 5), 2)
    yield from pointwise_with_arguments()
    for name in GRADIENT_AND_INPUT.split():
        yield sample(overload(name), x(4, 5), unit(4, 5))


def pointwise_with_arguments() -> Iterator[Sample]:
    a, b = x(4, 5), x(4, 5)
    z = torch.complex(a, b)
    yield from (sample(aten.real.default, z), sample(aten.imag.default, z), sample(aten.bitwise_not.default, index(4, 4, 5)))
    yield sample(aten.add.Tensor, a, 2.0)
    yield sample(aten.add.Tensor, a, b, alpha=3)
    yield sample(aten.mul.Tensor, a, 2.0)
    yield sample(aten.mul.Tensor, a, x())
    yield sample(aten.div.Tensor, a, 2.0)
    yield sample(aten.div.Tensor_mode, a, positive(4, 5), rounding_mode="floor")
    yield sample(aten.div.Scalar_mode, a, 3, rounding_mode="trunc")
    yield sample(aten.lerp.Scalar, a, b, 0.5)
    yield sample(aten.lerp.Tensor, a, b, x(5))
    yield sample(aten.addcdiv.default, a, b, positive(4, 5), value=2)
    yield sample(aten.addcmul.default, a, b, x(4, 1), value=2)
    yield sample(aten.copy.default, a, x(1, 5))
    yield sample(aten._to_copy.default, a, dtype=torch.float32)
    yield sample(aten._to_copy.default, a, dtype=torch.int64)
    yield sample(aten._to_copy.default, index(5, 4, 5), dtype=torch.float64)
    yield sample(aten._to_copy.default, mask(4, 5), dtype=torch.float64)
    yield sample(aten.clamp.default, a, -1, 2)
    yield sample(aten.clamp.Tensor, a, x(5), x(4, 5) + 9)
    yield sample(aten.clamp_max.default, a, 2)
    yield sample(aten.clamp_min.default, a, -1)
    yield sample(aten.fill.Scalar, a, 3)
    yield sample(aten.full_like.default, a, 3)
    yield sample(aten.empty_like.default, a, values=False)
    yield sample(aten.polygamma.default, 1, positive(4, 5))
    yield sample(aten.threshold.default, a, 1, 2)
    yield sample(aten.pow.Scalar, 2, a)
    yield sample(aten.pow.Tensor_Scalar, a, 2)
    yield sample(aten.where.self, mask(4, 1), a, x(5))
    yield sample(aten.where.ScalarOther, mask(4, 5), a, 0.0)
    yield sample(aten.where.ScalarOther, mask(4, 5), a, 2.0)
    yield sample(aten.where.ScalarSelf, mask(4, 5), 0.0, a)
    yield sample(aten.where.Scalar, mask(4, 5), 1.0, 0.0)
    yield sample(aten.masked_fill.Scalar, a, mask(4, 5), 0)
    yield sample(aten.masked_fill.Scalar, a, mask(4, 5), -7)
    yield sample(aten.masked_fill.Tensor, a, mask(5), x())
    yield sample(aten.gelu.default, a, approximate="tanh")
    yield sample(aten.threshold_backward.default, a, b, 0)
    yield sample(aten.hardtanh_backward.default, a, b, -1, 1)
    yield sample(aten.leaky_relu_backward.default, a, b, 0.5, False)
    yield sample(aten.elu_backward.default, a, 1, 1, 1, False, b)
    yield sample(aten.softplus_backward.default, a, b, 1, 20)
    yield sample(aten.logit_backward.default, a, unit(4, 5))
    yield sample(aten.native_dropout_backward.default, a, mask(4, 5), 2.0)
    yield sample(aten._prelu_kernel_backward.default, a, b, x(5))
    buffer = aten.log_sigmoid_forward.default(b)[1]
    yield sample(aten.log_sigmoid_backward.default, a, b, buffer)


def views() -> Iterator[Sample]:
    for before, after in (((4, 6), (24,)), ((24,), (4, 6)), ((4, 6), (6, 4)), ((4, 5, 6), (20, 6)), ((4, 6), (2, 2, 6)),
                          ((5, 1, 6), (5, 6)), ((6,), (1, 6, 1)), ((4, 6, 5), (4, 3, 2, 5)), ((1,), ()),
                          ((2, 6, 5), (6, 2, 5)), ((6, 4), (3, 8)), ((2, 2, 5), (4, 5)), ((5, 0), (0, 5))):  # fmt: skip
        yield sample(aten.view.default, x(*before), list(after))
    yield sample(aten._unsafe_view.default, x(4, 6), [2, 12])
    yield sample(aten.reshape.default, x(4, 6), [8, -1])
    yield sample(aten.view_copy.default, x(4, 6), [24])
    yield sample(aten._reshape_alias.default, x(4, 6), [24], [1])
    yield sample(aten.permute.default, x(2, 4, 5), [2, 0, -2])
    yield sample(aten.transpose.int, x(2, 4, 5), -1, 0)
    yield sample(aten.t.default, x(4, 5))
    yield sample(aten.unsqueeze.default, x(4, 5), -1)
    yield sample(aten.unsqueeze.default, x(), 0)
    yield sample(aten.squeeze.default, x(4, 1, 2, 1))
    yield sample(aten.squeeze.dim, x(4, 1, 5), 1)
    yield sample(aten.squeeze.dims, x(2, 1, 5, 1), [0, 1, -1])
    yield sample(aten.expand.default, x(4, 1, 5), [2, 4, 6, 5])
    yield sample(aten.expand.default, x(4, 1), [-1, 5])
    yield sample(aten.broadcast_to.default, x(5), [4, 5])
    yield sample(aten.slice.Tensor, x(4, 5), 1, 1, 4)
    yield sample(aten.slice.Tensor, x(4, 5), 1, 0, 9223372036854775807)
    yield sample(aten.slice.Tensor, x(4, 5))
    yield sample(aten.split.Tensor, x(4, 6), 4, 1)
    yield sample(aten.split_with_sizes.default, x(4, 6), [1, 2, 3], -1)
    yield sample(aten.select.int, x(4, 3, 5), 1, -1)
    yield sample(aten.unbind.int, x(3, 5), 0)
    yield sample(aten.diagonal.default, x(4, 5, 6), 0, 0, -1)
    yield sample(aten.unfold.default, x(4, 6), 1, 3, 2)
    yield sample(aten.slice_backward.default, x(4, 3), [4, 5], 1, 1, 4, 1)
    yield sample(aten.slice_backward.default, x(4, 5), [4, 5], 1, 0, 9223372036854775807, 1)
    yield sample(aten.select_backward.default, x(4, 5), [4, 3, 5], 1, 2)
    yield sample(aten.diagonal_backward.default, x(5, 4), [4, 5, 6], 0, 0, 2)
    yield sample(aten.unfold_backward.default, x(4, 2, 3), [4, 6], 1, 3, 2)
    yield sample(aten.slice_scatter.default, x(4, 5), x(4, 3), 1, 1, 4)
    yield sample(aten.select_scatter.default, x(4, 3, 5), x(4, 5), 1, 0)
    yield sample(aten.diagonal_scatter.default, x(4, 5, 6), x(5, 4), 0, 0, 2)
    yield from joins()


def joins() -> Iterator[Sample]:
    yield sample(aten.cat.default, [x(4, 5), x(4, 2)], 1)
    yield sample(aten.cat.default, [x(0), x(4, 2), x(3, 2)])
    yield sample(aten.stack.default, [x(4, 5), x(4, 5)], -1)
    yield sample(aten.flip.default, x(4, 5), [-1])
    yield sample(aten.roll.default, x(4, 5), [1], [1])
    yield sample(aten.roll.default, x(4, 5), [3])
    yield sample(aten.repeat.default, x(4, 5), [2, 1, 3])
    yield sample(aten.tril.default, x(4, 5, 5), 1)
    yield sample(aten.triu.default, x(2, 4, 5))
    yield sample(aten.constant_pad_nd.default, x(4, 5), [1, 2])
    yield sample(aten.constant_pad_nd.default, x(4, 5), [1, -1, 0, 0], 3)
    for n in (1, 2, 3):
        for kind in ("reflection_pad", "replication_pad"):
            image = x(2, 4, *[3] * n)
            padded = sample(overload(f"{kind}{n}d"), image, [1] * (2 * n))
            yield padded
            yield sample(overload(f"{kind}{n}d_backward"), x(*padded.results[0].shape), image, [1] * (2 * n))
    yield sample(aten.pixel_shuffle.default, x(2, 16, 3, 5), 2)
    yield sample(aten.pixel_unshuffle.default, x(2, 4, 4, 6), 2)
    yield sample(aten.as_strided.default, x(4, 5), [5, 4], [1, 5])


def reductions() -> Iterator[Sample]:
    a, d = x(4, 5, 3), distinct(4, 5)
    for op in (aten.sum, aten.mean, aten.max, aten.min, aten.prod, aten.median):
        yield sample(op.default, a)
    yield sample(aten.sum.default, x())
    for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default):
        yield sample(op, a, [0, -1])
        yield sample(op, a, [1], True)
    yield sample(aten.sum.dim_IntList, a, [])
    yield sample(aten.nansum.default, a, [1])
    yield sample(aten.count_nonzero.dim_IntList, a, [1])
    for op in (aten.max, aten.min, aten.median):
        yield sample(op.dim, d, 1)
        yield sample(op.dim, d, 0, True)
    yield sample(aten.max.other, a, x(5, 1))
    yield sample(aten.min.other, a, x(5, 1))
    for op in (aten.argmax.default, aten.argmin.default):
        yield sample(op, d)
        yield sample(op, d, 1, True)
    m = mask(4, 5)
    for op in (aten.any, aten.all):
        yield from (sample(op.default, m), sample(op.dim, m, 1), sample(op.dims, m, [0], True))
    yield sample(aten.prod.dim_int, a, 1)
    yield sample(aten.var.correction, a, [1], correction=1)
    yield sample(aten.std.correction, a, [1], correction=0, keepdim=True)
    yield sample(aten.var_mean.correction, a, [0, 2], correction=1, keepdim=True)
    yield sample(aten.linalg_vector_norm.default, a)
    yield sample(aten.linalg_vector_norm.default, a, 2, [1], True)
    yield sample(aten.norm.ScalarOpt_dim, a, 2, [1])
    yield from along()


def along() -> Iterator[Sample]:
    a, d = x(4, 5), distinct(4, 5)
    for op in (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default):
        yield sample(op, d / 4, 1)
    for op in (aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default):
        yield sample(op, *((a, -1, False) if op is not aten._safe_softmax.default else (a, -1)))
    yield sample(aten.softmax.int, a, 0)
    yield sample(aten.log_softmax.int, a, 0)
    yield sample(aten._softmax_backward_data.default, a, unit(4, 5), 1, torch.float64)
    yield sample(aten._log_softmax_backward_data.default, a, -unit(4, 5), -1, torch.float64)
    yield sample(aten.sort.default, d)
    yield sample(aten.sort.default, d, 0, True)
    yield sample(aten.sort.stable, d, stable=True, dim=0)
    yield sample(aten.argsort.default, d, 0)
    yield sample(aten.topk.default, d, 2)
    yield sample(aten.topk.default, d, 3, 0)
    yield sample(aten.glu.default, x(4, 6), 1)
    yield sample(aten.glu_backward.default, x(4, 3), x(4, 6), -1)


def creation() -> Iterator[Sample]:
    yield sample(aten.full.default, [4, 5], 3.0)
    yield sample(aten.zeros.default, [4, 5])
    yield sample(aten.ones.default, [4, 5])
    yield sample(aten.empty.memory_format, [4, 5], values=False)
    yield sample(aten.arange.default, 5)
    yield sample(aten.scalar_tensor.default, 5.0)
    yield sample(aten.eye.default, 4)
    for op, args in ((aten.rand, ([4],)), (aten.randn, ([4],)), (aten.randint, (5, [4])), (aten.randperm, (5,))):
        yield sample(op.default, *args, values=False)
    for op, args in ((aten.new_zeros, ()), (aten.new_ones, ()), (aten.new_full, (3,))):
        yield sample(op.default, x(4, 5), [5, 2], *args)
    yield sample(aten.new_empty.default, x(4, 5), [4, 5, 1], values=False)
    a = unit(4, 5)
    yield from (sample(op.default, a, values=False) for op in (aten.bernoulli, aten.rand_like, aten.randn_like))
    yield sample(aten.randint_like.default, a, 5, values=False)
    yield sample(aten.multinomial.default, a, 2, values=False)
    yield sample(aten.native_dropout.default, a, 0.5, True, values=False)


def normalization() -> Iterator[Sample]:
    a, w, b = x(4, 5, 6), x(6), x(6)
    for shape, affine in (([6], (w, b)), ([6], (None, None)), ([5, 6], (x(5, 6), x(5, 6))), ([6], (w, None))):
        forward = sample(aten.native_layer_norm.default, a, shape, *affine, 1e-5)
        yield forward
        _, mean, rstd = forward.results
        asked = [True, affine[0] is not None, affine[1] is not None]
        yield sample(aten.native_layer_norm_backward.default, x(4, 5, 6), a, shape, mean, rstd, *affine, asked)
    for shape, weight in (([6], w), ([6], None)):
        forward = sample(aten._fused_rms_norm.default, a, shape, weight, 1e-5)
        yield forward
        rstd = forward.results[1]
        yield sample(aten._fused_rms_norm_backward.default, x(4, 5, 6), a, shape, rstd, weight, [True, weight is not None])
    image = x(4, 8, 3, 2)
    for groups, affine in ((4, (x(8), x(8))), (1, (None, None)), (8, (x(8), None))):
        forward = sample(aten.native_group_norm.default, image, *affine, 4, 8, 6, groups, 1e-5)
        yield forward
        _, mean, rstd = forward.results
        asked = [True, affine[0] is not None, affine[1] is not None]
        yield sample(aten.native_group_norm_backward.default, x(4, 8, 3, 2), image, mean, rstd, affine[0], 4, 8, 6, groups, asked)  # fmt: skip


def convolution() -> Iterator[Sample]:
    cases: list[tuple[tuple[int, ...], tuple[int, ...], bool, bool, int]] = [
        ((4, 5, 4, 4), (6, 5, 3, 3), False, False, 1),
        ((4, 5, 4, 4), (6, 5, 3, 3), True, False, 1),
        ((4, 4, 6), (8, 1, 3), True, False, 4),
        ((4, 8, 6), (4, 4, 3), False, False, 2),
        ((4, 5, 4, 4), (5, 6, 3, 3), False, True, 1),
        ((4, 5, 4), (5, 6, 3), True, True, 1),
        ((4, 4, 4), (4, 2, 3), True, True, 4),
        ((2, 2, 3, 3, 3), (4, 2, 2, 2, 2), False, False, 1),
    ]
    for shape, weight, biased, transposed, groups in cases:
        n = len(shape) - 2
        i, w = x(*shape), x(*weight)
        outs = weight[1] * groups if transposed else weight[0]
        options = ([2] * n, [1] * n, [1] * n, transposed, [0] * n, groups)
        forward = sample(aten.convolution.default, i, w, x(outs) if biased else None, *options)
        yield forward
        grad, sizes = x(*forward.results[0].shape), [outs] if biased else None
        yield sample(aten.convolution_backward.default, grad, i, w, sizes, *options, [True, True, biased])
    yield sample(aten.convolution_backward.default, grad, i, w, None, *options, [False, True, False])


def resampling() -> Iterator[Sample]:
    for n in (2, 3):
        image = distinct(4, 3, *[4] * n) if n == 2 else distinct(2, 2, 4, 4, 4)
        small = x(*image.shape[:2], *[2] * n)
        pool = sample(overload(f"max_pool{n}d_with_indices"), image, [2] * n)
        yield pool
        yield sample(overload(f"max_pool{n}d_with_indices_backward"), small, image, [2] * n, [2] * n, [0] * n, [1] * n, False, pool.results[1])  # fmt: skip
        yield sample(overload(f"avg_pool{n}d"), image, [2] * n)
        yield sample(overload(f"avg_pool{n}d_backward"), small, image, [2] * n, [2] * n, [0] * n, False, True, None)
        yield sample(overload(f"_adaptive_avg_pool{n}d"), image, [2] * n)
        yield sample(overload(f"_adaptive_avg_pool{n}d_backward"), small, image)
        pool = sample(overload(f"adaptive_max_pool{n}d"), image, [2] * n)
        yield pool
        yield sample(overload(f"adaptive_max_pool{n}d_backward"), small, image, pool.results[1])
    yield from resizes()
    for n in (2, 3):
        image, grid = x(2, 4, *[3] * n), torch.rand(2, *[2] * n, n, dtype=torch.float64)
        forward = sample(overload(f"grid_sampler_{n}d"), image, grid, 0, 0, False)
        yield forward
        grad = x(*forward.results[0].shape)
        yield sample(overload(f"grid_sampler_{n}d_backward"), grad, image, grid, 0, 0, False, [True, True])
    yield sample(aten.im2col.default, x(2, 4, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2])
    yield sample(aten.col2im.default, x(2, 16, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2])


def resizes() -> Iterator[Sample]:
    for kind in ("nearest1d", "linear1d", "nearest2d", "bilinear2d", "bicubic2d", "nearest3d", "trilinear3d"):
        n = int(kind[-2])
        before, after = [2, 4, *[3] * n], [2, 4, *[5] * n]
        corners = () if kind.startswith("nearest") else (False,)
        for name in (f"upsample_{kind}", *([f"_upsample_nearest_exact{n}d"] if not corners else [])):
            yield sample(overload(name), x(*before), after[2:], *corners)
            yield sample(overload(f"{name}_backward"), x(*after), after[2:], before, *corners)
    yield sample(aten.upsample_bilinear2d.vec, x(2, 4, 3, 3), [5, 5], False, None)


def indexing() -> Iterator[Sample]:
    yield sample(aten.embedding.default, x(7, 6), index(7, 4, 5))
    yield sample(aten.embedding_dense_backward.default, x(4, 5, 6), index(7, 4, 5), 7, -1, False)
    yield sample(aten.embedding_dense_backward.default, x(4, 5), index(3, 4), 3, 0, True)
    yield sample(aten.gather.default, x(4, 7), 1, index(7, 4, 5))
    yield sample(aten.gather.default, x(4, 7), 0, index(4, 3, 5))
    yield sample(aten.gather.default, x(), 0, torch.tensor(0))
    columns = torch.stack([torch.randperm(7)[:5] for _ in range(4)])
    yield sample(aten.scatter.src, x(4, 7), 1, columns, x(4, 5))
    yield sample(aten.scatter.value, x(4, 7), 1, columns, 0)
    yield sample(aten.scatter.value, x(4, 7), -1, columns, 3)
    yield sample(aten.scatter_add.default, x(4, 7), 1, index(7, 4, 5), x(4, 5))
    yield sample(aten.scatter_add.default, x(4, 7), 0, index(4, 6, 5), x(6, 6))
    yield sample(aten.scatter_reduce.two, x(4, 7), 1, index(7, 4, 5), x(4, 5), "amax")
    yield sample(aten.index_select.default, x(4, 7), 1, index(7, 5))
    yield sample(aten.index_select.default, x(4, 7), 1, torch.tensor(2))
    yield sample(aten.index_add.default, x(4, 7), 1, index(7, 5), x(4, 5))
    yield sample(aten.index_copy.default, x(4, 7), 1, torch.randperm(7)[:5], x(4, 5))
    yield sample(aten.index_fill.int_Scalar, x(4, 7), 1, index(7, 5), 2)
    yield from advanced_indexing()
    yield sample(aten.nonzero.default, mask(4, 5))
    yield sample(aten.masked_scatter.default, x(4, 5), mask(4, 5), x(20))
    boundaries = torch.arange(-3.0, 3.0, dtype=torch.float64)
    yield sample(aten.bucketize.Tensor, x(4, 5), boundaries)
    yield sample(aten.searchsorted.Tensor, x(4, 6).sort(-1)[0], x(4, 5))
    yield sample(aten.histc.default, x(20), 4)
    yield sample(aten.bincount.default, index(5, 20))


def advanced_indexing() -> Iterator[Sample]:
    a, i, j = x(4, 7, 5), index(4, 6), index(5, 3, 1)
    for op in (aten.index.Tensor, aten._unsafe_index.Tensor):
        yield sample(op, a, [i])
        yield sample(op, a, [None, index(7, 2, 6)])
        yield sample(op, a, [index(4, 6), None, j])
        yield sample(op, a, [None, index(7, 6), j])
    yield sample(aten.index.Tensor, a, [mask(4)])
    once = torch.randperm(7)[:6]
    for op in (aten.index_put.default, aten._unsafe_index_put.default):
        yield sample(op, a, [None, once], x(4, 6, 5))
        yield sample(op, a, [None, index(7, 6)], x(4, 6, 5), True)
        yield sample(op, a, [None, once], x(5))
        yield sample(op, a, [i.clone(), None, index(5, 6)], x(6, 7), True)
    yield sample(aten.index_put.default, a, [mask(4)], x())


def losses() -> Iterator[Sample]:
    a, b = unit(4, 5), unit(4, 5)
    for reduction, grad in ((0, x(4, 5)), (1, x()), (2, x())):
        for name, extra in (("mse_loss", ()), ("smooth_l1_loss", (0.5,)), ("huber_loss", (0.5,)), ("soft_margin_loss", ())):
            yield sample(overload(name), a, b, reduction, *extra)
            yield sample(overload(f"{name}_backward"), grad, a, b, reduction, *extra)
        for weight in (None, x(5)):
            yield sample(aten.binary_cross_entropy.default, a, b, weight, reduction)
            yield sample(aten.binary_cross_entropy_backward.default, grad, a, b, weight, reduction)
        yield sample(aten.binary_cross_entropy_with_logits.default, a, b, None, None, reduction)
    for reduction in (0, 1, 2):
        for weight in (None, positive(6)):
            yield from nll(aten.nll_loss_forward, aten.nll_loss_backward, (4, 6), (4,), weight, reduction)
        yield from nll(aten.nll_loss2d_forward, aten.nll_loss2d_backward, (4, 6, 2, 3), (4, 2, 3), None, reduction)
    yield from nll(aten.nll_loss_forward, aten.nll_loss_backward, (6,), (), None, 1)
    yield sample(aten._cdist_forward.default, x(2, 4, 3), x(2, 5, 3), 2.0, None)


def nll(
    op: Any, backward: Any, shape: tuple[int, ...], samples: tuple[int, ...], weight: Tensor | None, reduction: int
) -> Iterator[Sample]:
    logits, target = -unit(*shape), index(6, *samples)
    forward = sample(op.default, logits, target, weight, reduction, 2)
    yield forward
    loss, total = forward.results
    yield sample(backward.default, x(*loss.shape), logits, target, weight, reduction, 2, total)


def contractions() -> Iterator[Sample]:
    yield sample(autopar.contract.default, x(2, 5, 3), x(4, 3), "bsk,nk->bsn")
    yield sample(autopar.contract.default, x(2, 5, 3), x(2, 5, 4), "bsk,bsn->nk")
    yield sample(autopar.contract.default, x(2, 4, 5), x(2, 5, 3), "bmk,bkn->bmn")


def attention() -> Iterator[Sample]:
    seed = torch.tensor(7)
    cases: list[tuple[int, int, int, Tensor | None, dict[str, Any]]] = [
        (4, 4, 5, None, {"is_causal": True}),
        (4, 2, 4, None, {"is_causal": False}),
        (4, 4, 4, mask(2, 1, 4, 6) | (torch.arange(6) == 0), {"is_causal": False}),
        (4, 2, 5, x(2, 4, 5, 6), {"is_causal": False}),
        (4, 4, 4, x(4, 6), {"is_causal": False, "dropout_p": 0.5}),
        (6, 3, 5, None, {"is_causal": True, "dropout_p": 0.25}),
    ]
    for heads, groups, queries, allowed, changes in cases:
        keys = queries if changes["is_causal"] else 6
        q, k, v = x(2, heads, queries, 3), x(2, groups, keys, 3), x(2, groups, keys, 4)
        options: dict[str, Any] = {
            "scale": 0.5, "dropout_p": 0.0, "site": 3, "global_shape": [2, heads, queries, keys], "offset": [0, 0, 0, 0],
            **changes,
        }  # fmt: skip
        dice = seed if options["dropout_p"] else None
        forward = sample(autopar.attention.default, q, k, v, allowed, dice, **options)
        yield forward
        out, lse = forward.results
        grad = x(*out.shape)
        yield sample(autopar.attention_backward.default, grad, q, k, v, allowed, out, lse, dice, **options)


def positional() -> Iterator[Sample]:
    """Ops that know where their shard lies."""
    seed, place = torch.tensor(3), {"global_shape": [4, 5, 6], "offset": [0, 0, 0]}
    yield sample(autopar.dropout.default, x(4, 5, 6), seed, p=0.5, site=1, **place)
    yield sample(autopar.uniform.default, seed, site=1, shape=[4, 5, 6], dtype=torch.float64, **place)
    table, rows = x(7, 6), index(7, 4, 5)
    for padding in (-1, 3):
        yield sample(autopar.lookup.default, table, rows, offset=0, padding_idx=padding)
        yield sample(autopar.lookup_backward.default, x(4, 5, 6), rows, rows=7, offset=0, padding_idx=padding)
    logits, target = x(4, 2, 7), index(7, 4, 2)
    target[0] = -100
    lse = logits.logsumexp(-1)
    options = {"ignore_index": -100, "offset": 0}
    yield sample(autopar.sumexp.default, logits, logits.amax(-1))
    yield sample(autopar.nll.default, logits, lse, target, **options)
    yield sample(autopar.nll_backward.default, x(4, 2), logits, lse, target, **options)


def batch_norm() -> Iterator[Sample]:
    for shape, affine in (((4, 6, 2, 5), (x(6), x(6))), ((4, 6), (None, None)), ((4, 5, 6), (x(5), None))):
        image, grad, c, n = x(*shape), x(*shape), shape[1], 1000
        mean, rstd = x(c), positive(c)
        yield sample(autopar.squared_deviation.default, image, mean)
        yield sample(autopar.batch_norm.default, image, *affine, mean, rstd, count=n)
        yield sample(autopar.batch_norm_backward_reduce.default, grad, image, mean, rstd)
        yield sample(autopar.batch_norm_backward_input.default, grad, image, affine[0], mean, rstd, x(c), x(c), count=n)


KINDS: dict[str, Callable[[], Iterator[Sample]]] = {
    f.__name__: f
    for f in (contraction, pointwise, views, reductions, creation, normalization, convolution, resampling, indexing,
              losses, contractions, attention, positional, batch_norm)
}  # fmt: skip
