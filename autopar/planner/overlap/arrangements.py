"""The arrangements of a program's collectives: which go together, where each launch is, and how long a step takes.

Trying one costs milliseconds: what is computed between two events is one event for the streams of
``schedule.timeline``.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate
from operator import attrgetter
from typing import TypeAlias

from autopar.planner.footprint.collective_buffers import needs_packing
from autopar.planner.overlap.collectives import Parts, SchedulableCollective, group_launches
from autopar.planner.pricing.prices import Prices
from autopar.planner.schedule.timeline import Event, simulated_seconds
from autopar.program import Arrangement, Op
from autopar.solver.clock import now

PREFETCHES = (0, 1, 2, 4)
SIZE_FACTORS = (1, 4, 16)
"""Bucket sizes to try, as multiples of the bytes that take as long to send as a launch. With less the launch dominates,
and with more nothing hides better. Also tried are 0 (each collective by itself) and all together."""

JOIN_FACTOR = 4
"""Multiple of a launch's bytes that may be reduced after its first collective while more may join it."""

MAX_LAUNCH_SHARE = 0.05
"""The largest share of the device's memory that goes in one launch."""

NEGLIGIBLE_SHARE = 0.05
"""A share of the communicated bytes that hardly matters."""


Leads: TypeAlias = Mapping[int, int]
"""By how many launches single collectives, by position, run ahead of their readers, if not as their arrangement
says."""

ALONE = -1
"""The lead of a collective that goes by itself: just before its reader, or as soon as what it sends is ready."""


@dataclass(frozen=True)
class _Launch:
    """One collective or several together, launched at a slot.

    Args:
        starts_s: when it is expected to start.
    """

    members: tuple[SchedulableCollective, ...]
    slot: int
    starts_s: float = 0.0

    @cached_property
    def order(self) -> tuple[bool, int, int, float, int]:
        """Sorting key: at one slot, what is needed first is launched first."""
        first = self.members[0]
        kind = ("middle", "early", "late").index(first.kind)
        return first.op.phase == "backward", self.slot, kind, self.starts_s, first.at


