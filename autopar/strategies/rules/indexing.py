"""Reading and writing at indices. A dim that is indexed is whole; index dims and the others may be cut."""

from __future__ import annotations

from autopar.ir import Node, Value
from autopar.strategies.registry import LinearSets, Metas, aten, rule
from autopar.strategies.rules.terms import arg, dim_arg, names, replicated, term

rule(aten.embedding, "[v] d, ... -> ... d", linear=((0,),))


def _by_frequency(node: Node) -> bool:
    return bool(arg(node, 4, False, "scale_grad_by_freq"))


def _embedding_backward(node: Node, metas: Metas) -> str:
    # Divided by how often each index occurs, a rank would have to see all of them.
    index = "[...]" if _by_frequency(node) else "..."
    return f"{index} d, {index} -> [v] d"


rule(aten.embedding_dense_backward, _embedding_backward, linear=((0,),))


def _same(left: tuple[int, ...], right: tuple[int, ...], dim: int) -> list[int]:
    """Dims besides ``dim`` in which the index does not reach the end of the tensor: those are whole."""
    return [i for i in range(len(left)) if i != dim and left[i] != right[i]]


def _gather(node: Node, metas: Metas) -> str:
    x, index = metas[0].shape, metas[1].shape
    if not x:
        return "-, - -> -"
    dim = dim_arg(node, 1, len(x))
    short = _same(x, index, dim)
    dims = names(len(x))
    read = term([f"x{i}" if i == dim or i in short else d for i, d in enumerate(dims)], [dim, *short])
    indexed = term(["j" if i == dim else f"j{i}" if i in short else d for i, d in enumerate(dims)], short)
    return f"{read}, {indexed} -> {indexed}"


rule(aten.gather, _gather, linear=((0,),))


def _scatter(node: Node, metas: Metas) -> str:
    """Self, index and, where values are a tensor, source."""
    x = metas[0].shape
    dims = names(len(x))
    dim = dim_arg(node, 1, len(x)) if x else 0
    others = [m.shape for m in metas[1:]]
    short = sorted({i for o in others for i in _same(x, o, dim)})
    whole = [dim, *short] if x else []
    written = term([f"x{i}" if i in whole else d for i, d in enumerate(dims)], whole)
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
    return f"{term(dims, [dim])}, {index} -> {term(after)}" if dims else "-, [one] -> -"


rule(aten.index_select, _index_select, linear=((0,),))


def _index_add(node: Node, metas: Metas) -> str:
    dims = names(len(metas[0].shape))
    dim = dim_arg(node, 1, len(dims))
    source = [*dims[:dim], "j", *dims[dim + 1 :]]
    return f"{term(dims, [dim])}, [j], {term(source, [dim])} -> {term(dims, [dim])}"


rule(aten.index_add, _index_add, linear=((0, 2),))
rule(aten.index_copy, _index_add, linear=((0, 2),))
rule(aten.index_reduce, _index_add)
rule(aten.index_fill.int_Scalar, replicated)


def _take(node: Node, metas: Metas) -> str:
    """Indices count elements of the whole tensor."""
    shape = metas[0].shape
    return f"{term(names(len(shape), 'x'), range(len(shape)))}, ... -> ..."


rule(aten.take, _take, linear=((0,),))


def _indexed(node: Node) -> tuple[int, ...]:
    """The dims of the first operand that are indexed by tensors."""
    indices = node.args[1]
    assert isinstance(indices, tuple)
    return tuple(i for i, index in enumerate(indices) if isinstance(index, Value))


def _index_terms(node: Node, metas: Metas, indices: Metas, index: str) -> tuple[str, list[str], str] | None:
    """Terms of x, of each index tensor and of what the indices pick; None for masks, whose counts vary.

    Index tensors broadcast among themselves; their dims stand where the first one was if they are next to each
    other, else in front.
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
    return term(x, at), terms, " ".join([*kept[:front], *picked, *kept[front:]]) or "-"


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
rule(aten.nonzero, replicated)
rule(aten.masked_scatter, replicated)
rule(aten.masked_scatter_backward, replicated, linear=((0,),))
rule(aten.bucketize.Tensor, "..., [boundaries] -> ...", elementwise=True)
rule(aten.searchsorted.Tensor, "... [sorted], ... values -> ... values")
rule(aten.histc, replicated)
rule(aten.bincount, replicated)


def _isin(node: Node, metas: Metas) -> str:
    shape = metas[1].shape
    return f"..., {term(names(len(shape), 'test'), range(len(shape)))} -> ..."


rule(aten.isin.Tensor_Tensor, _isin)
