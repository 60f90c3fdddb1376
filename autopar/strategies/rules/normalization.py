"""Layer, RMS and group normalization, and their gradients. Absent operands have no term.

Normalized dims may be cut: ranks then exchange the moments of their parts, and two sums for the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autopar.ir import Node, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.sharding.local import local_length
from autopar.sharding.strategy import Strategy
from autopar.strategies.combine import Combine, Operand
from autopar.strategies.localize import operand
from autopar.strategies.registry import LocalArg, LocalCall, Metas, Notation, aten, combining, lowering, rule
from autopar.strategies.rules.combined import GATHERED, cutting, kept, local_counts, result, torch_dtype, wide
from autopar.strategies.rules.terms import arg, int_arg, ints_arg

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


def _normalized(node: Node, position: int) -> tuple[str, str, str]:
    """Return the normalized dims, the same as dims of one element, and the suffix that makes statistics whole."""
    dims = [f"d{i}" for i in range(len(ints_arg(node, position, "normalized_shape")))]
    return " ".join(f"{{{d}}}" for d in dims), " ".join("1" for _ in dims), f"/ {' '.join(dims)}"


def _layer_norm(node: Node, metas: Metas) -> str:
    d, one, alike = _normalized(node, 1)
    affine = f", {d}" * (len(metas) - 1)
    return f"... {d}{affine} -> ... {d}, ... {one} {alike}, ... {one} {alike}"


def _layer_norm_backward(node: Node, metas: Metas) -> str:
    d, one, _ = _normalized(node, 2)
    affine = f", {d}" * (len(metas) - 4)
    return f"... {d}, ... {d}, ... {one}, ... {one}{affine} -> ... {d}, {d}, {d}"


def _rms_norm(node: Node, metas: Metas) -> str:
    d, one, alike = _normalized(node, 1)
    return f"... {d}{f', {d}' * (len(metas) - 1)} -> ... {d}, ... {one} {alike}"


def _rms_norm_backward(node: Node, metas: Metas) -> str:
    d, one, _ = _normalized(node, 2)
    return f"... {d}, ... {d}, ... {one}{f', {d}' * (len(metas) - 3)} -> ... {d}, {d}"


rule(aten.native_layer_norm, _layer_norm)
rule(aten.native_layer_norm_backward, _layer_norm_backward, linear=((0,),))
rule(aten._fused_rms_norm, _rms_norm)
rule(aten._fused_rms_norm_backward, _rms_norm_backward, linear=((0,),))


def _group_norm(node: Node, metas: Metas) -> str:
    channels, x = _channels(node, metas[0], 6)
    alike = f"/ {' '.join(_inside(node, metas[0], 6))}"
    return f"{x}{f', {channels}' * (len(metas) - 1)} -> {x}, n g {alike}, n g {alike}"


def _group_norm_backward(node: Node, metas: Metas) -> str:
    channels, x = _channels(node, metas[1], 8)
    return f"{x}, {x}, n g, n g{f', {channels}' * (len(metas) - 4)} -> {x}, {channels}, {channels}"


def _channels(node: Node, x: TensorMeta, groups_at: int) -> tuple[str, str]:
    """Return the terms of channels and of x. Channels within a group are cut only if there is a single group."""
    groups = int_arg(node, groups_at)
    channels = f"(g={groups} {'{q}' if groups == 1 else '[q]'})"
    return channels, f"n {channels} {' '.join(f'{{s{i}}}' for i in range(len(x.shape) - 2))}"


def _inside(node: Node, x: TensorMeta, groups_at: int) -> list[str]:
    """Return the factors that a group's statistics are taken over."""
    return ["q"] * (int_arg(node, groups_at) == 1) + [f"s{i}" for i in range(len(x.shape) - 2)]


rule(aten.native_group_norm, _group_norm)
rule(aten.native_group_norm_backward, _group_norm_backward, linear=((0,),))


