"""Reading and writing at indices. Index dims and all other dims may be cut, the indexed dim included.

If the indexed dim is cut, each rank reads the elements that it holds, and zeros for the rest, so the result is a
partial sum; and it writes only the elements of its part.
"""

from __future__ import annotations

from autopar.ir import Node, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.sharding.strategy import Strategy
from autopar.strategies.localize import local_offset
from autopar.strategies.registry import LinearSets, LocalArg, LocalCall, Metas, aten, lowering, rule
from autopar.strategies.rules.terms import arg, dim_arg, names, replicated, term

rule(aten.embedding, "[v] d, ... -> ... d", linear=((0,),))


def _by_frequency(node: Node) -> bool:
    return bool(arg(node, 4, False, "scale_grad_by_freq"))


def _embedding_backward(node: Node, metas: Metas) -> str:
    # A division by how often each index occurs needs all indices on every rank.
    index = "[...]" if _by_frequency(node) else "..."
    return f"{index} d, {index} -> [v] d"


rule(aten.embedding_dense_backward, _embedding_backward, linear=((0,),))


def _embedding_bag(node: Node, metas: Metas) -> str:
    """Write the rule: only columns are cut. Rows are whole, since a bag may take the maximum over them."""
    operands = ["[v] d", *(f"[{side}{i}]" for i, side in enumerate("ios"[: len(metas) - 1]))]
    rest = (m or metas[1] for m in node.outputs[1:])
    places = (f"[bag{i}] d" if len(m.shape) == 2 else f"[n{i}] / d" for i, m in enumerate(rest))
    return f"{', '.join(operands)} -> [bag] d, {', '.join(places)}"


def _embedding_bag_backward(node: Node, metas: Metas) -> str:
    rest = (f"[bag{i}] d" if len(m.shape) == 2 else f"[n{i}]" for i, m in enumerate(metas[1:]))
    return f"[bag] d, {', '.join(rest)} -> [v] d"


rule(aten._embedding_bag, _embedding_bag)
rule(aten._embedding_bag_backward, _embedding_bag_backward, linear=((0,),))


def _shorter_dims(left: tuple[int, ...], right: tuple[int, ...], dim: int) -> list[int]:
    """Return the dims besides ``dim`` in which the index is shorter than the tensor. They are never cut."""
    return [i for i in range(len(left)) if i != dim and left[i] != right[i]]


def _is_bool(x: TensorMeta) -> bool:
    """Whether the values are booleans, which have no sum."""
    return x.dtype == "bool"


def _gather(node: Node, metas: Metas) -> str:
    x, index = metas[0].shape, metas[1].shape
    if not x:
        return "-, - -> -"
    dim = dim_arg(node, 1, len(x))
    short = _shorter_dims(x, index, dim)
    dims = names(len(x))
    whole = [dim, *short] if _is_bool(metas[0]) else short
    read = term([f"x{i}" if i == dim or i in short else d for i, d in enumerate(dims)], whole)
    indexed = term(["j" if i == dim else f"j{i}" if i in short else d for i, d in enumerate(dims)], short)
    return f"{read}, {indexed} -> {indexed}"


rule(aten.gather, _gather, linear=((0,),))


def _scatter(node: Node, metas: Metas) -> str:
    """Write the rule for self, index and, if the values are a tensor, source."""
    x = metas[0].shape
    dims = names(len(x))
    dim = dim_arg(node, 1, len(x)) if x else 0
    others = [m.shape for m in metas[1:]]
    short = sorted({i for o in others for i in _shorter_dims(x, o, dim)})
    whole = [dim, *short] if x else []
    written = term([f"x{i}" if i in whole else d for i, d in enumerate(dims)], short)
    rest = (term([f"{s}{i}" if i in whole else d for i, d in enumerate(dims)], whole) for s in "js"[: len(others)])
    return f"{written}, {', '.join(rest)} -> {written}"


def _scatter_sums(node: Node, metas: Metas) -> LinearSets:
    return ((0, 2),) if len(metas) == 3 else ((0,),) if node.args[3] == 0 else ()


rule(aten.scatter.src, _scatter, linear=_scatter_sums)
rule(aten.scatter.value, _scatter, linear=_scatter_sums)
rule(aten.scatter_add, _scatter, linear=((0, 2),))
rule(aten.scatter_reduce, _scatter)


