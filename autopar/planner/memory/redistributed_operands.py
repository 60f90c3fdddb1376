"""Redistributed operands in the memory constraints: the bytes of what an op reads in another spec than it is held in.

Whether an operand takes memory of its own depends on two options, that of the maker and that of the reader. So every
use that may need such memory at a constrained point gets a node of its own in the problem. For each spec of the reader
it says whether the value is there as it is, which takes no bytes and requires the maker's spec to be the same, or is
redistributed into new memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from autopar.ir import Phase, Value
from autopar.planner.footprint.op_work import local_bytes
from autopar.planner.footprint.overwriting import MAKES_NEW
from autopar.planner.memory.in_parts import InParts, MayDecompose, no_product
from autopar.planner.memory.live_ranges import LiveRanges, copy_range, is_reshape, last_read, live_ranges
from autopar.planner.memory.pair_nodes import PairNode, fits
from autopar.planner.memory.points import ProgramPoint, after, before, replaced
from autopar.planner.problem.variables import Decisions, Use, spec_made, spec_read
from autopar.sharding import ShardingSpec

Array = npt.NDArray[np.float64]


def redistributed_operands(d: Decisions, may_decompose: MayDecompose = no_product) -> tuple[PairNode, ...]:
    """Return the nodes of all operands of ``d`` that may be redistributed.

    The states of each node are: nothing is read; then, for every spec, the value is there as it is, and it is
    redistributed.

    Args:
        may_decompose: which products may be decomposed beside the gather of an operand, which then never is whole.
    """
    operands = _Operands(d, live_ranges(d), InParts(d, may_decompose))
    found: dict[tuple[int, int, int], PairNode | None] = {}
    for use in d.uses:
        key = use.source, use.out, use.target
        if not use.kept and not use.rerun and use.source != use.target and found.get(key) is None:
            found[key] = operands.of(use)
    return tuple(node for node in found.values() if node is not None)


@dataclass
class _Operands:
    d: Decisions
    live: LiveRanges
    parts: InParts
    arrays: dict[Hashable, Array] = field(default_factory=dict)
    """One array for all equal keys: by identity the solver recognises repeated blocks."""
    specs: dict[Hashable, tuple[ShardingSpec, ...]] = field(default_factory=dict)
    """In which a reader takes an operand, one object where they are equal."""
    interned: dict[tuple[ShardingSpec, ...], tuple[ShardingSpec, ...]] = field(default_factory=dict)

    def of(self, use: Use) -> PairNode | None:
        """Return the node of a use; None if what is read never takes memory of its own."""
        live_range, (source, target) = self._live_range(use), (self.d.variables[i] for i in (use.source, use.target))
        if live_range is None:
            return None
        read = id(target.options), target.kept, use.position
        if read not in self.specs:
            found = tuple(dict.fromkeys(s for s in self._specs_read(use) if s is not None))
            self.specs[read] = self.interned.setdefault(found, found)
        specs, shares = self.specs[read], self._shares(use)
        there = tuple(shares.get(s, 1.0) for s in specs) if shares else ()
        of_specs = id(specs), use.meta, target.kind == "parameter", there
        sizes = self._array(("redistributed", *of_specs), lambda: self._sizes(use, specs, shares))
        if not sizes.any():
            return None
        (first, last), running = live_range, None
        if shares and target.kind == "op" and not last.running and self._is_there(use):
            last = ProgramPoint(last.node)
            running = self._array(("as it is", *of_specs), lambda: self._rests(use, specs, shares))
        made = "made", id(source.options), use.out, id(specs), self._makes_new(use.source)
        node = PairNode(
            (use.source, use.target),
            (
                self._array(made, lambda: self._fits_made(use, specs)),
                self._array(("read", *read), lambda: self._fits_read(use, specs)),
            ),
            first,
            last,
            sizes,
            running,
        )
        return node if target.kind != "copy" or first == last else self._until_read(node, use, specs, of_specs)

    def _until_read(self, node: PairNode, use: Use, specs: Sequence[ShardingSpec], of_specs: Hashable) -> PairNode:
        """Return the node of a copy beside its original with what it holds until the last reader, if that takes it as
        it is. What that takes in another spec an earlier reader may have taken too, and the copy be gone.

        The states of each node are: nothing is read; then, for every spec in which the reader takes it, that of a copy
        in that spec, of another copy, and of a copy that is the original.
        """
        last = self.d.last_reader(use.target)
        if last is None:
            return node
        copy, reader = self.d.variables[use.target], self.d.variables[last.target].options

        def made() -> Array:
            there = np.repeat(node.fits[0][:, 1::2] == 0, 3, axis=1)
            there[:, ::3], there[:, 1::3] = ~there[:, ::3], True
            return fits(np.concatenate([np.ones((len(there), 1), bool), there], axis=1))

        def copied() -> Array:
            same = np.repeat(_equal(self._specs_read(use), specs), 3, axis=1)
            same[:, 1::3], same[:, 2::3] = ~same[:, 1::3], True
            return fits(np.concatenate([np.ones((len(same), 1), bool), same], axis=1))

        def read() -> Array:
            same = _equal([spec_read(o, last.position) for o in reader], specs)
            return fits(np.concatenate([~same.any(axis=1, keepdims=True), np.repeat(same, 3, axis=1)], axis=1))

        def sizes() -> Array:
            found = np.zeros(1 + 3 * len(specs))
            found[1::3] = node.sizes[2::2]
            return found

        return replace(
            node,
            variables=(*node.variables, last.target),
            fits=(
                self._array(("made, until read", id(node.fits[0])), made),
                self._array(("copied, until read", id(copy.options), copy.kept, id(specs)), copied),
                self._array(("until read", id(reader), last.position, id(specs)), read),
            ),
            sizes=self._array(("sizes, until read", of_specs), sizes),
        )

    def _sizes(self, use: Use, specs: Sequence[ShardingSpec], shares: Mapping[ShardingSpec, float]) -> Array:
        """Return the bytes of each state, as far as they are certainly there at once: not all of what is gathered in
        parts, and of a gradient that takes several steps not that of the last."""
        stored = self.d.variables[use.target].kind == "parameter"
        steps = {s: sum(axis not in s.axes for axis in range(self.d.mesh.ndim)) for s in specs}
        share = {s: 0.0 if stored and steps[s] > 1 else shares.get(s, 1.0) for s in specs}
        return np.array([0.0, *(x for s in specs for x in (0.0, share[s] * self._bytes(use, s)))])

    def _rests(self, use: Use, specs: Sequence[ShardingSpec], shares: Mapping[ShardingSpec, float]) -> Array:
        """Return the bytes of each state beyond those that the reader's option counts, as if gathered in parts."""
        return np.array([0.0, *(x for s in specs for x in ((1 - shares.get(s, 1.0)) * self._bytes(use, s), 0.0))])

    def _bytes(self, use: Use, spec: ShardingSpec) -> int:
        return local_bytes(use.meta, spec, self.d.mesh)

    def _shares(self, use: Use) -> Mapping[ShardingSpec, float]:
        """Return the specs in which a product may gather what is read in parts, or will for a copy, with the share that
        is there at once. Parameters are gathered whole."""
        source, target = self.d.variables[use.source], self.d.variables[use.target]
        if self.d.graph.by_name[source.about].op == "placeholder":
            return {}
        if target.kind == "copy":
            return self.parts.shares(self.parts.first_of_copy(use.target), blocks=0)
        return self.parts.shares(self.parts.of(use.target, use.position))

    def _is_there(self, use: Use) -> bool:
        """Whether what a product reads as it is is there whole: not if the product gathers it for all readers."""
        first = self.parts.first_of_copy(use.source) if self.d.variables[use.source].kind == "copy" else None
        return first is None or first.variable is not self.d.variables[use.target]

    def _specs_read(self, use: Use) -> list[ShardingSpec | None]:
        """Return the spec in which each option reads the operand; None if it reads nothing, or what the forward
        gathered."""
        target = self.d.variables[use.target]
        kept = target.kept or (False,) * len(target.options)
        return [None if k else spec_read(o, use.position) for o, k in zip(target.options, kept, strict=True)]

    def _makes_new(self, source: int) -> bool:
        node = self.d.variables[source].node
        return node is not None and node.packet in MAKES_NEW

    def _fits_made(self, use: Use, specs: Sequence[ShardingSpec]) -> Array:
        """Return which states the maker's options allow. What is read takes no memory of its own if it is what was
        made, or overwrites it, as a sum over ranks may."""
        made = [spec_made(o, use.out) for o in self.d.variables[use.source].options]
        as_it_is = _equal(made, specs)
        if self._makes_new(use.source):
            overwritten = _equal([s.dims if s else None for s in made], [s.dims for s in specs])
            as_it_is |= overwritten & np.array([not s.partial for s in specs])
        allowed = np.ones((len(made), 1 + 2 * len(specs)), dtype=bool)
        allowed[:, 1::2] = as_it_is
        return fits(allowed)

    def _fits_read(self, use: Use, specs: Sequence[ShardingSpec]) -> Array:
        read = self._specs_read(use)
        nothing = np.array([[s is None] for s in read])
        return fits(np.concatenate([nothing, np.repeat(_equal(read, specs), 2, axis=1)], axis=1))

    def _live_range(self, use: Use) -> tuple[ProgramPoint, ProgramPoint] | None:
        """Return the points between which what is read is in memory together with what is made."""
        d, live = self.d, self.live
        target, source = d.variables[use.target], d.variables[use.source].node
        value = target.value
        if target.kind == "op" and target.node is not None:
            at = live.at[target.node.name]
            value_read = d.variables[use.source].value or (Value(source.name, use.out) if source else None)
            last = value_read is not None and live.released_by[target.phase].get(value_read) == target.node.name
            # A reshape may be a view of what it reads, which then counts as its result.
            return before(at), before(at) if last or is_reshape(d, target.node) else ProgramPoint(at)
        if target.kind == "parameter" and use.position < 0 and source is not None:
            return (replaced(live.at[source.name], use.out),) * 2
        if target.kind == "output" and value is not None:
            return after(live.at[value.node]), ProgramPoint(last_read(d, value, live))
        if target.kind == "copy" and value is not None and not target.key.endswith("@module"):
            held = copy_range(d, target, live)
            if held is not None:
                return (held.made, held.made) if held.first == held.made.next else None
            return self._reads(value, target.phase)
        return None

    def _reads(self, value: Value, phase: Phase) -> tuple[ProgramPoint, ProgramPoint] | None:
        first, last = self.live.reads[phase]
        return (before(first[value]), ProgramPoint(last[value])) if value in first else None

    def _array(self, key: Hashable, made: Callable[[], Array]) -> Array:
        if key not in self.arrays:
            self.arrays[key] = made()
        return self.arrays[key]


def _equal(rows: Sequence[Hashable], columns: Sequence[Hashable]) -> npt.NDArray[np.bool_]:
    """Return which of ``rows`` equals which of ``columns``, each compared once by its hash."""
    number = {key: i for i, key in enumerate(dict.fromkeys(columns))}
    of_rows, of_columns = (np.array([number.get(key, -1) for key in keys]) for keys in (rows, columns))
    equal: npt.NDArray[np.bool_] = of_rows[:, None] == of_columns
    return equal
