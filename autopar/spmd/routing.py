"""Rows of tokens sent to the ranks that have their experts, and back.

A mesh axis cuts tokens, experts, or both: then its ranks exchange rows, by one all-to-all whose parts are as long as
the router makes them. Every rank knows the layout of its routed rows from their keys (``ops.routing``), so they are
the same rows in the same order whether they came over the mesh or were taken from tokens that the rank had.

Like the rings of ``spmd.products``, these are generators, so simulated ranks and processes run one text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import RoomError
from autopar.mesh import Mesh
from autopar.sharding import spec as sharding
from autopar.spmd.collectives import CARRIED_AS
from autopar.spmd.ranks import Exchange, Rank
from autopar.spmd.rings import Receive, Ring, Send, run_ring


def route(
    rank: Rank,
    ids: Tensor,
    *,
    tokens: Sequence[int],
    rows: Sequence[int],
    experts: int,
    cuts: Sequence[Sequence[int]],
    owners: Sequence[int],
    layer: str,
) -> Tensor:
    """Return the keys of this rank's rows: of its tokens, or of all tokens of its group that go to its experts.

    Args:
        ids: this rank's shard of the experts of each token.
        tokens: global shape of the tokens.
        rows: local shape of the keys.
        experts: of all ranks.
        cuts: the mesh axes that cut each dim of the tokens.
        owners: the mesh axes that cut the experts; those that cut tokens too exchange rows.
        layer: the module's name, for the error.

    Raises:
        RoomError: on all ranks, if some rank gets more rows than there is room for.
    """
    found: Tensor = run_ring(rank, _routing(rank, ids, tokens, rows, experts, cuts, owners, layer))
    return found


def send(
    rank: Rank,
    x: Tensor,
    ids: Tensor,
    keys: Tensor,
    *,
    tokens: Sequence[int],
    experts: int,
    cuts: Sequence[Sequence[int]],
    owners: Sequence[int],
    each: bool = False,
) -> Tensor:
    """Return the rows [..., c, e, n] of this rank's ``keys``, from all ranks' tokens [..., b, n], or with ``each`` a
    row for each choice [..., b, r, n]."""
    found: Tensor = run_ring(rank, _sending(rank, x, ids, keys, tokens, experts, cuts, owners, each=each))
    return found


def collect(
    rank: Rank,
    y: Tensor,
    ids: Tensor,
    keys: Tensor,
    *,
    tokens: Sequence[int],
    experts: int,
    cuts: Sequence[Sequence[int]],
    owners: Sequence[int],
    each: bool = False,
) -> Tensor:
    """Return the sum of each token's rows [..., b, n], or with ``each`` all of them [..., b, r, n]. Rows of experts
    that are neither this rank's nor those of ranks that it exchanges with count as zeros."""
    found: Tensor = run_ring(rank, _collecting(rank, y, ids, keys, tokens, experts, cuts, owners, each=each))
    return found


