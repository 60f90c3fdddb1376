"""The functions that a local program calls to redistribute its tensors.

A collective launches and returns a ``Pending``, which ``wait`` completes. Packing and unpacking around the exchange are
the same on real and simulated ranks: the wire carries contiguous buffers of equal size, for which a shorter shard is
padded, and trimmed afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from autopar import kernels
from autopar.errors import SpecError
from autopar.mesh import Mesh
from autopar.sharding import spec as sharding
from autopar.sharding.local import LocalLength, local_length
from autopar.sharding.redistribution import Step
from autopar.sharding.spec import Reduction, ShardingSpec, chunk
from autopar.spmd.ranks import Exchange, Rank

CARRIED_AS = {
    torch.bool: torch.uint8,
    torch.int16: torch.float16,
    torch.uint16: torch.float16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
"""Dtypes that gloo or NCCL cannot send, and the dtypes of the same size that carry their bits."""

REDUCED_AS = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}
"""Dtypes that gloo or NCCL cannot reduce, and the dtypes in which they are reduced."""

KEEPS_SENT = frozenset({"all_gather", "reduce_scatter", "all_to_all", "permute"})
"""Collectives whose backend keeps the sent buffer alive until the wait. An all-reduce works in place on a copy."""


@dataclass(frozen=True)
class Pending:
    """A collective in flight: the result of ``exchange`` of ``buffer`` on ``rank`` is still to be unpacked.

    Args:
        sent: for a simulated rank, the buffer that a real one keeps alive until the wait.
    """

    rank: Rank
    buffer: Tensor
    exchange: Exchange
    unpack: Callable[[Tensor], Any]
    sent: Tensor | None = None


def all_gather(rank: Rank, x: Tensor, dim: int, axis: int, length: int) -> Pending:
    """Undo the innermost cut of ``dim``, by ``axis``.

    Args:
        x: this rank's shard.
        length: length of ``dim`` after the step, the same on all ranks of the group.
    """
    size = rank.mesh.shape[axis]
    buffer = _carried(_padded(x, dim, -(-length // size))).contiguous()
    unpack = partial(_unpack_gathered, dim=dim, length=length, dtype=x.dtype)
    if buffer.ndim == 0 or dim != 0:
        buffer = buffer.unsqueeze(0)
    return _launch(rank, buffer, Exchange("all_gather", axis), unpack)


def all_to_all(rank: Rank, x: Tensor, gather_dim: int, scatter_dim: int, axis: int, length: int) -> Pending:
    """Move ``axis``, the innermost cut of ``gather_dim``, to become the innermost of ``scatter_dim``.

    Args:
        x: this rank's shard.
        length: length of ``gather_dim`` after the step, the same on all ranks of the group.
    """
    size = rank.mesh.shape[axis]
    mine = chunk(x.shape[scatter_dim], size, rank.coordinate[axis])[1]
    buffer = _rows(_carried(_padded(x, gather_dim, -(-length // size))), scatter_dim, size)
    unpack = partial(
        _unpack_moved, gather_dim=gather_dim, scatter_dim=scatter_dim, length=length, mine=mine, dtype=x.dtype
    )
    return _launch(rank, buffer, Exchange("all_to_all", axis), unpack)


def all_reduce(rank: Rank, x: Tensor, axis: int, reduction: Reduction = "sum", *, in_place: bool = False) -> Pending:
    """Reduce ``x`` over the ranks along ``axis``. A sum of booleans is any. ``in_place`` may overwrite ``x``."""
    buffer = _reducible(x, reduction).contiguous()
    divisor = rank.mesh.shape[axis] if reduction == "avg" else 1
    unpack = partial(_unpack_reduced, dtype=x.dtype, divisor=divisor)
    exchange = Exchange("all_reduce", axis, _wire_reduction(reduction), in_place=in_place)
    return _launch(rank, buffer, exchange, unpack)


def reduce_scatter(rank: Rank, x: Tensor, dim: int, axis: int, reduction: Reduction = "sum") -> Pending:
    """Reduce ``x`` over the ranks along ``axis``, which becomes the innermost cut of ``dim``."""
    size = rank.mesh.shape[axis]
    mine = chunk(x.shape[dim], size, rank.coordinate[axis])[1]
    x_wire = _reducible_elements(x, reduction)
    buffer = _rows(x_wire, dim, size, REDUCED_AS.get(x_wire.dtype))
    divisor = size if reduction == "avg" else 1
    unpack = partial(_unpack_scattered, dim=dim, mine=mine, dtype=x.dtype, divisor=divisor)
    return _launch(rank, buffer, Exchange("reduce_scatter", axis, _wire_reduction(reduction)), unpack)


def permute(rank: Rank, x: Tensor, axes: Sequence[int], order: Sequence[int], shape: Sequence[int]) -> Pending:
    """Exchange shards, so that a dim cut by ``axes`` is then cut by the same axes in another ``order``.

    Args:
        x: this rank's shard.
        shape: shape of this rank's shard after the step.
    """
    buffer = _carried(x).contiguous()
    wire_shape = (*shape, 2) if x.is_complex() else tuple(shape)
    exchange = Exchange("permute", -1, "sum", permutation(rank.mesh, tuple(axes), tuple(order)), wire_shape)
    return _launch(rank, buffer, exchange, partial(_unpack_permuted, shape=wire_shape, dtype=x.dtype))


def wait(pending: Pending) -> Any:
    """Return the contiguous result of a collective; a tuple if it carries several tensors."""
    if pending.sent is not None:
        object.__setattr__(pending, "sent", None)
    return pending.unpack(pending.rank.finish(pending.buffer))


def slice_shard(rank: Rank, x: Tensor, dim: int, axis: int) -> Tensor:
    """Keep this rank's chunk of ``dim``, as a copy, so that the rest of ``x`` can be freed."""
    start, size = chunk(x.shape[dim], rank.mesh.shape[axis], rank.coordinate[axis])
    return x.narrow(dim, start, size).clone(memory_format=torch.contiguous_format)


