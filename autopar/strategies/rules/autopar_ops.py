"""autopar's own ops, which take the global position of the shard that they work on."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir import Node, TensorMeta
from autopar.mesh import Mesh
from autopar.sharding.local import local_length
from autopar.sharding.spec import ShardingSpec
from autopar.sharding.strategy import Strategy
from autopar.strategies.combine import Combine, Gathered, Operand
from autopar.strategies.localize import local_offset, local_shape
from autopar.strategies.registry import (
    LinearSets,
    LocalArg,
    LocalCall,
    Metas,
    Notation,
    autopar,
    combining,
    lowering,
    rule,
)
from autopar.strategies.rules.combined import GATHERED, cutting, local_counts, result, torch_dtype, with_operands

BILINEAR: LinearSets = ((0,), (1,))
FIRST: LinearSets = ((0,),)


def replace_kwargs(node: Node, **values: LocalArg) -> LocalCall:
    """Return the call with keyword arguments replaced."""
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
    """Convert an equation such as ``"bsk,nk->bsn"`` to the notation."""
    equation = next(a for a in (*node.args, *(a for _, a in node.kwargs)) if isinstance(a, str))
    left, right = equation.replace(" ", "").split("->")
    return f"{', '.join(' '.join(t) or '-' for t in left.split(','))} -> {' '.join(right) or '-'}"


rule(autopar.contract, _contraction, linear=BILINEAR, flops="product")


rule(autopar.checked_length, "..., - -> ...", linear=FIRST)

# Random numbers by global position.

rule(autopar.dropout, "..., - -> ...", linear=FIRST, elementwise=True)
rule(autopar.uniform, "- -> ...")


def global_offsets(node: Node, shape: Sequence[int], cuts: Sequence[tuple[int, ...]]) -> tuple[LocalArg, ...]:
    """Return where a rank's part of a tensor of random numbers begins; ``shape`` and ``cuts`` are of its first dims."""
    given = node.kwarg("offset")
    before = given if isinstance(given, tuple) and given else (0,) * len(shape)
    rest = before[len(shape) :]
    return (*(local_offset(n, axes, b) for n, axes, b in zip(shape, cuts, before, strict=False)), *rest)


