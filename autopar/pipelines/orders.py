"""The orders of a pipeline that have names, as the papers describe them, and one made for the costs at hand."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from types import MappingProxyType
from typing import cast

from autopar.errors import PlanError
from autopar.pipelines.actions import Action, Kind, Schedule
from autopar.pipelines.listed import listed
from autopar.pipelines.makespan import Costs

Pattern = Iterable[tuple[Kind, int]]
"""Kinds and stages of a rank's actions; the first of each kind and stage is of micro-batch 0, the next of 1, ..."""


def looped(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """The rank of each stage where every chunk begins on the first rank: 0 1 2 0 1 2."""
    return tuple(range(ranks)) * chunks


def folded(ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """The rank of each stage where chunks turn at the ends, which saves a message: 0 1 2 2 1 0."""
    return tuple(chain.from_iterable(range(ranks)[:: -1 if chunk % 2 else 1] for chunk in range(chunks)))


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards: every micro-batch is held at once (Huang et al., 2019)."""
    patterns = (_all("F", stage, micro_batches) + _all("B", stage, micro_batches) for stage in range(ranks))
    return _schedule("gpipe", patterns, looped(ranks), micro_batches)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """A forward and a backward in turn, after as many forwards as there are stages behind.

    As long as GPipe, but a stage holds only ``min(ranks - stage, micro_batches)`` micro-batches (Narayanan et al.,
    2019).
    """
    patterns = (
        _in_turn(_all("F", stage, micro_batches), _all("B", stage, micro_batches), ranks - stage - 1)
        for stage in range(ranks)
    )
    return _schedule("1f1b", patterns, looped(ranks), micro_batches)


def interleaved(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B of several chunks a rank, each in turns of as many micro-batches as there are ranks.

    The bubble is shorter by the number of chunks, for as many times the messages (Narayanan et al., 2021).
    """
    if micro_batches % ranks:
        fewer = micro_batches - micro_batches % ranks
        raise PlanError(
            "An interleaved pipeline needs a number of micro-batches that is a multiple of its ranks.",
            found=f"{micro_batches} micro-batches on {ranks} ranks",
            hint=f"take {f'{fewer} or ' if fewer else ''}{fewer + ranks} micro-batches",
        )
    turns, order = micro_batches // ranks, range(chunks)

    def pattern(kind: Kind, rank: int, order: range) -> list[tuple[Kind, int]]:
        return [(kind, chunk * ranks + rank) for chunk in order for _ in range(ranks)] * turns

    patterns = (
        _in_turn(
            pattern("F", rank, order), pattern("B", rank, order[::-1]), (chunks - 1) * ranks + 2 * (ranks - rank - 1)
        )
        for rank in range(ranks)
    )
    return _schedule("interleaved", patterns, looped(ranks, chunks), micro_batches)


def zero_bubble(ranks: int, micro_batches: int, lag: Sequence[int] | None = None) -> Schedule:
    """ZB-H1: 1F1B, with each W put off by as many micro-batches as there are stages before it (Qi et al., 2023).

    W fills most of the bubble, and no stage holds more micro-batches than the first one under 1F1B.

    Args:
        lag: by how many micro-batches each stage puts W off, where there is no memory for as many.
    """
    lags = range(ranks) if lag is None else lag

    def pattern(stage: int) -> Iterator[tuple[Kind, int]]:
        put_off = 0
        both = _all("F", stage, micro_batches), _all("I", stage, micro_batches)
        for kind, _ in _in_turn(*both, ranks - stage - 1):
            yield kind, stage
            put_off += kind == "I"
            if put_off > lags[stage]:
                yield "W", stage
                put_off -= 1
        yield from _all("W", stage, put_off)

    return _schedule("zb", map(pattern, range(ranks)), looped(ranks), micro_batches)


def zero_bubble_v(ranks: int, micro_batches: int) -> Schedule:
    """ZBV: two chunks a rank, the second on the way back; without a bubble where F, I and W take the same time
    (Qi et al., 2023). Fewer than ``2 * ranks - 1`` micro-batches run as that many without the last ones."""
    count = max(micro_batches, 2 * ranks - 1)

    def pattern(rank: int) -> list[tuple[Kind, int]]:
        behind = ranks - rank
        steady = count - 2 * ranks + rank + 1
        text = (
            "F0 " * (2 * behind - 1)
            + "F1 F0 " * rank
            + "F1 I1 W1 " * behind
            + "F0 I0 W0 F1 I1 W1 " * steady
            + "I0 W0 F1 I1 W1 " * (behind - 1)
            + "I0 I1 " * rank
            + "I0 W0 " * behind
            + "W1 " * rank
            + "W0 " * rank
        )
        stages = {"0": rank, "1": 2 * ranks - 1 - rank}
        return [(cast(Kind, word[0]), stages[word[1]]) for word in text.split()]

    return _schedule("zbv", map(pattern, range(ranks)), folded(ranks), micro_batches)


def _all(kind: Kind, stage: int, number: int) -> list[tuple[Kind, int]]:
    return [(kind, stage)] * number


def _in_turn(forwards: Sequence[tuple[Kind, int]], backwards: Sequence[tuple[Kind, int]], ahead: int) -> Pattern:
    """Some forwards, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    pairs = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    return chain(forwards[:ahead], pairs, backwards[len(backwards) - ahead :])


def _schedule(name: str, patterns: Iterable[Pattern], rank_of: tuple[int, ...], micro_batches: int) -> Schedule:
    rows = []
    for pattern in patterns:
        numbers: defaultdict[tuple[Kind, int], Iterator[int]] = defaultdict(count)
        actions = (Action(kind, stage, next(numbers[kind, stage])) for kind, stage in _whole_on_first_stage(pattern))
        rows.append(tuple(action for action in actions if action.micro_batch < micro_batches))
    return Schedule(name, tuple(rows), rank_of, micro_batches)


def _whole_on_first_stage(pattern: Pattern) -> Pattern:
    """The first stage gives no gradient back, so its backward is not split. W follows I at once there in all orders."""
    for kind, stage in pattern:
        if stage > 0 or kind in "FB":
            yield kind, stage
        elif kind == "I":
            yield "B", stage


@dataclass(frozen=True)
class Family:
    """The schedules of one name.

    Args:
        make: from ranks, micro-batches, chunks, costs and caps.
        rank_of: of each stage, from ranks and chunks.
        chunks: how many stages a rank may have.
    """

    make: Callable[[int, int, int, Costs | None, Sequence[float] | None], Schedule]
    rank_of: Callable[[int, int], tuple[int, ...]]
    chunks: range


_ANY = range(1, sys.maxsize)

SCHEDULES: Mapping[str, Family] = MappingProxyType(
    {
        "gpipe": Family(lambda p, m, *_: gpipe(p, m), looped, range(1, 2)),
        "1f1b": Family(lambda p, m, *_: one_f_one_b(p, m), looped, range(1, 2)),
        "interleaved": Family(lambda p, m, chunks, *_: interleaved(p, m, chunks), looped, _ANY),
        "zb": Family(lambda p, m, *_: zero_bubble(p, m), looped, range(1, 2)),
        "zbv": Family(lambda p, m, *_: zero_bubble_v(p, m), folded, range(2, 3)),
        "listed": Family(lambda p, m, chunks, costs, caps: _listed(folded(p, chunks), m, costs, caps), folded, _ANY),
    }
)
"""By the names that users write."""


def schedule(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int = 1,
    costs: Costs | None = None,
    caps: Sequence[float] | None = None,
) -> Schedule:
    """The schedule of a name, for ``chunks`` stages a rank. Only "listed" reads costs, and caps in bytes by rank.

    Raises:
        PlanError: there is no such schedule, or none for these numbers.
    """
    family = SCHEDULES.get(name)
    if family is None:
        raise PlanError(
            "There is no pipeline schedule of this name.", found=repr(name), hint=f"one of {', '.join(SCHEDULES)}"
        )
    for what, number in (("ranks", ranks), ("micro-batches", micro_batches)):
        if number < 1:
            raise PlanError(f"A pipeline needs {what}.", found=f"{number} {what}", hint="give 1 or more")
    if chunks not in family.chunks:
        only = f"{family.chunks[0]}" + ("" if len(family.chunks) == 1 else " or more")
        raise PlanError(
            f"The pipeline schedule {name!r} does not run this number of stages on a rank.",
            found=f"{chunks} chunks",
            hint=f"take {only}, or another schedule",
        )
    return family.make(ranks, micro_batches, chunks, costs, caps)


def _listed(
    rank_of: tuple[int, ...], micro_batches: int, costs: Costs | None, caps: Sequence[float] | None
) -> Schedule:
    if costs is None:
        raise PlanError(
            "A listed schedule is made for the costs of its stages.",
            found="no costs",
            hint="pass costs, or name another",
        )
    return listed(costs, rank_of, micro_batches, caps)
