"""Convolution. ``n`` samples, ``i`` and ``o`` channels in and out, of each of ``g`` groups.

``h`` is the first dim of space. Where it is cut, the kernel reads rows of the neighbours' shards: operands come with
halos. The other dims of space are whole, and so is all of it in a transposed convolution.
"""

from __future__ import annotations

import math
from typing import cast

from autopar.ir import Node
from autopar.mesh import Mesh
from autopar.sharding.halo import Halo, Slide, cutting_axis, halo, own_rows
from autopar.sharding.local import LocalOffset
from autopar.sharding.strategy import Strategy
from autopar.strategies.localize import local_length, local_shape
from autopar.strategies.registry import LinearSets, LocalArg, LocalCall, Metas, aten, lowering, rule, windows
from autopar.strategies.rules.terms import int_arg, ints_arg


def _space(prefix: str, ndim: int, first: str = "") -> str:
    return " ".join(first if first and not i else f"[{prefix}{i}]" for i in range(ndim - 2))


def _terms(ndim: int, groups: int, transposed: bool, i: str = "i") -> tuple[str, str, str, str]:
    """x, weight, result and bias. With groups, only whole groups are cut: channels within one are whole."""
    if groups == 1:
        ins, outs = i, "o"
        weight = f"{ins} {outs}" if transposed else f"{outs} {ins}"
    else:
        ins, outs = f"(g={groups} [i])", f"(g={groups} [o])"
        weight = f"{ins} [o]" if transposed else f"{outs} [i]"
    rows = ("", "", "") if transposed else ("h", "", "h'")
    x, w, y = (_space(side, ndim, first) for side, first in zip("xwy", rows, strict=True))
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


ROWS = 2  # the first dim of space


def _slide(node: Node, metas: Metas, *, backward: bool) -> Slide:
    at = 4 if backward else 3
    stride, padding, dilation = (ints_arg(node, at + i)[0] for i in range(3))
    return Slide(stride, padding, dilation * (metas[2 if backward else 1].shape[ROWS] - 1))


@windows(aten.convolution)
def _convolution_windows(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> tuple[Halo, ...] | None:
    result, axis = node.outputs[0], cutting_axis(strategy.inputs[0], ROWS)
    assert result is not None
    if axis is None:
        return None if strategy.inputs[0].dims[ROWS] else ()
    slide = _slide(node, metas, backward=False)
    needed = [slide.read_for(rows) for rows in own_rows(result.shape[ROWS], mesh.shape[axis])]
    found = halo(0, ROWS, axis, metas[0].shape[ROWS], needed, mesh)
    return None if found is None else (found,)


@windows(aten.convolution_backward)
def _convolution_backward_windows(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> tuple[Halo, ...] | None:
    axis = cutting_axis(strategy.inputs[0], ROWS)
    if axis is None:
        return None if strategy.inputs[0].dims[ROWS] else ()
    grad, x = (metas[i].shape[ROWS] for i in (0, 1))
    slide = _slide(node, metas, backward=True)
    made = own_rows(grad, mesh.shape[axis])
    into = [slide.made_from(rows) for rows in own_rows(x, mesh.shape[axis])]
    of_grad = [(min(a, o), max(b, e)) for (a, b), (o, e) in zip(into, made, strict=True)]
    found = (
        halo(0, ROWS, axis, grad, of_grad, mesh),
        halo(1, ROWS, axis, x, [slide.read_for(rows) for rows in made], mesh),
    )
    return None if found[0] is None or found[1] is None else (found[0], found[1])


@lowering(aten.convolution)
def _lower_convolution(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    groups, args = int_arg(node, 8), node.args
    local = groups if groups == 1 else local_length(groups, strategy.inputs[0].dims[1], mesh)
    if strategy.inputs[0].dims[ROWS]:  # the halo brings the padding
        args = (*args[:4], (0, *ints_arg(node, 4)[1:]), *args[5:])
    return node.op, (*args[:8], local), node.kwargs


@lowering(aten.convolution_backward)
def _lower_convolution_backward(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    groups, bias, spec = int_arg(node, 9), node.outputs[2], strategy.outputs[2]
    local = groups if groups == 1 else local_length(groups, strategy.inputs[1].dims[1], mesh)
    sizes = node.args[3] if bias is None or spec is None else local_shape(bias.shape, spec, mesh)
    if strategy.inputs[0].dims[ROWS]:
        return _lower_rows_backward(node, strategy, metas, mesh, local, sizes)
    return node.op, (*node.args[:3], sizes, *node.args[4:9], local, *node.args[10:]), node.kwargs


def _lower_rows_backward(
    node: Node, strategy: Strategy, metas: Metas, mesh: Mesh, groups: LocalArg, sizes: LocalArg
) -> LocalCall:
    """The op needs to know, for each rank, its rows of x and of the gradient, and where its window of that begins."""
    axis = cutting_axis(strategy.inputs[0], ROWS)
    found = _convolution_backward_windows(node, strategy, metas, mesh)
    assert axis is not None
    assert found is not None
    ways = mesh.shape[axis]
    own = zip(own_rows(metas[1].shape[ROWS], ways), own_rows(metas[0].shape[ROWS], ways), found[0].windows, strict=True)
    rows = tuple(n for x, made, (start, _) in own for n in (*x, *made, start))
    kwargs: dict[str, LocalArg] = {
        "bias_sizes": sizes, "stride": node.args[4], "padding": node.args[5], "dilation": node.args[6],
        "groups": groups, "mask": node.args[10], "at": LocalOffset(ways, (axis,)), "rows": rows,
    }  # fmt: skip
    return "autopar.convolution_rows_backward.default", node.args[:3], tuple(kwargs.items())
