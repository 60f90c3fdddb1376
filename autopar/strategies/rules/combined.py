"""How ops run along a cut dim if ranks first exchange summaries of their parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from autopar.ir import Node, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.sharding.local import LocalOffset
from autopar.sharding.strategy import Strategy
from autopar.strategies.combine import Combine, Gathered, Operand, counts, ways
from autopar.strategies.localize import local_offset, local_shape
from autopar.strategies.registry import Metas, aten, combining
from autopar.strategies.rules.terms import arg, dim_arg, dims_arg, int_arg

GATHERED = Gathered()


def torch_dtype(dtype: str) -> str:
    return f"torch.{dtype}"


def wide(dtype: str) -> str:
    """Return the dtype in which sums are accumulated."""
    return "float64" if dtype == "float64" else "float32"


def result(node: Node, index: int = 0) -> TensorMeta:
    meta = node.outputs[index]
    assert meta is not None
    return meta


def cutting(strategy: Strategy, dims: Sequence[int], operand: int = 0) -> tuple[int, ...]:
    """Return the mesh axes that cut any of ``dims``, in order of the dims. A scalar counts as having an uncut dim 0."""
    cut = strategy.inputs[operand].dims
    return tuple(a for d in dims if cut for a in cut[d])


def kept(
    strategy: Strategy, meta: TensorMeta, dims: Sequence[int], mesh: Mesh, n: int = 1, operand: int = 0
) -> tuple[int, ...]:
    """Return the local shape on the fullest rank with ``dims`` reduced to ``n`` elements."""
    shape = meta.local_shape(strategy.inputs[operand], mesh)
    return tuple(n if i in dims else m for i, m in enumerate(shape))


def local_counts(strategy: Strategy, metas: Metas, dims: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """Return how many elements of ``dims`` of the first operand each rank summarizes."""
    spec, shape = strategy.inputs[0], metas[0].shape
    return counts([(shape[d], spec.dims[d]) for d in dims], cutting(strategy, dims), mesh)


def with_operands(args: Sequence[Any]) -> tuple[Any, ...]:
    """Replace each tensor in the arguments by an ``Operand``, numbered in order."""
    found = iter(range(len(args)))
    return tuple(Operand(next(found)) if isinstance(a, Value) else a for a in args)


# Reductions whose partial results are combined by a reduction of the same kind.


def _dims(node: Node, metas: Metas, position: int | None) -> tuple[int, ...]:
    ndim = len(metas[0].shape)
    return tuple(range(ndim)) if position is None or ndim == 0 else dims_arg(node, position, ndim)


Recombine = Callable[[Node], "tuple[str, tuple[Any, ...]] | None"]

_RECOMBINED: Mapping[str, tuple[int | None, Recombine]] = {
    "aten.any.default": (None, lambda node: ("aten.any.dim", (GATHERED, 0))),
    "aten.any.dim": (1, lambda node: ("aten.any.dim", (GATHERED, 0))),
    "aten.any.dims": (1, lambda node: ("aten.any.dim", (GATHERED, 0))),
    "aten.all.default": (None, lambda node: ("aten.all.dim", (GATHERED, 0))),
    "aten.all.dim": (1, lambda node: ("aten.all.dim", (GATHERED, 0))),
    "aten.all.dims": (1, lambda node: ("aten.all.dim", (GATHERED, 0))),
    "aten.prod.default": (None, lambda node: ("aten.prod.dim_int", (GATHERED, 0))),
    "aten.prod.dim_int": (1, lambda node: ("aten.prod.dim_int", (GATHERED, 0))),
    "aten.logsumexp.default": (1, lambda node: ("aten.logsumexp.default", (GATHERED, (0,)))),
    "aten.linalg_vector_norm.default": (2, lambda node: _norm_of_norms(node, "aten.linalg_vector_norm.default")),
    "aten.norm.ScalarOpt_dim": (2, lambda node: _norm_of_norms(node, "aten.norm.ScalarOpt_dim")),
}
"""For each op, the position of its dims argument, and the call on the gathered summaries."""


def _norm_of_norms(node: Node, op: str) -> tuple[str, tuple[Any, ...]] | None:
    """Return the call for the norm of the parts' norms, or None for p = 0, which counts elements."""
    p = arg(node, 1, 2)
    return None if p == 0 else (op, (GATHERED, 2 if p is None else p, (0,)))


