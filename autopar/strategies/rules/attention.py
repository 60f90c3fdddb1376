"""Scaled-dot-product attention: autopar's own op, and each of torch's kernels.

There are ``g`` groups of keys and values, each read by ``q`` query heads. The keys' sequence is only cut together with
the queries', and then goes round a ring. Where the queries' alone is cut under a causal mask, ranks lend each other
rows, since the last rows read the most keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.ir import Node, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.sharding.loan import Loan, loan
from autopar.sharding.strategy import Strategy, ring_axes
from autopar.strategies.localize import operand
from autopar.strategies.registry import LinearSets, LocalCall, Lowering, Metas, autopar, lending, lowering, rule
from autopar.strategies.rules.autopar_ops import global_offsets, replace_kwargs
from autopar.strategies.rules.terms import arg, names, replicated, term

GRADIENT: LinearSets = ((0,),)


@dataclass(frozen=True)
class _Letters:
    """Factors of attention: query heads, key heads, and the queries' sequence."""

    heads: str
    groups: str
    queries: str

    @staticmethod
    def of(queries: TensorMeta, keys: TensorMeta, *, whole: bool) -> _Letters:
        """Return the factors; if ``whole``, the queries' sequence is never cut."""
        h, g = queries.shape[1], keys.shape[1]
        sequence = "[s]" if whole else "s"
        return _Letters("h", "h", sequence) if h == g else _Letters(f"(g={g} [q])", "g", sequence)

    def operands(self) -> list[str]:
        keys = f"b {self.groups} [t]"
        return [f"b {self.heads} {self.queries} [d]", f"{keys} [d]", f"{keys} [e]"]

    def results(self) -> list[str]:
        rows = f"b {self.heads} {self.queries}"
        return [f"{rows} [e]", rows]

    def of_role(self, role: str, meta: TensorMeta, other: str) -> str:
        """Return the term of an operand or result of torch's kernels; ``other`` prefixes uncut dims."""
        if role in "qkv":
            return self.operands()["qkv".index(role)]
        if role == "m" and meta.numel:
            return self.mask(meta)
        if role == "y":
            return self.results()[0]
        if role == "p":
            return self.mask(meta)
        if role == "l" and meta.numel:
            of_row = [self.queries if self.queries == "s" else "[rows]", "1"][: len(meta.shape) - 2]
            return " ".join(["b", self.heads, *of_row])
        return term(names(len(meta.shape), other), range(len(meta.shape)))

    def mask(self, meta: TensorMeta) -> str:
        return " ".join(["b", self.heads, self.queries, "[columns]"][4 - len(meta.shape) :])


def _has(node: Node, position: int) -> bool:
    return position < len(node.args) and isinstance(node.args[position], Value)


def _own(node: Node, queries: TensorMeta, keys: TensorMeta, mask: int) -> _Letters:
    """Return the factors of autopar's op, whose mask is argument ``mask``.

    No rows of an additive mask are lent, and only where queries and keys are the same rows does the loan balance.
    """
    causal = bool(node.kwarg("is_causal"))
    return _Letters.of(queries, keys, whole=causal and (_has(node, mask) or queries.shape[2] != keys.shape[2]))


def _attention(node: Node, metas: Metas) -> str:
    letters = _own(node, metas[0], metas[1], 3)
    mask = [letters.mask(metas[3])] if _has(node, 3) else []
    seed = ["-"] if _has(node, 4) else []
    return f"{', '.join([*letters.operands(), *mask, *seed])} -> {', '.join(letters.results())}"


def _attention_backward(node: Node, metas: Metas) -> str:
    letters = _own(node, metas[1], metas[2], 4)
    mask = [letters.mask(metas[4])] if _has(node, 4) else []
    seed = ["-"] if _has(node, 7) else []
    out, lse = letters.results()
    operands = [out, *letters.operands(), *mask, out, lse, *seed]
    return f"{', '.join(operands)} -> {', '.join(letters.operands())}"


BACKWARD = 2.5
"""FLOPs of the backward over those of the forward: five products against two (Dao, "FlashAttention-2", 2023,
section 4.1)."""


def _products(q: TensorMeta, k: TensorMeta, v: TensorMeta) -> float:
    """Return the FLOPs of the forward, q k^T and p v. By convention, what a causal mask hides is counted too."""
    b, h, s, d = q.shape
    t, e = k.shape[2], v.shape[3]
    return 2.0 * b * h * s * t * (d + e)


def _attention_flops(node: Node, metas: Metas) -> float:
    return _products(*metas[:3])


def _attention_backward_flops(node: Node, metas: Metas) -> float:
    return BACKWARD * _products(*metas[1:4])


RINGS = (("s", "t"),)