def length(rank: Rank, n: int, axes: Sequence[int]) -> int:
    """Return how many elements this rank holds of a dim of ``n`` cut by ``axes``."""
    return sharding.length(n, axes, rank.mesh, rank.coordinate)


def offset(rank: Rank, n: int, axes: Sequence[int], micro_rows: int = 0) -> int:
    """Return the global index of the first element that this rank holds of a dim of ``n`` cut by ``axes``.

    Args:
        micro_rows: elements of the dim in each of the micro-batches, of which the rank runs one.
    """
    return rank.micro_batch * micro_rows + sharding.offset(n, axes, rank.mesh, rank.coordinate)


def choice(rank: Rank, values: Sequence[int], axis: int) -> int:
    """Return one of ``values``, by this rank's coordinate along ``axis``."""
    return values[rank.coordinate[axis]]


@lru_cache(maxsize=1024)
def permutation(mesh: Mesh, axes: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return for each rank the rank whose shard it needs, if axes in the order ``axes`` are to cut in ``order``."""
    out = []
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        index = 0
        for a in order:
            index = index * mesh.shape[a] + coordinate[a]
        source = list(coordinate)
        for a in reversed(axes):
            index, source[a] = divmod(index, mesh.shape[a])
        out.append(mesh.rank(tuple(source)))
    return tuple(out)


def step_call(
    step: Step, spec: ShardingSpec, global_shape: Sequence[int], mesh: Mesh
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function of this module that takes ``step`` from ``spec``, and its arguments after rank and tensor.

    An argument that differs between ranks is (or contains) a ``LocalLength``, which ``length`` resolves.
    """
    if step.kind == "slice":
        return slice_shard, {"dim": step.dim, "axis": step.axis}
    if step.kind == "all_reduce":
        return all_reduce, {"axis": step.axis, "reduction": step.reduction}
    if step.kind == "reduce_scatter":
        return reduce_scatter, {"dim": step.dim, "axis": step.axis, "reduction": step.reduction}
    after = step.apply(spec)
    if step.kind == "permute":
        shape = tuple(local_length(n, axes, mesh) for n, axes in zip(global_shape, after.dims, strict=True))
        axes = spec.dims[step.dim] if step.dim >= 0 else tuple(reversed(step.axes))
        return permute, {"axes": axes, "order": step.axes, "shape": shape}
    gathered = local_length(global_shape[step.dim], after.dims[step.dim], mesh)
    if step.kind == "all_gather":
        return all_gather, {"dim": step.dim, "axis": step.axis, "length": gathered}
    return all_to_all, {"gather_dim": step.dim, "scatter_dim": step.to_dim, "axis": step.axis, "length": gathered}


def resolve(rank: Rank, arg: Any) -> Any:
    """Replace each ``LocalLength`` in ``arg`` by this rank's length."""
    if isinstance(arg, LocalLength):
        return length(rank, arg.n, arg.axes)
    if isinstance(arg, tuple):
        return tuple(resolve(rank, a) for a in arg)
    return arg


def simulate(
    function: Callable[..., Pending],
    ranks: Sequence[Rank],
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    meters: Sequence[Any] = (),
) -> list[Pending]:
    """Launch a collective on every simulated rank of a mesh and exchange the buffers.

    Args:
        ranks: all ranks of the mesh, in order.
        calls: positional arguments (after the rank) and keyword arguments of each rank.
        meters: memory counters, one per rank: contexts that count the tensors created inside, with a method ``hold``
            for other tensors.
    """
    launched = []
    for i, (rank, (args, kwargs)) in enumerate(zip(ranks, calls, strict=True)):
        with meters[i] if meters else nullcontext():
            launched.append(function(rank, *args, **kwargs))
    exchange, mesh = launched[0].exchange, ranks[0].mesh
    sent = [p.buffer for p in launched]
    if exchange.kind == "permute":
        received = [sent[source].clone() for source in exchange.sources]
    else:
        received = list(sent)
        for group in mesh.groups(exchange.axis):
            for member, buffer in zip(group, _exchanged([sent[r] for r in group], exchange), strict=True):
                received[member] = buffer
    if exchange.in_place:
        received = [mine.copy_(buffer) for mine, buffer in zip(sent, received, strict=True)]
    for meter, buffer in zip(meters, received, strict=False):
        meter.hold([buffer])
    kept = exchange.kind in KEEPS_SENT
    return [replace(p, buffer=b, sent=p.buffer if kept else None) for p, b in zip(launched, received, strict=True)]


def _exchanged(sent: list[Tensor], exchange: Exchange) -> list[Tensor]:
    """Return what each rank of one group receives."""
    if exchange.kind == "all_gather":
        return [torch.cat(sent) for _ in sent]
    if exchange.kind == "all_to_all":
        chunks = [s.chunk(len(sent)) for s in sent]
        return [torch.cat([c[i] for c in chunks]) for i in range(len(sent))]
    reduced = _reduced(sent, exchange.reduction)
    if exchange.kind == "all_reduce":
        return [reduced.clone() for _ in sent]
    return [c.clone() for c in reduced.chunk(len(sent))]


def _reduced(sent: list[Tensor], reduction: str) -> Tensor:
    """Reduce the buffers. Half precision is summed in float32: the result does not depend on the number of ranks."""
    half = sent[0].dtype in (torch.float16, torch.bfloat16)
    total = sent[0].float() if half else sent[0]
    for x in sent[1:]:
        if reduction == "sum":
            total = total + x
        else:
            total = torch.maximum(total, x) if reduction == "max" else torch.minimum(total, x)
    return total.to(sent[0].dtype)


def _launch(rank: Rank, buffer: Tensor, exchange: Exchange, unpack: Callable[[Tensor], Any]) -> Pending:
    return Pending(rank, rank.launch(buffer, exchange), exchange, unpack)


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    missing = size - x.shape[dim]
    return pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing]) if missing else x


