"""Samples of pointwise ops."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.cpu.rule_operands import index, mask, overload, positive, unit, x
from tests.cpu.rule_simulation import Sample, sample

aten = torch.ops.aten


UNARY = """
    abs acos angle asin asinh atan ceil celu cos cosh digamma elu erf erfc exp exp2 expm1 floor frac gelu hardshrink
    hardsigmoid hardswish hardtanh isfinite isinf isnan isneginf isposinf leaky_relu logical_not mish nan_to_num
    relu relu6 round selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_erfcx special_i0
    special_i0e special_i1 special_i1e special_airy_ai special_bessel_j0 special_bessel_j1 special_log_ndtr
    special_modified_bessel_i0 special_modified_bessel_i1 special_spherical_bessel_j0
    square tan tanh trunc i0 alias clone conj detach lift_fresh_copy neg positive
    deg2rad rad2deg zeros_like ones_like zero
"""
UNARY_POSITIVE = "acosh lgamma log log10 log1p log2 reciprocal rsqrt special_entr sqrt \
    special_bessel_y0 special_bessel_y1 special_modified_bessel_k0 special_modified_bessel_k1 \
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1"
UNARY_UNIT = "atanh erfinv logit special_ndtri"
BINARY = """
    atan2 copysign eq fmax fmin fmod ge gt heaviside hypot le logaddexp logaddexp2 logical_and logical_or logical_xor lt
    maximum minimum ne nextafter remainder floor_divide add sub mul div true_divide rsub _prelu_kernel
"""
BINARY_POSITIVE = "pow xlogy special_xlog1py igamma igammac"
BINARY_INTEGER = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm"
SCALAR = "eq ge gt le lt ne add sub mul div true_divide rsub remainder fmod leaky_relu".split()
GRADIENT_AND_INPUT = """
    silu_backward tanh_backward sigmoid_backward hardsigmoid_backward hardswish_backward mish_backward gelu_backward
"""


def pointwise() -> Iterator[Sample]:
    for values, names in ((x, UNARY), (positive, UNARY_POSITIVE), (unit, UNARY_UNIT)):
        for name in names.split():
            yield sample(overload(name), values(4, 5))
    for values, names in ((x, BINARY), (positive, BINARY_POSITIVE)):
        for name in names.split():
            op = overload(name, "Tensor", "Tensor_Tensor")
            yield sample(op, values(4, 5), positive(4, 5))
            if name != "_prelu_kernel":  # torch itself warns where its operands broadcast
                yield sample(op, values(3, 1, 5), positive(4, 1))
    for name in BINARY_INTEGER.split():
        yield sample(overload(name, "Tensor"), index(4, 4, 5), index(4, 4, 5) + 1)
    for name in SCALAR:
        yield sample(overload(name, "Scalar", "Tensor_Scalar"), x(4, 5), 2)
    yield from pointwise_with_arguments()
    yield from rarer()
    for name in GRADIENT_AND_INPUT.split():
        yield sample(overload(name), x(4, 5), unit(4, 5))


def rarer() -> Iterator[Sample]:
    yield sample(aten.frexp.Tensor, x(4, 5))
    yield sample(aten.ldexp.Tensor, x(4, 5), index(4, 5))
    yield sample(aten.__lshift__.Scalar, index(4, 4, 5), 1)
    yield sample(aten.__rshift__.Scalar, index(4, 4, 5), 1)
    yield sample(aten.special_zeta.default, positive(4, 5) + 1, positive(4, 5))
    yield sample(aten.mvlgamma.default, positive(4, 5), 1)


def pointwise_with_arguments() -> Iterator[Sample]:
    a, b = x(4, 5), x(4, 5)
    z = torch.complex(a, b)
    for op in (aten.real, aten.imag, aten.conj, aten._conj, aten._conj_physical, aten.resolve_conj, aten.resolve_neg):
        yield sample(op.default, z)
    yield sample(aten.complex.default, a, b)
    yield sample(aten.polar.default, a, b)
    yield sample(aten.bitwise_not.default, index(4, 4, 5))
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
    yield sample(aten._to_copy.default, a, dtype=torch.float8_e5m2)
    yield sample(aten._to_copy.default, index(5, 4, 5), dtype=torch.float64)
    yield sample(aten._to_copy.default, mask(4, 5), dtype=torch.float64)
    yield sample(aten._to_copy.default, index(2, 4, 5), dtype=torch.bool)
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
    yield sample(aten.log_sigmoid_forward.default, b)
    buffer = aten.log_sigmoid_forward.default(b)[1]
    yield sample(aten.log_sigmoid_backward.default, a, b, buffer)
