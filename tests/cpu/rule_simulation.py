"""Run an op with a strategy on the ranks of a simulated mesh, and compare with the op on whole tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from autopar import spmd
from autopar.ir import Node, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.passes.lower import shared_attention
from autopar.sharding import ShardingSpec, Strategy
from autopar.sharding.halo import Halo
from autopar.sharding.local import LocalChoice, LocalLength, LocalOffset
from autopar.sharding.spec import length, offset
from autopar.strategies import Combine, Gathered, Operand, combine, halos, lent, localize, strategies

MESHES = (Mesh((2,)), Mesh((2, 2)), Mesh((3,)))
TOLERANCE = 1e-9  # in float64, for results that are not integral


@dataclass(frozen=True)
class Sample:
    """One call of an op. With ``values=False``, only the shapes and dtypes of its results are defined."""

    node: Node
    operands: tuple[Tensor, ...]
    results: tuple[Tensor | None, ...]
    values: bool = True

    @property
    def metas(self) -> tuple[TensorMeta, ...]:
        return tuple(map(meta, self.operands))

    def __str__(self) -> str:
        shapes = ", ".join(str(list(t.shape)) for t in self.operands)
        plain = [a for a in self.node.args if not isinstance(a, Value)]
        return f"{self.node.op}({shapes}; {plain} {dict(self.node.kwargs)})"


def meta(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def sample(op: Any, *args: Any, values: bool = True, **kwargs: Any) -> Sample:
    """Call ``op``, an overload of torch, and return its node, operands and results."""
    operands: list[Tensor] = []

    def ir(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            operands.append(arg)
            return Value(f"x{len(operands) - 1}")
        if isinstance(arg, (list, tuple)):
            return tuple(map(ir, arg))
        return str(arg) if isinstance(arg, torch.dtype) else arg

    ir_args, ir_kwargs = ir(args), tuple((k, ir(v)) for k, v in kwargs.items())
    results = _results(find_op(str(op))(*args, **kwargs))
    outputs = tuple(None if r is None else meta(r) for r in results)
    return Sample(Node("sample", str(op), ir_args, ir_kwargs, outputs), tuple(operands), results, values)


def _results(value: Any) -> tuple[Tensor | None, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


class WrongRule(AssertionError):  # noqa: N818  it is an assertion
    """A strategy whose shards do not make up the op's result."""


def check(case: Sample, meshes: Sequence[Mesh] = MESHES) -> int:
    """Check every strategy of the sample on every mesh, and return their number.

    Raises:
        WrongRule: if a strategy gives another result than the op on whole tensors.
    """
    tried = 0
    for mesh in meshes:
        for strategy in strategies(case.node, case.metas, mesh):
            try:
                check_strategy(case, strategy, mesh)
            except Exception as error:
                raise WrongRule(f"{case} by {strategy} {strategy.axes} on mesh {mesh}: {error}") from error
            tried += 1
    return tried


def check_strategy(case: Sample, strategy: Strategy, mesh: Mesh) -> None:
    ranks = [mesh.coordinate(r) for r in range(mesh.size)]
    shards = [shard(t, spec, mesh) for t, spec in zip(case.operands, strategy.inputs, strict=True)]
    told = combine(case.node, strategy, case.metas, mesh)
    op, args, kwargs = told.finish if told else localize(case.node, strategy, case.metas, mesh)
    gathered = summaries(told, shards, mesh) if told else {}
    for h in halos(case.node, strategy, case.metas, mesh) or ():
        shards[h.operand] = {rank: windowed(shards[h.operand], h, rank) for rank in ranks}
    calls = []
    for rank in ranks:
        own = [s[rank] for s in shards]
        operands = Operands(iter(own), own, gathered.get(rank, []))
        calls.append(([_local(a, operands, mesh, rank) for a in args], _local_options(kwargs, operands, mesh, rank)))
    together = shared(case.node, strategy, case.metas, mesh, calls)
    made = [find_op(op)(*a, **k) for a, k in calls] if together is None else together
    results = dict(zip(ranks, map(_results, made), strict=True))
    for index, (expected, spec) in enumerate(zip(case.results, strategy.outputs, strict=True)):
        if expected is None:
            assert spec is None, f"result {index} is absent"
            continue
        assert spec is not None, f"result {index} has no spec"
        pieces = completed({rank: results[rank][index] for rank in ranks}, spec, mesh)
        tolerance = tolerance_of(expected) if case.values else math.inf
        for rank, piece in pieces.items():
            whole = expected[spec.local_slices(expected.shape, mesh, rank)]
            assert_same(piece, whole, f"result {index} on rank {rank}", tolerance)


def shared(
    node: Node,
    strategy: Strategy,
    metas: Sequence[TensorMeta],
    mesh: Mesh,
    calls: Sequence[Any],
    meters: Sequence[Any] = (),
) -> list[Any] | None:
    """Run the calls of all ranks of an attention whose work they share; None if they do not."""
    found = shared_attention(node, strategy, lent(node, strategy, metas, mesh), metas)
    if found is None:
        return None
    function, terms = found
    ring, ranks = spmd.RINGS[function], spmd.local_ranks(mesh)
    return spmd.simulate_ring(ring, ranks, [(a, {**k, **terms}) for a, k in calls], meters)


