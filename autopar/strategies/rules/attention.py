"""Scaled-dot-product attention: autopar's own, and torch's for CPUs.

``g`` groups of keys and values, each read by ``q`` query heads; the keys' sequence is whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir import Node, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.sharding.strategy import Strategy
from autopar.strategies.localize import local_offset
from autopar.strategies.registry import LinearSets, LocalCall, Lowering, Metas, aten, autopar, lowering, rule
from autopar.strategies.rules.autopar_ops import replace_kwargs
from autopar.strategies.rules.terms import arg

GRADIENT: LinearSets = ((0,),)


@dataclass(frozen=True)
class _Letters:
    """Terms of attention: query heads, key heads, and the queries' sequence.

    Under a causal mask the last queries read the most keys, so that cutting them would not divide the work.
    """

    heads: str
    groups: str
    queries: str

    @staticmethod
    def of(queries: TensorMeta, keys: TensorMeta, *, causal: bool) -> _Letters:
        h, g = queries.shape[1], keys.shape[1]
        sequence = "[s]" if causal else "s"
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
    letters = _Letters.of(metas[0], metas[1], causal=bool(node.kwarg("is_causal")))
    mask = [letters.mask(metas[3])] if _has(node, 3) else []
    seed = ["-"] if _has(node, 4) else []
    return f"{', '.join([*letters.operands(), *mask, *seed])} -> {', '.join(letters.results())}"


def _attention_backward(node: Node, metas: Metas) -> str:
    letters = _Letters.of(metas[1], metas[2], causal=bool(node.kwarg("is_causal")))
    mask = [letters.mask(metas[4])] if _has(node, 4) else []
    seed = ["-"] if _has(node, 7) else []
    out, lse = letters.results()
    operands = [out, *letters.operands(), *mask, out, lse, *seed]
    return f"{', '.join(operands)} -> {', '.join(letters.operands())}"


BACKWARD = 2.5
"""Five products where the forward has two (Dao, "FlashAttention-2", 2023, section 4.1)."""


def _products(q: TensorMeta, k: TensorMeta, v: TensorMeta) -> float:
    """FLOPs of the forward: q k^T and p v. As everyone counts them, what a causal mask hides is not left out."""
    b, h, s, d = q.shape
    t, e = k.shape[2], v.shape[3]
    return 2.0 * b * h * s * t * (d + e)


def _attention_flops(node: Node, metas: Metas) -> float:
    return _products(*metas[:3])


def _attention_backward_flops(node: Node, metas: Metas) -> float:
    return BACKWARD * _products(*metas[1:4])


rule(autopar.attention, _attention, flops=_attention_flops)
rule(autopar.attention_backward, _attention_backward, linear=GRADIENT, flops=_attention_backward_flops)


def _lower_attention(queries: int) -> Lowering:
    """Dropout numbers the probabilities [b, h, s, t] by their place in the global tensor."""

    def lower(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
        shape, cuts = metas[queries].shape[:3], strategy.inputs[queries].dims[:3]
        offset = node.kwarg("offset")
        if not isinstance(offset, tuple) or not any(cuts):
            return node.op, node.args, node.kwargs
        local = [local_offset(n, axes) if axes else o for n, axes, o in zip(shape, cuts, offset, strict=False)]
        return replace_kwargs(node, offset=(*local, *offset[3:]))

    return lower


lowering(autopar.attention)(_lower_attention(queries=0))
lowering(autopar.attention_backward)(_lower_attention(queries=1))


# torch's own, where a program was captured with it.


def _causal(node: Node, position: int) -> bool:
    return bool(arg(node, position, False, "is_causal"))


def _flash(node: Node, metas: Metas) -> str:
    letters = _Letters.of(metas[0], metas[1], causal=_causal(node, 4))
    mask = [letters.mask(m) for m in metas[3:]]
    return f"{', '.join([*letters.operands(), *mask])} -> {', '.join(letters.results())}"


def _flash_backward(node: Node, metas: Metas) -> str:
    letters = _Letters.of(metas[1], metas[2], causal=_causal(node, 7))
    operands = [letters.results()[0], *letters.operands(), *letters.results(), *(letters.mask(m) for m in metas[6:])]
    return f"{', '.join(operands)} -> {', '.join(letters.operands())}"


def _flash_flops(node: Node, metas: Metas) -> float:
    return _products(*metas[:3])


def _flash_backward_flops(node: Node, metas: Metas) -> float:
    return BACKWARD * _products(*metas[1:4])


rule(aten._scaled_dot_product_flash_attention_for_cpu, _flash, flops=_flash_flops)
rule(
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    _flash_backward,
    linear=GRADIENT,
    flops=_flash_backward_flops,
)
