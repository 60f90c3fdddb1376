"""The collectives of a program, the slots in which each can be launched, and those that go together.

Slots are counted in the ops that stay: a launch in slot ``i`` comes just before the ``i``-th of them. A collective is
*early* if what it sends is available when its phase begins, as shards of parameters are; *late* if the program reads
its result at the end of the phase, as gradients are; and else in the *middle* of computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autopar.cost_models import BUCKETED
from autopar.ir import FLOATS, Phase
from autopar.planner.footprint.collective_buffers import SUMMED
from autopar.program import LocalTensor, Op, Program, turn_of

Kind: TypeAlias = Literal["early", "middle", "late"]


@dataclass(frozen=True, slots=True)
class SchedulableCollective:
    """A collective and the slots in which it can be launched.

    Args:
        at: its position among the collectives.
        first, last: the first and the last slot.
        level: for an early one, how many others it passes through until it is read; for a late one, how many come
            before.
        waits_for: positions of the collectives whose results it sends.
        key: collectives with equal keys may share a launch.
        casts: ops that make what it sends of an input alone, just before it is launched.
    """

    op: Op
    at: int
    first: int
    last: int
    kind: Kind
    level: int
    waits_for: tuple[int, ...]
    key: tuple[object, ...]
    casts: tuple[Op, ...] = ()


@dataclass(frozen=True)
class Parts:
    """A program without its collectives, and these.

    Args:
        fixed: the ops that stay in their order: all but collectives, what goes with them, and waits for them.
        collectives: the collectives, in the order of the program.
        begins, ends: of each phase, the first slot and the one after its last op.
    """

    fixed: tuple[Op, ...]
    collectives: tuple[SchedulableCollective, ...]
    begins: Mapping[Phase, int]
    ends: Mapping[Phase, int]


def extract_collectives(program: Program) -> Parts:
    """Take the collectives out of ``program``, each with its slots."""
    launched = {t.name for op in program.ops if op.is_collective for t in op.writes}
    casts = _casts(program)
    beside = {op.name for made in casts.values() for op in made}
    fixed = tuple(op for op in program.ops if not (op.is_collective or _is_wait(op, launched) or op.name in beside))
    begins, ends = _phases(fixed)
    moved = [op for op in program.ops if op.is_collective]
    made = {t.name: i for i, op in enumerate(fixed) for t in op.writes}
    by = {t.name: i for i, op in enumerate(moved) for t in op.writes}
    first, level = _first_slots(moved, made, by, begins)
    last, after = _last_slots(moved, fixed, by, ends)
    collectives = []
    for i, op in enumerate(moved):
        kind: Kind = "middle"
        if first[i] <= begins[op.phase]:
            kind = "early"
        elif last[i] >= ends[op.phase]:
            kind = "late"
        depth = after[i] if kind == "early" else level[i]
        waits_for = tuple(by[name] for name in op.reads if name in by)
        key = _key(op, i, kind, depth)
        own = casts.get(op.name, ())
        collectives.append(SchedulableCollective(op, i, first[i], last[i], kind, depth, waits_for, key, own))
    return Parts(fixed, tuple(collectives), begins, ends)


def _casts(program: Program) -> dict[str, tuple[Op, ...]]:
    """Return the ops that can wait until a collective is launched, by its name: narrower casts, views and slices of an
    input that are read by the collective and perhaps by others in later phases."""
    readers: dict[str, list[Op]] = {}
    for op in program.ops:
        for name in op.reads if op.kind != "wait" else ():
            readers.setdefault(name, []).append(op)
    changed = {op.reads[op.operand] for op in program.ops if op.in_place and op.kind == "compute"}
    there = {t.name: t for op in program.ops if op.kind == "input" for t in op.writes if t.name not in changed}
    kept = changed | {name for _, name in program.results}
    made: dict[str, tuple[Op, ...]] = {}
    found: dict[str, tuple[Op, ...]] = {}
    for op in program.ops:
        if op.is_collective or op.in_place or len(op.reads) != 1 or op.reads[0] not in there:
            continue
        if not _shows(op, there[op.reads[0]]) or op.name in program.once or op.writes[0].name in kept:
            continue
        written, casts = op.writes[0], (*made.get(op.reads[0], ()), op)
        of = readers.get(written.name, [])
        now = [r for r in of if r.phase == op.phase]
        if len(now) != 1 or not (len(of) == 1 or all(r.is_collective for r in of)):
            continue
        there[written.name], made[written.name] = written, casts
        if now[0].is_collective:
            found[now[0].name] = casts
    return found


def _shows(op: Op, given: LocalTensor) -> bool:
    """Whether an op only shows what it is given in another way, in no more bytes."""
    if len(op.writes) != 1 or op.kind not in ("compute", "redistribute"):
        return False
    made = op.writes[0]
    return op.kind == "redistribute" or op.alias or (made.meta.shape == given.meta.shape and made.bytes < given.bytes)


def _key(op: Op, at: int, kind: Kind, level: int) -> tuple[object, ...]:
    step, meta = op.step, op.writes[0].meta
    assert step is not None
    if step.kind not in BUCKETED or step.reduction not in SUMMED or meta.dtype not in FLOATS:
        return (at,)
    return step.kind, step.axis, step.reduction, meta.dtype, op.phase, kind, level


def _is_wait(op: Op, launched: set[str]) -> bool:
    """Whether an op waits for a collective. The wait for an offload reads what is copied, which a collective may have
    made, and then the copy."""
    return op.kind == "wait" and op.reads[-1] in launched


def _phases(fixed: Sequence[Op]) -> tuple[dict[Phase, int], dict[Phase, int]]:
    turn = turn_of(fixed)
    start = next((i for i, op in enumerate(fixed) if op.kind != "input"), len(fixed))
    return {"forward": min(start, turn), "backward": turn}, {"forward": turn, "backward": len(fixed)}


def _first_slots(
    moved: Sequence[Op], made: Mapping[str, int], by: Mapping[str, int], begins: Mapping[Phase, int]
) -> tuple[list[int], list[int]]:
    """Return the first slot of each collective, and how many it waits for one after the other."""
    first: list[int] = []
    level: list[int] = []
    for op in moved:
        before = [by[name] for name in op.reads if name in by and moved[by[name]].phase == op.phase]
        there = [made[name] + 1 for name in op.reads if name in made]
        first.append(max([begins[op.phase], *there, *(first[i] for i in before)]))
        level.append(max((level[i] + 1 for i in before), default=0))
    return first, level


def _last_slots(
    moved: Sequence[Op], fixed: Sequence[Op], by: Mapping[str, int], ends: Mapping[Phase, int]
) -> tuple[list[int], list[int]]:
    """Return the last slot of each collective, and how many wait for it one after the other."""
    last = [ends[op.phase] for op in moved]
    after = [0] * len(moved)
    for i in reversed(range(len(fixed))):
        for name in fixed[i].reads:
            if name in by and moved[by[name]].phase == fixed[i].phase:
                last[by[name]] = min(last[by[name]], i)
    for i in reversed(range(len(moved))):
        for name in moved[i].reads:
            if name in by and moved[by[name]].phase == moved[i].phase:
                last[by[name]] = min(last[by[name]], last[i])
                after[by[name]] = max(after[by[name]], after[i] + 1)
    return last, after


def group_launches(
    collectives: Sequence[SchedulableCollective], most_bytes: int, most_beside: float = math.inf
) -> Iterator[tuple[SchedulableCollective, ...]]:
    """Group collectives of one key in turn, as long as a launch has less than ``most_bytes`` and there is a slot for
    all.

    A tensor of ``most_bytes`` goes by itself: its launch costs little, and copying it into a bucket would cost more.

    Args:
        most_beside: bytes of collectives of any key, counted from a launch's first one, after which no more join it.
            Else the few bytes of a rare kind would wait for the last of them, and what follows with them.
    """
    gathering: dict[tuple[object, ...], _OpenLaunch] = {}
    passed = 0
    for m in collectives:
        passed += m.op.wire_bytes
        if m.op.wire_bytes >= most_bytes:
            yield (m,)
            continue
        held = gathering.get(m.key)
        if held is not None and passed - held.begun < most_beside and held.try_add(m, most_bytes):
            continue
        if held is not None:
            yield tuple(held.members)
        gathering[m.key] = _OpenLaunch([m], m.op.wire_bytes, m.first, m.last, passed)
    yield from (tuple(held.members) for held in gathering.values())


@dataclass(slots=True)
class _OpenLaunch:
    """A launch that more collectives may join: its bytes, the slots that suit all, and the bytes seen before it
    began."""

    members: list[SchedulableCollective]
    size: int
    first: int
    last: int
    begun: int

    def try_add(self, m: SchedulableCollective, most_bytes: int) -> bool:
        """Add a collective if it fits, and return whether it did."""
        first, last = max(m.first, self.first), min(m.last, self.last)
        if self.size >= most_bytes or first > last:
            return False
        self.members.append(m)
        self.size, self.first, self.last = self.size + m.op.wire_bytes, first, last
        return True