@dataclass
class Arrangements:
    """The arrangements of a program's collectives.

    Args:
        whole: the arrangements of the program that this one is a part of; their sizes are tried.
    """

    parts: Parts
    prices: Prices
    whole: Arrangements | None = None
    _groups: dict[tuple[str, int], list[tuple[SchedulableCollective, ...]]] = field(default_factory=dict)
    _priced: dict[tuple[int, ...], tuple[float, float, int]] = field(default_factory=dict)
    _copy_seconds: dict[int, float] = field(default_factory=dict)
    _launch_of: dict[tuple[str, int], int] = field(default_factory=dict)
    _placed: dict[tuple[object, ...], list[_Launch]] = field(default_factory=dict)
    _ordered: dict[tuple[int, int, int], list[_Launch]] = field(default_factory=dict)
    _events_of: dict[int, tuple[tuple[SchedulableCollective, ...], Event]] = field(default_factory=dict)

    def search(self, seconds: Callable[[Arrangement], float], deadline: float) -> dict[Arrangement, float]:
        """Return the simulated seconds of the arrangements that were tried: first how to reduce, then how to gather."""
        tried: dict[Arrangement, float] = {}

        def best() -> Arrangement:
            return min(tried, key=lambda a: (tried[a], a.prefetch, a.gathered_bytes, a.reduced_bytes))

        def look(arrangements: Iterable[Arrangement]) -> None:
            for a in arrangements:
                if a not in tried and (not tried or now() < deadline):
                    tried[a] = seconds(a)

        of = self.whole or self
        reduced, gathered = of.sizes("late"), of.sizes("early")
        look(Arrangement(r, 0, 1 if of._of_kind["early"] else 0) for r in reduced)
        best_so_far = best()
        if of._of_kind["early"]:
            look(replace(best_so_far, gathered_bytes=g, prefetch=d) for g in gathered for d in PREFETCHES)
        best_so_far = best()
        look(replace(best_so_far, reduced_bytes=r) for r in reduced)
        return tried

    def sizes(self, kind: str) -> list[int]:
        """Return the bucket sizes to try: the bytes at which a launch is complete."""
        if not self._of_kind[kind]:
            return [0]
        total, most = self._total_bytes(kind), MAX_LAUNCH_SHARE * self.prices.cluster.device.memory_bytes
        found = {0, *(min(times * self.launch_bytes(kind), total) for times in SIZE_FACTORS), total}
        return sorted(size for size in found if size <= most)

    def launch_bytes(self, kind: str) -> int:
        """Return the bytes that take as long to send as a launch, on the axis where that is the most."""
        return max(map(self._launch_bytes, self._of_kind[kind]), default=0)

    def largest_share(self) -> float:
        """Return the largest share of what can go together that goes in one launch, where it takes several."""
        return max((share for share in self._shares() if share < 1), default=0.0)

    def largest_launch(self) -> float:
        """Return what the largest launch could carry, as a share of all of its kind; more than 1 where all goes in one
        launch."""
        return max(self._shares(), default=0.0)

    def _shares(self) -> Iterator[float]:
        several = NEGLIGIBLE_SHARE * sum(map(self._total_bytes, ("early", "late")))
        for kind in ("early", "late"):
            most = SIZE_FACTORS[-1] * self.launch_bytes(kind)
            sent: dict[tuple[object, ...], int] = {}
            for m in self._of_kind[kind]:
                if m.op.wire_bytes < most:
                    sent[m.key] = sent.get(m.key, 0) + m.op.wire_bytes
            yield from (most / size for size in sent.values() if size > several)

    def _total_bytes(self, kind: str) -> int:
        return sum(m.op.wire_bytes for m in self._of_kind[kind]) + 1

    def _launch_bytes(self, m: SchedulableCollective) -> int:
        """Return the bytes that take as long to send as the launch."""
        step = m.op.step
        assert step is not None
        key = step.kind, step.axis
        if key not in self._launch_of:
            alpha_s, beta_s_per_byte = self.prices.collectives.lines(*key)[-1]
            self._launch_of[key] = int(alpha_s / beta_s_per_byte) if beta_s_per_byte else 0
        return self._launch_of[key]

    def seconds(self, a: Arrangement) -> float:
        """Simulate a step in this arrangement."""
        return self._simulated(self._launches(a, {}))[0]

    def _simulated(self, launches: Sequence[_Launch]) -> tuple[float, list[float]]:
        """Return the seconds of a step with these launches, and when the program comes to each slot."""
        begins: list[float] = []
        slots, events = zip(*self._events_with(launches), strict=True)
        seconds = simulated_seconds(events, self.prices.overlap, begins)
        times: list[float] = []
        came, reached_s = 0, 0.0
        for slot, begun_s in zip((*slots, len(self._until)), (*begins, seconds), strict=True):
            if slot is not None:
                times += [reached_s + until - self._until[came] for until in self._until[came:slot]]
                came, reached_s = slot, begun_s
        return seconds, list(accumulate(times, max))

    def _events_with(self, launches: Sequence[_Launch]) -> Iterator[tuple[int | None, Event]]:
        """Yield the events of a step with these launches, with all computation between two events as one, and the slot
        of each but the launches."""
        at = 0
        for launch in launches:
            if launch.slot > at:
                yield from self._computed(at, launch.slot)
                at = launch.slot
            casts_s = sum([op.seconds for m in launch.members for op in m.casts])
            if casts_s:
                yield None, Event("compute", "", launch.members[0].op.phase, (), (), casts_s)
            if id(launch.members) not in self._events_of:
                self._events_of[id(launch.members)] = launch.members, self._event(launch.members)
            yield None, self._events_of[id(launch.members)][1]
        yield from self._computed(at, len(self.parts.fixed))

    def _computed(self, start: int, end: int) -> Iterator[tuple[int, Event]]:
        """Yield the events between two slots, each with its own."""
        for event in self._events[self._event_from[start] : self._event_from[end]]:
            if start < event:
                yield start, self._run(start, event)
            start = event
        if start < end:
            yield start, self._run(start, end)

    def _run(self, start: int, end: int) -> Event:
        """Return the ops from ``start`` to ``end``, none of which but the first waits, as one event."""
        first = self.parts.fixed[start]
        if start in self._uncomputed:
            return Event.of(first)
        return Event("compute", "", first.phase, first.reads, (), self._until[end] - self._until[start])

    def _event(self, members: Sequence[SchedulableCollective]) -> Event:
        first = members[0].op
        if len(members) == 1:
            return Event.of(first)
        assert first.step is not None
        seconds, launch_s, _ = self._cost(members)
        reads = tuple([name for m in members for name in m.op.reads])
        writes = tuple([t.name for m in members for t in m.op.writes])
        return Event("launch", "", first.phase, reads, writes, seconds, launch_s, first.step.link)

    def slots(self, a: Arrangement, leads: Leads) -> dict[int, int]:
        """Return the slot of each collective, by position."""
        return {m.at: launch.slot for launch in self._launches(a, leads) for m in launch.members}

    def ops(self, a: Arrangement, leads: Leads | None = None) -> tuple[Op, ...]:
        """Return the program's ops in this arrangement, with other leads for the collectives in ``leads``."""
        made: list[Op] = []
        at = 0
        for launch in self._launches(a, leads or {}):
            if launch.slot > at:
                made += self.parts.fixed[at : launch.slot]
                at = launch.slot
            made += [op for m in launch.members for op in m.casts]
            made.append(self._launch(launch.members))
        return (*made, *self.parts.fixed[at:])

    @cached_property
    def _until(self) -> list[float]:
        """Seconds of computation before each slot."""
        own = (0.0 if op.kind == "input" or op.is_transfer else op.seconds for op in self.parts.fixed)
        return list(accumulate(own, initial=0.0))

    @cached_property
    def _uncomputed(self) -> set[int]:
        """Ops that are not only computation."""
        return {i for i, op in enumerate(self.parts.fixed) if op.is_transfer or op.kind in ("wait", "decomposed")}

    @cached_property
    def _events(self) -> list[int]:
        """Slots of ops that wait, of transfers, of what follows one, and of the beginning of each phase."""
        awaited = {t.name for m in self.parts.collectives for t in m.op.writes}
        awaited |= {t.name for i in self._uncomputed for t in self.parts.fixed[i].writes}
        waiting = {i for i, op in enumerate(self.parts.fixed) if not awaited.isdisjoint(op.reads)}
        found = waiting | self._uncomputed | {i + 1 for i in self._uncomputed} | set(self.parts.begins.values())
        return sorted(i for i in found if i < len(self.parts.fixed))

    @cached_property
    def _event_from(self) -> list[int]:
        """For each slot, the number of events before or at it."""
        counts = [0] * (len(self.parts.fixed) + 1)
        for event in self._events:
            counts[event] += 1
        return list(accumulate(counts))

    def _launches(self, a: Arrangement, leads: Leads) -> list[_Launch]:
        """Return every launch in the order of the program.

        Where late collectives wait for others, they are placed by the times of computation, and then by those at which
        the step with these launches comes to each slot, if that is sooner done.
        """
        key = a.reduced_bytes, a.gathered_bytes, a.prefetch
        if not leads and key in self._ordered:
            return self._ordered[key]
        ahead, late = self._all_placed(a, leads)
        order = _in_order([*ahead, *late])
        if any(m.waits_for for launch in late for m in launch.members):
            seconds, times = self._simulated(order)
            again = _in_order([*ahead, *self._late(a, ahead, leads, times)])
            order = again if self._simulated(again)[0] < seconds else order
        if not leads:
            self._ordered[key] = order
        return order

    def _all_placed(self, a: Arrangement, leads: Leads) -> tuple[list[_Launch], list[_Launch]]:
        """Return all launches with their slots, the late ones apart. Without leads, equal ones of other arrangements
        are cached."""
        if leads:
            ahead = [*self._middle, *self._early(a, leads)]
            return ahead, self._late(a, ahead, leads, self._until)
        early = "early", a.gathered_bytes, a.prefetch
        if early not in self._placed:
            self._placed[early] = [*self._middle, *self._early(a, {})]
        late = "late", a.reduced_bytes, early if self._late_waits_for_early else ()
        if late not in self._placed:
            self._placed[late] = self._late(a, self._placed[early], {}, self._until)
        return self._placed[early], self._placed[late]

    @cached_property
    def _late_waits_for_early(self) -> bool:
        awaited = {i for m in self._of_kind["late"] for i in m.waits_for}
        return any(m.at in awaited for m in self._of_kind["early"])

    @cached_property
    def _of_kind(self) -> Mapping[str, list[SchedulableCollective]]:
        found: dict[str, list[SchedulableCollective]] = {"early": [], "middle": [], "late": []}
        for m in self.parts.collectives:
            found[m.kind].append(m)
        found["early"].sort(key=lambda m: (m.last, m.at))
        for kind in ("middle", "late"):
            found[kind].sort(key=lambda m: (m.first, m.at))
        return found

    def _grouped(self, kind: str, size: int) -> list[tuple[SchedulableCollective, ...]]:
        """Return the launches of early or late collectives; those come first that no other has to precede."""
        if (kind, size) not in self._groups:
            groups = group_launches(self._of_kind[kind], size, JOIN_FACTOR * size if kind == "late" else math.inf)
            self._groups[kind, size] = sorted(groups, key=lambda g: g[0].level)
        return self._groups[kind, size]

    def _groups_with_leads(self, kind: str, size: int, leads: Leads) -> list[tuple[SchedulableCollective, ...]]:
        """Return the same launches, with those apart that go by themselves."""
        groups = self._grouped(kind, size)
        if not leads:
            return groups
        apart = [(m,) for g in groups for m in g if leads.get(m.at) == ALONE]
        rest = [tuple(m for m in g if leads.get(m.at) != ALONE) for g in groups]
        return sorted([*filter(None, rest), *apart], key=lambda g: (g[0].level, g[0].at))

    @cached_property
    def _middle(self) -> list[_Launch]:
        """Launches of middle collectives: each as soon as its operand is there, grouped while the launch dominates the
        cost."""
        found = self._of_kind["middle"]
        least = min(map(self._launch_bytes, found), default=0)
        groups = group_launches([m for m in found if not m.waits_for], least)
        chained = [_Launch((m,), m.last) for m in found if m.waits_for]
        return [_Launch(g, max(m.first for m in g)) for g in groups] + chained

    def _early(self, a: Arrangement, leads: Leads) -> list[_Launch]:
        """Launch what is read some launches ahead of its reader, and what another collective waits for just in time for
        that.

        Times are those of computation, with one collective at a time on each queue.
        """
        groups = self._groups_with_leads("early", a.gathered_bytes, leads)
        readers = {phase: _readers(groups, phase) for phase in self.parts.begins}
        of = {m.at: i for i, group in enumerate(groups) for m in group}
        before = [sorted({of[i] for m in group for i in m.waits_for if i in of}) for group in groups]
        left = Counter(j for those in before for j in those)
        due = [_needed(group) for group in groups]
        due_s = [self._until[slot] for slot in due]
        free_s: dict[object, float] = {}
        launches: list[_Launch] = []
        latest = [(-due_s[i], i) for i in range(len(groups)) if i not in left]
        heapify(latest)
        while latest:
            i = heappop(latest)[1]
            group, begin = groups[i], self.parts.begins[groups[i][0].op.phase]
            queue = self._queue(group[0].op)
            lead = min(leads.get(m.at, a.prefetch) for m in group)
            if lead == ALONE:
                slot, at_s = due[i], due_s[i]
            elif i in left:
                at_s = min(due_s[i], free_s.get(queue, math.inf)) - self._cost_s(group)
                slot = max(bisect_right(self._until, at_s) - 1, begin)
            else:
                there = readers[group[0].op.phase]
                ahead = bisect_left(there, _needed(group)) - lead
                slot = there[ahead] if ahead >= 0 else begin
                at_s = self._until[slot]
            free_s[queue] = min(at_s, free_s.get(queue, math.inf))
            launches.append(_Launch(group, slot, at_s))
            for j in before[i]:
                due[j], due_s[j] = min(due[j], slot), min(due_s[j], at_s)
                left[j] -= 1
                if not left[j]:
                    heappush(latest, (-due_s[j], j))
        return launches

    @staticmethod
    def _queue(op: Op) -> tuple[str, int]:
        assert op.step is not None
        return op.phase, op.step.link

    def _late(self, a: Arrangement, ahead: Sequence[_Launch], leads: Leads, times: Sequence[float]) -> list[_Launch]:
        """Launch each collective when what it sends should be ready, with one at a time on each queue.

        One that waits for another would stop the program if it were launched sooner.

        Args:
            times: when the program comes to each slot.
        """
        groups = self._groups_with_leads("late", a.reduced_bytes, leads)
        of = {m.at: i for i, group in enumerate(groups) for m in group}
        there_s = {m.at: times[launch.slot] + self._cost_s(launch.members) for launch in ahead for m in launch.members}
        left = [{of[i] for m in group for i in m.waits_for if i in of} for group in groups]
        followers: dict[int, list[int]] = {}
        for i, before in enumerate(left):
            for j in before:
                followers.setdefault(j, []).append(i)
        ready_s = [
            max([times[max(m.first for m in g)], *(there_s[i] for m in g for i in m.waits_for if i in there_s)])
            for g in groups
        ]
        ready = [(ready_s[i], i) for i, before in enumerate(left) if not before]
        heapify(ready)
        free_s: dict[object, float] = {}
        launches: list[_Launch] = []
        while ready:
            at_s, i = heappop(ready)
            first = groups[i][0].op
            slot = max(*(m.first for m in groups[i]), bisect_left(times, at_s))
            slot = min(slot, self.parts.ends[first.phase])
            queue = self._queue(first)
            start_s = max(at_s, times[slot], free_s.get(queue, 0.0))
            free_s[queue] = start_s + self._cost_s(groups[i])
            launches.append(_Launch(groups[i], slot, start_s))
            for j in followers.get(i, ()):
                ready_s[j] = max(ready_s[j], free_s[queue])
                left[j].discard(i)
                if not left[j]:
                    heappush(ready, (ready_s[j], j))
        return launches

    def _launch(self, members: Sequence[SchedulableCollective]) -> Op:
        """Return the op of a launch. Several tensors are priced as one collective of all their bytes."""
        ops = [m.op for m in members]
        first = ops[0]
        if len(ops) == 1:
            return first
        steps = tuple(op.step for op in ops if op.step is not None)
        seconds, launch_s, size = self._cost(members)
        return replace(
            first,
            name=f"{first.name}|{len(ops)} together",
            bucket=steps,
            in_place=False,
            kernels=(),
            reads=tuple(name for op in ops for name in op.reads),
            writes=tuple(t for op in ops for t in op.writes),
            seconds=seconds,
            wire_bytes=size,
            launch_s=launch_s,
        )

    def _cost_s(self, members: Sequence[SchedulableCollective]) -> float:
        return members[0].op.seconds if len(members) == 1 else self._cost(members)[0]

    def _cost(self, members: Sequence[SchedulableCollective]) -> tuple[float, float, int]:
        """Return the seconds of a launch of several, the part of them that nothing hides, and the bytes."""
        key = tuple([m.at for m in members])
        if key not in self._priced:
            first = members[0].op
            assert first.step is not None
            costs = self.prices.collectives.of(first.writes[0].meta.dtype)
            size = sum([m.op.wire_bytes for m in members])
            copied_s = sum(map(self._copy_in_s, members))
            kind, axis = first.step.kind, first.step.axis
            seconds = costs.seconds(kind, size, axis) + copied_s
            self._priced[key] = seconds, costs.launches.seconds(kind, 0, axis) + copied_s, size
        return self._priced[key]

    def _copy_in_s(self, m: SchedulableCollective) -> float:
        """Return the seconds to copy a tensor into the bucket or out of it, where by itself it would not be copied."""
        if m.at not in self._copy_seconds:
            op, tensor = m.op, m.op.writes[0]
            assert op.step is not None
            whole = op.step.kind == "all_reduce" or needs_packing(op.step, tensor.spec, tensor.meta, self.prices.mesh)
            self._copy_seconds[m.at] = 0.0 if whole else self._copy_s(op.wire_bytes)
        return self._copy_seconds[m.at]

    def _copy_s(self, size: int) -> float:
        alpha_s, beta_s_per_byte = self.prices.compute.copy_line()
        return alpha_s + 2 * beta_s_per_byte * size


def _in_order(placed: Sequence[_Launch]) -> list[_Launch]:
    """Return launches in the order of the program, each after those that it waits for."""
    of = {m.at: launch for launch in placed for m in launch.members}
    done: set[int] = set()
    order: list[_Launch] = []

    def add(launch: _Launch) -> None:
        if launch.members[0].at in done:
            return
        done.add(launch.members[0].at)
        for at in sorted({i for m in launch.members for i in m.waits_for if i not in done}):
            add(of[at])
        order.append(launch)

    for launch in sorted(placed, key=attrgetter("order")):
        add(launch)
    return order


def _needed(group: Sequence[SchedulableCollective]) -> int:
    return min(m.last for m in group)


def _readers(groups: Sequence[Sequence[SchedulableCollective]], phase: str) -> list[int]:
    """Return the slots where the program reads what the last steps bring."""
    return sorted({_needed(g) for g in groups if g[0].level == 0 and g[0].op.phase == phase})