@combining(*_RECOMBINED)
def _reduction(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Combine | None:
    position, recombine = _RECOMBINED[node.op]
    axes, call = cutting(strategy, _dims(node, metas, position)), recombine(node)
    spec = strategy.outputs[0]
    if not axes or call is None or spec is None:
        return None
    meta = TensorMeta(result(node).local_shape(spec, mesh), result(node).dtype)
    return Combine((node.op, with_operands(node.args), node.kwargs), (meta,), axes, (*call, ()))


@combining(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def _variance(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Combine | None:
    dims = _dims(node, metas, 1)
    axes, spec = cutting(strategy, dims), strategy.outputs[0]
    if not axes or spec is None or metas[0].dtype.startswith("complex"):
        return None
    meta = TensorMeta((2, *kept(strategy, metas[0], dims, mesh)), wide(metas[0].dtype))
    correction = node.kwarg("correction", 1)
    args = (
        GATHERED,
        local_counts(strategy, metas, dims, mesh),
        float(cast(float, 1 if correction is None else correction)),
        "std" in node.packet,
        local_shape(result(node).shape, spec, mesh),
        torch_dtype(result(node).dtype),
    )
    op = "autopar.variance_of_moments.default" if len(node.outputs) == 1 else "autopar.var_mean_of_moments.default"
    return Combine(("autopar.moments.default", (Operand(0), dims), ()), (meta,), axes, (op, args, ()))


# Softmax and its gradient.


@combining(aten._softmax, aten._log_softmax, aten._safe_softmax, aten.softmax.int, aten.log_softmax.int)
def _softmax(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Combine | None:
    dim = dim_arg(node, 1, len(metas[0].shape))
    axes = cutting(strategy, [dim])
    if not axes:
        return None
    meta = TensorMeta(kept(strategy, metas[0], [dim], mesh), wide(metas[0].dtype))
    args = (Operand(0), GATHERED, "log" in node.packet, "safe" in node.packet, torch_dtype(result(node).dtype))
    summary = ("autopar.lse.default", (Operand(0), dim), ())
    return Combine(summary, (meta,), axes, ("autopar.softmax_of_lse.default", args, ()))


@combining(aten._softmax_backward_data, aten._log_softmax_backward_data)
def _softmax_backward(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Combine | None:
    dim = dim_arg(node, 2, len(metas[0].shape))
    axes, log = cutting(strategy, [dim]), "log" in node.packet
    if not axes:
        return None
    meta = TensorMeta(kept(strategy, metas[0], [dim], mesh), wide(metas[0].dtype))
    both = (Operand(0), Operand(1))
    finish = ("autopar.softmax_backward_of_sum.default", (*both, GATHERED, log, torch_dtype(result(node).dtype)), ())
    return Combine(("autopar.softmax_sum.default", (*both, dim, log), ()), (meta,), axes, finish)


# Scans: each rank continues from the totals of the ranks before it.


def _position(axes: tuple[int, ...], mesh: Mesh) -> LocalOffset:
    """Return the rank's position among those that exchange summaries."""
    return LocalOffset(ways(axes, mesh), axes)


@combining(aten.cumsum, aten.cumprod, aten.logcumsumexp)
def _scan(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Combine | None:
    dim = dim_arg(node, 1, len(metas[0].shape)) if metas[0].shape else 0
    axes = cutting(strategy, [dim])
    if not axes:
        return None
    kind, dtype = node.packet.removeprefix("aten.").replace("cum", ""), result(node).dtype
    sums = "float32" if dtype in ("bfloat16", "float16") else dtype  # rounded once, at the end
    meta = TensorMeta(kept(strategy, metas[0], [dim], mesh), sums)
    summary = ("autopar.scan_total.default", (Operand(0), dim, kind, torch_dtype(sums)), ())
    args = (Operand(0), GATHERED, dim, kind, _position(axes, mesh), torch_dtype(dtype))
    return Combine(summary, (meta,), axes, ("autopar.scan.default", args, ()))


@combining(aten.cummax, aten.cummin)
def _extremum_scan(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Combine | None:
    dim = dim_arg(node, 1, len(metas[0].shape))
    axes, largest = cutting(strategy, [dim]), node.packet == "aten.cummax"
    if not axes:
        return None
    shape, offset = kept(strategy, metas[0], [dim], mesh), local_offset(metas[0].shape[dim], axes)
    summary = ("autopar.extremum_total.default", (Operand(0), dim, largest, offset), ())
    args = (Operand(0), GATHERED, Gathered(1), dim, largest, _position(axes, mesh), offset)
    summaries = (TensorMeta(shape, metas[0].dtype), TensorMeta(shape, "int64"))
    return Combine(summary, summaries, axes, ("autopar.extremum_scan.default", args, ()))


# The largest or smallest elements along a dim.


def _top(
    node: Node, strategy: Strategy, metas: Metas, mesh: Mesh, dim: int, k: int, largest: bool, finish: tuple[Any, ...]
) -> Combine | None:
    """Select the top ``k`` of the parts' top ``k``. ``finish`` is the final op, and its arguments after operands."""
    axes = cutting(strategy, [dim])
    if not axes or min(local_counts(strategy, metas, [dim], mesh)) < k:
        return None
    shape, offset = kept(strategy, metas[0], [dim], mesh, k), local_offset(metas[0].shape[dim], axes)
    summaries = (TensorMeta(shape, metas[0].dtype), TensorMeta(shape, "int64"))
    summary = ("autopar.top.default", (Operand(0), k, dim, largest, offset), ())
    op, *rest = finish
    return Combine(summary, summaries, axes, (op, (GATHERED, Gathered(1), *rest), ()))


@combining(aten.topk)
def _topk(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Combine | None:
    k, dim = int_arg(node, 1), dim_arg(node, 2, len(metas[0].shape), -1)
    largest, ordered = bool(arg(node, 3, True, "largest")), bool(arg(node, 4, True, "sorted"))
    finish = ("autopar.top_of.default", k, dim, largest, ordered, True)
    return _top(node, strategy, metas, mesh, dim, k, largest, finish)


@combining(aten.max.dim, aten.min.dim)
def _extremum(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Combine | None:
    dim, largest = dim_arg(node, 1, len(metas[0].shape)), node.packet == "aten.max"
    finish = ("autopar.top_of.default", 1, dim, largest, True, bool(arg(node, 2, False, "keepdim")))
    return _top(node, strategy, metas, mesh, dim, 1, largest, finish)


@combining(aten.argmax, aten.argmin)
def _extremum_index(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Combine | None:
    if arg(node, 1, None, "dim") is None:
        return None
    dim, largest = dim_arg(node, 1, len(metas[0].shape)), node.packet == "aten.argmax"
    finish = ("autopar.place_of_top.default", dim, largest, bool(arg(node, 2, False, "keepdim")))
    return _top(node, strategy, metas, mesh, dim, 1, largest, finish)
