"""Rings: functions in which ranks compute while they send each other blocks.

A ring is written as a generator, which yields what to send and what to wait for. A process of a job runs it by itself,
simulated ranks run theirs together step by step. All ranks send and wait in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

import torch
from torch import Tensor

from autopar.spmd.ranks import Exchange, Rank


@dataclass(frozen=True)
class Send:
    """A request to start an exchange of ``block``."""

    block: Tensor
    exchange: Exchange


@dataclass(frozen=True)
class Receive:
    """A request to wait for what a ``Send`` started to receive."""

    started: Tensor
    shape: tuple[int, ...]


Ring: TypeAlias = Generator[Union[Send, Receive], Any, Any]


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


def simulate_ring(
    ring_of: Callable[..., Ring],
    ranks: Sequence[Rank],
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    meters: Sequence[Any] = (),
) -> list[Any]:
    """Run a ring on every simulated rank of a mesh, step by step, like ``spmd.simulate``."""
    rings = [ring_of(rank, *args, **kwargs) for rank, (args, kwargs) in zip(ranks, calls, strict=True)]
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
