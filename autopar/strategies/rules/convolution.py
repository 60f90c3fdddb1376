"""Convolution. ``n`` is samples, ``i`` and ``o`` are input and output channels, in each of ``g`` groups.

``h0``, ``h1`` and ``h2`` are spatial dims. If one is cut, the kernel reads rows of the neighbours' shards: operands
come with halos, one dim after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from autopar.ir import Node, TensorMeta
from autopar.mesh import Mesh
from autopar.sharding.halo import Halo, Slide, Window, halo, own_rows, space_cuts
from autopar.sharding.local import LocalChoice, local_length
from autopar.sharding.spec import ShardingSpec
from autopar.sharding.strategy import Strategy
from autopar.strategies.localize import local_shape
from autopar.strategies.registry import LinearSets, LocalArg, LocalCall, Metas, aten, lowering, rule, windows
from autopar.strategies.rules.terms import int_arg, ints_arg

APOSTROPHE = "'"


def _space(ndim: int, end: str = "") -> str:
    return " ".join(f"h{i}{end}" for i in range(ndim - 2))


def _terms(ndim: int, groups: int, transposed: bool, i: str = "i") -> tuple[str, str, str, str]:
    """Return the terms of x, weight, result and bias. Only groups as a whole are cut, not the channels within one."""
    if groups == 1:
        ins, outs = i, "o"
        weight = f"{ins} {outs}" if transposed else f"{outs} {ins}"
    else:
        ins, outs = f"(g={groups} [i])", f"(g={groups} [o])"
        weight = f"{ins} [o]" if transposed else f"{outs} [i]"
    kernel = " ".join(f"[w{k}]" for k in range(ndim - 2))
    return f"n {ins} {_space(ndim)}", f"{weight} {kernel}", f"n {outs} {_space(ndim, APOSTROPHE)}", outs


def _convolution(node: Node, metas: Metas) -> str:
    biased = len(metas) == 3
    # Each rank would add the bias once, so the sum over i cannot be deferred.
    x, weight, y, bias = _terms(len(metas[0].shape), int_arg(node, 8), bool(node.args[6]), "[i]" if biased else "i")
    return f"{x}, {weight}, {bias} -> {y}" if biased else f"{x}, {weight} -> {y}"


def _convolution_sums(node: Node, metas: Metas) -> LinearSets:
    return ((0,), (1,)) if len(metas) == 2 else ((0, 2), (1, 2))


def _convolution_backward(node: Node, metas: Metas) -> str:
    x, weight, y, bias = _terms(len(metas[0].shape), int_arg(node, 9), bool(node.args[7]))
    # The gradient of the bias does not depend on x: if i is cut, every rank has it whole.
    return f"{y}, {x}, {weight} -> {x}, {weight}, {bias} / i"


def _convolution_flops(node: Node, metas: Metas) -> float:
    """Return 2 x samples x positions x elements of the weight. Positions are those of the smaller, strided side."""
    result = node.outputs[0]
    assert result is not None
    side = metas[0].shape if node.args[6] else result.shape
    return 2.0 * side[0] * math.prod(side[2:]) * metas[1].numel


def _convolution_backward_flops(node: Node, metas: Metas) -> float:
    """Return the FLOPs of the forward for each requested gradient, of x and of the weight."""
    side = metas[1].shape if node.args[7] else metas[0].shape
    asked = cast(tuple[bool, ...], node.args[10])
    return 2.0 * side[0] * math.prod(side[2:]) * metas[2].numel * sum(asked[:2])


rule(aten.convolution, _convolution, linear=_convolution_sums, flops=_convolution_flops)
rule(aten.convolution_backward, _convolution_backward, linear=((0,),), flops=_convolution_backward_flops)


SPACE = 2  # the first spatial dim


def _slide(node: Node, weight: TensorMeta, dim: int, *, backward: bool) -> Slide:
    i, at = dim - SPACE, 4 if backward else 3
    stride, padding, dilation = (_each(node, at + k, len(weight.shape) - SPACE)[i] for k in range(3))
    return Slide(stride, padding, dilation * (weight.shape[dim] - 1))


def _each(node: Node, position: int, n: int) -> tuple[int, ...]:
    """Return an argument's value for each spatial dim; one integer applies to all."""
    given = ints_arg(node, position)
    return given if len(given) == n else given * n