@dataclass(frozen=True)
class _Layout:
    """Where tokens and experts are.

    Args:
        local: shape of this rank's tokens.
        choices: experts of a token.
    """

    mesh: Mesh
    at: tuple[int, ...]
    tokens: tuple[int, ...]
    local: tuple[int, ...]
    choices: int
    experts: int
    cuts: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]

    @property
    def span(self) -> int:
        return math.prod(self.tokens) * self.choices

    @property
    def none(self) -> int:
        """The key of rows that stand for none."""
        return self.experts * self.span

    @property
    def moved(self) -> frozenset[int]:
        """The axes whose ranks exchange rows."""
        return frozenset(a for axes in self.cuts for a in axes) & frozenset(self.owners)

    def start(self, dim: int) -> int:
        return sharding.offset(self.tokens[dim], self.cuts[dim], self.mesh, self.at)

    def keys(self, ids: Tensor) -> Tensor:
        """Return the key of each choice of this rank's tokens."""
        token = torch.zeros((), dtype=torch.int64, device=ids.device)
        for dim, n in enumerate(self.local):
            index = torch.arange(n, device=ids.device) + self.start(dim)
            token = token.unsqueeze(-1) * self.tokens[dim] + index
        place = token.reshape(-1, 1) * self.choices + torch.arange(self.choices, device=ids.device)
        return ids.reshape(-1) * self.span + place.view(-1)

    def slots(self, keys: Tensor) -> Tensor:
        """Return the position of each key's place among the choices of this rank's tokens."""
        place = keys % self.span
        token, choice = place // self.choices, place % self.choices
        slot, inside = torch.zeros_like(token), 1
        for dim in reversed(range(len(self.tokens))):
            slot += (token % self.tokens[dim] - self.start(dim)) * inside
            token = token // self.tokens[dim]
            inside *= self.local[dim]
        return slot * self.choices + choice

    def owner(self, keys: Tensor) -> Tensor:
        """Return the rank that has the expert of each key: among this rank and those that it exchanges with; the
        number of ranks for keys of others."""
        own = self.experts // math.prod(self.mesh.shape[a] for a in self.owners)
        found = torch.full_like(keys, self.mesh.rank(self.at))
        return found.masked_fill_(~self._towards(found, keys // self.span // own, self.owners), self.mesh.size)

    def source(self, keys: Tensor) -> Tensor:
        """Return the rank that has the token of each key; the number of ranks for rows that stand for none."""
        found, token = torch.full_like(keys, self.mesh.rank(self.at)), keys % self.span // self.choices
        for dim in reversed(range(len(self.tokens))):
            self._towards(found, token % self.tokens[dim] // self.local[dim], self.cuts[dim])
            token = token // self.tokens[dim]
        return found.masked_fill_(keys >= self.none, self.mesh.size)

    def _towards(self, rank: Tensor, part: Tensor, axes: Sequence[int]) -> Tensor:
        """Move ``rank`` along the exchanging axes to the owner of ``part``, and return where others agree with it."""
        agrees = torch.ones_like(part, dtype=torch.bool)
        for a in reversed(axes):
            coordinate = part % self.mesh.shape[a]
            part = part // self.mesh.shape[a]
            if a in self.moved:
                rank += (coordinate - self.at[a]) * math.prod(self.mesh.shape[a + 1 :])
            else:
                agrees &= coordinate == self.at[a]
        return agrees & (part == 0)


def _layout(
    rank: Rank,
    ids: Tensor,
    tokens: Sequence[int],
    experts: int,
    cuts: Sequence[Sequence[int]],
    owners: Sequence[int],
) -> _Layout:
    return _Layout(
        rank.mesh,
        tuple(rank.coordinate),
        tuple(tokens),
        tuple(ids.shape[:-1]),
        ids.shape[-1],
        experts,
        tuple(map(tuple, cuts)),
        tuple(owners),
    )


def _routing(
    rank: Rank,
    ids: Tensor,
    tokens: Sequence[int],
    rows: Sequence[int],
    experts: int,
    cuts: Sequence[Sequence[int]],
    owners: Sequence[int],
    layer: str,
) -> Ring:
    layout, room = _layout(rank, ids, tokens, experts, cuts, owners), math.prod(rows)
    keys = layout.keys(ids)
    owner = layout.owner(keys)
    keys = keys.masked_fill_(owner == rank.mesh.size, layout.none).sort().values
    here, own = rank.mesh.rank(layout.at), keys.shape[0]
    if layout.owners:
        counts = torch.bincount(owner, minlength=rank.mesh.size + 1)[: rank.mesh.size]
        everywhere = Exchange("all_gather", shape=(rank.mesh.size, rank.mesh.size))
        told = yield Send(counts.view(1, -1), everywhere)
        table = (yield Receive(told, everywhere.shape)).tolist()
        sent, received = table[here], [row[here] for row in table]
        own = sum(sent)
        fullest = max(map(sum, zip(*table, strict=True)))
        if fullest > room:
            raise _no_room(layer, fullest, room, layout)
        if layout.moved:
            keys = (yield from _exchanged(keys[:own], sent, received)).sort().values
            own = sum(received)
    made = ids.new_full((room,), layout.none)
    made[:own] = keys[:own]
    return made.view(*rows)


def _no_room(layer: str, fullest: int, room: int, layout: _Layout) -> RoomError:
    ways = math.prod(layout.mesh.shape[a] for a in layout.owners)
    outside = {a for axes in layout.cuts for a in axes} - layout.moved
    mean = layout.span / ways / math.prod(layout.mesh.shape[a] for a in outside)
    return RoomError(
        f"The router of {layer or 'a layer'} sends a rank more rows than there is room for.",
        found=f"{fullest} rows, {fullest / mean:.2f} times the mean; there is room for {room}",
        hint=f"plan with expert_room={math.ceil(fullest / mean * 4 + 1) / 4:g}, or balance the router.",
    )


def _exchanged(x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Ring:
    """Send ``sent[r]`` rows to each rank ``r`` of the mesh, in order, and return the rows that arrive."""
    shape = (sum(received), *x.shape[1:])
    carried = x.view(CARRIED_AS[x.dtype]) if x.dtype in CARRIED_AS else x
    started = yield Send(
        carried.contiguous(), Exchange("all_to_all", shape=shape, sent=tuple(sent), received=tuple(received))
    )
    arrived: Tensor = yield Receive(started, shape)
    return arrived.view(x.dtype) if x.dtype in CARRIED_AS else arrived


@dataclass(frozen=True)
class _Movement:
    """What a rank sends and receives.

    Args:
        slots: positions of the choices that it sends, in the order in which it sends them.
        rows: positions of the rows that it receives, in the order in which they arrive.
    """

    slots: Tensor
    rows: Tensor
    sent: list[int]
    received: list[int]


def _movement(layout: _Layout, ids: Tensor, keys: Tensor) -> _Movement:
    ranks = layout.mesh.size
    own = layout.keys(ids)
    owner, source = layout.owner(own), layout.source(keys.reshape(-1))
    slots = own.masked_fill_(owner == ranks, layout.none).argsort()
    counts = torch.stack([torch.bincount(r, minlength=ranks + 1)[:ranks] for r in (owner, source)])
    sent, received = counts.tolist()
    rows = source.argsort(stable=True)
    return _Movement(slots[: sum(sent)], rows[: sum(received)], sent, received)


def _sending(
    rank: Rank,
    x: Tensor,
    ids: Tensor,
    keys: Tensor,
    tokens: Sequence[int],
    experts: int,
    cuts: Sequence[Sequence[int]],
    owners: Sequence[int],
    *,
    each: bool = False,
) -> Ring:
    layout, n = _layout(rank, ids, tokens, experts, cuts, owners), x.shape[-1]
    given, per = x.reshape(-1, n), 1 if each else layout.choices
    if layout.moved:
        plan = _movement(layout, ids, keys)
        arrived = yield from _exchanged(given.index_select(0, plan.slots // per), plan.sent, plan.received)
        return x.new_zeros(keys.numel(), n).index_copy_(0, plan.rows, arrived).view(*keys.shape, n)
    flat = keys.reshape(-1)
    none = flat >= layout.none
    rows = given.index_select(0, layout.slots(flat).masked_fill_(none, 0) // per)
    return rows.masked_fill_(none.unsqueeze(1), 0).view(*keys.shape, n)


def _collecting(
    rank: Rank,
    y: Tensor,
    ids: Tensor,
    keys: Tensor,
    tokens: Sequence[int],
    experts: int,
    cuts: Sequence[Sequence[int]],
    owners: Sequence[int],
    *,
    each: bool = False,
) -> Ring:
    layout, n = _layout(rank, ids, tokens, experts, cuts, owners), y.shape[-1]
    given, count = y.reshape(-1, n), ids.numel()
    if layout.moved:
        plan = _movement(layout, ids, keys)
        home = yield from _exchanged(given.index_select(0, plan.rows), plan.received, plan.sent)
        slots = y.new_zeros(count, n).index_copy_(0, plan.slots, home)
        del home
    else:
        flat = keys.reshape(-1)
        at = layout.slots(flat).masked_fill_(flat >= layout.none, count)
        slots = y.new_zeros(count + 1, n).index_copy_(0, at, given)[:count]
    own = slots.view(*ids.shape, n)
    if not each:
        return own.sum(-2)
    return own if layout.moved else own.clone()


ROUTINGS: dict[Any, Any] = {route: _routing, send: _sending, collect: _collecting}
"""The generator of each function."""
