"""Ops that move elements, and Fourier transforms. All are linear in all operands together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.ir import LocalOffset, Node, TensorMeta
from autopar.mesh import Mesh
from autopar.sharding.local import local_length
from autopar.sharding.strategy import Strategy
from autopar.strategies.localize import local_offset, local_shape
from autopar.strategies.registry import LinearSets, LocalCall, Metas, Notation, aten, lowering, rule
from autopar.strategies.rules.terms import arg, dim_arg, int_arg, ints_arg, names, replicated, term, wrap


def _all(node: Node, metas: Metas) -> LinearSets:
    return (tuple(range(len(metas))),)


def _view(op: object, notation: Notation, **shapes: int) -> None:
    rule(op, notation, linear=_all, shape_args={int(k.removeprefix("arg")): v for k, v in shapes.items()})


def _result(node: Node) -> TensorMeta:
    result = node.outputs[0]
    assert result is not None
    return result


# Reshaping.


def reshaped(before: Sequence[int], after: Sequence[int]) -> str:
    """Write the rule of a view: runs of dims with equal products are split into common factors.

    A run of several dims on both sides shares only one factor, the greatest common divisor of its first dims.
    """
    left, right = ([n for n in shape if n != 1] for shape in (before, after))
    terms: tuple[list[str], list[str]] = ([], [])
    run = 0
    while left or right:
        ins, outs = _next_run(left, right)
        for side, written in zip(terms, _run(ins, outs, f"v{run}_"), strict=True):
            side += written
        run += 1
    filled = (_with_ones(shape, side) for shape, side in zip((before, after), terms, strict=True))
    return " -> ".join(filled)


def _next_run(left: list[int], right: list[int]) -> tuple[list[int], list[int]]:
    """Remove the shortest leading runs with equal products from both sides, and return them."""
    ins, outs = [left.pop(0)], [right.pop(0)]
    while math.prod(ins) != math.prod(outs):
        side, source = (ins, left) if math.prod(ins) < math.prod(outs) else (outs, right)
        side.append(source.pop(0))
    return ins, outs


def _run(ins: Sequence[int], outs: Sequence[int], prefix: str) -> tuple[list[str], list[str]]:
    if len(ins) == 1 or len(outs) == 1:
        many = outs if len(ins) == 1 else ins
        factors = [f"{prefix}{i}" for i in range(len(many))]
        if len(many) == 1:
            return factors, factors
        group = [f"({' '.join(factors)})"]
        return (group, factors) if len(ins) == 1 else (factors, group)
    common = math.gcd(ins[0], outs[0])
    sides = []
    for side, shape in zip("io", (ins, outs), strict=True):
        rest = [f"[{prefix}{side}{j}={n}]" for j, n in enumerate(shape[1:], 1)]
        sides.append([f"({prefix}c={common} [{prefix}{side}0={shape[0] // common}])", *rest])
    return sides[0], sides[1]


def _with_ones(shape: Sequence[int], dims: list[str]) -> str:
    remaining = iter(dims)
    return " ".join("1" if n == 1 else next(remaining) for n in shape) or "-"


def _reshape(node: Node, metas: Metas) -> str:
    before, after = metas[0].shape, _result(node).shape
    if 0 in before:
        return f"{term(names(len(before)), range(len(before)))} -> {term(names(len(after), 'e'), range(len(after)))}"
    return reshaped(before, after)


def _lower_reshape(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    # Local strides can differ from the traced ones, so a view may be impossible.
    spec = strategy.outputs[0]
    assert spec is not None
    return "aten.reshape.default", (node.args[0], local_shape(_result(node).shape, spec, mesh)), ()


for _op in (aten.view.default, aten._unsafe_view, aten.reshape, aten.view_copy.default, aten._reshape_alias):
    rule(_op, _reshape, linear=_all)
    lowering(_op)(_lower_reshape)


# Adding, dropping and moving dims.


def _permuted(order: Sequence[int]) -> str:
    dims = names(len(order))
    return f"{term(dims)} -> {term(dims[d] for d in order)}"


def _permute(node: Node, metas: Metas) -> str:
    ndim = len(metas[0].shape)
    return _permuted([wrap(d, ndim) for d in ints_arg(node, 1, "dims")])


def _transpose(node: Node, metas: Metas) -> str:
    ndim = len(metas[0].shape)
    order = list(range(ndim))
    if ndim:
        a, b = dim_arg(node, 1, ndim, name="dim0"), dim_arg(node, 2, ndim, name="dim1")
        order[a], order[b] = order[b], order[a]
    return _permuted(order)


def _t(node: Node, metas: Metas) -> str:
    return _permuted(list(range(len(metas[0].shape)))[::-1])


def _unsqueeze(node: Node, metas: Metas) -> str:
    dims = names(len(metas[0].shape))
    at = dim_arg(node, 1, len(dims) + 1)
    return f"{term(dims)} -> {term([*dims[:at], '1', *dims[at:]])}"


def _squeeze(node: Node, metas: Metas) -> str:
    shape = metas[0].shape
    given = ints_arg(node, 1, "dim")
    chosen = {wrap(d, len(shape)) for d in given} if given else set(range(len(shape)))
    dims = names(len(shape))
    return f"{term(dims)} -> {term(d for i, d in enumerate(dims) if not (i in chosen and shape[i] == 1))}"


_view(aten.permute, _permute)
_view(aten.transpose.int, _transpose)
_view(aten.t, _t)
_view(aten.unsqueeze, _unsqueeze)
_view(aten.squeeze, _squeeze)
lowering(aten.squeeze)(_lower_reshape)  # a dim that is cut to one element must stay
_view(aten.expand, "... -> ...", arg1=0)
_view(aten.broadcast_to, "... -> ...", arg1=0)


# Slices: a dim that is not taken whole is never cut.


def _kept(metas: Metas, fixed: Sequence[int]) -> str:
    """Write the rule of ops that keep the dims. Those in ``fixed`` are never cut (their length may change)."""
    dims = names(len(metas[0].shape))
    after = [f"e{i}" if i in fixed else d for i, d in enumerate(dims)]
    return f"{term(dims, fixed)} -> {term(after, fixed)}"


def _slice(node: Node, metas: Metas) -> str:
    dim = dim_arg(node, 1, len(metas[0].shape))
    return _kept(metas, [dim] if metas[0].shape != _result(node).shape else [])


def _split(node: Node, metas: Metas) -> str:
    dim = dim_arg(node, 2, len(metas[0].shape))
    dims = names(len(metas[0].shape))
    outs = (term([*dims[:dim], f"e{i}", *dims[dim + 1 :]], [dim]) for i in range(len(node.outputs)))
    return f"{term(dims, [dim])} -> {', '.join(outs)}"


def _without(dims: Sequence[str], *gone: int) -> list[str]:
    return [d for i, d in enumerate(dims) if i not in gone]


def _select(node: Node, metas: Metas) -> str:
    dims = names(len(metas[0].shape))
    dim = dim_arg(node, 1, len(dims))
    return f"{term(dims, [dim])} -> {term(_without(dims, dim))}"


def _unbind(node: Node, metas: Metas) -> str:
    dims = names(len(metas[0].shape))
    dim = dim_arg(node, 1, len(dims))
    return f"{term(dims, [dim])} -> {', '.join([term(_without(dims, dim))] * len(node.outputs))}"


def _diagonal(node: Node, metas: Metas) -> str:
    dims = names(len(metas[0].shape))
    pair = [dim_arg(node, 2, len(dims), 0, "dim1"), dim_arg(node, 3, len(dims), 1, "dim2")]
    return f"{term(dims, pair)} -> {' '.join([*_without(dims, *pair), '[diagonal]'])}"


def _unfold(node: Node, metas: Metas) -> str:
    dims = names(len(metas[0].shape))
    dim = dim_arg(node, 1, len(dims), name="dimension")
    after = [*dims[:dim], "windows", *dims[dim + 1 :], "window"]
    return f"{term(dims, [dim])} -> {term(after, [dim, len(dims)])}"


_view(aten.slice.Tensor, _slice)
_view(aten.split.Tensor, _split)
_view(aten.split_with_sizes, _split)
_view(aten.unsafe_split.Tensor, _split)
_view(aten.unsafe_split_with_sizes, _split)
_view(aten.select.int, _select)
_view(aten.unbind.int, _unbind)
_view(aten.diagonal, _diagonal)
_view(aten.unfold, _unfold)


def _narrow(node: Node, metas: Metas) -> str:
    """Write the rule. The rows that are read are whole; those of a micro-batch, whose place is known, may be cut."""
    dim = dim_arg(node, 1, len(metas[0].shape))
    dims = names(len(metas[0].shape))
    after = [*dims[:dim], "part", *dims[dim + 1 :]]
    return f"{term(dims, [dim])} -> {term(after, [] if isinstance(node.args[2], LocalOffset) else [dim])}"


rule(aten.narrow_copy, _narrow, linear=_all)


@lowering(aten.narrow_copy)
def _lower_narrow(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    x, dim, start, n = node.args[:4]
    at, spec = dim_arg(node, 1, len(metas[0].shape)), strategy.outputs[0]
    assert spec is not None
    axes = spec.dims[at]
    first = local_offset(int_arg(node, 3), axes, start) if isinstance(start, LocalOffset) else start
    return node.op, (x, dim, first, local_length(int_arg(node, 3), axes, mesh) if axes else n), node.kwargs


# Gradients of slices: the result's shape is an argument.


def _slice_backward(node: Node, metas: Metas) -> str:
    dim = dim_arg(node, 2, len(metas[0].shape))
    return _kept(metas, [dim] if metas[0].shape != _result(node).shape else [])


def _select_backward(node: Node, metas: Metas) -> str:
    dims = names(len(_result(node).shape))
    dim = dim_arg(node, 2, len(dims))
    return f"{term(_without(dims, dim))} -> {term(dims, [dim])}"


def _diagonal_backward(node: Node, metas: Metas) -> str:
    dims = names(len(_result(node).shape))
    pair = [dim_arg(node, 3, len(dims), 0, "dim1"), dim_arg(node, 4, len(dims), 1, "dim2")]
    return f"{' '.join([*_without(dims, *pair), '[diagonal]'])} -> {term(dims, pair)}"


def _unfold_backward(node: Node, metas: Metas) -> str:
    dims = names(len(_result(node).shape))
    dim = dim_arg(node, 2, len(dims))
    before = [*dims[:dim], "windows", *dims[dim + 1 :], "window"]
    return f"{term(before, [dim, len(dims)])} -> {term(dims, [dim])}"


_view(aten.slice_backward, _slice_backward, arg1=0)
_view(aten.select_backward, _select_backward, arg1=0)


def _diagonal_embedded(node: Node, metas: Metas) -> str:
    dims = names(len(_result(node).shape))
    pair = [dim_arg(node, 2, len(dims), -2, "dim1"), dim_arg(node, 3, len(dims), -1, "dim2")]
    return f"{' '.join([*_without(dims, *pair), '[diagonal]'])} -> {term(dims, pair)}"


_view(aten.diag_embed, _diagonal_embedded)
_view(aten.diagonal_backward, _diagonal_backward, arg1=0)
_view(aten.unfold_backward, _unfold_backward, arg1=0)


# Writing slices.


def _slice_scatter(node: Node, metas: Metas) -> str:
    dims = names(len(metas[0].shape))
    dim = dim_arg(node, 2, len(dims))
    source = [*dims[:dim], "source", *dims[dim + 1 :]]
    return f"{term(dims, [dim])}, {term(source, [dim])} -> {term(dims, [dim])}"


def _select_scatter(node: Node, metas: Metas) -> str:
    dims = names(len(metas[0].shape))
    dim = dim_arg(node, 2, len(dims))
    return f"{term(dims, [dim])}, {term(_without(dims, dim))} -> {term(dims, [dim])}"


def _diagonal_scatter(node: Node, metas: Metas) -> str:
    dims = names(len(metas[0].shape))
    pair = [dim_arg(node, 3, len(dims), 0, "dim1"), dim_arg(node, 4, len(dims), 1, "dim2")]
    source = " ".join([*_without(dims, *pair), "[diagonal]"])
    return f"{term(dims, pair)}, {source} -> {term(dims, pair)}"


_view(aten.slice_scatter, _slice_scatter)
_view(aten.select_scatter, _select_scatter)
_view(aten.diagonal_scatter, _diagonal_scatter)


# Joining and rearranging.


def _cat(node: Node, metas: Metas) -> str:
    dims = names(len(_result(node).shape))
    dim = dim_arg(node, 1, len(dims))
    parts = []
    for i, meta in enumerate(metas):
        empty = meta.shape == (0,) and len(dims) != 1
        parts.append("[none]" if empty else term([*dims[:dim], f"part{i}", *dims[dim + 1 :]], [dim]))
    return f"{', '.join(parts)} -> {term(dims, [dim])}"


def _stack(node: Node, metas: Metas) -> str:
    dims = names(len(_result(node).shape))
    dim = dim_arg(node, 1, len(dims))
    return f"{', '.join([term(_without(dims, dim))] * len(metas))} -> {term(dims, [dim])}"


def _flip(node: Node, metas: Metas) -> str:
    ndim = len(metas[0].shape)
    return _kept(metas, [wrap(d, ndim) for d in ints_arg(node, 1, "dims")])


def _roll(node: Node, metas: Metas) -> str:
    ndim = len(metas[0].shape)
    rolled = ints_arg(node, 2, "dims")
    return _kept(metas, [wrap(d, ndim) for d in rolled] if rolled else range(ndim))


def _pad(node: Node, metas: Metas) -> str:
    ndim = len(metas[0].shape)
    pads = ints_arg(node, 1, "pad")
    return _kept(metas, [ndim - 1 - i // 2 for i, n in enumerate(pads) if n])


def _pad_sums(node: Node, metas: Metas) -> LinearSets:
    return ((0,),) if arg(node, 2, 0, "value") == 0 else ()


def _repeat(node: Node, metas: Metas) -> str:
    """Write the rule. A repeated dim is whole, even one of a single element: its count would have to be cut with it."""
    counts = ints_arg(node, 1, "repeats")
    dims = names(len(counts))
    before = dims[len(counts) - len(metas[0].shape) :]
    first = len(dims) - len(before)
    fixed = [i for i, c in enumerate(counts) if c != 1]
    after = [f"e{i}" if i in fixed else d for i, d in enumerate(dims)]
    return f"{term(before, [i - first for i in fixed])} -> {term(after, fixed)}"


_view(aten.cat, _cat)
_view(aten.stack, _stack)
_view(aten.flip, _flip)
_view(aten.roll, _roll)
_view(aten.repeat, _repeat)
_view(aten.tril, "... [i] [j] -> ... [i] [j]")
_view(aten.triu, "... [i] [j] -> ... [i] [j]")
rule(aten.constant_pad_nd, _pad, linear=_pad_sums)


def _windows(node: Node, metas: Metas) -> str:
    """Write the rule of padding by reflection or replication, and of its gradient. The padded dims are whole."""
    shape = metas[0].shape
    last = len(ints_arg(node, 1 if len(metas) == 1 else 2, "padding")) // 2
    kept = names(len(shape) - last)
    before, after = (" ".join([*kept, *(f"[{side}{i}]" for i in range(last))]) for side in "xy")
    return f"{before} -> {after}" if len(metas) == 1 else f"{after}, {before} -> {before}"


for _kind in ("reflection_pad", "replication_pad"):
    for _n in (1, 2, 3):
        rule(f"aten.{_kind}{_n}d", _windows, linear=((0,),))
        rule(f"aten.{_kind}{_n}d_backward", _windows, linear=((0,),))


def _pixel_shuffle(node: Node, metas: Metas) -> str:
    r = int_arg(node, 1)
    return f"... (c [r={r}] [s={r}]) h w -> ... c (h [r]) (w [s])"


def _pixel_unshuffle(node: Node, metas: Metas) -> str:
    r = int_arg(node, 1)
    return f"... c (h [r={r}]) (w [s={r}]) -> ... (c [r] [s]) h w"


_view(aten.pixel_shuffle, _pixel_shuffle)
_view(aten.pixel_unshuffle, _pixel_unshuffle)


def _in_order(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements with these strides are stored in order without gaps."""
    steps = [(n, s) for n, s in zip(size, stride, strict=True) if n != 1]
    return [s for _, s in steps] == [math.prod(n for n, _ in steps[i + 1 :]) for i in range(len(steps))]