@dataclass(frozen=True)
class _Along:
    """A spatial dim that ``axis`` cuts, with each rank's own rows of the input ``x`` and the output ``y``."""

    dim: int
    axis: int
    slide: Slide
    x: tuple[Window, ...]
    y: tuple[Window, ...]

    def rows(self, windows: Sequence[Window], own: Sequence[Window]) -> tuple[LocalChoice, LocalChoice]:
        """Return where ``own`` rows begin in ``windows``, and their number."""
        starts = tuple(o[0] - w[0] for o, w in zip(own, windows, strict=True))
        return LocalChoice(starts, self.axis), LocalChoice(tuple(b - a for a, b in own), self.axis)


def _along(
    node: Node, spec: ShardingSpec, x: TensorMeta, y: TensorMeta, weight: TensorMeta, mesh: Mesh, *, backward: bool
) -> list[_Along] | None:
    """Return every cut spatial dim, or None if these cuts are not allowed."""
    cuts = space_cuts(spec, x.shape, SPACE)
    return (
        None
        if cuts is None
        else [
            _Along(
                d,
                a,
                _slide(node, weight, d, backward=backward),
                own_rows(x.shape[d], mesh.shape[a]),
                own_rows(y.shape[d], mesh.shape[a]),
            )
            for d, a in cuts
        ]
    )


def _result(node: Node) -> TensorMeta:
    result = node.outputs[0]
    assert result is not None
    return result