def summaries(told: Combine, shards: list[Any], mesh: Mesh) -> dict[tuple[int, ...], list[Tensor]]:
    """Return what each rank gathers: each summary stacked over the ranks of its group, in row-major order."""
    op, args, kwargs = told.summary
    said = {}
    for rank in map(mesh.coordinate, range(mesh.size)):
        own = [s[rank] for s in shards]
        operands = Operands(iter(own), own, [])
        local = [_local(a, operands, mesh, rank) for a in args]
        said[rank] = _results(find_op(op)(*local, **{k: _local(v, operands, mesh, rank) for k, v in kwargs}))
        for result, expected in zip(said[rank], told.summaries, strict=True):
            assert result is not None
            assert all(n <= most for n, most in zip(result.shape, expected.shape, strict=True)), "more is told"
            assert meta(result).dtype == expected.dtype
    heard = {}
    for rank in said:
        others = []
        for place in itertools.product(*(range(mesh.shape[a]) for a in told.axes)):
            at = dict(zip(told.axes, place, strict=True))
            others.append(said[tuple(at.get(a, i) for a, i in enumerate(rank))])
        heard[rank] = [torch.stack(parts) for parts in zip(*others, strict=True)]
    return heard


def shard(whole: Tensor, spec: ShardingSpec, mesh: Mesh) -> dict[tuple[int, ...], Tensor]:
    """Return what each rank holds of ``whole``; a partial sum is split into random summands."""
    summing = [a for a, _ in spec.partial]
    parts = list(itertools.product(*(range(mesh.shape[a]) for a in summing)))
    summands = dict(zip(parts, _split(whole, len(parts)), strict=True))
    held = {}
    for rank in map(mesh.coordinate, range(mesh.size)):
        part = summands[tuple(rank[a] for a in summing)]
        held[rank] = part[spec.local_slices(whole.shape, mesh, rank)].contiguous()
    return held