def _strided(node: Node, metas: Metas, first: int) -> str:
    """Write the rule. Strides refer to the global storage: dims may be cut if this is just another shape of all
    elements."""
    size, stride = ints_arg(node, first, "size"), ints_arg(node, first + 1, "stride")
    every = math.prod(size) == metas[0].numel > 0 and not arg(node, first + 2, 0, "storage_offset")
    if not every or not _in_order(size, stride):
        return replicated(node, metas)
    x, y = reshaped(metas[0].shape, size).split(" -> ")
    return f"{x} -> {y}" if first == 1 else f"{x}, {y} -> {x}"


def _as_strided(node: Node, metas: Metas) -> str:
    return _strided(node, metas, 1)


def _as_strided_scatter(node: Node, metas: Metas) -> str:
    return _strided(node, metas, 2)


rule(aten.as_strided, _as_strided, linear=_all, even=True)
rule(aten.as_strided_scatter, _as_strided_scatter, linear=_all, even=True)


@lowering(aten.as_strided)
@lowering(aten.as_strided_scatter)
def _lower_as_strided(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    first = 1 if node.packet == "aten.as_strided" else 2
    meta, spec = (_result(node), strategy.outputs[0]) if first == 1 else (metas[1], strategy.inputs[1])
    if spec is None or not any(spec.dims):
        return node.op, node.args, node.kwargs
    size = spec.local_shape(meta.shape, mesh)
    stride = tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
    return node.op, (*node.args[:first], size, stride), ()


_view(aten.view_as_real, "... -> ... [parts]")
_view(aten.view_as_complex, "... [parts] -> ...")


# Fourier transforms are linear; the transformed dims are whole.


def _transformed(node: Node, metas: Metas) -> str:
    ndim = len(metas[0].shape)
    return _kept(metas, [wrap(d, ndim) for d in ints_arg(node, 1, "dim")])


for _op in (aten._fft_r2c, aten._fft_c2c, aten._fft_c2r):
    _view(_op, _transformed)
