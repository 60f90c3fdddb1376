"""When collectives are launched and which go together, so that they hide behind computation within the memory budget.

Small collectives of one kind, axis and dtype that are needed at about the same time go in one launch. Gathers of shards
that are available when a phase begins are launched some launches ahead of their readers, reductions of gradients when
enough of them are ready, and everything else as soon as its operand is. How much goes together and how far gathers run
ahead is chosen for the shortest simulated step: each arrangement is tried on the streams of ``schedule.timeline``, and
the best one whose exact memory fits is taken. The order of computation does not change. Every rank has the same
program, so all ranks launch in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from autopar.planner.memory.exact import MemoryProfile
from autopar.planner.overlap.arrangements import ALONE, Arrangements
from autopar.planner.overlap.collectives import extract_collectives
from autopar.planner.overlap.shortening import Depths, shortened
from autopar.planner.pricing.prices import Prices
from autopar.planner.schedule.timeline import Timeline, simulate_streams
from autopar.planner.schedule.waits import place_waits, wait_sooner
from autopar.program import Arrangement, Program
from autopar.solver.clock import now

EQUAL_SHARE = 1e-4
"""Steps that differ by less than this share count as equal. Among equal ones the arrangement that groups and prefetches
the least is taken."""

UNSURE_SHARE, MAX_EXACT = 2e-3, 2
"""Arrangements of a deep program within the share ``UNSURE_SHARE`` of the shortest step are simulated with all layers,
but at most this many."""

NEAR_SHARE, MAX_NEAR = 0.01, 6
"""When two short programs stand for a deep one, arrangements within the share ``NEAR_SHARE`` of the best in the shorter
one are simulated in the longer one, but at most this many."""

MAX_CHECKED = 8
"""The number of arrangements that may turn out to be over the budget, the shortest step first, before the program stays
as it is."""

MAX_RELAXED = 2
"""The number of arrangements to try that fit only with some collectives later than they ask for. Others are hardly
better."""

NEARLY_FITS = 1.01
"""Factor on the budget beyond which waiting sooner for collectives does not help."""

WAIT_LATER = 1.0
"""How long after its predicted end a collective is waited for where memory allows, as a multiple of its predicted time.
Predictions may be wrong, and then a wait stops the program."""


@dataclass(frozen=True)
class Arranged:
    """A program with its collectives arranged, or as it was if that is no slower.

    Args:
        before: the timeline of the program as it was.
    """

    program: Program
    memory: MemoryProfile
    timeline: Timeline
    before: Timeline


@dataclass(frozen=True)
class TriedArrangements:
    """Arrangements of a program's collectives that were simulated, and the seconds of a step in each, whatever memory
    it takes."""

    program: Program
    arrangements: Arrangements
    seconds: dict[Arrangement, float]
    before: Timeline

    @staticmethod
    def of(program: Program, likes: Mapping[str, str], prices: Prices, deadline: float) -> TriedArrangements:
        """Simulate arrangements of ``program``.

        Args:
            likes: of the nodes of its graph (``Graph.likes``).
            deadline: on ``clock.now``; what was found by then counts.
        """
        arrangements = Arrangements(extract_collectives(program), prices)
        found = search(arrangements, program, likes, deadline) if program.collectives else {}
        return TriedArrangements(program, arrangements, found, simulate_streams(program, prices.overlap))

    def least_s(self) -> float:
        """Return the seconds of the shortest step."""
        return min([self.before.seconds, *self.seconds.values()])

    def shortest(self, overlap: float) -> Program:
        """Return the program in the arrangement of the shortest step, whatever it holds."""
        best = min(self.seconds, key=self.seconds.__getitem__, default=None)
        if best is None or self.seconds[best] >= self.before.seconds:
            return self.program
        return place_waits(replace(self.program, ops=self.arrangements.ops(best, {}), arrangement=best), overlap)

    def promising(self) -> list[Arrangement]:
        """Return the arrangements that are faster than the program as it is, the fastest first."""
        before_s = self.before.seconds
        shorter = (a for a, seconds in self.seconds.items() if seconds < before_s)
        return sorted(shorter, key=lambda a: _rank(a, self.seconds[a], before_s))


def arrange(
    tried: TriedArrangements,
    profiled: Callable[[Program], MemoryProfile],
    budget: float,
    deadline: float,
    memory: MemoryProfile | None = None,
) -> Arranged:
    """Return the arrangement of a program with the shortest step whose peak is within ``budget``, or no higher than it
    was.

    Args:
        profiled: computes the exact memory of a program.
        deadline: on ``clock.now``; what was found by then is taken.
        memory: of the program as it is, if it is known.
    """
    program, overlap = tried.program, tried.arrangements.prices.overlap
    memory = memory or profiled(program)
    fitter = _Fitter(program, tried, overlap, profiled, max(budget, memory.peak_bytes), deadline)
    best: Arranged | None = None
    over: list[Arrangement] = []
    relaxed = 0
    for arrangement in tried.promising():
        if any(_holds_more(arrangement, other) for other in over):
            continue
        found, as_asked = fitter.fit(arrangement)
        if found is not None and (best is None or found.timeline.seconds < best.timeline.seconds):
            best = found
        relaxed += found is not None
        if as_asked or relaxed == MAX_RELAXED or len(over) == MAX_CHECKED or now() > deadline:
            break
        over.append(arrangement)
    if best is not None and best.timeline.seconds < (1 - EQUAL_SHARE) * tried.before.seconds:
        return best
    return Arranged(program, memory, tried.before, tried.before)


@dataclass
class _Fitter:
    """Brings arrangements of a program within the budget, or at least to the peak of the program as it is.

    Args:
        most: the higher of both, in bytes.
    """

    program: Program
    tried: TriedArrangements
    overlap: float
    profiled: Callable[[Program], MemoryProfile]
    most: float
    deadline: float
    began: float = field(default_factory=now)

    def fit(self, arrangement: Arrangement) -> tuple[Arranged | None, bool]:
        """Return the program in this arrangement, and whether it is the whole arrangement.

        Where it holds too much, collectives that are under way there are launched later, in the end by themselves. None
        if that does not help, or not in time.
        """
        leads: dict[int, int] = {}
        recorded = replace(arrangement, before_s=self.tried.before.seconds)
        nearly = NEARLY_FITS
        while True:
            made = replace(self.program, ops=self.tried.arrangements.ops(arrangement, leads), arrangement=recorded)
            for later in (WAIT_LATER, 0.0):
                found, held = self._measured(place_waits(made, self.overlap, later), nearly)
                if held.peak_bytes <= self.most:
                    after = simulate_streams(found, self.overlap)
                    return Arranged(found, held, after, self.tried.before), not leads
                if held.peak_bytes > nearly * self.most:
                    break
            if nearly > NEARLY_FITS or now() > self.deadline:
                return None, False
            if not self._reduce_leads(arrangement, leads, self._held_by_slot(found, held)):
                nearly = math.inf  # only earlier waits can still help

    def _measured(self, program: Program, nearly: float) -> tuple[Program, MemoryProfile]:
        """Return a program and its memory, with earlier waits if it holds too much, but at most ``nearly`` times the
        limit."""
        held = self.profiled(program)
        if not self.most < held.peak_bytes <= nearly * self.most:
            return program, held
        sooner = wait_sooner(program, held.timeline, self.most)
        now = self.profiled(sooner) if sooner is not None else held
        return (sooner, now) if sooner is not None and now.peak_bytes < held.peak_bytes else (program, held)

    def _held_by_slot(self, found: Program, held: MemoryProfile) -> npt.NDArray[np.int64]:
        """Return the most bytes that are held at each slot; see ``overlap.collectives``."""
        stays = {op.name for op in self.tried.arrangements.parts.fixed}
        passed = np.cumsum([0, *(op.name in stays for op in found.ops)])
        most = np.zeros(passed[-1] + 1, dtype=np.int64)
        np.maximum.at(most, passed, np.array(held.timeline))
        return most

    def _reduce_leads(self, arrangement: Arrangement, leads: dict[int, int], held: npt.NDArray[np.int64]) -> bool:
        """Halve the leads of collectives that are under way where too much is held, until that should be enough.

        Args:
            held: the bytes at each slot; updated with what the shorter leads should free.

        Returns:
            Whether any lead is shorter.
        """
        arrangements, changed = self.tried.arrangements, False
        late = now() > (self.began + self.deadline) / 2  # late: go straight to what is surely enough
        slots = arrangements.slots(arrangement, leads)
        while True:
            over = np.concatenate([[0], np.cumsum(held > self.most)])
            shorter = False
            for m in arrangements.parts.collectives:
                span = (slots[m.at], m.last) if m.kind == "early" else (m.first, slots[m.at])
                lead = leads.get(m.at, arrangement.prefetch if m.kind == "early" else 0)
                if m.kind != "middle" and lead != ALONE and over[max(span)] > over[span[0]]:
                    leads[m.at] = lead // 2 if lead > 0 and not late else ALONE
                    shorter = changed = True
            if not shorter:
                return changed
            before, slots = slots, arrangements.slots(arrangement, leads)
            for m in arrangements.parts.collectives:
                there, then = before[m.at], slots[m.at]
                held[min(there, then) : max(there, then)] -= m.op.wire_bytes if m.at in leads else 0


def search(
    arrangements: Arrangements, program: Program, likes: Mapping[str, str], deadline: float
) -> dict[Arrangement, float]:
    """Return the seconds of the arrangements that were tried.

    For deep programs they are extrapolated from shorter ones, and exact for the best arrangements.
    """
    short = shortened(program, likes, arrangements.largest_share())
    if short is None:
        return arrangements.search(arrangements.seconds, deadline)
    few, more = (Arrangements(extract_collectives(p), arrangements.prices, arrangements) for p in short.programs)
    tried = _extrapolated(short.depths, few, more, deadline)
    least = min(tried.values())
    near = [a for a in tried if tried[a] <= (1 + UNSURE_SHARE) * least]
    exact = sorted(near, key=lambda a: _rank(a, tried[a], least))[:MAX_EXACT]
    return tried | {a: arrangements.seconds(a) for a in exact if now() < deadline}


def _extrapolated(depths: Depths, few: Arrangements, more: Arrangements, deadline: float) -> dict[Arrangement, float]:
    """Extrapolate the seconds of a deep program's arrangements from two short ones.

    Arrangements far from the best in the shorter program are extrapolated from that one alone.
    """
    tried = few.search(few.seconds, deadline)
    least, *others = sorted(tried, key=tried.__getitem__)
    near = [least, *(a for a in others[: MAX_NEAR - 1] if tried[a] <= (1 + NEAR_SHARE) * tried[least])]
    whole = {a: depths.seconds(tried[a], more.seconds(a)) for a in near}
    return {a: s * whole[least] / tried[least] for a, s in tried.items()} | whole


def _holds_more(a: Arrangement, other: Arrangement) -> bool:
    """Whether launches of ``a`` are at least as large and as early as those of ``other``."""
    return (
        a.reduced_bytes >= other.reduced_bytes
        and a.gathered_bytes >= other.gathered_bytes
        and a.prefetch >= other.prefetch
    )


def _rank(a: Arrangement, seconds: float, before_s: float) -> tuple[float, ...]:
    return round(seconds / before_s / EQUAL_SHARE), a.prefetch, a.gathered_bytes, a.reduced_bytes
