"""Rows of tokens in the order of their experts: ``ops.routing``.

``t0 ... tb`` are tokens, ``tb'`` is the dim of a routed tensor that has as many parts as ``tb``, ``e`` are experts. A
mesh axis may cut tokens outside and experts inside: then rows move to the ranks of their experts, and back.
"""

from __future__ import annotations

from autopar.ir import Node, TensorMeta
from autopar.mesh import Mesh
from autopar.sharding.local import local_length
from autopar.sharding.spec import ShardingSpec
from autopar.sharding.strategy import Strategy
from autopar.strategies.localize import local_offset, local_shape
from autopar.strategies.registry import LocalCall, Metas, Moves, autopar, lowering, rule
from autopar.strategies.rules.autopar_ops import FIRST, replace_kwargs
from autopar.strategies.rules.contraction import BILINEAR, keeping_alignment
from autopar.strategies.rules.terms import names


def _lead(keys: TensorMeta) -> tuple[str, str]:
    """Return the terms of tokens and of routed rows."""
    outer = names(len(keys.shape) - 2, "t")
    return " ".join([*outer, "tb"]), " ".join([*outer, "tb'", "e"])


def _moves(node: Node, metas: Metas) -> Moves:
    keys = metas[2] if len(metas) == 3 else node.outputs[0]
    assert keys is not None
    return tuple((t, "e") for t in (*names(len(keys.shape) - 2, "t"), "tb"))


def _route(node: Node, metas: Metas) -> str:
    keys = node.outputs[0]
    assert keys is not None
    tokens, rows = _lead(keys)
    return f"{tokens} [r] -> {rows}"


def _each(node: Node) -> str:
    return " [r]" if node.kwarg("each") else ""


def _send(node: Node, metas: Metas) -> str:
    tokens, rows = _lead(metas[2])
    return f"{tokens}{_each(node)} k, {tokens} [r], {rows} -> {rows} k"


def _collect(node: Node, metas: Metas) -> str:
    tokens, rows = _lead(metas[2])
    return f"{rows} k, {tokens} [r], {rows} -> {tokens}{_each(node)} k"


rule(autopar.route, _route, moves=_moves, even=True)
rule(autopar.send, _send, moves=_moves, linear=FIRST, even=True)
rule(autopar.collect, _collect, moves=_moves, linear=FIRST, even=True)


def _call(node: Node, ids: TensorMeta, tokens: ShardingSpec, keys: ShardingSpec) -> LocalCall:
    """Return the call of ``spmd`` for these cuts of tokens and of routed rows."""
    cuts, owners = tokens.dims[:-1], keys.dims[-1]
    name, args, kwargs = replace_kwargs(node, tokens=ids.shape[:-1], cuts=cuts, owners=owners)
    return name.replace(".default", ".across_ranks"), args, kwargs


@lowering(autopar.route)
def _lower_route(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    keys, spec = node.outputs[0], strategy.outputs[0]
    assert keys is not None
    assert spec is not None
    name, args, kwargs = _call(node, metas[0], strategy.inputs[0], spec)
    given = {k: v for k, v in kwargs if k != "columns"}
    given |= {"rows": local_shape(keys.shape_in(spec), spec, mesh), "layer": node.module}
    return name, args, tuple(given.items())


@lowering(autopar.send)
@lowering(autopar.collect)
def _lower_moved(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    name, args, kwargs = _call(node, metas[1], strategy.inputs[1], strategy.inputs[2])
    return name, args, (*kwargs, ("experts", metas[2].shape[-1]))


# Products of routed rows. Their tokens are those of the keys, so none of their dims is tied to another's.


def _rows(keys: TensorMeta) -> str:
    return " ".join([*names(len(keys.shape) - 1, "t"), "e"])


def _matrix(node: Node, k: str, n: str) -> str:
    return f"e {n} {k}" if node.kwarg("transposed") else f"e {k} {n}"


def _product(node: Node, metas: Metas) -> str:
    rows, weight, keys = metas
    wide = weight.shape[1 if node.kwarg("transposed") else 2]
    k, n = keeping_alignment("k", rows, rows.shape[-1]), keeping_alignment("n", rows, wide)
    lead = _rows(keys)
    return f"{lead} {k}, {_matrix(node, k, n)}, {lead} -> {lead} {n}"


def _product_weight(node: Node, metas: Metas) -> str:
    rows, grad, keys = metas
    k, n = keeping_alignment("k", rows, rows.shape[-1]), keeping_alignment("n", rows, grad.shape[-1])
    lead = _rows(keys)
    return f"{lead} {k}, {lead} {n}, {lead} -> {_matrix(node, k, n)}"


def _span(node: Node) -> int:
    span = node.kwarg("span")
    assert isinstance(span, int)
    return span


rule(
    autopar.routed_mm,
    _product,
    linear=BILINEAR,
    flops=lambda node, metas: 2.0 * _span(node) * metas[1].numel / max(metas[1].shape[0], 1),
)
rule(
    autopar.routed_mm_weight,
    _product_weight,
    linear=BILINEAR,
    flops=lambda node, metas: 2.0 * _span(node) * metas[0].shape[-1] * metas[1].shape[-1],
)
rule(autopar.of_expert, lambda node, metas: f"e n, {_rows(metas[1])} -> {_rows(metas[1])} n", linear=FIRST)
rule(autopar.sum_of_expert, lambda node, metas: f"{_rows(metas[1])} n, {_rows(metas[1])} -> e n", linear=FIRST)


@lowering(autopar.routed_mm)
@lowering(autopar.of_expert)
def _lower_product(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    keys = metas[-1]
    return replace_kwargs(node, first=local_offset(keys.shape[-1], strategy.inputs[-1].dims[-1]))


@lowering(autopar.routed_mm_weight)
@lowering(autopar.sum_of_expert)
def _lower_sum(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    experts, axes = metas[-1].shape[-1], strategy.inputs[-1].dims[-1]
    return replace_kwargs(node, first=local_offset(experts, axes), experts=local_length(experts, axes, mesh))
