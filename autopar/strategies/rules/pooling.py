"""Pooling of images: samples, channels and rows ``h`` are cut, columns are whole.

Where rows are cut, the window reads rows of the neighbours' shards. With ``ceil_mode``, or where padding does not
count, rows stay whole.
"""

from __future__ import annotations

from autopar.ir import Node
from autopar.mesh import Mesh
from autopar.sharding.halo import Halo, Slide, cutting_axis, halo, own_rows
from autopar.sharding.local import LocalOffset
from autopar.sharding.strategy import Strategy
from autopar.strategies.registry import LinearSets, LocalArg, LocalCall, Metas, aten, lowering, rule, windows
from autopar.strategies.rules.terms import arg, ints_arg

LINEAR: LinearSets = ((0,),)


def _pair(node: Node, position: int, default: tuple[int, int]) -> tuple[int, int]:
    given = ints_arg(node, position) or default
    return (given[0], given[-1])


def _geometry(node: Node, at: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Kernel, stride and padding from argument ``at`` on."""
    kernel = _pair(node, at, (1, 1))
    return kernel, _pair(node, at + 1, kernel), _pair(node, at + 2, (0, 0))


def _slides(node: Node, *, at: int, ceil_at: int, counts_at: int | None = None) -> bool:
    padding = _geometry(node, at)[2]
    counts = counts_at is None or bool(arg(node, counts_at, True)) or padding[0] == 0
    return counts and not bool(arg(node, ceil_at, False))


def _rows(cut: bool) -> tuple[str, str]:
    return ("... h [x1]", "... h' [y1]") if cut else ("... [x0] [x1]", "... [y0] [y1]")


def _maximum(node: Node, metas: Metas) -> str:
    x, y = _rows(_slides(node, at=1, ceil_at=5))
    return f"{x} -> {y}, {y}"


def _maximum_backward(node: Node, metas: Metas) -> str:
    x, y = _rows(_slides(node, at=2, ceil_at=6))
    return f"{y}, {x}, {y} -> {x}"


def _average(node: Node, metas: Metas) -> str:
    x, y = _rows(_slides(node, at=1, ceil_at=4, counts_at=5))
    return f"{x} -> {y}"


def _average_backward(node: Node, metas: Metas) -> str:
    x, y = _rows(_slides(node, at=2, ceil_at=5, counts_at=6))
    return f"{y}, {x} -> {x}"


rule(aten.max_pool2d_with_indices, _maximum)
rule(aten.max_pool2d_with_indices_backward, _maximum_backward, linear=LINEAR)
rule(aten.avg_pool2d, _average, linear=LINEAR)
rule(aten.avg_pool2d_backward, _average_backward, linear=LINEAR)


def _slide(node: Node, at: int, dilation: int = 1) -> Slide:
    kernel, stride, padding = _geometry(node, at)
    return Slide(stride[0], padding[0], dilation * (kernel[0] - 1))


def _forward(
    node: Node, strategy: Strategy, metas: Metas, mesh: Mesh, slide: Slide, fill: float
) -> tuple[Halo, ...] | None:
    result, dim = node.outputs[0], len(metas[0].shape) - 2
    axis = cutting_axis(strategy.inputs[0], dim)
    if axis is None or result is None:
        return None if strategy.inputs[0].dims[dim] else ()
    needed = [slide.read_for(rows) for rows in own_rows(result.shape[dim], mesh.shape[axis])]
    found = halo(0, dim, axis, metas[0].shape[dim], needed, mesh, fill)
    return None if found is None else (found,)


def _backward(
    strategy: Strategy, metas: Metas, mesh: Mesh, slide: Slide, operands: tuple[int, ...]
) -> tuple[Halo, ...] | None:
    """``operands``: that come from the result, of which each rank needs what its own rows of x went into."""
    dim = len(metas[1].shape) - 2
    axis = cutting_axis(strategy.inputs[1], dim)
    if axis is None:
        return None if strategy.inputs[1].dims[dim] else ()
    into = [slide.made_from(rows) for rows in own_rows(metas[1].shape[dim], mesh.shape[axis])]
    found = [halo(i, dim, axis, metas[i].shape[dim], into, mesh) for i in operands]
    whole = tuple(h for h in found if h is not None)
    return whole if len(whole) == len(found) else None


def _dilation(node: Node, position: int) -> tuple[int, int]:
    return _pair(node, position, (1, 1))


@windows(aten.max_pool2d_with_indices)
def _maximum_windows(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> tuple[Halo, ...] | None:
    slide = _slide(node, 1, _dilation(node, 4)[0])
    return _forward(node, strategy, metas, mesh, slide, float("-inf"))


@windows(aten.avg_pool2d)
def _average_windows(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> tuple[Halo, ...] | None:
    return _forward(node, strategy, metas, mesh, _slide(node, 1), 0.0)


@windows(aten.max_pool2d_with_indices_backward)
def _maximum_backward_windows(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> tuple[Halo, ...] | None:
    return _backward(strategy, metas, mesh, _slide(node, 2, _dilation(node, 5)[0]), (0, 2))


@windows(aten.avg_pool2d_backward)
def _average_backward_windows(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> tuple[Halo, ...] | None:
    return _backward(strategy, metas, mesh, _slide(node, 2), (0,))


def _at(halos: tuple[Halo, ...], mesh: Mesh) -> LocalOffset:
    """Which of the windows is the rank's."""
    return LocalOffset(mesh.shape[halos[0].axis], (halos[0].axis,))


def _own_starts(halos: tuple[Halo, ...], metas: Metas, mesh: Mesh) -> tuple[int, ...]:
    n = metas[1].shape[halos[0].dim]
    return tuple(start for start, _ in own_rows(n, mesh.shape[halos[0].axis]))


@lowering(aten.max_pool2d_with_indices)
def _lower_maximum(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    halos = _maximum_windows(node, strategy, metas, mesh)
    if not halos:
        return node.op, node.args, node.kwargs
    kernel, stride, padding = _geometry(node, 1)
    kwargs: dict[str, LocalArg] = {
        "kernel": kernel, "stride": stride, "padding": padding, "dilation": _dilation(node, 4), "at": _at(halos, mesh),
        "starts": tuple(start for start, _ in halos[0].windows),
    }  # fmt: skip
    return "autopar.max_pool_rows.default", node.args[:1], tuple(kwargs.items())


@lowering(aten.avg_pool2d)
def _lower_average(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    if not _average_windows(node, strategy, metas, mesh):
        return node.op, node.args, node.kwargs
    kernel, stride, padding = _geometry(node, 1)  # the halo brings the padding
    return node.op, (node.args[0], kernel, stride, (0, padding[1]), *node.args[4:]), node.kwargs


@lowering(aten.max_pool2d_with_indices_backward)
def _lower_maximum_backward(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    halos = _maximum_backward_windows(node, strategy, metas, mesh)
    if not halos:
        return node.op, node.args, node.kwargs
    kwargs: dict[str, LocalArg] = {"at": _at(halos, mesh), "starts": _own_starts(halos, metas, mesh)}
    return "autopar.max_pool_rows_backward.default", (*node.args[:2], node.args[7]), tuple(kwargs.items())


@lowering(aten.avg_pool2d_backward)
def _lower_average_backward(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    halos = _average_backward_windows(node, strategy, metas, mesh)
    if not halos:
        return node.op, node.args, node.kwargs
    kernel, stride, padding = _geometry(node, 2)
    firsts = (start for start, _ in halos[0].windows)
    rows = tuple(n for pair in zip(_own_starts(halos, metas, mesh), firsts, strict=True) for n in pair)
    kwargs: dict[str, LocalArg] = {
        "kernel": kernel, "stride": stride, "padding": padding, "include": bool(arg(node, 6, True)),
        "divisor": arg(node, 7), "at": _at(halos, mesh), "rows": rows,
    }  # fmt: skip
    return "autopar.avg_pool_rows_backward.default", node.args[:2], tuple(kwargs.items())
