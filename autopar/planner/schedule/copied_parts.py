"""Copies of what the backward needs of a larger result, so that the rest of it need not stay.

A view keeps the memory of all that it is a part of: the values of attention, which the backward reads, keep the queries
and keys that one product made beside them. A copy of the part takes two passes over its bytes, and the whole is freed
after its last reader in the forward. The constraints of the search count the parts alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autopar.planner.pricing.prices import Prices
from autopar.program import Op, Program

COPIED = "|copied"
"""The suffix of a tensor that is a copy of a part."""


def with_parts_copied(program: Program, prices: Prices, timeline: Sequence[int], budget: float) -> Program | None:
    """Return ``program`` with copies of parts whose wholes are held where ``timeline`` is over ``budget``; None if
    there are none.

    Those that free most are copied first, and no more than necessary.

    Args:
        timeline: the bytes that are held while each op runs.
    """
    wholes = sorted(_wholes(program, program.turn), key=lambda w: -w.freed)
    over = np.array(timeline[: len(program.ops)], dtype=np.float64) - budget
    copies: dict[int, list[Op]] = {}
    for whole in wholes:
        if np.any(over[whole.released + 1 : whole.last + 1] > 0):
            over[whole.released + 1 : whole.last + 1] -= whole.freed
            copies.setdefault(whole.released, []).extend(_copy(program, part, prices) for part in whole.parts)
    return replace(program, ops=tuple(_with(program.ops, copies))) if copies else None


class _Whole(NamedTuple):
    """A tensor of which the backward reads only ``parts``, through views.

    Args:
        freed: bytes that copies of the parts save.
        released: position of the last op of the forward that reads it, after which only the parts are needed.
        last: position of the last op that reads a part.
    """

    parts: tuple[str, ...]
    freed: int
    released: int
    last: int


def copied_seconds(program: Program) -> float:
    """Return the seconds of the copies of parts, which the objective does not have."""
    return sum(op.seconds for op in program.ops if op.kind == "copy")


def _wholes(program: Program, turn: int) -> Iterator[_Whole]:
    """Yield what could be freed before position ``turn`` if parts of it were copied."""
    released: dict[str, int] = {}
    for at, op in enumerate(program.ops[:turn]):
        for name in (*op.reads, *(t.name for t in op.writes)):
            released[program.root[name]] = at
    parts: dict[str, dict[str, int]] = {}
    for at, op in enumerate(program.ops[turn:], turn):
        for name in op.reads:
            if program.writer[name] < turn:
                parts.setdefault(program.root[name], {})[name] = at
    results = {program.root[name] for _, name in program.results}
    for root, read in parts.items():
        freed = program.tensors[root].bytes - sum(program.tensors[name].bytes for name in read)
        stays = root in read or root in results or program.ops[program.writer[root]].kind == "input"
        if freed > 0 and not stays:
            yield _Whole(tuple(read), freed, released[root], max(read.values()))


def _copy(program: Program, name: str, prices: Prices) -> Op:
    part = program.tensors[name]
    launch_s, s_per_byte = prices.compute.copy_line()
    made = replace(part, name=f"{name}{COPIED}")
    node = program.ops[program.writer[name]].node
    return Op(made.name, "copy", node, (name,), (made,), "forward", seconds=launch_s + 2 * s_per_byte * part.bytes)


def _with(ops: Sequence[Op], copies: Mapping[int, Sequence[Op]]) -> Iterator[Op]:
    """Yield ``ops`` with each of ``copies`` after its position; the backward reads them."""
    copied = {op.reads[0]: op.writes[0].name for made in copies.values() for op in made}
    for at, op in enumerate(ops):
        reads = tuple(copied.get(name, name) for name in op.reads) if op.phase == "backward" else op.reads
        yield op if reads == op.reads else replace(op, reads=reads)
        yield from copies.get(at, ())
