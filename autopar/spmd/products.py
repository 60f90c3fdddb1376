"""Matrix products decomposed to overlap with the gather of an operand or the scatter of their sum.

On a ring of k ranks a product has k parts, one for each rank's block. While a rank multiplies one block it passes
another on, so each of the k - 1 messages is hidden by a part, as far as it is not longer (Wang et al., "Overlap
communication with dependent computation via decomposition in large deep learning models", ASPLOS 2023). GPUs with
access to each other's memory do the same with torch's symmetric-memory ops, in which copy engines carry the blocks.

A ring is written as a generator, which yields what to send and what to wait for. A process of a job runs it by itself,
simulated ranks run theirs together step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, Union

import torch
from torch import Tensor

from autopar import _torch
from autopar.mesh import Mesh
from autopar.sharding.spec import chunk
from autopar.spmd.ranks import Exchange, Rank


@dataclass(frozen=True)
class Send:
    """A request to pass ``block`` along the ring."""

    block: Tensor
    exchange: Exchange


@dataclass(frozen=True)
class Receive:
    """A request to wait for what a ``Send`` started to receive."""

    started: Tensor
    shape: tuple[int, ...]


Ring: TypeAlias = Generator[Union[Send, Receive], Any, Any]


def gather_product(
    rank: Rank,
    x: Tensor,
    w: Tensor,
    *,
    equation: str,
    operand: int,
    dim: int,
    axis: int,
    length: int,
    keep: bool = False,
) -> Any:
    """Return ``contract(x, w)`` where operand ``operand`` is this rank's shard of ``dim``, cut innermost by ``axis``.

    Args:
        length: length of ``dim`` after the gather, the same on all ranks of the group.
        keep: whether to return (product, gathered operand).
    """
    group = rank.symmetric(axis)
    if group and operand == 0 and length % rank.mesh.shape[axis] == 0:
        matrix = _as_matrix(equation, w)
        if matrix is not None:
            product, gathered = _torch.fused_gather_product(x, matrix, dim, group, keep=keep)
            return (product, gathered) if keep else product
    return run_ring(rank, _gathering(rank, x, w, equation, operand, dim, axis, length, keep=keep))


def product_scatter(rank: Rank, x: Tensor, w: Tensor, *, equation: str, operand: int, dim: int, axis: int) -> Tensor:
    """Return this rank's chunk of the sum over ``axis`` of ``contract(x, w)``, cut along the operand's ``dim``."""
    group = rank.symmetric(axis)
    if group and operand == 0 and x.shape[dim] % rank.mesh.shape[axis] == 0:
        matrix = _as_matrix(equation, w)
        if matrix is not None:
            return _torch.fused_product_scatter(x, matrix, dim, group)
    found: Tensor = run_ring(rank, _scattering(rank, x, w, equation, operand, dim, axis))
    return found


def simulate_ring(
    generator: Callable[..., Ring],
    ranks: Sequence[Rank],
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    meters: Sequence[Any] = (),
) -> list[Any]:
    """Run a function's generator on every simulated rank of a mesh, step by step, like ``spmd.simulate``."""
    rings = [generator(rank, *args, **kwargs) for rank, (args, kwargs) in zip(ranks, calls, strict=True)]
    replies: list[Any] = [None] * len(rings)
    while True:
        requests: list[Send | Receive] = []
        results: list[Any] = []
        for i, ring in enumerate(rings):
            with meters[i] if meters else nullcontext():
                try:
                    requests.append(ring.send(replies[i]))
                except StopIteration as done:
                    results.append(done.value)
            replies[i] = None
        if results:
            return results
        replies = _replies(requests)
        for meter, reply in zip(meters, replies, strict=False):
            meter.hold([reply])


def _replies(requests: Sequence[Send | Receive]) -> list[Tensor]:
    """Answer each rank's request: with what others send it, or with what it has received before."""
    blocks = [r.block for r in requests if isinstance(r, Send)]
    return [r.started if isinstance(r, Receive) else _received(i, r, requests, blocks) for i, r in enumerate(requests)]


def _received(here: int, request: Send, requests: Sequence[Send | Receive], blocks: Sequence[Tensor]) -> Tensor:
    exchange = request.exchange
    if exchange.kind == "all_gather":
        return torch.cat(list(blocks))
    if exchange.kind == "permute":
        return blocks[exchange.sources[here]].clone()
    parts = []
    for sender in requests:
        assert isinstance(sender, Send)
        parts.append(torch.split(sender.block, list(sender.exchange.sent))[here])
    assert tuple(map(len, parts)) == exchange.received
    return torch.cat(parts)


