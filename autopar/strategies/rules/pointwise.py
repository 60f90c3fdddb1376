"""Elementwise ops: one broadcasting rule for all."""

from __future__ import annotations

from autopar.ir import Node, Value
from autopar.strategies.registry import Linear, LinearSets, Metas, aten, rule

# Linear in the first operand: the only one, the numerator, or the gradient.
FIRST = """
    alias clone conj _conj _conj_physical resolve_conj resolve_neg detach lift_fresh_copy neg positive real imag
    deg2rad rad2deg div.Scalar div.Tensor true_divide.Tensor true_divide.Scalar mul.Scalar
    gelu_backward silu_backward tanh_backward sigmoid_backward threshold_backward hardtanh_backward
    leaky_relu_backward elu_backward softplus_backward hardsigmoid_backward hardswish_backward mish_backward
    logit_backward native_dropout_backward _prelu_kernel_backward zero ldexp.Tensor
"""

# Linear in each operand if the other is whole.
BILINEAR = "mul.Tensor"

# Linear in both operands together.
TOGETHER = "complex add.Tensor sub.Tensor rsub.Tensor lerp.Scalar lerp.Tensor addcdiv"

NONLINEAR = """
    abs acos acosh angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min copysign cos cosh digamma
    div.Tensor_mode div.Scalar_mode elu eq erf erfc erfinv exp exp2 expm1 fill floor floor_divide fmax fmin fmod frac
    full_like gcd ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf isnan isneginf
    isposinf le leaky_relu lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or
    logical_xor logit lt maximum minimum mish nan_to_num ne ones_like pow polygamma _prelu_kernel
    reciprocal relu relu6 remainder round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink
    special_entr special_erfcx special_i0 special_i0e special_i1 special_i1e special_ndtri special_xlog1py sqrt square
    tan tanh threshold trunc xlogy zeros_like empty_like add.Scalar sub.Scalar rsub.Scalar nextafter polar
    where.Scalar i0 frexp igamma igammac lcm mvlgamma special_airy_ai special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_zeta __lshift__ __rshift__
"""


def broadcast(node: Node, metas: Metas) -> str:
    """Write the rule in which all operands and results share their dims, aligned from the right."""
    return f"{', '.join(['...'] * len(metas))} -> {', '.join(['...'] * len(node.outputs))}"


def _pointwise(ops: str, linear: Linear = ()) -> None:
    for op in ops.split():
        rule(f"aten.{op}", broadcast, linear=linear, elementwise=True)


def _where_sums(node: Node, metas: Metas) -> LinearSets:
    """Return the linear sets: both choices together. A number must be zero, or every rank would add it."""
    chosen = node.args[1:]
    if any(not isinstance(a, Value) and a != 0 for a in chosen):
        return ()
    return (tuple(range(1, len(metas))),)


def _masked_fill_sums(node: Node, metas: Metas) -> LinearSets:
    if len(metas) == 3:
        return ((0, 2),)
    return ((0,),) if node.args[2] == 0 else ()


def _cast_sums(node: Node, metas: Metas) -> LinearSets:
    """Return no linear set for a scalar such as a loss: it is summed before it is rounded.

    Sending two bytes less would be no faster, and less accurate.
    """
    made = node.outputs[0]
    return () if made is not None and made.numel == 1 and made.dtype in ("float16", "bfloat16") else ((0,),)


_pointwise(FIRST, ((0,),))
_pointwise(BILINEAR, ((0,), (1,)))
_pointwise(TOGETHER, ((0, 1),))
_pointwise(NONLINEAR)
_pointwise("addcmul", ((0, 1), (0, 2)))
_pointwise("copy", ((1,),))
_pointwise("_to_copy", _cast_sums)
_pointwise("where.self where.ScalarOther where.ScalarSelf", _where_sums)
_pointwise("masked_fill", _masked_fill_sums)


def _log_sigmoid_backward(node: Node, metas: Metas) -> str:
    # The buffer is empty on some devices.
    return "..., ..., [none] -> ..." if metas[2].numel == 0 else "..., ..., ... -> ..."


rule(aten.log_sigmoid_backward, _log_sigmoid_backward, linear=((0,),), elementwise=True)


def _log_sigmoid_forward(node: Node, metas: Metas) -> str:
    buffer = node.outputs[1]
    return f"... -> ..., {'[none]' if buffer is not None and buffer.shape == (0,) else '...'}"


rule(aten.log_sigmoid_forward, _log_sigmoid_forward, elementwise=True)
