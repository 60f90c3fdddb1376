"""When collectives are launched, and which of them together: so that they hide behind computation, within the budget.

Small collectives of one kind, axis and dtype that are needed at about the same time go in one launch. What is gathered
from shards that are there when a phase begins is launched some launches ahead of its reader; reductions of gradients
when enough of them are there; whatever else as soon as its operand is. How much is put together and how far gathers
run ahead is what makes the simulated step the shortest: each way is tried on the streams of `planner.timeline`, and
the best whose exact memory fits is taken. Nothing is computed in another order, and every rank has the one program, so
all ranks launch in the same order.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import attrgetter

from autopar.ir import Phase
from autopar.planner.liveness import MemoryProfile
from autopar.planner.movable import Movable, Parts, take_apart, together
from autopar.planner.packing import packs
from autopar.planner.pricing import Prices
from autopar.planner.timeline import Timeline, simulate_streams
from autopar.planner.waits import place_waits
from autopar.program import Arrangement, Op, Program

PREFETCHES = (0, 1, 2, 4)
SIZES = (1, 4, 16)
"""Times the bytes that take as long to send as a launch: less is dominated by the launch, more hides no better. Also
tried are 0, each by itself, and all together."""

ALIKE = 1e-4
"""Steps that differ by less than this share are taken for equal, of which the least is put together and prefetched."""

MOST_CHECKED = 8
"""Ways whose memory is looked at, the shortest step first."""

WAIT_LATER = 1.0
"""Of a collective's predicted time, how much later than its end it is waited for where memory allows: predictions may
be wrong, and then a wait stops the program."""


@dataclass(frozen=True)
class Arranged:
    """A program with its collectives arranged, or as it was where that is no longer."""

    program: Program
    memory: MemoryProfile
    timeline: Timeline


def arrange(
    program: Program, prices: Prices, memory: MemoryProfile, profiled: Callable[[Program], MemoryProfile],
    budget: float, deadline: float,
) -> Arranged:  # fmt: skip
    """The arrangement of ``program`` with the shortest step whose peak is within ``budget``, or at most as it was.

    Args:
        memory: of ``program``.
        profiled: the exact memory of a program.
        deadline: on ``time.perf_counter``; what was found by then is taken.
    """
    timeline = simulate_streams(program, prices.overlap)
    as_it_was = Arranged(program, memory, timeline)
    if not program.collectives:
        return as_it_was
    ways = _Ways(take_apart(program), prices)
    tried = ways.search(deadline)
    for a in sorted(tried, key=lambda a: _rank(a, tried[a], timeline.seconds))[:MOST_CHECKED]:
        if tried[a] >= timeline.seconds:
            break
        made = replace(program, ops=ways.ops(a), arrangement=replace(a, before_s=timeline.seconds))
        for later in (WAIT_LATER, 0.0):
            found = place_waits(made, prices.overlap, later)
            held = profiled(found)
            if held.peak_bytes <= max(budget, memory.peak_bytes):
                after = simulate_streams(found, prices.overlap)
                if after.seconds < timeline.seconds:
                    return Arranged(found, held, after)
                break
        if time.perf_counter() > deadline:
            break
    return as_it_was


def _rank(a: Arrangement, seconds: float, before_s: float) -> tuple[float, ...]:
    return round(seconds / before_s / ALIKE), a.prefetch, a.gathered_bytes, a.reduced_bytes


@dataclass(frozen=True)
class _Launch:
    """One collective or several together, at a place among the ops that stay."""

    members: tuple[Movable, ...]
    place: int

    @property
    def order(self) -> tuple[bool, int, int, int]:
        """What is needed first goes first where several are launched at one place."""
        first = self.members[0]
        return first.op.phase == "backward", self.place, ("middle", "early", "late").index(first.kind), first.at


@dataclass
class _Ways:
    """The ways to arrange the collectives of a program."""

    parts: Parts
    prices: Prices

    def search(self, deadline: float) -> dict[Arrangement, float]:
        """Simulated seconds of the ways that were tried: first how to reduce, then how to gather."""
        tried: dict[Arrangement, float] = {}

        def best() -> Arrangement:
            return min(tried, key=lambda a: (tried[a], a.prefetch, a.gathered_bytes, a.reduced_bytes))

        def look(ways: Iterable[Arrangement]) -> None:
            for a in ways:
                if a not in tried and (not tried or time.perf_counter() < deadline):
                    tried[a] = simulate_streams(self._merged(a), self.prices.overlap).seconds

        reduced, gathered = self._sizes("late"), self._sizes("early")
        look(Arrangement(r, 0, 1) for r in reduced)
        some = best()
        look(replace(some, gathered_bytes=g, prefetch=d) for g in gathered for d in PREFETCHES)
        some = best()
        look(replace(some, reduced_bytes=r) for r in reduced)
        return tried

    def _sizes(self, kind: str) -> list[int]:
        """Bytes from which on to launch together."""
        found = [m for m in self.parts.movables if m.kind == kind]
        total = sum(m.op.wire_bytes for m in found) + 1
        sizes = {min(times * max(map(self._launch_bytes, found)), total) for times in SIZES} if found else set()
        return sorted({0, *sizes, total})

    def _launch_bytes(self, m: Movable) -> int:
        """Bytes that take as long as the launch."""
        step = m.op.step
        assert step is not None
        alpha_s, beta_s_per_byte = self.prices.collectives.lines(step.kind, step.axis)[-1]
        return int(alpha_s / beta_s_per_byte) if beta_s_per_byte else 0

    def ops(self, a: Arrangement) -> tuple[Op, ...]:
        """The program's ops in this arrangement."""
        return tuple(self._ordered(a, lambda start, end: self.parts.fixed[start:end]))

    def _merged(self, a: Arrangement) -> Program:
        """A program that takes as long, in which what is computed between two events is one op."""
        return Program(tuple(self._ordered(a, self._runs)), ())

    def _ordered(self, a: Arrangement, between: Callable[[int, int], Sequence[Op]]) -> Iterator[Op]:
        at = 0
        for launch in self._launches(a):
            if launch.place > at:
                yield from between(at, launch.place)
                at = launch.place
            yield self._launch(launch.members)
        yield from between(at, len(self.parts.fixed))

    def _runs(self, start: int, end: int) -> list[Op]:
        made = []
        for event in self._events[self._event_from[start] : self._event_from[end]]:
            made += self._run(start, event)
            start = event
        return [*made, *self._run(start, end)]

    def _run(self, start: int, end: int) -> list[Op]:
        """Ops from ``start`` to ``end``, of which none but the first waits, as one."""
        if start == end:
            return []
        first = self.parts.fixed[start]
        if start in self._alone:
            return [first]
        return [replace(first, kind="compute", writes=(), seconds=self._until[end] - self._until[start])]

    @cached_property
    def _until(self) -> list[float]:
        """Seconds of computation before each place."""
        own = (0.0 if op.kind == "input" or op.is_transfer else op.seconds for op in self.parts.fixed)
        return list(accumulate(own, initial=0.0))

    @cached_property
    def _alone(self) -> set[int]:
        """Ops that are more than computation."""
        return {i for i, op in enumerate(self.parts.fixed) if op.is_transfer or op.kind in ("wait", "decomposed")}

    @cached_property
    def _events(self) -> list[int]:
        """Places of ops that wait, of transfers, of what follows one, and of each phase's begin."""
        awaited = {t.name for m in self.parts.movables for t in m.op.writes}
        awaited |= {t.name for i in self._alone for t in self.parts.fixed[i].writes}
        waiting = {i for i, op in enumerate(self.parts.fixed) if not awaited.isdisjoint(op.reads)}
        found = waiting | self._alone | {i + 1 for i in self._alone} | set(self.parts.begins.values())
        return sorted(i for i in found if i < len(self.parts.fixed))

    @cached_property
    def _event_from(self) -> list[int]:
        """For each place, how many events come before or at it."""
        counts = [0] * (len(self.parts.fixed) + 1)
        for event in self._events:
            counts[event] += 1
        return list(accumulate(counts))

    def _launches(self, a: Arrangement) -> list[_Launch]:
        """Every launch in the order of the program."""
        ahead = [*self._middle(), *self._early(a)]
        placed = [*ahead, *self._late(a, ahead)]
        of = {m.at: launch for launch in placed for m in launch.members}
        done: set[int] = set()
        order: list[_Launch] = []

        def add(launch: _Launch) -> None:
            if launch.members[0].at in done:
                return
            done.add(launch.members[0].at)
            for at in sorted({i for m in launch.members for i in m.waits_for}):
                add(of[at])
            order.append(launch)

        for launch in sorted(placed, key=attrgetter("order")):
            add(launch)
        return order

    def _of_kind(self, kind: str) -> list[Movable]:
        return [m for m in self.parts.movables if m.kind == kind]

    def _middle(self) -> list[_Launch]:
        """As soon as the operand is there, together while launches are what they cost."""
        found = sorted(self._of_kind("middle"), key=lambda m: (m.first, m.at))
        least = min(map(self._launch_bytes, found), default=0)
        groups = together([m for m in found if not m.waits_for], least)
        chained = [_Launch((m,), m.last) for m in found if m.waits_for]
        return [_Launch(g, max(m.first for m in g)) for g in groups] + chained

    def _early(self, a: Arrangement) -> list[_Launch]:
        """In the order of need, each some launches ahead of it, and a step that another needs one more."""
        found = sorted(self._of_kind("early"), key=lambda m: (m.last, m.at))
        groups = list(together(found, a.gathered_bytes))
        places = {
            phase: sorted({_needed(g) for g in groups if g[0].level == 0 and g[0].op.phase == phase})
            for phase in self.parts.begins
        }
        before: dict[int, int] = {}
        launches = []
        for group in sorted(groups, key=lambda g: g[0].level):
            phase = group[0].op.phase
            ahead = bisect_left(places[phase], _needed(group)) - a.prefetch - group[0].level
            place = places[phase][ahead] if ahead >= 0 else self.parts.begins[phase]
            place = min([place, *(before[m.at] for m in group if m.at in before)])
            launches.append(_Launch(group, place))
            for i in (i for m in group for i in m.waits_for):
                before[i] = min(place, before.get(i, place))
        return launches

    def _late(self, a: Arrangement, ahead: Sequence[_Launch]) -> list[_Launch]:
        """When the last operand is there; a step after another when the next of those is launched."""
        launches: list[_Launch] = []
        of = {m.at: launch.place for launch in ahead for m in launch.members}
        places: dict[Phase, list[int]] = {"forward": [], "backward": []}
        found = sorted(self._of_kind("late"), key=lambda m: (m.first, m.at))
        for group in sorted(together(found, a.reduced_bytes), key=lambda g: g[0].level):
            phase = group[0].op.phase
            place = max(m.first for m in group)
            after = [of[i] for m in group for i in m.waits_for if i in of]
            if after:
                known, following = places[phase], bisect_right(places[phase], max(after))
                place = max(place, known[following] if following < len(known) else self.parts.ends[phase])
            else:
                insort(places[phase], place)
            launches.append(_Launch(group, place))
            of.update((m.at, place) for m in group)
        return launches

    def _launch(self, members: Sequence[Movable]) -> Op:
        """The op of a launch: of several tensors, priced as one collective of all their bytes."""
        ops = [m.op for m in members]
        first = ops[0]
        if len(ops) == 1:
            return first
        steps = tuple(op.step for op in ops if op.step is not None)
        kind, axis = steps[0].kind, steps[0].axis
        costs = self.prices.collectives.of(first.writes[0].meta.dtype)
        size = sum(op.wire_bytes for op in ops)
        copied_s = sum(map(self._copied_s, ops))
        launch_s = costs.seconds(kind, 0, axis)
        return replace(
            first, name=f"{first.name}|{len(ops)} together", bucket=steps, in_place=False, kernels=(),
            reads=tuple(name for op in ops for name in op.reads), writes=tuple(t for op in ops for t in op.writes),
            seconds=costs.seconds(kind, size, axis) + copied_s, wire_bytes=size, launch_s=launch_s + copied_s,
        )  # fmt: skip

    def _copied_s(self, op: Op) -> float:
        """Seconds to copy a tensor into the bucket or out of it, where by itself it would not be copied."""
        assert op.step is not None
        tensor = op.writes[0]
        if op.step.kind == "all_reduce" or packs(op.step, tensor.spec, tensor.meta, self.prices.mesh):
            return 0.0
        return self._copy_s(op.wire_bytes)

    def _copy_s(self, size: int) -> float:
        alpha_s, beta_s_per_byte = self.prices.compute.copy_line()
        return alpha_s + 2 * beta_s_per_byte * size


def _needed(group: Sequence[Movable]) -> int:
    return min(m.last for m in group)
