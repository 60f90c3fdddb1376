"""Matrix products. ``m`` and ``n`` are rows and columns of the result, ``k`` is summed, ``b`` is a batch."""

from __future__ import annotations

from autopar.ir import Node, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.sharding.local import local_length
from autopar.sharding.spec import ShardingSpec
from autopar.sharding.strategy import Strategy
from autopar.strategies.localize import local_offset
from autopar.strategies.registry import LinearSets, LocalArg, LocalCall, Metas, OpName, aten, autopar, lowering, rule
from autopar.strategies.rules.autopar_ops import replace_kwargs
from autopar.strategies.rules.terms import names, replicated

BILINEAR: LinearSets = ((0,), (1,))

rule(aten.mm, "m k, k n -> m n", linear=BILINEAR, flops="product")
rule(aten.bmm, "b m k, b k n -> b m n", linear=BILINEAR, flops="product")
rule(aten.mv, "m k, k -> m", linear=BILINEAR, flops="product")
rule(aten.dot, "k, k -> -", linear=BILINEAR, flops="product")
rule(aten.vdot, "k, k -> -", linear=BILINEAR, flops="product")
rule(aten.outer, "m, n -> m n", linear=BILINEAR, flops="product")


def _linear_layer(node: Node, metas: Metas) -> str:
    # Each rank would add the bias once, so with a bias the sum over k cannot be deferred.
    return "... k, n k -> ... n" if len(metas) == 2 else "... [k], n [k], n -> ... n"


def _linear_layer_sums(node: Node, metas: Metas) -> tuple[tuple[int, ...], ...]:
    return BILINEAR if len(metas) == 2 else ((0, 2), (1, 2))


rule(aten.linear, _linear_layer, linear=_linear_layer_sums, flops="product")


def _matmul(node: Node, metas: Metas) -> str:
    left, right = (len(m.shape) for m in metas)
    first = "k" if left == 1 else "... m k"
    second = "k" if right == 1 else "... k n"
    result = " ".join((["..."] if max(left, right) > 2 else []) + ["m"] * (left > 1) + ["n"] * (right > 1))
    first, second = (t if n > 2 else t.removeprefix("... ") for t, n in ((first, left), (second, right)))
    return f"{first}, {second} -> {result or '-'}"


rule(aten.matmul, _matmul, linear=BILINEAR, flops="product")


def _plus_product(op: object, operands: str, product: str) -> None:
    """Register ``added + product``. Every rank would add ``added``, so k is never cut; both are partial together."""
    dims = product.split()

    def notation(node: Node, metas: Metas) -> str:
        added = dims[len(dims) - len(metas[0].shape) :]
        return f"{' '.join(added) or '-'}, {operands} -> {product}"

    rule(op, notation, linear=((0, 1), (0, 2)), flops="product")


_plus_product(aten.addmm, "m [k], [k] n", "m n")
_plus_product(aten.baddbmm, "b m [k], b [k] n", "b m n")
_plus_product(aten.addmv, "m [k], [k]", "m")


# Products of 8-bit floats with one scale or a scale per row and column. The kernel needs multiples of sixteen.


def _scaled(node: Node, metas: Metas) -> str:
    result, more = node.outputs[0], metas[4:]  # a bias, which each rank would add, and a scale of the result
    once = bool(more) or (result is not None and result.itemsize == 1)
    (_, wide), n = metas[0].shape, _sixteens("n", metas[1].shape[1])
    k = "[k]" if once else _sixteens("k", wide)
    scales = [_scale(m, d) for m, d in zip(metas[2:], ("m 1", f"1 {n}", n, n), strict=False)]
    return f"{', '.join([f'm {k}, {k} {n}', *scales])} -> m {n}"


def _sixteens(name: str, length: int) -> str:
    return f"({name} [{name}_align=16])" if length % 16 == 0 else f"[{name}]"


def _scale(meta: TensorMeta, dims: str) -> str:
    return " ".join(["1"] * len(meta.shape)) or "-" if meta.numel == 1 else dims


rule(aten._scaled_mm, _scaled, flops=lambda node, metas: 2.0 * metas[0].numel * metas[1].shape[-1])


# Grouped products: ``ends``, the cumulative counts, assigns rows ``t`` to experts ``e``. A rank with some of the
# experts computes their rows, and zeros for the others.

ALIGNMENT_BYTES = 16  # of rows; the kernel demands it of shards too


def _aligned(name: str, meta: TensorMeta) -> str:
    return f"({name} [{name}_align={ALIGNMENT_BYTES // meta.itemsize}])"


def _grouped(node: Node, metas: Metas) -> str:
    shapes = [len(m.shape) for m in metas]
    k, n = _aligned("k", metas[0]), _aligned("n", metas[1])
    if shapes == [3, 3]:
        return f"e m {k}, e {k} {n} -> e m {n}"
    if shapes == [2, 3, 1]:
        return f"[t] {k}, e {k} {n}, [ends] -> [t] {n}"
    if shapes == [2, 2, 1]:  # the gradient of the weight
        return f"{k} [t], [t] {n}, [ends] -> e {k} {n}"
    return replicated(node, metas)


