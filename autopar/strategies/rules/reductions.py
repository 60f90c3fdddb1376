"""Reductions, scans and softmax.

A sum or a maximum over a cut dim is partial. A mean is not, since ranks may hold different counts: averaged dims stay
whole, as do those of a median. If a dim is written ``{d}``, ranks exchange summaries; see ``combined``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from autopar.ir import Node
from autopar.strategies.registry import LinearSets, Metas, Notation, OpName, aten, rule
from autopar.strategies.rules.terms import arg, dim_arg, dims_arg, names, term


def _reduced(ndim: int, dims: Sequence[int], keep: bool, *, cut: str, results: int = 1) -> str:
    """Write the rule of a reduction. ``cut`` is the format of a reduced dim."""
    before = names(ndim)
    after = ["1" if i in dims else d for i, d in enumerate(before) if keep or i not in dims]
    whole = f" / {' '.join(before[i] for i in dims)}" if cut == COMBINED and dims else ""
    operand = " ".join(cut.format(d) if i in dims else d for i, d in enumerate(before)) or "-"
    return f"{operand} -> {', '.join([(' '.join(after) or '-') + whole] * results)}"


PARTIAL, WHOLE, COMBINED = "{}", "[{}]", "{{{}}}"
"""How a reduced dim is written: may be cut and leaves the result partial; never cut; or cut with summaries."""


def _over(dims_at: int | None, keep_at: int | None, cut: str, *, results: int = 1) -> Notation:
    """Return the rule of a reduction over the dims in argument ``dims_at``, or over all if it is None or absent."""

    def notation(node: Node, metas: Metas) -> str:
        ndim = len(metas[0].shape)
        dims = tuple(range(ndim)) if dims_at is None or ndim == 0 else dims_arg(node, dims_at, ndim)
        keep = keep_at is not None and bool(arg(node, keep_at, False, "keepdim"))
        return _reduced(ndim, dims, keep, cut=cut, results=results)

    return notation


def _extremes(node: Node, metas: Metas) -> str:
    """Write the rule of aminmax. Reduced dims are never cut: one op would need two reductions."""
    ndim, dim = len(metas[0].shape), node.kwarg("dim")
    dims = range(ndim) if dim is None else [int(cast(int, dim)) % max(ndim, 1)]
    return _reduced(ndim, dims, bool(node.kwarg("keepdim", False)), cut=WHOLE, results=2)


rule(aten.sum.default, _over(None, None, PARTIAL), linear=((0,),))
rule(aten.sum.dim_IntList, _over(1, 2, PARTIAL), linear=((0,),))
rule(aten.mean.default, _over(None, None, WHOLE), linear=((0,),))
rule(aten.mean.dim, _over(1, 2, WHOLE), linear=((0,),))
rule(aten.nansum, _over(1, 2, PARTIAL))
rule(aten.count_nonzero, _over(1, None, PARTIAL))

rule(aten.amax, _over(1, 2, PARTIAL), reduction="max")
rule(aten.amin, _over(1, 2, PARTIAL), reduction="min")
rule(aten.max.default, _over(None, None, PARTIAL), reduction="max")
rule(aten.min.default, _over(None, None, PARTIAL), reduction="min")
rule(aten.max.dim, _over(1, 2, COMBINED, results=2))
rule(aten.min.dim, _over(1, 2, COMBINED, results=2))
rule(aten.aminmax, _extremes)
rule(aten.max.other, "..., ... -> ...", elementwise=True)
rule(aten.min.other, "..., ... -> ...", elementwise=True)
rule(aten.argmax, _over(1, 2, COMBINED))
rule(aten.argmin, _over(1, 2, COMBINED))

rule(aten.any.default, _over(None, None, COMBINED))
rule(aten.any.dim, _over(1, 2, COMBINED))
rule(aten.any.dims, _over(1, 2, COMBINED))
rule(aten.all.default, _over(None, None, COMBINED))
rule(aten.all.dim, _over(1, 2, COMBINED))
rule(aten.all.dims, _over(1, 2, COMBINED))
rule(aten.prod.default, _over(None, None, COMBINED))
rule(aten.prod.dim_int, _over(1, 2, COMBINED))


def _moments(results: int) -> Notation:
    """Return the rule of variances. ``correction`` and ``keepdim`` are keyword arguments of the newest overload."""
    return _over(1, 3, COMBINED, results=results)


rule(aten.var.correction, _moments(1))
rule(aten.std.correction, _moments(1))
rule(aten.var_mean.correction, _moments(2))
rule(aten.std_mean.correction, _moments(2))
rule(aten.logsumexp, _over(1, 2, COMBINED))
rule(aten.linalg_vector_norm, _over(2, 3, COMBINED))
rule(aten.norm.ScalarOpt_dim, _over(2, 3, COMBINED))
rule(aten.median.default, _over(None, None, WHOLE))
rule(aten.median.dim, _over(1, 2, WHOLE, results=2))
rule(aten.nanmedian.dim, _over(1, 2, WHOLE, results=2))


def _one_of(dim_at: int) -> Notation:
    """Return the rule of a value and its position along one dim, by default the last."""

    def notation(node: Node, metas: Metas) -> str:
        ndim = len(metas[0].shape)
        keep = bool(arg(node, dim_at + 1, False, "keepdim"))
        return _reduced(ndim, [dim_arg(node, dim_at, ndim, -1)], keep, cut=WHOLE, results=2)

    return notation


rule(aten.kthvalue, _one_of(2))
rule(aten.mode, _one_of(1))


def _along(position: int, cut: str = COMBINED, *, results: int = 1, default: int = 0) -> Notation:
    """Return the rule of ops along one dim. All tensors have the same dims; ``cut`` is the format of that dim."""

    def notation(node: Node, metas: Metas) -> str:
        ndim = len(metas[0].shape)
        at = dim_arg(node, position, ndim, default)
        dims = " ".join(cut.format(d) if i == at else d for i, d in enumerate(names(ndim))) or "-"
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
_each([aten.sort.default], _along(1, WHOLE, results=2, default=-1))
_each([aten.sort.stable], _along(2, WHOLE, results=2, default=-1))  # ``stable`` is a keyword, or comes first
_each([aten.argsort.default], _along(1, WHOLE, default=-1))


def _halved(node: Node, metas: Metas) -> str:
    """Write the rule of GLU and its gradient. The result has half of a dim of the operand."""
    shape = metas[-1].shape
    dim = dim_arg(node, len(metas), len(shape), -1)
    whole, half = ([*names(dim), p, *names(len(shape), "d")[dim + 1 :]] for p in ("whole", "half"))
    sides = term(half, [dim]), term(whole, [dim])
    return f"{sides[1]} -> {sides[0]}" if len(metas) == 1 else f"{sides[0]}, {sides[1]} -> {sides[1]}"


rule(aten.glu, _halved)
rule(aten.glu_backward, _halved, linear=((0,),))


def _topk(node: Node, metas: Metas) -> str:
    dims = names(len(metas[0].shape))
    if not dims:
        return "- -> -, -"
    at = dim_arg(node, 2, len(dims), -1)
    before, after = (" ".join(to if i == at else d for i, d in enumerate(dims)) for to in (f"{{d{at}}}", "[k]"))
    return f"{before} -> {', '.join([f'{after} / d{at}'] * 2)}"


rule(aten.topk, _topk)