def _rows(x: Tensor, dim: int, size: int, dtype: torch.dtype | None = None) -> Tensor:
    """Cut ``x`` into ``size`` parts along ``dim``, stacked along a new dim 0, optionally cast to ``dtype``."""
    part = -(-x.shape[dim] // size)
    stacked = x.is_contiguous() and part * size == x.shape[dim] and 1 in (size, math.prod(x.shape[:dim]))
    if (not stacked or dtype not in (None, x.dtype)) and kernels.enabled(x, integers=True):
        packed: Tensor = kernels.run("pack", x, dim, size, dtype)
        return packed
    x = x if dtype is None else x.to(dtype)
    shape = (*x.shape[:dim], size, part, *x.shape[dim + 1 :])
    return _padded(x, dim, part * size).reshape(shape).movedim(dim, 0).contiguous()


def _joined(rows: Tensor, dim: int, length: int) -> Tensor:
    """Join the parts along dim 0 along ``dim`` of a part, and trim the result to ``length``."""
    size, part = rows.shape[0], rows.shape[dim + 1]
    joined = rows.is_contiguous() and part * size == length and 1 in (size, math.prod(rows.shape[1 : dim + 1]))
    if not joined and kernels.enabled(rows, integers=True):
        unpacked: Tensor = kernels.run("unpack", rows, dim, length)
        return unpacked
    if part * size == length:
        return rows.movedim(0, dim).flatten(dim, dim + 1).contiguous()
    lengths = [chunk(length, size, i)[1] for i in range(size)]
    return torch.cat([row.narrow(dim, 0, n) for row, n in zip(rows.unbind(), lengths, strict=True)], dim)


def _carried(x: Tensor) -> Tensor:
    """Return ``x`` in a dtype that every backend can send. Complex numbers get a last dim of two."""
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.view(CARRIED_AS[x.dtype]) if x.dtype in CARRIED_AS else x


def _restored(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(x)
    return x.view(dtype)


def _reducible(x: Tensor, reduction: Reduction) -> Tensor:
    x = _reducible_elements(x, reduction)
    return x.to(REDUCED_AS.get(x.dtype, x.dtype))


def _reducible_elements(x: Tensor, reduction: Reduction) -> Tensor:
    """Return ``x`` before its cast to a dtype that backends can reduce. Complex numbers get a last dim of two."""
    if x.is_complex() and reduction in ("sum", "avg"):
        return torch.view_as_real(x.resolve_conj())
    if x.is_complex() or (reduction == "avg" and not x.is_floating_point()):
        raise SpecError(
            f"The reduction {reduction} is not defined for {x.dtype}.",
            found=f"a tensor of shape {tuple(x.shape)}",
            hint="sum it, or convert it to a floating-point dtype first.",
        )
    return x


def _wire_reduction(reduction: Reduction) -> Reduction:
    return "sum" if reduction == "avg" else reduction


def _unpack_gathered(buffer: Tensor, dim: int, length: int, dtype: torch.dtype) -> Tensor:
    if dim == 0:
        return _restored(buffer.narrow(0, 0, length), dtype)
    return _restored(_joined(buffer, dim, length), dtype)


def _unpack_moved(
    buffer: Tensor, gather_dim: int, scatter_dim: int, length: int, mine: int, dtype: torch.dtype
) -> Tensor:
    return _restored(_joined(buffer.narrow(scatter_dim + 1, 0, mine), gather_dim, length), dtype)


def _unpack_reduced(buffer: Tensor, dtype: torch.dtype, divisor: int) -> Tensor:
    mean = buffer / divisor if divisor > 1 else buffer
    return torch.view_as_complex(mean) if dtype.is_complex else mean.to(dtype)


def _unpack_scattered(buffer: Tensor, dim: int, mine: int, dtype: torch.dtype, divisor: int) -> Tensor:
    return _unpack_reduced(buffer.squeeze(0).narrow(dim, 0, mine).contiguous(), dtype, divisor)


def _unpack_permuted(buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return _restored(buffer.reshape(shape), dtype)


COLLECTIVES = frozenset({all_gather, all_to_all, all_reduce, reduce_scatter, permute})
"""The functions that exchange data between ranks."""


def device(rank: Rank) -> torch.device:
    """Return the device of the rank's tensors."""
    return rank.device