def _grouped_flops(node: Node, metas: Metas) -> float:
    """Return the FLOPs: each row is multiplied by the matrix of one expert."""
    return 2.0 * metas[0].numel * metas[1].shape[-1]


rule(aten._grouped_mm, _grouped, linear=BILINEAR, flops=_grouped_flops)

_library = OpName("transformers")
rule(
    _library.grouped_mm_fallback,
    "[t] k, e k n, [ends] -> [t] n",
    linear=BILINEAR,
    flops=lambda node, metas: 2.0 * metas[0].numel * metas[1].shape[-1],
)
rule(
    _library.grouped_mm_fallback_backward,
    "[t] k, e k n, [ends], [t] n -> [t] k, e k n",
    linear=((3,),),
    flops=lambda node, metas: 4.0 * metas[0].numel * metas[1].shape[-1],
)


def _first(experts: TensorMeta, spec: ShardingSpec | None) -> LocalArg | None:
    """Return the rank's first expert, or None if it has all."""
    return local_offset(experts.shape[0], spec.dims[0]) if spec is not None and spec.dims[0] else None


@lowering(aten._grouped_mm)
def _lower_grouped(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    result = node.outputs[0]
    assert result is not None
    shapes, whole = [len(m.shape) for m in metas], (node.op, node.args, node.kwargs)
    if shapes == [2, 3, 1]:
        first = _first(metas[1], strategy.inputs[1])
        return whole if first is None else ("autopar.grouped_mm_part.default", (*node.args[:3], first), ())
    spec = strategy.outputs[0]
    first = _first(result, spec) if shapes == [2, 2, 1] else None
    if first is None or spec is None:
        return whole
    experts = local_length(result.shape[0], spec.dims[0], mesh)
    return "autopar.grouped_mm_part_weight.default", (*node.args[:3], first, experts), ()


@lowering(_library.grouped_mm_fallback)
@lowering(_library.grouped_mm_fallback_backward)
def _lower_fallback(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    first = _first(metas[1], strategy.inputs[1])
    if first is None:
        return node.op, node.args, node.kwargs
    backward = "_backward" if node.packet.endswith("_backward") else ""
    operands = (*node.args[: 4 if backward else 3], *(v for _, v in node.kwargs if isinstance(v, Value)))
    return f"autopar.grouped_mm_part{backward}.default", (*operands, first), ()


# Products of rows that each name their experts ``r``. Rows ``t`` can be cut too, since no row depends on another. A
# rank with some of the experts ``e`` computes zeros for the rows of the others.


def keeping_alignment(name: str, meta: TensorMeta, length: int) -> str:
    """Return a factor that keeps alignment. Unaligned rows do not use the kernel, so they may be cut anywhere."""
    return name if length * meta.itemsize % ALIGNMENT_BYTES else _aligned(name, meta)


def _expert_terms(rows: TensorMeta, ids: TensorMeta, k: int, n: int, node: Node) -> tuple[str, ...]:
    """Return the terms of the rows, the matrices, the ids and the products."""
    lead = names(len(rows.shape) - 1, "t")
    each = [*lead, "r"][: len(ids.shape)]
    of_k, of_n = keeping_alignment("k", rows, k), keeping_alignment("n", rows, n)
    matrix = f"e {of_n} {of_k}" if node.kwarg("transposed") else f"e {of_k} {of_n}"
    return " ".join([*lead, of_k]), matrix, " ".join(each) or "-", " ".join([*each, of_n])


def _experts(node: Node, metas: Metas) -> str:
    rows, weight, ids = metas
    k, n = rows.shape[-1], weight.shape[1 if node.kwarg("transposed") else 2]
    of_rows, matrix, each, made = _expert_terms(rows, ids, k, n, node)
    return f"{of_rows}, {matrix}, {each} -> {made}"


def _experts_weight(node: Node, metas: Metas) -> str:
    rows, grad, ids = metas
    of_rows, matrix, each, made = _expert_terms(rows, ids, rows.shape[-1], grad.shape[-1], node)
    return f"{of_rows}, {made}, {each} -> {matrix}"


rule(
    autopar.experts_mm,
    _experts,
    linear=BILINEAR,
    flops=lambda node, metas: 2.0 * metas[2].numel * metas[1].numel / max(metas[1].shape[0], 1),
)
rule(
    autopar.experts_mm_weight,
    _experts_weight,
    linear=BILINEAR,
    flops=lambda node, metas: 2.0 * metas[0].shape[-1] * metas[1].numel,
)


@lowering(autopar.experts_mm)
def _lower_experts(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    return replace_kwargs(node, first=_first(metas[1], strategy.inputs[1]) or 0)


@lowering(autopar.experts_mm_weight)
def _lower_experts_weight(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    result, spec = node.outputs[0], strategy.outputs[0]
    assert result is not None
    assert spec is not None
    experts = local_length(result.shape[0], spec.dims[0], mesh)
    return replace_kwargs(node, first=_first(result, spec) or 0, experts=experts)
