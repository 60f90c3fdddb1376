"""Reductions, scans and softmax.

A sum or a maximum over a cut dim is partial. A mean is not: ranks may hold different counts, so the dims that are
averaged stay whole, as do those of every op that sees all of a dim at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir import Node
from autopar.strategies.registry import LinearSets, Metas, Notation, OpName, aten, rule
from autopar.strategies.rules.terms import arg, dim_arg, dims_arg, names, term


def _reduced(ndim: int, dims: Sequence[int], keep: bool, *, whole: bool, results: int = 1) -> str:
    before = names(ndim)
    after = ["1" if i in dims else d for i, d in enumerate(before) if keep or i not in dims]
    return f"{term(before, dims if whole else ())} -> {', '.join([' '.join(after) or '-'] * results)}"


def _over(dims_at: int | None, keep_at: int | None, *, whole: bool, results: int = 1) -> Notation:
    """Reduction over the dims in argument ``dims_at``; all of them where it is None or absent."""

    def notation(node: Node, metas: Metas) -> str:
        ndim = len(metas[0].shape)
        dims = tuple(range(ndim)) if dims_at is None or ndim == 0 else dims_arg(node, dims_at, ndim)
        keep = keep_at is not None and bool(arg(node, keep_at, False, "keepdim"))
        return _reduced(ndim, dims, keep, whole=whole, results=results)

    return notation


rule(aten.sum.default, _over(None, None, whole=False), linear=((0,),))
rule(aten.sum.dim_IntList, _over(1, 2, whole=False), linear=((0,),))
rule(aten.mean.default, _over(None, None, whole=True), linear=((0,),))
rule(aten.mean.dim, _over(1, 2, whole=True), linear=((0,),))
rule(aten.nansum, _over(1, 2, whole=False))
rule(aten.count_nonzero, _over(1, None, whole=False))

rule(aten.amax, _over(1, 2, whole=False), reduction="max")
rule(aten.amin, _over(1, 2, whole=False), reduction="min")
rule(aten.max.default, _over(None, None, whole=False), reduction="max")
rule(aten.min.default, _over(None, None, whole=False), reduction="min")
rule(aten.max.dim, _over(1, 2, whole=True, results=2))
rule(aten.min.dim, _over(1, 2, whole=True, results=2))
rule(aten.max.other, "..., ... -> ...", elementwise=True)
rule(aten.min.other, "..., ... -> ...", elementwise=True)
rule(aten.argmax, _over(1, 2, whole=True))
rule(aten.argmin, _over(1, 2, whole=True))

rule(aten.any.default, _over(None, None, whole=True))
rule(aten.any.dim, _over(1, 2, whole=True))
rule(aten.any.dims, _over(1, 2, whole=True))
rule(aten.all.default, _over(None, None, whole=True))
rule(aten.all.dim, _over(1, 2, whole=True))
rule(aten.all.dims, _over(1, 2, whole=True))
rule(aten.prod.default, _over(None, None, whole=True))
rule(aten.prod.dim_int, _over(1, 2, whole=True))


def _moments(results: int) -> Notation:
    """Variances: ``correction`` and ``keepdim`` are keyword arguments of the newest overload."""
    return _over(1, 3, whole=True, results=results)


rule(aten.var.correction, _moments(1))
rule(aten.std.correction, _moments(1))
rule(aten.var_mean.correction, _moments(2))
rule(aten.logsumexp, _over(1, 2, whole=True))
rule(aten.linalg_vector_norm, _over(2, 3, whole=True))
rule(aten.norm.ScalarOpt_dim, _over(2, 3, whole=True))
rule(aten.median.default, _over(None, None, whole=True))
rule(aten.median.dim, _over(1, 2, whole=True, results=2))
rule(aten.nanmedian.dim, _over(1, 2, whole=True, results=2))


def _one_of(dim_at: int) -> Notation:
    """A value and its position along one dim, the last where none is named."""

    def notation(node: Node, metas: Metas) -> str:
        ndim = len(metas[0].shape)
        keep = bool(arg(node, dim_at + 1, False, "keepdim"))
        return _reduced(ndim, [dim_arg(node, dim_at, ndim, -1)], keep, whole=True, results=2)

    return notation


rule(aten.kthvalue, _one_of(2))
rule(aten.mode, _one_of(1))


def _along(position: int, *, results: int = 1, default: int = 0, name: str = "dim") -> Notation:
    """All operands and results have the same dims, and the one that is an argument is whole."""

    def notation(node: Node, metas: Metas) -> str:
        ndim = len(metas[0].shape)
        dims = term(names(ndim), [dim_arg(node, position, ndim, default, name)])
        return f"{', '.join([dims] * len(metas))} -> {', '.join([dims] * results)}"

    return notation


def _each(ops: Sequence[OpName], notation: Notation, linear: LinearSets = ()) -> None:
    for op in ops:
        rule(op, notation, linear=linear)


_each([aten.cumsum], _along(1), ((0,),))
_each([aten.cumprod, aten.logcumsumexp], _along(1))
_each([aten.cummax, aten.cummin], _along(1, results=2))
_each([aten._softmax, aten._log_softmax, aten._safe_softmax], _along(1))
_each([aten.softmax.int, aten.log_softmax.int], _along(1))
_each([aten._softmax_backward_data, aten._log_softmax_backward_data], _along(2), ((0,),))
_each([aten.sort.default], _along(1, results=2, default=-1))
_each([aten.sort.stable], _along(2, results=2, default=-1))  # ``stable`` is a keyword, or comes first
_each([aten.argsort.default], _along(1, default=-1))


def _halved(node: Node, metas: Metas) -> str:
    """Gated linear unit: the result has half of a dim; its gradient has the whole again."""
    shape = metas[-1].shape
    dim = dim_arg(node, len(metas), len(shape), -1)
    whole, half = ([*names(dim), p, *names(len(shape), "d")[dim + 1 :]] for p in ("whole", "half"))
    sides = term(half, [dim]), term(whole, [dim])
    return f"{sides[1]} -> {sides[0]}" if len(metas) == 1 else f"{sides[0]}, {sides[1]} -> {sides[1]}"


rule(aten.glu, _halved)
rule(aten.glu_backward, _halved, linear=((0,),))


def _topk(node: Node, metas: Metas) -> str:
    ndim = len(metas[0].shape)
    dim = dim_arg(node, 2, ndim, -1)
    after = [f"k{i}" if i == dim else d for i, d in enumerate(names(ndim))]
    return f"{term(names(ndim), [dim])} -> {', '.join([term(after, [dim])] * 2)}"


rule(aten.topk, _topk)