rule(autopar.attention, _attention, flops=_attention_flops, rings=RINGS)
rule(autopar.attention_backward, _attention_backward, linear=GRADIENT, flops=_attention_backward_flops, rings=RINGS)


def _lower_attention(queries: int) -> Lowering:
    """Return a lowering with the shard's offset: dropout numbers the probabilities [b, h, s, t] by global position."""

    def lower(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
        shape, cuts = metas[queries].shape[:3], strategy.inputs[queries].dims[:3]
        if not node.kwarg("dropout_p") or not any(cuts):
            return node.op, node.args, node.kwargs
        return replace_kwargs(node, offset=(*global_offsets(node, shape, cuts), 0)[:4])

    return lower


def _lends(queries: int) -> Callable[[Node, Strategy, Metas, Mesh], Loan | None]:
    def lent(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Loan | None:
        alone = node.kwarg("is_causal") and not ring_axes(strategy)
        axes = strategy.inputs[queries].dims[2] if alone else ()
        return loan(metas[queries].shape[2], axes, mesh)

    return lent


for _op, _queries in ((autopar.attention, 0), (autopar.attention_backward, 1)):
    lowering(_op)(_lower_attention(_queries))
    lending(_op)(_lends(_queries))


# torch's own kernels, for programs that were captured with them.


@dataclass(frozen=True)
class _Variant:
    """One of torch's kernels, forward or backward.

    Args:
        takes: role of each argument: ``q``, ``k``, ``v``, a mask ``m``, the result ``y`` or its gradient, the logsumexp
            ``l``, probabilities ``p``, or ``.`` for anything else.
        gives: role of each result.
        dropout: position of the dropout probability.
        rows: whether the queries' sequence may be cut. Kernels for GPUs take its length as an argument and pad ``l``.
        causal: distance from the dropout argument to the one for causality.
    """

    takes: str
    gives: str
    dropout: int
    rows: bool = False
    causal: int = 1


VARIANTS = {
    "flash_attention": _Variant("qkv", "yl", 3),
    "flash_attention_backward": _Variant("yqkvyl", "qkv", 10),
    "efficient_attention": _Variant("qkvm", "yl", 5),
    "efficient_attention_backward": _Variant("yqkvmyl", "qkvm", 9, causal=2),
    "cudnn_attention": _Variant("qkvm", "yl", 5),
    "cudnn_attention_backward": _Variant("yqkvyl..m", "qkv", 13),
    "fused_attention_overrideable": _Variant("qkvm", "yl", 4),
    "fused_attention_overrideable_backward": _Variant("yqkvm.yl", "qkvm", 12),
    "attention_math": _Variant("qkvm..p", "yp", 4, rows=True),
    "flash_attention_for_cpu": _Variant("qkv", "yl", 3, rows=True),
    "flash_attention_for_cpu_backward": _Variant("yqkvyl", "qkv", 6, rows=True),
}


def _variant(node: Node) -> _Variant:
    return VARIANTS[node.packet.removeprefix("aten._scaled_dot_product_")]


def _torch_attention(node: Node, metas: Metas) -> str:
    """Write the rule. These kernels do not draw dropout by global position, so with dropout nothing is cut."""
    kind = _variant(node)
    if arg(node, kind.dropout, 0.0, "dropout_p"):
        return replicated(node, metas)
    causal = bool(arg(node, kind.dropout + kind.causal, False, "is_causal"))
    q, k = (metas[operand(node, kind.takes.index(role)) or 0] for role in "qk")
    letters = _Letters.of(q, k, whole=causal or not kind.rows)
    terms: list[str] = []
    for i, value in enumerate((*node.args, *(v for _, v in node.kwargs))):
        if isinstance(value, Value):
            role = kind.takes[i] if i < min(len(kind.takes), len(node.args)) else "." if i < len(node.args) else "m"
            terms.append(letters.of_role(role, metas[len(terms)], f"x{i}_"))
    results = enumerate(node.outputs)
    gives = [letters.of_role((kind.gives + "." * 9)[i], m or TensorMeta((), "int64"), f"y{i}_") for i, m in results]
    alike = f" / b {letters.groups}"  # counters and generator states do not depend on them
    gives = [g + alike if i >= len(kind.gives) else g for i, g in enumerate(gives)]
    return f"{', '.join(terms)} -> {', '.join(gives)}"


def _torch_attention_flops(node: Node, metas: Metas) -> float:
    first = _variant(node).takes.index("q")
    return (BACKWARD if first else 1.0) * _products(*metas[first : first + 3])


for _name in VARIANTS:
    rule(
        f"aten._scaled_dot_product_{_name}",
        _torch_attention,
        linear=GRADIENT if "backward" in _name else (),
        flops=_torch_attention_flops,
    )