def windowed(held: dict[tuple[int, ...], Tensor], h: Halo, rank: tuple[int, ...]) -> Tensor:
    """Return the rank's window, made from its own rows and those that its neighbours send alone."""
    at, ways = rank[h.axis], len(h.windows)

    def neighbour(step: int) -> Tensor:
        return held[(*rank[: h.axis], (at + step) % ways, *rank[h.axis + 1 :])]

    own, (start, stop) = held[rank], h.windows[at]
    size = -(-h.n // ways)
    before = neighbour(-1).narrow(h.dim, neighbour(-1).shape[h.dim] - h.before, h.before)
    joined = torch.cat([before, own, neighbour(1).narrow(h.dim, 0, h.after)], h.dim)
    first, last = max(start, 0), min(stop, h.n)
    inner = joined.narrow(h.dim, first - (at * size - h.before), last - first)
    pads = [0, 0] * (own.ndim - 1 - h.dim) + [first - start, stop - last]
    return torch.nn.functional.pad(inner, pads, value=h.fill)


def _split(whole: Tensor, parts: int) -> Iterator[Tensor]:
    """Yield random summands in quarters, so that sums stay exact and rounding does not look linear."""
    rest = whole
    for _ in range(parts - 1):
        part = torch.randint(-20, 21, whole.shape).to(whole.dtype)
        part = part / 4 if whole.is_floating_point() else part
        rest = rest - part
        yield part
    yield rest


def completed(
    pieces: dict[tuple[int, ...], Tensor | None], spec: ShardingSpec, mesh: Mesh
) -> dict[tuple[int, ...], Tensor]:
    """Return what each rank holds once partial results are reduced."""
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    present = {rank: piece for rank, piece in pieces.items() if piece is not None}
    assert len(present) == len(pieces), "a rank has no result"
    for axis, kind in spec.partial:
        assert all(p.dtype != torch.bool for p in present.values()), "truth values cannot be partial"
        groups = {r: [(*r[:axis], i, *r[axis + 1 :]) for i in range(mesh.shape[axis])] for r in pieces}
        present = {r: reduce(combine[kind], [present[g] for g in group]) for r, group in groups.items()}
    return present


def tolerance_of(expected: Tensor) -> float:
    """Return zero for integral results, whose sums and products are exact in any order, or a tolerance."""
    inexact = expected.is_floating_point() or expected.is_complex()
    parts = torch.view_as_real(expected.resolve_conj()) if expected.is_complex() else expected
    parts = parts.float() if parts.itemsize == 1 else parts  # few ops support eight bits
    if not inexact or torch.equal(parts, parts.round()):
        return 0.0
    return TOLERANCE if parts.dtype == torch.float64 else 1e-3


def assert_same(found: Tensor, wanted: Tensor, what: str, tolerance: float = 0.0) -> None:
    assert found.shape == wanted.shape, f"{what} has shape {list(found.shape)}, not {list(wanted.shape)}"
    assert found.dtype == wanted.dtype, f"{what} is {found.dtype}, not {wanted.dtype}"
    if tolerance < math.inf:
        assert torch.allclose(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True), f"{what} differs"


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, asked: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x * rstd * weight by autograd."""
    with torch.enable_grad():
        leaf, scale = x.detach().requires_grad_(), None if weight is None else weight.detach().requires_grad_()
        normalized = torch.nn.functional.rms_norm(leaf, list(shape), scale, 1e-5)
    leaves = [leaf] if scale is None else [leaf, scale]
    found = torch.autograd.grad(normalized, leaves, grad)
    return found[0], found[1] if scale is not None else None


def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [t, k] by weights [e, k, n], given cumulative counts [e]; the result is [t, n]."""
    expert = torch.searchsorted(ends, torch.arange(len(rows), dtype=ends.dtype), right=True)
    return torch.einsum("tk,tkn->tn", rows, weight[expert])


def grouped_mm_backward(rows: Tensor, weight: Tensor, ends: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    expert = torch.searchsorted(ends, torch.arange(len(rows), dtype=ends.dtype), right=True)
    by_row = torch.einsum("tk,tn->tkn", rows, grad)
    return torch.einsum("tn,tkn->tk", grad, weight[expert]), torch.zeros_like(weight).index_add(0, expert, by_row)


def attention_of(kind: str) -> Any:
    """Return a reference for an attention kernel for GPUs; counters and states of generators are zeros."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float | None = None) -> tuple[Any, ...]:
        bias = next((a for a in rest if isinstance(a, Tensor)), None)
        causal = [a for a in rest if isinstance(a, bool)][1 if kind in ("efficient", "cudnn") else 0]
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores if bias is None else scores + bias
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
        nothing = torch.zeros(2, dtype=torch.int64)
        if kind == "efficient":
            return out, torch.nn.functional.pad(lse, [0, -lse.shape[-1] % 32]), nothing, nothing
        return out, lse.unsqueeze(-1) if kind == "cudnn" else lse, None, None, None, None, nothing, nothing, nothing

    return forward


def attention_backward_of(kind: str) -> Any:
    place = {"flash": (None, 11), "efficient": (4, 11), "cudnn": (8, 14), "overrideable": (4, 13)}[kind]

    def backward(*args: Any, scale: float | None = None) -> tuple[Any, ...]:
        bias = None if place[0] is None else args[place[0]]
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (*args[1:4], *([bias] if bias is not None else []))]
            rest = [*([True] if kind in ("efficient", "cudnn") else []), bool(args[place[1]])]
            out = attention_of(kind)(*leaves[:3], leaves[3] if bias is not None else None, *rest, scale=scale)[0]
        found = torch.autograd.grad(out, leaves, args[0])
        return found if kind in ("efficient", "overrideable") else found[:3]

    return backward


# Ops without a kernel for CPUs, and ops of other libraries.
REFERENCES = {
    "aten._fused_rms_norm_backward.default": rms_norm_backward,
    "transformers.grouped_mm_fallback.default": grouped_mm,
    "transformers.grouped_mm_fallback_backward.default": grouped_mm_backward,
    **{
        f"aten._scaled_dot_product_{name}{suffix}.default": of(kind)
        for name, kind in (
            ("flash_attention", "flash"),
            ("efficient_attention", "efficient"),
            ("cudnn_attention", "cudnn"),
            ("fused_attention_overrideable", "overrideable"),
        )
        for suffix, of in (("", attention_of), ("_backward", attention_backward_of))
    },
}


def find_op(name: str) -> Any:
    if name in REFERENCES:
        return REFERENCES[name]
    namespace, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)


@dataclass(frozen=True)
class Operands:
    """What a rank has: its shards in call order and by position, and the gathered summaries."""

    ordered: Iterator[Tensor]
    own: Sequence[Tensor]
    gathered: Sequence[Tensor]


def _local(arg: Any, operands: Operands, mesh: Mesh, rank: tuple[int, ...]) -> Any:
    """Return an argument as one rank sees it; operands are taken in order."""
    if isinstance(arg, Value):
        return next(operands.ordered)
    if isinstance(arg, Operand):
        return operands.own[arg.position]
    if isinstance(arg, Gathered):
        return operands.gathered[arg.index]
    if isinstance(arg, LocalLength):
        return length(arg.n, arg.axes, mesh, rank)
    if isinstance(arg, LocalChoice):
        return arg.values[rank[arg.axis]]
    if isinstance(arg, LocalOffset):
        return offset(arg.n, arg.axes, mesh, rank)
    if isinstance(arg, tuple):
        return [_local(a, operands, mesh, rank) for a in arg]
    if isinstance(arg, str) and arg.startswith("torch."):
        return getattr(torch, arg.removeprefix("torch."))
    return arg


def _local_options(kwargs: Any, operands: Operands, mesh: Mesh, rank: tuple[int, ...]) -> dict[str, Any]:
    return {k: _local(a, operands, mesh, rank) for k, a in kwargs}
