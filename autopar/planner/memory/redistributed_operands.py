"""Redistributed copies, seen by the rows: what an op reads in another spec than the one in which the value is held.

Whether there is a copy depends on two options, that of the maker and that of the reader, so every handover that may
need one at a moment of a row gets a node of its own there: for each spec of the reader it tells whether the value is
there as it is, which takes nothing and needs the maker's spec to be the same, or copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from autopar.ir import Phase, Value
from autopar.planner.footprint.op_work import local_bytes
from autopar.planner.footprint.overwriting import MAKES_NEW
from autopar.planner.memory.live_ranges import BEFORE, Lives, last_read, lives_of, taken_over, takes_over
from autopar.planner.problem.variables import Decisions, Use, Variable, spec_made, spec_read
from autopar.sharding import ShardingSpec
from autopar.solver import Edge, Problem, Usage

Array = npt.NDArray[np.float64]
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Copy:
    """A handover that may be copied, ``sizes`` by each spec in which it is read, and the places while it lives."""

    handover: Use
    specs: tuple[ShardingSpec, ...]
    sizes: tuple[float, ...]
    first: float
    last: float


@dataclass
class Copies:
    """The nodes of all copies of ``decisions``. Options of each: nothing is read; then for every spec that it is there
    as it is, and that it is copied."""

    decisions: Decisions
    _arrays: dict[tuple[object, ...], Array] = field(default_factory=dict)

    def extend(self, problem: Problem, places: Sequence[float]) -> Problem:
        """``problem`` with the copies that live at ``places``, whose rows are at times 0, 1, ..."""
        costs, edges, usages = list(problem.costs), list(problem.edges), list(problem.usages)
        for copy, times in self._at(places):
            node = len(costs)
            size = self._array(("sizes", copy.sizes), lambda c: [0.0, *(b for z in c.sizes for b in (0.0, z))], copy)
            costs.append(self._array(("costs", len(size)), np.zeros, len(size)))
            edges.append(Edge(copy.handover.source, node, self._made(copy)))
            edges.append(Edge(node, copy.handover.target, self._read(copy)))
            usages += [Usage(node, size, t, t + 1) for t in times]
        return Problem(tuple(costs), tuple(edges), tuple(usages), problem.limit)

    def states(self, choice: Sequence[int], places: Sequence[float]) -> tuple[int, ...]:
        """``choice`` with the nodes that ``extend`` adds."""
        added = []
        for copy, _ in self._at(places):
            made, read = self._specs(copy, choice)
            there = read is not None and self._there(copy.handover, made, read)
            added.append(0 if read is None else 1 + 2 * copy.specs.index(read) + int(not there))
        return (*choice, *added)

    def bytes(self, choice: Sequence[int], place: float) -> float:
        """What all copies hold at ``place``."""
        return sum(self._bytes(copy, choice) for copy, _ in self._at((place,)))

    def by_variable(self, place: float) -> Mapping[int, Sequence[tuple[int, Callable[[Sequence[int]], float]]]]:
        """For each variable the copies at ``place`` that hang on it: a number, and the bytes under a choice."""
        found: dict[int, list[tuple[int, Callable[[Sequence[int]], float]]]] = {}
        for i, (copy, _) in enumerate(self._at((place,))):
            for variable in {copy.handover.source, copy.handover.target}:
                found.setdefault(variable, []).append((i, partial(self._bytes, copy)))
        return found

    def _bytes(self, copy: _Copy, choice: Sequence[int]) -> float:
        made, read = self._specs(copy, choice)
        if read is None or self._there(copy.handover, made, read):
            return 0.0
        return copy.sizes[copy.specs.index(read)]

    def _specs(self, copy: _Copy, choice: Sequence[int]) -> tuple[ShardingSpec | None, ShardingSpec | None]:
        h, v = copy.handover, self.decisions.variables
        target = v[h.target]
        read = self._spec_read(target, choice[h.target], h.position)
        return spec_made(v[h.source].options[choice[h.source]], h.out), read

    def _there(self, h: Use, made: ShardingSpec | None, read: ShardingSpec) -> bool:
        """Whether what is read is there as it is, or takes the place of what was made: a sum over ranks may."""
        if made is None or made == read or made.dims != read.dims or read.partial:
            return made == read
        return self._makes_new(h.source)

    def _makes_new(self, source: int) -> bool:
        node = self.decisions.variables[source].node
        return node is not None and node.packet in MAKES_NEW

    def _spec_read(self, target: Variable, option: int, position: int) -> ShardingSpec | None:
        """None where the option reads nothing, or what the forward has gathered."""
        return None if target.kept and target.kept[option] else spec_read(target.options[option], position)

    def _specs_read(self, h: Use) -> list[ShardingSpec | None]:
        target = self.decisions.variables[h.target]
        return [self._spec_read(target, o, h.position) for o in range(len(target.options))]

    def _at(self, places: Sequence[float]) -> Iterator[tuple[_Copy, list[int]]]:
        for copy in self.copies:
            times = [t for t, p in enumerate(places) if copy.first <= p <= copy.last]
            if times:
                yield copy, times

    @cached_property
    def _lives(self) -> Lives:
        return lives_of(self.decisions)

    @cached_property
    def copies(self) -> tuple[_Copy, ...]:
        d = self.decisions
        found: dict[tuple[int, int, int], _Copy] = {}
        known: dict[tuple[object, ...], tuple[ShardingSpec, ...]] = {}
        sizes: dict[tuple[object, ...], tuple[float, ...]] = {}
        for h in d.handovers:
            target = d.variables[h.target]
            life = self._life(h, target)
            if h.kept or h.rerun or life is None or h.source == h.target or (h.source, h.out, h.target) in found:
                continue
            read = id(target.options), target.kept, h.position
            if read not in known:
                known[read] = tuple(dict.fromkeys(s for s in self._specs_read(h) if s is not None))
            specs = known[read]
            if (specs, h.meta) not in sizes:
                sizes[specs, h.meta] = tuple(float(local_bytes(h.meta, s, d.mesh)) for s in specs)
            if max(sizes[specs, h.meta], default=0.0) > 0:
                found[h.source, h.out, h.target] = _Copy(h, specs, sizes[specs, h.meta], *life)
        return tuple(found.values())

    def _life(self, h: Use, target: Variable) -> tuple[float, float] | None:
        """The places at which what is read is there beside what is handed over."""
        lives, value = self._lives, target.value
        source = self.decisions.variables[h.source].node
        if target.kind == "op" and target.node is not None:
            at = lives.at[target.node.name]
            handed = self.decisions.variables[h.source].value or (Value(source.name, h.out) if source else None)
            last = handed is not None and lives.handed[target.phase].get(handed) == target.node.name
            return at - BEFORE, at - BEFORE if last else at
        if target.kind == "parameter" and h.position < 0 and source is not None:
            return (lives.at[source.name] + BEFORE,) * 2
        if target.kind == "output" and value is not None:
            return lives.at[value.node] + BEFORE, last_read(self.decisions, value, lives)
        if target.kind == "copy" and value is not None and not target.key.endswith("@module"):
            if takes_over(self.decisions, target):
                return (taken_over(self.decisions, target, lives)[0],) * 2
            return self._reads(value, target.phase)
        return None

    def _reads(self, value: Value, phase: Phase) -> tuple[float, float] | None:
        first, last = self._lives.reads[phase]
        return (first[value] - BEFORE, last[value]) if value in first else None

    def _made(self, copy: _Copy) -> Array:
        h = copy.handover
        key = ("made", id(self.decisions.variables[h.source].options), self._makes_new(h.source), h.out, copy.specs)
        return self._array(key, self._fits_as_made, copy)

    def _fits_as_made(self, copy: _Copy) -> Array:
        h = copy.handover
        made = [spec_made(o, h.out) for o in self.decisions.variables[h.source].options]
        fits = [[True, *(f for s in copy.specs for f in (self._there(h, m, s), True))] for m in made]
        return np.where(fits, 0.0, math.inf)

    def _read(self, copy: _Copy) -> Array:
        target, position = self.decisions.variables[copy.handover.target], copy.handover.position
        key = ("read", id(target.options), target.kept, position, copy.specs)
        return self._array(key, self._fits_as_read, copy)

    def _fits_as_read(self, copy: _Copy) -> Array:
        read = self._specs_read(copy.handover)
        fits = [[r is None for r in read], *([r == s for r in read] for s in copy.specs for _ in range(2))]
        return np.where(fits, 0.0, math.inf)

    def _array(self, key: tuple[object, ...], made: Callable[[_T], Sequence[float] | Array], of: _T) -> Array:
        """Equal ones are one array, by which the solver finds repeated blocks."""
        if key not in self._arrays:
            self._arrays[key] = np.asarray(made(of), dtype=np.float64)
        return self._arrays[key]