def _gathering(
    rank: Rank,
    x: Tensor,
    w: Tensor,
    equation: str,
    operand: int,
    dim: int,
    axis: int,
    length: int,
    *,
    keep: bool = False,
) -> Ring:
    ways, here = rank.mesh.shape[axis], rank.coordinate[axis]
    block, other = (x, w) if operand == 0 else (w, x)
    out_dim = _out_dim(equation, operand, dim)
    block = block.contiguous()
    gathered = product = None
    for step in range(ways):
        start, size = chunk(length, ways, (here + step) % ways)
        coming = None
        if step < ways - 1:
            shape = _with_length(block.shape, dim, chunk(length, ways, (here + step + 1) % ways)[1])
            coming = yield Send(block, _hop(rank, axis, 1, shape))
        if keep:
            gathered = block.new_empty(_with_length(block.shape, dim, length)) if gathered is None else gathered
            gathered.narrow(dim, start, size).copy_(block)
        part = _contract(block, other, equation, operand)
        product = part.new_empty(_with_length(part.shape, out_dim, length)) if product is None else product
        product.narrow(out_dim, start, size).copy_(part)
        del part
        if coming is not None:
            block = yield Receive(coming, shape)
            del coming
    return (product, gathered) if keep else product


def _scattering(rank: Rank, x: Tensor, w: Tensor, equation: str, operand: int, dim: int, axis: int) -> Ring:
    ways, here = rank.mesh.shape[axis], rank.coordinate[axis]
    cut, other = (x, w) if operand == 0 else (w, x)
    length, out_dim = cut.shape[dim], _out_dim(equation, operand, dim)
    # A partial sum starts next to the rank that will own it, and goes all the way round.
    owners = [(here - 1 - step) % ways for step in range(ways)]
    total = _contract(cut.narrow(dim, *chunk(length, ways, owners[0])), other, equation, operand)
    for owner in owners[1:]:
        start, size = chunk(length, ways, owner)
        shape = _with_length(total.shape, out_dim, size)
        coming = yield Send(total, _hop(rank, axis, -1, shape))
        own = _contract(cut.narrow(dim, start, size), other, equation, operand)
        total = yield Receive(coming, shape)
        del coming
        total += own
        del own
    return total


PRODUCTS: Mapping[Callable[..., Any], Callable[..., Ring]] = {gather_product: _gathering, product_scatter: _scattering}
"""The ring of each function."""


def run_ring(rank: Rank, ring: Ring) -> Any:
    """Run a ring on a process of a job."""
    reply: Any = None
    while True:
        try:
            request = ring.send(reply)
        except StopIteration as done:
            return done.value
        if isinstance(request, Send):
            reply = rank.launch(request.block, request.exchange)
        else:
            reply = rank.finish(request.started).view(request.shape)


def _contract(block: Tensor, other: Tensor, equation: str, operand: int) -> Tensor:
    made: Tensor = torch.ops.autopar.contract(*((block, other) if operand == 0 else (other, block)), equation)
    return made


def _out_dim(equation: str, operand: int, dim: int) -> int:
    inputs, out = equation.split("->")
    return out.index(inputs.split(",")[operand][dim])


def _as_matrix(equation: str, w: Tensor) -> Tensor | None:
    """Return ``w`` as the matrix B of ``A @ B`` if the contraction is of that form, else None."""
    inputs, out = equation.split("->")
    first, second = inputs.split(",")
    if first[:-1] != out[:-1] or len(second) != 2 or set(second) != {first[-1], out[-1]}:
        return None
    return w if second[0] == first[-1] else w.t()


def _with_length(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])


def _hop(rank: Rank, axis: int, away: int, shape: tuple[int, ...]) -> Exchange:
    """Return the exchange in which every rank receives from the one ``away`` along ``axis``."""
    return Exchange("permute", -1, "sum", _neighbours(rank.mesh, axis, away), shape)


@lru_cache(maxsize=256)
def _neighbours(mesh: Mesh, axis: int, away: int) -> tuple[int, ...]:
    found = []
    for r in range(mesh.size):
        at = list(mesh.coordinate(r))
        at[axis] = (at[axis] + away) % mesh.shape[axis]
        found.append(mesh.rank(tuple(at)))
    return tuple(found)