@lowering(aten.native_group_norm)
def _lower_group_norm(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    return _local_counts(node, strategy, mesh, x=0, counts=3)


@lowering(aten.native_group_norm_backward)
def _lower_group_norm_backward(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    return _local_counts(node, strategy, mesh, x=1, counts=5)


def _local_counts(node: Node, strategy: Strategy, mesh: Mesh, *, x: int, counts: int) -> LocalCall:
    """Make the arguments N, C, HxW and groups, from position ``counts`` on, local."""
    assert isinstance(node.args[x], Value)
    samples, channels = strategy.inputs[x].dims[:2]
    n, c, pixels, groups = (int_arg(node, counts + i) for i in range(4))
    local = (
        local_length(n, samples, mesh),
        local_length(c, channels, mesh),
        pixels,
        local_length(groups, channels, mesh),
    )
    return node.op, (*node.args[:counts], *local, *node.args[counts + 4 :]), node.kwargs


# What ranks run if normalized dims are cut.


def _dtype(node: Node, index: int) -> str:
    return torch_dtype(result(node, index).dtype)


def _last(node: Node, metas: Metas, position: int, x: int = 0) -> list[int]:
    ndim = len(metas[x].shape)
    return list(range(ndim - len(ints_arg(node, position, "normalized_shape")), ndim))


def _vector(node: Node, position: int) -> Operand | None:
    at = operand(node, position)
    return None if at is None else Operand(at)


def _summaries(strategy: Strategy, metas: Metas, dims: Sequence[int], mesh: Mesh, x: int = 0) -> tuple[TensorMeta]:
    return (TensorMeta((2, *kept(strategy, metas[x], dims, mesh, operand=x)), wide(metas[x].dtype)),)


@combining(aten.native_layer_norm, aten._fused_rms_norm)
def _combined_norm(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Combine | None:
    dims = _last(node, metas, 1)
    axes, layer = cutting(strategy, dims), node.packet == "aten.native_layer_norm"
    if not axes:
        return None
    eps = arg(node, 4 if layer else 3, None, "eps")
    finish: tuple[Any, ...] = (Operand(0), GATHERED, _vector(node, 2), *([_vector(node, 3)] if layer else []))
    # Without an epsilon, RMS norm uses that of the dtype.
    options = (
        ("counts", local_counts(strategy, metas, dims, mesh)),
        *([] if layer else [("dtype", _dtype(node, 1))]),
        ("eps", EPSILON[metas[0].dtype] if eps is None else eps),
    )
    op = f"autopar.{'layer' if layer else 'rms'}_norm_of_moments.default"
    summary = ("autopar.moments.default", (Operand(0), tuple(dims)), ())
    return Combine(summary, _summaries(strategy, metas, dims, mesh), axes, (op, finish, options))


@combining(aten.native_layer_norm_backward, aten._fused_rms_norm_backward)
def _combined_norm_backward(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Combine | None:
    dims, layer = _last(node, metas, 2, x=1), node.packet == "aten.native_layer_norm_backward"
    axes = cutting(strategy, dims, 1)
    if not axes:
        return None
    mean = Operand(2) if layer else None
    first = (Operand(0), Operand(1), mean, Operand(3 if layer else 2), _vector(node, 5 if layer else 4))
    count = math.prod(metas[1].shape[d] for d in dims)
    options = (("count", count), ("own", tuple(range(dims[0]))), ("mask", node.args[7 if layer else 5]))
    op = f"autopar.{'layer' if layer else 'rms'}_norm_backward_of_sums.default"
    summary = ("autopar.norm_sums.default", (*first, tuple(dims)), ())
    return Combine(summary, _summaries(strategy, metas, dims, mesh, 1), axes, (op, (*first, GATHERED), options))


def _group_summaries(strategy: Strategy, metas: Metas, groups: LocalArg, x: int, mesh: Mesh) -> tuple[TensorMeta]:
    samples, channels = strategy.inputs[x].local_shape(metas[x].shape, mesh)[:2]
    of = groups if isinstance(groups, int) else channels  # on the fullest rank, at most
    return (TensorMeta((2, samples, of, 1, 1), wide(metas[x].dtype)),)


def _cut_inside(node: Node, strategy: Strategy, groups: int, x: int) -> list[int]:
    """Return the dims of x that statistics are taken over and that may be cut."""
    assert isinstance(node.args[x], Value)
    return [*([1] if groups == 1 else []), *range(2, len(strategy.inputs[x].dims))]


@combining(aten.native_group_norm)
def _combined_group_norm(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Combine | None:
    groups, spec = int_arg(node, 6), strategy.inputs[0]
    dims = _cut_inside(node, strategy, groups, 0)
    axes = cutting(strategy, dims)
    if not axes:
        return None
    own: LocalArg = 1 if groups == 1 else local_length(groups, spec.dims[1], mesh)
    counted = local_counts(strategy, metas, dims, mesh)
    each = 1 if groups == 1 else metas[0].shape[1] // groups
    options = (("groups", own), ("counts", tuple(n * each for n in counted)), ("eps", node.args[7]))
    finish = (Operand(0), GATHERED, _vector(node, 1), _vector(node, 2))
    summary = ("autopar.group_moments.default", (Operand(0), own), ())
    summaries = _group_summaries(strategy, metas, own, 0, mesh)
    return Combine(summary, summaries, axes, ("autopar.group_norm_of_moments.default", finish, options))


@combining(aten.native_group_norm_backward)
def _combined_group_norm_backward(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Combine | None:
    groups, spec = int_arg(node, 8), strategy.inputs[1]
    axes = cutting(strategy, _cut_inside(node, strategy, groups, 1), 1)
    if not axes:
        return None
    own: LocalArg = 1 if groups == 1 else local_length(groups, spec.dims[1], mesh)
    first = (*map(Operand, range(4)), _vector(node, 4))
    count = math.prod(metas[1].shape[1:]) // groups
    options = (("groups", own), ("count", count), ("mask", node.args[9]))
    finish = ("autopar.group_norm_backward_of_sums.default", (*first, GATHERED), options)
    summary = ("autopar.group_norm_sums.default", (*first, own), ())
    return Combine(summary, _group_summaries(strategy, metas, own, 1, mesh), axes, finish)


# Batch normalization in one op needs all samples of a channel, unless its statistics are given.


def _vectors(metas: Sequence[TensorMeta | None], name: str) -> list[str]:
    """Return the terms of vectors of channels. Those saved for training can be empty."""
    return [f"[{name}{i}]" if meta is not None and meta.numel == 0 else "c" for i, meta in enumerate(metas)]


def _samples(ndim: int, training: bool) -> str:
    """Return the term of x. In training, samples and spatial dims are whole, since statistics are taken over them."""
    space = [f"s{i}" for i in range(ndim - 2)]
    return " ".join(["[n]", "c", *(f"[{s}]" for s in space)] if training else ["n", "c", *space])


def _batch_norm(training: int | None) -> Notation:
    """Return the rule. ``training`` is the position of that argument."""

    def notation(node: Node, metas: Metas) -> str:
        ndim = len(metas[0].shape)
        x = _samples(ndim, training is not None and bool(node.args[training]))
        given = f"/ n {' '.join(f's{i}' for i in range(ndim - 2))}"  # without training, statistics are passed on
        results = [f"{v} {given}" for v in _vectors(node.outputs[1:], "saved")]
        return f"{', '.join([x, *_vectors(metas[1:], 'empty')])} -> {', '.join([x, *results])}"

    return notation


def _batch_norm_backward(node: Node, metas: Metas) -> str:
    x = _samples(len(metas[1].shape), bool(node.args[7]))
    return f"{', '.join([x, x, *_vectors(metas[2:], 'empty')])} -> {x}, c, c"


rule(aten.native_batch_norm, _batch_norm(5))
rule(aten._native_batch_norm_legit_functional, _batch_norm(5))
rule(aten._native_batch_norm_legit.no_stats, _batch_norm(3))
rule(aten._native_batch_norm_legit_no_training, _batch_norm(None))
rule(aten.native_batch_norm_backward, _batch_norm_backward, linear=((0,),))