@lowering(autopar.dropout)
def _lower_dropout(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    return replace_kwargs(node, offset=global_offsets(node, metas[0].shape, strategy.inputs[0].dims))


@lowering(autopar.uniform)
def _lower_uniform(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    shape, spec = _meta(node.outputs[0]).shape, _spec(strategy.outputs[0])
    return replace_kwargs(node, shape=local_shape(shape, spec, mesh), offset=global_offsets(node, shape, spec.dims))


# If the rows of a vocabulary are cut, rows that a rank does not hold count as zeros.

rule(autopar.lookup, "v d, ... -> ... d", linear=FIRST)
rule(autopar.lookup_backward, "... d, ... -> v d", linear=FIRST)


@lowering(autopar.lookup)
def _lower_lookup(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    rows = metas[0].shape[0]
    return replace_kwargs(node, offset=local_offset(rows, strategy.inputs[0].dims[0]), vocabulary=rows)


@lowering(autopar.lookup_backward)
def _lower_lookup_backward(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    rows, axes = _meta(node.outputs[0]).shape[0], _spec(strategy.outputs[0]).dims[0]
    return replace_kwargs(node, rows=local_length(rows, axes, mesh), offset=local_offset(rows, axes))


# Cross entropy over a cut vocabulary reduces the maximum ``m`` and the sum of exponentials on the way.

rule(autopar.sumexp, "... v, ... -> ...")


def _weighted(metas: Metas, plain: int) -> str:
    """Return the terms for class weights: the share of each row's target, and the shares of the other classes."""
    return ", ..., v" if len(metas) > plain else ""


rule(autopar.nll, lambda node, metas: f"... v, ..., ...{_weighted(metas, 3)} -> ...")
rule(autopar.nll_backward, lambda node, metas: f"..., ... v, ..., ...{_weighted(metas, 4)} -> ... v", linear=FIRST)


@lowering(autopar.nll)
def _lower_nll(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    classes = metas[0].shape[-1]
    return replace_kwargs(node, offset=local_offset(classes, strategy.inputs[0].dims[-1]), vocabulary=classes)


@lowering(autopar.nll_backward)
def _lower_nll_backward(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    return replace_kwargs(node, offset=local_offset(metas[1].shape[-1], strategy.inputs[1].dims[-1]))


def _lower_rows(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    return replace_kwargs(node, offset=local_offset(metas[2].shape[0], strategy.inputs[2].dims[0]))


# The same, fused with the product that computes the logits. Its summed dim is never cut: the logits would be partial
# sums, and exchanging them would materialize all of them.


def _linear_nll(node: Node, metas: Metas) -> str:
    bias = ", v" if len(metas) % 2 == 0 else ""
    return f"... [k], {{v}} [k]{bias}, ...{_weighted(metas, 4)} -> ... / v, ... / v"


def _linear_nll_backward(node: Node, metas: Metas) -> str:
    bias = ", v" if len(metas) % 2 == 0 else ""
    return f"..., ... [k], v [k]{bias}, ..., ...{_weighted(metas, 6)} -> ... [k], v [k], v"


def _products(node: Node, metas: Metas) -> float:
    """Return the FLOPs of recomputing the logits, and of a product for each gradient."""
    gradients = sum(made is not None for made in node.outputs[:2])
    return 2.0 * (1 + gradients) * metas[1].numel * metas[2].shape[0]


rule(autopar.linear_nll, _linear_nll, flops="product")
rule(autopar.linear_nll_backward, _linear_nll_backward, linear=FIRST, flops=_products)
lowering(autopar.linear_nll_backward)(_lower_rows)


@combining(autopar.linear_nll)
def _combine_linear_nll(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Combine | None:
    classes, axes = metas[1].shape[0], strategy.inputs[1].dims[0]
    if not axes:
        return None
    ignored = ("ignore_index", node.kwarg("ignore_index"))
    smoothed = tuple((name, value) for name, value in node.kwargs if name in ("own", "each"))
    shape = strategy.inputs[0].local_shape(metas[0].shape, mesh)
    meta = TensorMeta((2, *shape[:-1]), "float64" if metas[0].dtype == "float64" else "float32")
    args = with_operands(node.args)
    summary = ("autopar.linear_nll_part.default", args, (ignored, ("offset", local_offset(classes, axes)), *smoothed))
    finish = ("autopar.linear_nll_of_parts.default", (Gathered(), args[3]), (ignored, ("vocabulary", classes)))
    return Combine(summary, (meta,), axes, finish)


# Connectionist temporal classification: frames and labels of a sample belong together.

rule(autopar.ctc, "[t] n [c], n [s], n, n -> n, [t] n [c]")


# Batch normalization. For the statistics ranks exchange the moments of their parts; in the ops that apply them every
# dim may be cut.


def _channels(tensors: int, results: str) -> Notation:
    """Return a rule for ``tensors`` operands of shape [n, c, ...], followed by vectors of channels."""

    def notation(node: Node, metas: Metas) -> str:
        x = " ".join(["n", "c", *(f"s{i}" for i in range(len(metas[0].shape) - 2))])
        return f"{', '.join([x] * tensors + ['c'] * (len(metas) - tensors))} -> {results.format(x=x)}"

    return notation


def _batch_var_mean(node: Node, metas: Metas) -> str:
    inside = ["n", *(f"s{i}" for i in range(len(metas[0].shape) - 2))]
    first, *space = (f"{{{name}}}" for name in inside)
    statistics = f"c / {' '.join(inside)}"
    return f"{first} c {' '.join(space)} -> {statistics}, {statistics}"


def _gradient_and_sums(node: Node, metas: Metas) -> LinearSets:
    """Return the linear set: the gradient and its two sums, the last operands."""
    return ((0, len(metas) - 2, len(metas) - 1),)


rule(autopar.batch_var_mean, _batch_var_mean)
rule(autopar.batch_norm, _channels(1, "{x}"))
rule(autopar.batch_norm_backward_reduce, _channels(2, "c, c"), linear=FIRST)
rule(autopar.batch_norm_backward_input, _channels(2, "{x}"), linear=_gradient_and_sums)


@combining(autopar.batch_var_mean)
def _combine_batch_var_mean(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Combine | None:
    dims = [d for d in range(len(metas[0].shape)) if d != 1]
    axes, spec = cutting(strategy, dims), strategy.outputs[0]
    if not axes or spec is None:
        return None
    meta = result(node)
    moments = TensorMeta((2, *spec.local_shape(meta.shape, mesh)), meta.dtype)
    args = (
        GATHERED,
        local_counts(strategy, metas, dims, mesh),
        0.0,
        False,
        local_shape(meta.shape, spec, mesh),
        torch_dtype(meta.dtype),
    )
    finish = ("autopar.var_mean_of_moments.default", args, ())
    return Combine(("autopar.batch_moments.default", (Operand(0),), ()), (moments,), axes, finish)