def _index_select(node: Node, metas: Metas) -> str:
    dims = names(len(metas[0].shape))
    dim = dim_arg(node, 1, len(dims))
    index = "j" if metas[1].shape else "-"
    after = [*dims[:dim], "j" if metas[1].shape else "1", *dims[dim + 1 :]]
    whole = [] if metas[1].shape and not _is_bool(metas[0]) else [dim]
    return f"{term(dims, whole)}, {index} -> {term(after)}" if dims else "-, [one] -> -"


rule(aten.index_select, _index_select, linear=((0,),))


def _index_add(node: Node, metas: Metas) -> str:
    dims = names(len(metas[0].shape))
    dim = dim_arg(node, 1, len(dims))
    source = [*dims[:dim], "j", *dims[dim + 1 :]]
    if not dims:
        return f"-, {'[j]' if metas[1].shape else '-'}, {'[j]' if metas[2].shape else '-'} -> -"
    return f"{term(dims)}, [j], {term(source, [dim])} -> {term(dims)}"


rule(aten.index_add, _index_add, linear=((0, 2),))
rule(aten.index_copy, _index_add, linear=((0, 2),))
rule(aten.index_reduce, _index_add)
rule(aten.index_fill.int_Scalar, replicated)


def _take(node: Node, metas: Metas) -> str:
    """Write the rule. Indices count elements of the global tensor, so it is never cut."""
    shape = metas[0].shape
    return f"{term(names(len(shape), 'x'), range(len(shape)))}, ... -> ..."


rule(aten.take, _take, linear=((0,),))


def _indexed(node: Node) -> tuple[int, ...]:
    """Return the dims of the first operand that tensors index."""
    indices = node.args[1]
    assert isinstance(indices, tuple)
    return tuple(i for i, index in enumerate(indices) if isinstance(index, Value))


def _cuttable_dim(node: Node, metas: Metas) -> int:
    """Return the indexed dim that may be cut, the longest."""
    return max(_indexed(node), key=lambda i: metas[0].shape[i], default=-1)


def _index_terms(node: Node, metas: Metas, indices: Metas, index: str) -> tuple[str, list[str], str] | None:
    """Return the terms of x, of each index tensor and of the picked elements; None for masks, whose counts vary.

    Index tensors broadcast with each other. Their dims take the place of the first indexed dim if the indexed dims are
    adjacent, else they come first.
    """
    if any(m.dtype in ("bool", "uint8") for m in indices):
        return None
    x = names(len(metas[0].shape))
    at = _indexed(node)
    width = max((len(m.shape) for m in indices), default=0)
    picked = [index.format(f"j{i}") for i in range(width)]
    kept = [d for i, d in enumerate(x) if i not in at]
    adjacent = not at or at == tuple(range(at[0], at[0] + len(at)))
    front = at[0] if at and adjacent else 0
    terms = [" ".join(picked[width - len(m.shape) :]) or "-" for m in indices]
    whole = [i for i in at if i != _cuttable_dim(node, metas) or _is_bool(metas[0])]
    return term(x, whole), terms, " ".join([*kept[:front], *picked, *kept[front:]]) or "-"


def _index(node: Node, metas: Metas) -> str:
    terms = _index_terms(node, metas, metas[1:], "{}")
    return f"{', '.join([terms[0], *terms[1]])} -> {terms[2]}" if terms else replicated(node, metas)


def _index_put(node: Node, metas: Metas) -> str:
    terms = _index_terms(node, metas, metas[1:-1], "[{}]")
    if terms is None:
        return replicated(node, metas)
    x, index, picked = terms
    dims = picked.replace("-", "").split()
    values = dims[len(dims) - len(metas[-1].shape) :]
    return f"{', '.join([x, *index, ' '.join(values) or '-'])} -> {x}"


def _index_put_sums(node: Node, metas: Metas) -> LinearSets:
    return ((0, len(metas) - 1),)


rule(aten.index.Tensor, _index, linear=((0,),))
rule(aten._unsafe_index.Tensor, _index, linear=((0,),))
rule(aten.index_put, _index_put, linear=_index_put_sums)
rule(aten._unsafe_index_put, _index_put, linear=_index_put_sums)


# What a rank runs if the indexed dim is cut.


def _offset(x: TensorMeta, strategy: Strategy, dim: int) -> LocalArg | None:
    """Return where the rank's part of the indexed dim begins, or None if the dim is whole."""
    return local_offset(x.shape[dim], strategy.inputs[0].dims[dim]) if strategy.inputs[0].dims[dim] else None


