"""Layer, RMS and group normalisation, and their gradients. Operands that are absent have no term."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir import Node, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.sharding.strategy import Strategy
from autopar.strategies.localize import local_length
from autopar.strategies.registry import LocalCall, Metas, Notation, aten, lowering, rule
from autopar.strategies.rules.terms import int_arg, ints_arg


def _normalized(node: Node, position: int, letter: str = "d") -> str:
    """The dims that are normalised, never cut."""
    return " ".join(f"[{letter}{i}]" for i in range(len(ints_arg(node, position, "normalized_shape"))))


def _ones(node: Node, position: int) -> str:
    return " ".join("1" for _ in ints_arg(node, position, "normalized_shape"))


def _layer_norm(node: Node, metas: Metas) -> str:
    d, one = _normalized(node, 1), _ones(node, 1)
    affine = f", {d}" * (len(metas) - 1)
    return f"... {d}{affine} -> ... {d}, ... {one}, ... {one}"


def _layer_norm_backward(node: Node, metas: Metas) -> str:
    d, one = _normalized(node, 2), _ones(node, 2)
    affine = f", {d}" * (len(metas) - 4)
    return f"... {d}, ... {d}, ... {one}, ... {one}{affine} -> ... {d}, {d}, {d}"


def _rms_norm(node: Node, metas: Metas) -> str:
    d, one = _normalized(node, 1), _ones(node, 1)
    return f"... {d}{f', {d}' * (len(metas) - 1)} -> ... {d}, ... {one}"


def _rms_norm_backward(node: Node, metas: Metas) -> str:
    d, one = _normalized(node, 2), _ones(node, 2)
    return f"... {d}, ... {d}, ... {one}{f', {d}' * (len(metas) - 3)} -> ... {d}, {d}"


rule(aten.native_layer_norm, _layer_norm)
rule(aten.native_layer_norm_backward, _layer_norm_backward, linear=((0,),))
rule(aten._fused_rms_norm, _rms_norm)
rule(aten._fused_rms_norm_backward, _rms_norm_backward, linear=((0,),))


def _group_norm(node: Node, metas: Metas) -> str:
    channels = f"(g={int_arg(node, 6)} [q])"
    x = f"n {channels} {_spatial(metas[0].shape)}"
    return f"{x}{f', {channels}' * (len(metas) - 1)} -> {x}, n g, n g"


def _group_norm_backward(node: Node, metas: Metas) -> str:
    channels = f"(g={int_arg(node, 8)} [q])"
    x = f"n {channels} {_spatial(metas[1].shape)}"
    return f"{x}, {x}, n g, n g{f', {channels}' * (len(metas) - 4)} -> {x}, {channels}, {channels}"


def _spatial(shape: tuple[int, ...]) -> str:
    return " ".join(f"[s{i}]" for i in range(len(shape) - 2))


rule(aten.native_group_norm, _group_norm)
rule(aten.native_group_norm_backward, _group_norm_backward, linear=((0,),))


@lowering(aten.native_group_norm)
def _lower_group_norm(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    return _local_counts(node, strategy, mesh, x=0, counts=3)


@lowering(aten.native_group_norm_backward)
def _lower_group_norm_backward(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    return _local_counts(node, strategy, mesh, x=1, counts=5)


def _local_counts(node: Node, strategy: Strategy, mesh: Mesh, *, x: int, counts: int) -> LocalCall:
    """The arguments N, C, HxW, groups, from position ``counts`` on, made local."""
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


# Batch normalisation in one op sees all samples of a channel, unless its statistics are given.


def _vectors(metas: Sequence[TensorMeta | None], name: str) -> list[str]:
    """Vectors of channels; those that are saved for training can be empty."""
    return [f"[{name}{i}]" if meta is not None and meta.numel == 0 else "c" for i, meta in enumerate(metas)]


def _samples(ndim: int, training: bool) -> str:
    """Samples and space are whole while statistics are taken from them."""
    space = [f"s{i}" for i in range(ndim - 2)]
    return " ".join(["[n]", "c", *(f"[{s}]" for s in space)] if training else ["n", "c", *space])


def _batch_norm(training: int | None) -> Notation:
    """``training`` is the position of that argument."""

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
