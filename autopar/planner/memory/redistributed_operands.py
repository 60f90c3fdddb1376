"""Redistributed operands in the memory constraints: the bytes of what an op reads in another spec than it is held in.

Whether an operand takes memory of its own depends on two options, that of the maker and that of the reader. So every
use that may need such memory at a constrained point gets a node of its own in the problem. For each spec of the reader
it says whether the value is there as it is, which takes no bytes and requires the maker's spec to be the same, or is
redistributed into new memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from autopar.ir import Phase, TensorMeta, Value
from autopar.planner.footprint.contraction import CONTRACTION
from autopar.planner.footprint.op_work import local_bytes
from autopar.planner.footprint.overwriting import MAKES_NEW
from autopar.planner.footprint.transients_of_products import BLOCKS, least_share
from autopar.planner.memory.live_ranges import LiveRanges, copy_range, first_product, last_read, live_ranges
from autopar.planner.memory.points import ProgramPoint, after, before, replaced
from autopar.planner.problem.variables import Decisions, Use, Variable, spec_made, spec_read
from autopar.sharding import ShardingSpec
from autopar.solver import Edge, Problem, Usage

Array = npt.NDArray[np.float64]
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Operand:
    """A use that may be redistributed: bytes by the spec in which it is read, and its live range."""

    use: Use
    specs: tuple[ShardingSpec, ...]
    sizes: tuple[float, ...]
    first: ProgramPoint
    last: ProgramPoint


@dataclass
class RedistributedOperands:
    """The nodes of all operands of ``decisions`` that may be redistributed.

    The options of each node are: nothing is read; then, for every spec, the value is there as it is, and it is
    redistributed.

    Args:
        decomposes: whether products may be decomposed beside the gather of an operand, which then never is whole.
    """

    decisions: Decisions
    decomposes: bool = True
    _arrays: dict[tuple[object, ...], Array] = field(default_factory=dict)

    def extend(self, problem: Problem, points: Sequence[ProgramPoint]) -> Problem:
        """Return ``problem`` with a node for each operand that lives at one of ``points``; the i-th point is time i."""
        costs, edges, usages = list(problem.costs), list(problem.edges), list(problem.usages)
        for operand, times in self._live_at(points):
            node = len(costs)
            size = self._array(
                ("sizes", operand.sizes), lambda c: [0.0, *(b for z in c.sizes for b in (0.0, z))], operand
            )
            costs.append(self._array(("costs", len(size)), np.zeros, len(size)))
            edges.append(Edge(operand.use.source, node, self._maker_edge(operand)))
            edges.append(Edge(node, operand.use.target, self._reader_edge(operand)))
            usages += [Usage(node, size, t, t + 1) for t in times]
        return Problem(tuple(costs), tuple(edges), tuple(usages), problem.limit, problem.shift)

    def extend_choice(self, choice: Sequence[int], points: Sequence[ProgramPoint]) -> tuple[int, ...]:
        """Return ``choice`` with the options of the nodes that ``extend`` adds."""
        added = []
        for operand, _ in self._live_at(points):
            made, read = self._specs(operand, choice)
            in_place = read is not None and self._is_in_place(operand.use, made, read)
            added.append(0 if read is None else 1 + 2 * operand.specs.index(read) + int(not in_place))
        return (*choice, *added)

    def bytes(self, choice: Sequence[int], point: ProgramPoint) -> float:
        """Return the bytes that all redistributed operands hold at ``point``."""
        return sum(self._bytes(operand, choice) for operand, _ in self._live_at((point,)))

    def _bytes(self, operand: _Operand, choice: Sequence[int]) -> float:
        made, read = self._specs(operand, choice)
        if read is None or self._is_in_place(operand.use, made, read):
            return 0.0
        return operand.sizes[operand.specs.index(read)]

    def _specs(self, operand: _Operand, choice: Sequence[int]) -> tuple[ShardingSpec | None, ShardingSpec | None]:
        use, v = operand.use, self.decisions.variables
        target = v[use.target]
        read = self._spec_read(target, choice[use.target], use.position)
        return spec_made(v[use.source].options[choice[use.source]], use.out), read

    def _is_in_place(self, use: Use, made: ShardingSpec | None, read: ShardingSpec) -> bool:
        """Whether what is read takes no memory of its own: it is what was made, or overwrites it, as a sum over ranks
        may."""
        if made is None or made == read or made.dims != read.dims or read.partial:
            return made == read
        return self._makes_new(use.source)

    def _makes_new(self, source: int) -> bool:
        node = self.decisions.variables[source].node
        return node is not None and node.packet in MAKES_NEW

    def _spec_read(self, target: Variable, option: int, position: int) -> ShardingSpec | None:
        """Return the spec in which an option reads an operand; None if it reads nothing, or what the forward
        gathered."""
        return None if target.kept and target.kept[option] else spec_read(target.options[option], position)

    def _specs_read(self, use: Use) -> list[ShardingSpec | None]:
        target = self.decisions.variables[use.target]
        return [self._spec_read(target, o, use.position) for o in range(len(target.options))]

    def _live_at(self, points: Sequence[ProgramPoint]) -> Iterator[tuple[_Operand, list[int]]]:
        for operand in self.operands:
            times = [t for t, p in enumerate(points) if operand.first <= p <= operand.last]
            if times:
                yield operand, times

    @cached_property
    def _live(self) -> LiveRanges:
        return live_ranges(self.decisions)

    @cached_property
    def operands(self) -> tuple[_Operand, ...]:
        d = self.decisions
        found: dict[tuple[int, int, int], _Operand] = {}
        known: dict[tuple[object, ...], tuple[ShardingSpec, ...]] = {}
        sizes: dict[tuple[object, ...], tuple[float, ...]] = {}  # not by specs: to hash them all takes long
        for use in d.uses:
            target = d.variables[use.target]
            live_range = self._live_range(use, target)
            if (
                use.kept
                or use.rerun
                or live_range is None
                or use.source == use.target
                or (use.source, use.out, use.target) in found
            ):
                continue
            read = id(target.options), target.kept, use.position
            if read not in known:
                known[read] = tuple(dict.fromkeys(s for s in self._specs_read(use) if s is not None))
            specs = known[read]
            blocks = self._blocks(use.target) if self.decomposes else None
            held = sizes.get((read, use.meta, blocks))
            if held is None:
                held = tuple(self._bytes_at_once(use.meta, s, blocks) for s in specs)
                sizes[read, use.meta, blocks] = held
            if max(held, default=0.0) > 0:
                found[use.source, use.out, use.target] = _Operand(use, specs, held, *live_range)
        return tuple(found.values())

    def _blocks(self, target: int) -> int | None:
        """Return how many blocks are there at least of what a product may gather, or will for a copy; None for what is
        gathered whole."""
        v = self.decisions.variables[target]
        if v.kind == "op":
            return BLOCKS if v.node is not None and v.node.packet == CONTRACTION else None
        return 0 if v.kind == "copy" and first_product(self.decisions, target) is not None else None

    def _bytes_at_once(self, meta: TensorMeta, spec: ShardingSpec, blocks: int | None) -> float:
        mesh = self.decisions.mesh
        share = 1.0 if blocks is None else least_share(spec, mesh, made=False, blocks=blocks)
        return local_bytes(meta, spec, mesh) * share

    def _live_range(self, use: Use, target: Variable) -> tuple[ProgramPoint, ProgramPoint] | None:
        """Return the points between which what is read is in memory together with what is made."""
        live, value = self._live, target.value
        source = self.decisions.variables[use.source].node
        if target.kind == "op" and target.node is not None:
            at = live.at[target.node.name]
            value_read = self.decisions.variables[use.source].value or (Value(source.name, use.out) if source else None)
            last = value_read is not None and live.released_by[target.phase].get(value_read) == target.node.name
            return before(at), before(at) if last else ProgramPoint(at)
        if target.kind == "parameter" and use.position < 0 and source is not None:
            return (replaced(live.at[source.name], use.out),) * 2
        if target.kind == "output" and value is not None:
            return after(live.at[value.node]), ProgramPoint(last_read(self.decisions, value, live))
        if target.kind == "copy" and value is not None and not target.key.endswith("@module"):
            held = copy_range(self.decisions, target, live)
            if held is not None:
                return (held.made, held.made) if held.first == held.made.next else None
            return self._reads(value, target.phase)
        return None

    def _reads(self, value: Value, phase: Phase) -> tuple[ProgramPoint, ProgramPoint] | None:
        first, last = self._live.reads[phase]
        return (before(first[value]), ProgramPoint(last[value])) if value in first else None

    def _maker_edge(self, operand: _Operand) -> Array:
        use = operand.use
        key = (
            "made",
            id(self.decisions.variables[use.source].options),
            self._makes_new(use.source),
            use.out,
            operand.specs,
        )
        return self._array(key, self._maker_costs, operand)

    def _maker_costs(self, operand: _Operand) -> Array:
        use = operand.use
        made = [spec_made(o, use.out) for o in self.decisions.variables[use.source].options]
        fits = [[True, *(f for s in operand.specs for f in (self._is_in_place(use, m, s), True))] for m in made]
        return np.where(fits, 0.0, math.inf)

    def _reader_edge(self, operand: _Operand) -> Array:
        target, position = self.decisions.variables[operand.use.target], operand.use.position
        key = ("read", id(target.options), target.kept, position, operand.specs)
        return self._array(key, self._reader_costs, operand)

    def _reader_costs(self, operand: _Operand) -> Array:
        read = self._specs_read(operand.use)
        fits = [[r is None for r in read], *([r == s for r in read] for s in operand.specs for _ in range(2))]
        return np.where(fits, 0.0, math.inf)

    def _array(self, key: tuple[object, ...], made: Callable[[_T], Sequence[float] | Array], of: _T) -> Array:
        """Return one array object for all equal keys: by identity the solver recognises repeated blocks."""
        if key not in self._arrays:
            self._arrays[key] = np.asarray(made(of), dtype=np.float64)
        return self._arrays[key]
