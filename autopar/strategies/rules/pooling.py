"""Pooling of images and volumes. Samples, channels and spatial dims may be cut.

If a spatial dim is cut, windows read rows of the neighbours' shards, and padding beyond the ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.ir import Node, TensorMeta
from autopar.mesh import Mesh
from autopar.sharding.halo import Halo, Slide, Window, halo, own_rows, space_cuts
from autopar.sharding.local import LocalChoice
from autopar.sharding.strategy import Strategy
from autopar.strategies.registry import LinearSets, LocalArg, LocalCall, Metas, lowering, rule, windows
from autopar.strategies.rules.terms import arg, ints_arg

LINEAR: LinearSets = ((0,),)


@dataclass(frozen=True)
class _Pool:
    """A pooling op in ``n`` dims, described by the positions of its arguments.

    Args:
        at: position of the kernel; stride and padding follow it.
        ceil: position of ``ceil_mode``.
        counts: position of ``count_include_pad``, for an average.
        dilation: position of the dilation, for a maximum.
    """

    n: int
    at: int
    ceil: int
    counts: int | None = None
    dilation: int | None = None

    def numbers(self, node: Node, position: int, default: tuple[int, ...]) -> tuple[int, ...]:
        given = ints_arg(node, position) or default
        return given if len(given) == self.n else given * self.n

    def geometry(self, node: Node) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return kernel, stride and padding."""
        kernel = self.numbers(node, self.at, (1,))
        return kernel, self.numbers(node, self.at + 1, kernel), self.numbers(node, self.at + 2, (0,))

    def dilations(self, node: Node) -> tuple[int, ...]:
        return (1,) * self.n if self.dilation is None else self.numbers(node, self.dilation, (1,))

    def ceils(self, node: Node) -> bool:
        return bool(arg(node, self.ceil, False))

    def includes(self, node: Node) -> bool:
        """Whether padding counts in an average."""
        return self.counts is None or bool(arg(node, self.counts, True))

    def counts_all(self, node: Node) -> bool:
        """Whether every window averages over the same number of elements."""
        divisor = self.counts is not None and arg(node, self.counts + 1) is not None
        return divisor or not (self.ceils(node) or (any(self.geometry(node)[2]) and not self.includes(node)))

    def slide(self, node: Node, i: int) -> Slide:
        kernel, stride, padding = self.geometry(node)
        return Slide(stride[i], padding[i], self.dilations(node)[i] * (kernel[i] - 1))

    def terms(self, node: Node) -> tuple[str, str]:
        """Return the terms of x and of the result."""
        dims = [f"h{i}" for i in range(self.n)]
        return f"... {' '.join(dims)}", f"... {' '.join(d + APOSTROPHE for d in dims)}"

    def along(self, node: Node, strategy: Strategy, x: TensorMeta, operand: int) -> tuple[tuple[int, int], ...] | None:
        """Return the cut spatial dims, each with its axis."""
        return space_cuts(strategy.inputs[operand], x.shape, len(x.shape) - self.n)


APOSTROPHE = "'"