def _forward_along(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> list[_Along] | None:
    return _along(node, strategy.inputs[0], metas[0], _result(node), metas[1], mesh, backward=False)


def _backward_along(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> list[_Along] | None:
    return _along(node, strategy.inputs[1], metas[1], metas[0], metas[2], mesh, backward=True)


def _read_rows(c: _Along, *, transposed: bool) -> list[Window]:
    """Return the rows of x that each rank's own results are computed from."""
    return [c.slide.made_from(rows) if transposed else c.slide.read_for(rows) for rows in c.y]


def _contributed_rows(c: _Along, *, transposed: bool) -> list[Window]:
    """Return the rows of the result that each rank's own rows of x contribute to, joined with its own rows."""
    into = [c.slide.read_for(rows) if transposed else c.slide.made_from(rows) for rows in c.x]
    return [(min(a, o), max(b, e)) for (a, b), (o, e) in zip(into, c.y, strict=True)]


def _all(found: Sequence[Halo | None]) -> tuple[Halo, ...] | None:
    there = tuple(h for h in found if h is not None)
    return there if len(there) == len(found) else None


@windows(aten.convolution)
def _convolution_windows(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> tuple[Halo, ...] | None:
    along, transposed = _forward_along(node, strategy, metas, mesh), bool(node.args[6])
    if along is None:
        return None
    n = metas[0].shape
    return _all([halo(0, c.dim, c.axis, n[c.dim], _read_rows(c, transposed=transposed), mesh) for c in along])


@windows(aten.convolution_backward)
def _convolution_backward_windows(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> tuple[Halo, ...] | None:
    along, transposed = _backward_along(node, strategy, metas, mesh), bool(node.args[7])
    if along is None:
        return None
    found = []
    for c in along:
        of_grad = _contributed_rows(c, transposed=transposed)
        found.append(halo(0, c.dim, c.axis, metas[0].shape[c.dim], of_grad, mesh))
        if not transposed:
            found.append(halo(1, c.dim, c.axis, metas[1].shape[c.dim], _read_rows(c, transposed=False), mesh))
    return _all(found)


def _without_padding(given: Sequence[int], along: Sequence[_Along]) -> tuple[int, ...]:
    """Set the padding of cut dims to 0, since their halos contain it."""
    cut = {c.dim - SPACE for c in along}
    return tuple(0 if i in cut else n for i, n in enumerate(given))


def _own(along: Sequence[_Along], windows: Sequence[Sequence[Window]], own: Sequence[Sequence[Window]]) -> Any:
    pairs = [c.rows(w, o) for c, w, o in zip(along, windows, own, strict=True)]
    return tuple(first for first, _ in pairs), tuple(size for _, size in pairs)


@lowering(aten.convolution)
def _lower_convolution(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    groups, along = int_arg(node, 8), _forward_along(node, strategy, metas, mesh) or []
    local = groups if groups == 1 else local_length(groups, strategy.inputs[0].dims[1], mesh)
    padding, dilation, transposed, output_padding = node.args[4:8]
    n = len(metas[0].shape) - SPACE
    padding = _without_padding(_each(node, 4, n), along) if along else padding
    if not (transposed and along):
        return node.op, (*node.args[:4], padding, dilation, transposed, output_padding, local), node.kwargs
    made = [[(c.slide.read_for((a, a + 1))[0], b) for a, b in _read_rows(c, transposed=True)] for c in along]
    first, size = _own(along, made, [c.y for c in along])
    kwargs: dict[str, LocalArg] = {
        "stride": _each(node, 3, n),
        "padding": padding,
        "dilation": _each(node, 5, n),
        "output_padding": _without_padding(_each(node, 7, n), along),
        "groups": local,
        "dims": tuple(c.dim for c in along),
        "first": first,
        "size": size,
    }
    return "autopar.convolution_transposed_part.default", node.args[:3], tuple(kwargs.items())


@lowering(aten.convolution_backward)
def _lower_convolution_backward(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    groups, bias, spec = int_arg(node, 9), node.outputs[2], strategy.outputs[2]
    local = groups if groups == 1 else local_length(groups, strategy.inputs[1].dims[1], mesh)
    sizes = node.args[3] if bias is None or spec is None else local_shape(bias.shape, spec, mesh)
    along = _backward_along(node, strategy, metas, mesh) or []
    if along:
        return _lower_part_backward(node, along, len(metas[1].shape) - SPACE, local, sizes)
    return node.op, (*node.args[:3], sizes, *node.args[4:9], local, *node.args[10:]), node.kwargs


def _lower_part_backward(node: Node, along: list[_Along], n: int, groups: LocalArg, sizes: LocalArg) -> LocalCall:
    """Return the call of the backward, with the position of the rank's rows in its window of the gradient."""
    transposed = bool(node.args[7])
    windows_ = [_contributed_rows(c, transposed=transposed) for c in along]
    made_first, made_size = _own(along, windows_, [c.y for c in along])
    if transposed:
        into = [[c.slide.read_for(rows) for rows in c.x] for c in along]
        first, size = _own(along, windows_, into)
    else:  # the rows of x that all rows of the gradient's window are computed from
        reached = [[(c.slide.read_for((a, a + 1))[0], b) for a, b in w] for c, w in zip(along, windows_, strict=True)]
        first, size = _own(along, reached, [c.x for c in along])
    kwargs: dict[str, LocalArg] = {
        "bias_sizes": sizes,
        "stride": _each(node, 4, n),
        "padding": _without_padding(_each(node, 5, n), along),
        "dilation": _each(node, 6, n),
        "groups": groups,
        "mask": node.args[10],
        "dims": tuple(c.dim for c in along),
        "first": first,
        "size": size,
        "made_first": made_first,
        "made_size": made_size,
    }
    if transposed:
        kwargs["output_padding"] = _without_padding(_each(node, 8, n), along)
    op = "autopar.convolution_transposed_part_backward" if transposed else "autopar.convolution_part_backward"
    return f"{op}.default", node.args[:3], tuple(kwargs.items())
