"""autopar's own ops, which know the global position of the shard that they work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir import Node, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.sharding.spec import ShardingSpec
from autopar.sharding.strategy import Strategy
from autopar.strategies.localize import local_length, local_offset, local_shape
from autopar.strategies.registry import (
    LinearSets,
    LocalArg,
    LocalCall,
    Lowering,
    Metas,
    Notation,
    autopar,
    lowering,
    rule,
)

BILINEAR: LinearSets = ((0,), (1,))
FIRST: LinearSets = ((0,),)


def _replace(node: Node, **values: LocalArg) -> LocalCall:
    """The call with keyword arguments replaced."""
    kwargs = {**dict(node.kwargs), **values}
    return node.op, node.args, tuple(kwargs.items())


def _spec(spec: ShardingSpec | None) -> ShardingSpec:
    assert spec is not None
    return spec


def _meta(meta: TensorMeta | None) -> TensorMeta:
    assert meta is not None
    return meta


# Contraction: the equation is the rule.


def _contraction(node: Node, metas: Metas) -> str:
    """``"bsk,nk->bsn"`` as notation."""
    equation = next(a for a in (*node.args, *(a for _, a in node.kwargs)) if isinstance(a, str))
    left, right = equation.replace(" ", "").split("->")
    return f"{', '.join(' '.join(t) or '-' for t in left.split(','))} -> {' '.join(right) or '-'}"


rule(autopar.contract, _contraction, linear=BILINEAR, flops="product")


# Attention. ``g`` groups of keys and values, each read by ``q`` query heads; the keys' sequence is whole.


@dataclass(frozen=True)
class _Letters:
    """Terms of attention: query heads, key heads, and the queries' sequence.

    Under a causal mask the last queries read the most keys, so that cutting them would not divide the work.
    """

    heads: str
    groups: str
    queries: str

    @staticmethod
    def of(node: Node, queries: TensorMeta, keys: TensorMeta) -> _Letters:
        h, g = queries.shape[1], keys.shape[1]
        sequence = "[s]" if node.kwarg("is_causal", False) else "s"
        return _Letters("h", "h", sequence) if h == g else _Letters(f"(g={g} [q])", "g", sequence)

    def operands(self) -> list[str]:
        keys = f"b {self.groups} [t]"
        return [f"b {self.heads} {self.queries} [d]", f"{keys} [d]", f"{keys} [e]"]

    def results(self) -> list[str]:
        rows = f"b {self.heads} {self.queries}"
        return [f"{rows} [e]", rows]

    def mask(self, meta: TensorMeta) -> str:
        return " ".join(["b", self.heads, self.queries, "[t]"][4 - len(meta.shape) :])


def _has(node: Node, position: int) -> bool:
    return position < len(node.args) and isinstance(node.args[position], Value)


def _attention(node: Node, metas: Metas) -> str:
    letters = _Letters.of(node, metas[0], metas[1])
    mask = [letters.mask(metas[3])] if _has(node, 3) else []
    seed = ["-"] if _has(node, 4) else []
    return f"{', '.join([*letters.operands(), *mask, *seed])} -> {', '.join(letters.results())}"


def _attention_backward(node: Node, metas: Metas) -> str:
    letters = _Letters.of(node, metas[1], metas[2])
    mask = [letters.mask(metas[4])] if _has(node, 4) else []
    seed = ["-"] if _has(node, 7) else []
    out, lse = letters.results()
    operands = [out, *letters.operands(), *mask, out, lse, *seed]
    return f"{', '.join(operands)} -> {', '.join(letters.operands())}"


def _attention_products(node: Node, q: TensorMeta, k: TensorMeta, v: TensorMeta) -> float:
    """FLOPs of one pass: q k^T and p v, of which a causal mask leaves half."""
    b, h, s, d = q.shape
    t, e = k.shape[2], v.shape[3]
    return 2.0 * b * h * s * t * (d + e) * (0.5 if node.kwarg("is_causal", False) else 1.0)


def _attention_flops(node: Node, metas: Metas) -> float:
    return _attention_products(node, *metas[:3])


def _attention_backward_flops(node: Node, metas: Metas) -> float:
    """Five products where the forward has two (Dao, "FlashAttention-2", 2023, section 4.1)."""
    return 2.5 * _attention_products(node, *metas[1:4])


rule(autopar.attention, _attention, flops=_attention_flops)
rule(autopar.attention_backward, _attention_backward, linear=FIRST, flops=_attention_backward_flops)


def _lower_attention(queries: int) -> Lowering:
    """Dropout numbers the probabilities [b, h, s, t] by their place in the global tensor."""

    def lower(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
        shape, cuts = metas[queries].shape[:3], strategy.inputs[queries].dims[:3]
        offset = node.kwarg("offset")
        if not isinstance(offset, tuple) or not any(cuts):
            return node.op, node.args, node.kwargs
        local = [local_offset(n, axes) if axes else o for n, axes, o in zip(shape, cuts, offset, strict=False)]
        return _replace(node, offset=(*local, *offset[3:]))

    return lower


lowering(autopar.attention)(_lower_attention(queries=0))
lowering(autopar.attention_backward)(_lower_attention(queries=1))


# Random numbers by global position.

rule(autopar.dropout, "..., - -> ...", linear=FIRST, elementwise=True)
rule(autopar.uniform, "- -> ...")


def _offsets(shape: Sequence[int], spec: ShardingSpec) -> tuple[LocalArg, ...]:
    return tuple(local_offset(n, axes) for n, axes in zip(shape, spec.dims, strict=True))


@lowering(autopar.dropout)
def _lower_dropout(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    return _replace(node, offset=_offsets(metas[0].shape, strategy.inputs[0]))


@lowering(autopar.uniform)
def _lower_uniform(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    shape, spec = _meta(node.outputs[0]).shape, _spec(strategy.outputs[0])
    return _replace(node, shape=local_shape(shape, spec, mesh), offset=_offsets(shape, spec))


# A vocabulary whose rows are cut: rows that a rank does not hold count as zeros.

rule(autopar.lookup, "v d, ... -> ... d", linear=FIRST)
rule(autopar.lookup_backward, "... d, ... -> v d", linear=FIRST)


@lowering(autopar.lookup)
def _lower_lookup(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    return _replace(node, offset=local_offset(metas[0].shape[0], strategy.inputs[0].dims[0]))


@lowering(autopar.lookup_backward)
def _lower_lookup_backward(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    rows, axes = _meta(node.outputs[0]).shape[0], _spec(strategy.outputs[0]).dims[0]
    return _replace(node, rows=local_length(rows, axes, mesh), offset=local_offset(rows, axes))


# Cross entropy over a vocabulary that is cut: the maximum ``m`` and the sum of exponentials are reduced on the way.

rule(autopar.sumexp, "... v, ... -> ...")
rule(autopar.nll, "... v, ..., ... -> ...")
rule(autopar.nll_backward, "..., ... v, ..., ... -> ... v", linear=FIRST)


def _lower_classes(logits: int) -> Lowering:
    def lower(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
        return _replace(node, offset=local_offset(metas[logits].shape[-1], strategy.inputs[logits].dims[-1]))

    return lower


lowering(autopar.nll)(_lower_classes(logits=0))
lowering(autopar.nll_backward)(_lower_classes(logits=1))


# Batch normalisation from statistics that were reduced on the way: every dim may be cut.


def _channels(tensors: int, results: str) -> Notation:
    """``tensors`` operands of shape [n, c, ...], then vectors of channels."""

    def notation(node: Node, metas: Metas) -> str:
        x = " ".join(["n", "c", *(f"s{i}" for i in range(len(metas[0].shape) - 2))])
        return f"{', '.join([x] * tensors + ['c'] * (len(metas) - tensors))} -> {results.format(x=x)}"

    return notation


rule(autopar.squared_deviation, _channels(1, "c"))
rule(autopar.batch_norm, _channels(1, "{x}"))
rule(autopar.batch_norm_backward_reduce, _channels(2, "c, c"), linear=FIRST)
rule(autopar.batch_norm_backward_input, _channels(2, "{x}"))
