"""Convolution. ``n`` samples, ``i`` and ``o`` channels in and out, of each of ``g`` groups; space is whole."""

from __future__ import annotations

import math
from typing import cast

from autopar.ir import Node
from autopar.mesh import Mesh
from autopar.sharding.strategy import Strategy
from autopar.strategies.localize import local_length, local_shape
from autopar.strategies.registry import LinearSets, LocalCall, Metas, aten, lowering, rule
from autopar.strategies.rules.terms import int_arg


def _space(prefix: str, ndim: int) -> str:
    return " ".join(f"[{prefix}{i}]" for i in range(ndim - 2))


def _terms(ndim: int, groups: int, transposed: bool, i: str = "i") -> tuple[str, str, str, str]:
    """x, weight, result and bias. With groups, only whole groups are cut: channels within one are whole."""
    if groups == 1:
        ins, outs = i, "o"
        weight = f"{ins} {outs}" if transposed else f"{outs} {ins}"
    else:
        ins, outs = f"(g={groups} [i])", f"(g={groups} [o])"
        weight = f"{ins} [o]" if transposed else f"{outs} [i]"
    x, w, y = (_space(side, ndim) for side in "xwy")
    return f"n {ins} {x}", f"{weight} {w}", f"n {outs} {y}", outs


def _convolution(node: Node, metas: Metas) -> str:
    biased = len(metas) == 3
    # Each rank would add the bias once, so that the sum over i cannot be delayed.
    x, weight, y, bias = _terms(len(metas[0].shape), int_arg(node, 8), bool(node.args[6]), "[i]" if biased else "i")
    return f"{x}, {weight}, {bias} -> {y}" if biased else f"{x}, {weight} -> {y}"


def _convolution_sums(node: Node, metas: Metas) -> LinearSets:
    return ((0,), (1,)) if len(metas) == 2 else ((0, 2), (1, 2))


def _convolution_backward(node: Node, metas: Metas) -> str:
    x, weight, y, bias = _terms(len(metas[0].shape), int_arg(node, 9), bool(node.args[7]))
    # The gradient of the bias does not depend on x: where i is cut, every rank has it whole.
    return f"{y}, {x}, {weight} -> {x}, {weight}, {bias} / i"


def _convolution_flops(node: Node, metas: Metas) -> float:
    """2 x samples x positions x elements of the weight, each position being of the smaller, strided side."""
    result = node.outputs[0]
    assert result is not None
    side = metas[0].shape if node.args[6] else result.shape
    return 2.0 * side[0] * math.prod(side[2:]) * metas[1].numel


def _convolution_backward_flops(node: Node, metas: Metas) -> float:
    """As the forward, for each of the gradients of x and of the weight that is asked for."""
    side = metas[1].shape if node.args[7] else metas[0].shape
    asked = cast(tuple[bool, ...], node.args[10])
    return 2.0 * side[0] * math.prod(side[2:]) * metas[2].numel * sum(asked[:2])


rule(aten.convolution, _convolution, linear=_convolution_sums, flops=_convolution_flops)
rule(aten.convolution_backward, _convolution_backward, linear=((0,),), flops=_convolution_backward_flops)


@lowering(aten.convolution)
def _lower_convolution(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    groups = int_arg(node, 8)
    local = groups if groups == 1 else local_length(groups, strategy.inputs[0].dims[1], mesh)
    return node.op, (*node.args[:8], local), node.kwargs


@lowering(aten.convolution_backward)
def _lower_convolution_backward(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    groups, bias, spec = int_arg(node, 9), node.outputs[2], strategy.outputs[2]
    local = groups if groups == 1 else local_length(groups, strategy.inputs[1].dims[1], mesh)
    sizes = node.args[3] if bias is None or spec is None else local_shape(bias.shape, spec, mesh)
    return node.op, (*node.args[:3], sizes, *node.args[4:9], local, *node.args[10:]), node.kwargs