def _cut_dim(node: Node, strategy: Strategy, metas: Metas) -> tuple[int, LocalArg | None]:
    """Return the dim that the op's second argument names, and where the rank's part of it begins."""
    if not metas[0].shape:
        return 0, None
    dim = dim_arg(node, 1, len(metas[0].shape))
    return dim, _offset(metas[0], strategy, dim)


@lowering(aten.gather)
def _lower_gather(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    dim, offset = _cut_dim(node, strategy, metas)
    if offset is None:
        return node.op, node.args, node.kwargs
    return "autopar.gather_part.default", (node.args[0], dim, node.args[2], offset), ()


@lowering(aten.index_select)
def _lower_index_select(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    dim, offset = _cut_dim(node, strategy, metas)
    if offset is None:
        return node.op, node.args, node.kwargs
    indices = (*[None] * dim, node.args[2])
    return "autopar.index_part.default", (node.args[0], indices, dim, offset, metas[0].shape[dim]), ()


@lowering(aten.index.Tensor)
@lowering(aten._unsafe_index.Tensor)
def _lower_index(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    at = _cuttable_dim(node, metas)
    offset = _offset(metas[0], strategy, at) if at >= 0 else None
    if offset is None:
        return node.op, node.args, node.kwargs
    return "autopar.index_part.default", (*node.args[:2], at, offset, metas[0].shape[at]), ()


@lowering(aten.index_put)
@lowering(aten._unsafe_index_put)
def _lower_index_put(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    at = _cuttable_dim(node, metas)
    offset = _offset(metas[0], strategy, at) if at >= 0 else None
    if offset is None:
        return node.op, node.args, node.kwargs
    accumulate = bool(arg(node, 3, False, "accumulate"))
    args = (*node.args[:3], accumulate, at, offset, metas[0].shape[at])
    return "autopar.index_put_part.default", args, ()


@lowering(aten.scatter.src)
@lowering(aten.scatter.value)
@lowering(aten.scatter_add)
@lowering(aten.scatter_reduce)
def _lower_scatter(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    x, _, index, given = node.args[:4]
    at, offset = _cut_dim(node, strategy, metas)
    if offset is None:
        return node.op, node.args, node.kwargs
    kind = {"aten.scatter": "set", "aten.scatter_add": "sum"}.get(node.packet) or str(arg(node, 4, "", "reduce"))
    source, value = (given, 0) if isinstance(given, Value) else (None, given)
    rest = (kind, bool(arg(node, 5, True, "include_self")), offset)
    return "autopar.scatter_part.default", (x, at, index, source, value, *rest), ()


@lowering(aten.index_add)
@lowering(aten.index_copy)
@lowering(aten.index_reduce)
def _lower_index_write(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    dim, offset = _cut_dim(node, strategy, metas)
    if offset is None:
        return node.op, node.args, node.kwargs
    kind = node.packet.removeprefix("aten.index_")
    kind = str(arg(node, 4, "", "reduce")) if kind == "reduce" else kind
    rest = (kind, node.kwarg("alpha", 1), bool(node.kwarg("include_self", True)), offset)
    return "autopar.index_write_part.default", (node.args[0], dim, node.args[2], node.args[3], *rest), ()


rule(aten.nonzero, replicated)
rule(aten.masked_scatter, replicated)
rule(aten.masked_scatter_backward, replicated, linear=((0,),))
rule(aten.bucketize.Tensor, "..., [boundaries] -> ...", elementwise=True)
rule(aten.searchsorted.Tensor, "... [sorted], ... values -> ... values")


def _histogram(node: Node, metas: Metas) -> str:
    """Write the rule: counts add up. Without bounds they are those of the values."""
    lowest, highest = arg(node, 2, 0, "min"), arg(node, 3, 0, "max")
    return replicated(node, metas) if lowest == highest else f"{term(names(len(metas[0].shape)))} -> [bins]"


rule(aten.histc, _histogram)
rule(aten.put, replicated)
rule("aten.repeat_interleave.Tensor", replicated)
rule(aten.bincount, replicated)


def _isin(node: Node, metas: Metas) -> str:
    shape = metas[1].shape
    return f"..., {term(names(len(shape), 'test'), range(len(shape)))} -> ..."


rule(aten.isin.Tensor_Tensor, _isin)