def _forward(kind: _Pool, fill: float) -> Callable[[Node, Strategy, Metas, Mesh], tuple[Halo, ...] | None]:
    def found(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> tuple[Halo, ...] | None:
        result, shape = node.outputs[0], metas[0].shape
        cuts = kind.along(node, strategy, metas[0], 0)
        if cuts is None or result is None:
            return None
        made = []
        for dim, axis in cuts:
            slide = kind.slide(node, dim - len(shape) + kind.n)
            needed = [slide.read_for(rows) for rows in own_rows(result.shape[dim], mesh.shape[axis])]
            made.append(halo(0, dim, axis, shape[dim], needed, mesh, fill))
        return _all(made)

    return found


def _backward(kind: _Pool, operands: Sequence[int]) -> Callable[[Node, Strategy, Metas, Mesh], tuple[Halo, ...] | None]:
    """Return the windows of ``operands``, which are shaped like the result: the rows that a rank's own x went into."""

    def found(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> tuple[Halo, ...] | None:
        cuts = kind.along(node, strategy, metas[1], 1)
        if cuts is None:
            return None
        made = []
        for dim, axis in cuts:
            into = _contributed_rows(kind, node, metas, dim, axis, mesh)
            made += [halo(i, dim, axis, metas[i].shape[dim], into, mesh) for i in operands]
        return _all(made)

    return found


def _contributed_rows(kind: _Pool, node: Node, metas: Metas, dim: int, axis: int, mesh: Mesh) -> list[Window]:
    """Return the rows of the result that each rank's own rows of x contribute to."""
    shape = metas[1].shape
    slide = kind.slide(node, dim - len(shape) + kind.n)
    return [slide.made_from(rows) for rows in own_rows(shape[dim], mesh.shape[axis])]


def _all(found: Sequence[Halo | None]) -> tuple[Halo, ...] | None:
    there = tuple(h for h in found if h is not None)
    return there if len(there) == len(found) else None


def _padding(kind: _Pool, node: Node, shape: Sequence[int], cuts: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the padding, 0 for cut dims, since their halos contain it."""
    cut = {dim - len(shape) + kind.n for dim, _ in cuts}
    return tuple(0 if i in cut else p for i, p in enumerate(kind.geometry(node)[2]))


def _starts(
    n: int, shape: Sequence[int], cuts: Sequence[tuple[int, int]], rows: Callable[[int, int], Sequence[Window]]
) -> tuple[int | LocalChoice, ...]:
    """Return where the rank's rows of each spatial dim begin."""
    starts: list[int | LocalChoice] = [0] * n
    for dim, axis in cuts:
        starts[dim - len(shape) + n] = LocalChoice(tuple(start for start, _ in rows(dim, axis)), axis)
    return tuple(starts)


def _maximum(n: int) -> None:
    op, kind = f"aten.max_pool{n}d_with_indices", _Pool(n, 1, 5, dilation=4)
    back, kind_back = f"{op}_backward", _Pool(n, 2, 6, dilation=5)

    def forward(node: Node, metas: Metas) -> str:
        x, y = kind.terms(node)
        return f"{x} -> {y}, {y}"

    def backward(node: Node, metas: Metas) -> str:
        x, y = kind_back.terms(node)
        return f"{y}, {x}, {y} -> {x}"

    rule(op, forward)
    rule(back, backward, linear=LINEAR)
    find = windows(op)(_forward(kind, float("-inf")))
    windows(back)(_backward(kind_back, (0, 2)))

    @lowering(op)
    def lower(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
        halos, shape = find(node, strategy, metas, mesh), metas[0].shape
        cuts = kind.along(node, strategy, metas[0], 0)
        if not halos or not cuts:
            return node.op, node.args, node.kwargs
        of = {h.dim: h.windows for h in halos}
        kernel, stride, _ = kind.geometry(node)
        kwargs: dict[str, LocalArg] = {
            "kernel": kernel,
            "stride": stride,
            "padding": _padding(kind, node, shape, cuts),
            "dilation": kind.dilations(node),
            "ceil": kind.ceils(node),
            "starts": _starts(n, shape, cuts, lambda dim, axis: of[dim]),
            "whole": shape[len(shape) - n :],
        }
        return "autopar.max_pool_part.default", node.args[:1], tuple(kwargs.items())

    @lowering(back)
    def lower_back(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
        shape, cuts = metas[1].shape, kind_back.along(node, strategy, metas[1], 1)
        if not cuts:
            return node.op, node.args, node.kwargs
        own = _starts(n, shape, cuts, lambda dim, axis: own_rows(shape[dim], mesh.shape[axis]))
        kwargs: dict[str, LocalArg] = {"starts": own, "whole": shape[len(shape) - n :]}
        return "autopar.max_pool_part_backward.default", (*node.args[:2], node.args[7]), tuple(kwargs.items())


def _average(n: int) -> None:
    op, kind = f"aten.avg_pool{n}d", _Pool(n, 1, 4, counts=5)
    back, kind_back = f"{op}_backward", _Pool(n, 2, 5, counts=6)

    def forward(node: Node, metas: Metas) -> str:
        x, y = kind.terms(node)
        return f"{x} -> {y}"

    def backward(node: Node, metas: Metas) -> str:
        x, y = kind_back.terms(node)
        return f"{y}, {x} -> {x}"

    rule(op, forward, linear=LINEAR)
    rule(back, backward, linear=LINEAR)
    windows(op)(_forward(kind, 0.0))
    windows(back)(_backward(kind_back, (0,)))

    @lowering(op)
    def lower(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
        cuts = kind.along(node, strategy, metas[0], 0)
        if not cuts:
            return node.op, node.args, node.kwargs
        kernel, stride, _ = kind.geometry(node)
        padding, result = _padding(kind, node, metas[0].shape, cuts), node.outputs[0]
        if kind.counts_all(node) or result is None:
            return node.op, (node.args[0], kernel, stride, padding, *node.args[4:]), node.kwargs
        rows = [own_rows(result.shape[dim], mesh.shape[axis]) for dim, axis in cuts]
        kwargs: dict[str, LocalArg] = {
            "kernel": kernel,
            "stride": stride,
            "padding": padding,
            "ceil": kind.ceils(node),
            "include": kind.includes(node),
            "dims": tuple(dim for dim, _ in cuts),
            **_counting(kind, node, metas[0], cuts, rows),
        }
        return "autopar.avg_pool_part.default", node.args[:1], tuple(kwargs.items())

    @lowering(back)
    def lower_back(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
        shape, cuts = metas[1].shape, kind_back.along(node, strategy, metas[1], 1)
        if not cuts:
            return node.op, node.args, node.kwargs
        kernel, stride, _ = kind_back.geometry(node)
        firsts = tuple(LocalChoice(_first(kind_back, node, metas, dim, axis, mesh), axis) for dim, axis in cuts)
        rows = [_contributed_rows(kind_back, node, metas, dim, axis, mesh) for dim, axis in cuts]
        none: dict[str, LocalArg] = {"pads": (), "starts": (), "whole": ()}
        kwargs: dict[str, LocalArg] = {
            "kernel": kernel,
            "stride": stride,
            "padding": _padding(kind_back, node, shape, cuts),
            "ceil": kind_back.ceils(node),
            "include": kind_back.includes(node),
            "divisor": arg(node, 7),
            "dims": tuple(dim for dim, _ in cuts),
            "first": firsts,
            **(none if kind_back.counts_all(node) else _counting(kind_back, node, metas[1], cuts, rows)),
        }
        return "autopar.avg_pool_part_backward.default", node.args[:2], tuple(kwargs.items())


def _counting(
    kind: _Pool, node: Node, x: TensorMeta, cuts: Sequence[tuple[int, int]], rows: Sequence[Sequence[Window]]
) -> dict[str, LocalArg]:
    """Return where windows of cut dims lie on the global image, given each rank's rows of the result for each cut."""
    padding, space = kind.geometry(node)[2], len(x.shape) - kind.n
    return {
        "pads": tuple(padding[dim - space] for dim, _ in cuts),
        "starts": tuple(
            LocalChoice(tuple(start for start, _ in of), axis) for of, (_, axis) in zip(rows, cuts, strict=True)
        ),
        "whole": tuple(x.shape[dim] for dim, _ in cuts),
    }


def _first(kind: _Pool, node: Node, metas: Metas, dim: int, axis: int, mesh: Mesh) -> tuple[int, ...]:
    """Return where each rank's own rows of x begin among the rows that its window of the gradient depends on."""
    shape = metas[1].shape
    slide = kind.slide(node, dim - len(shape) + kind.n)
    into = _contributed_rows(kind, node, metas, dim, axis, mesh)
    own = own_rows(shape[dim], mesh.shape[axis])
    return tuple(o - slide.read_for((a, b))[0] for (o, _), (a, b) in zip(own, into, strict=True))


for _n in (2, 3):
    _maximum(_n)
    _average(_n)
