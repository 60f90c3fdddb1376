"""From which values are kept to the whole choice, and simple rules for which to keep.

The rules start the exact search, which is slow to find a first choice by itself, and stand beside its result: Chen et
al. (2016) keep what crosses evenly spaced cuts of the forward, the square root of its length being the number of cuts
for which both the cuts and the stretch between two of them stay small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from autopar.holding import ABSENT, KEEP, RECOMPUTE
from autopar.ir import Value
from autopar.planner.memory.exact import MemoryProfile
from autopar.planner.problem.variables import Decisions, hold_key, rerun_key
from autopar.program import Program
from autopar.solver import Run

Choice = tuple[int, ...]
Measure = Callable[[Sequence[int]], "tuple[Program, MemoryProfile]"]


def layer_boundaries(decisions: Decisions, runs: Sequence[Run]) -> frozenset[int]:
    """The hold variables of what crosses from layer to layer, in all layers at the same narrow place.

    Where such a value is recomputed, so is all of the layer before it, and all layers before that, at once: each op
    runs again when the first of its readers does. Constraints see every layer recomputed by itself.
    """
    keeping = Keeping(decisions, (), {})
    places = [p for run in runs for p in _layer_starts(decisions, run, keeping)]
    crossing = [keeping.crossing(p) for p in places] or [keeping.cuts(2)]
    kept = frozenset[Value]().union(*crossing)
    if len(crossing) > 1:  # what all layers read is no link between two of them
        kept -= crossing[0].intersection(*crossing[1:])
    return frozenset(decisions.index[hold_key(value)] for value in kept)


def _layer_starts(decisions: Decisions, run: Run, keeping: Keeping) -> list[int]:
    """The positions of the op of each layer before which the least crosses, in the layers in the middle."""
    middle = [decisions.variables[i] for i in run.rows[len(run.rows) // 2]]
    width = {
        column: keeping.widths[keeping.position[v.node.name]]
        for column, v in enumerate(middle)
        if v.kind == "op" and v.node is not None and keeping.position[v.node.name] in keeping.widths
    }
    if not width:
        return []
    column = min(width, key=lambda c: (width[c], c))
    made = (decisions.variables[i].node for i in run.rows[:, column])
    return [keeping.position[node.name] for node in made if node is not None]


@dataclass(frozen=True)
class Keeping:
    """Ways to hold values where every op has one strategy: the others are as in ``choice``.

    ``seconds``: of running an op again, by the position of its node.
    """

    decisions: Decisions
    choice: Choice
    seconds: dict[int, float]

    @cached_property
    def position(self) -> dict[str, int]:
        return {n.name: i for i, n in enumerate(self.decisions.graph.nodes)}

    @cached_property
    def root(self) -> dict[Value, Value]:
        """The value whose memory a value that the backward can use occupies."""
        roots: dict[Value, Value] = {}
        for node in self.decisions.graph.nodes:
            for i in range(len(node.outputs)):
                view = node.name in self.decisions.views
                roots[Value(node.name, i)] = roots[node.inputs[0]] if view else Value(node.name, i)
        return roots

    @cached_property
    def storages(self) -> tuple[Value, ...]:
        """What can be kept, in the order of the program; views are held as what they are views of."""
        held = (v.value for v in self.decisions.variables if KEEP in v.actions and v.value is not None)
        return tuple(v for v in held if self.root[v] == v)

    def choosing(self, kept: Collection[Value]) -> Choice:
        """The choice that keeps ``kept``, as far as the backward needs it, and makes all else that it needs again."""
        d = self.decisions
        choice = list(self.choice)
        again: set[str] = set()
        for node in reversed(d.graph.nodes):
            for i in range(len(node.outputs)):
                value = Value(node.name, i)
                at = d.index.get(hold_key(value))
                if at is None:
                    continue
                readers = (n for n, _ in d.graph.consumers.get(value, ()))
                needed = any(n.phase == "backward" or n.name in again for n in readers)
                stays = self.root[value] in kept or hold_key(self.root[value]) not in d.index
                stays = stays and KEEP in d.variables[at].actions
                action = ABSENT if not needed else KEEP if stays else RECOMPUTE
                choice[at] = d.variables[at].actions.index(action)
                if action.remakes:
                    again.add(node.name)
            if rerun_key(node.name) in d.index:
                choice[d.index[rerun_key(node.name)]] = int(node.name in again)
        return tuple(choice)

    def kept_by(self, choice: Sequence[int]) -> frozenset[Value]:
        """The storages that a choice keeps."""
        found = ((v, self.decisions.index[hold_key(v)]) for v in self.storages)
        return frozenset(v for v, at in found if self.decisions.variables[at].actions[choice[at]] == KEEP)

    def crossing(self, position: int) -> frozenset[Value]:
        """What the forward has made before ``position`` and still reads from there on."""
        return frozenset(root for made, last, root in self._spans if made < position <= last)

    @cached_property
    def _spans(self) -> tuple[tuple[int, int, Value], ...]:
        """Of each value that the forward reads: where it is made and read last, and the storage that it occupies."""
        storages, found = set(self.storages), []
        for value, readers in self.decisions.graph.consumers.items():
            last = max((self.position[n.name] for n, _ in readers if n.phase == "forward"), default=-1)
            if last >= 0 and self.root[value] in storages:
                found.append((self.position[value.node], last, self.root[value]))
        return tuple(found)

    def cuts(self, pieces: int) -> frozenset[Value]:
        """What crosses the cuts of the forward into so many pieces of about equal bytes, each cut where it is narrow
        nearby."""
        sizes = self._made
        total, kept = sum(sizes), frozenset[Value]()
        share = total / pieces
        for piece in range(1, pieces):
            near = [p for p in self.widths if abs(self._before[p] - piece * share) <= share / 3]
            if near:
                kept |= self.crossing(min(near, key=lambda p: (self.widths[p], p)))
        return kept

    @cached_property
    def _made(self) -> list[int]:
        graph, storages = self.decisions.graph, set(self.storages)
        values = ([Value(n.name, i) for i in range(len(n.outputs))] for n in graph.nodes)
        return [sum(graph.meta(v).bytes for v in of if v in storages) for of in values]

    @cached_property
    def _before(self) -> list[int]:
        found = [0]
        for size in self._made:
            found.append(found[-1] + size)
        return found

    @cached_property
    def widths(self) -> dict[int, int]:
        """Bytes that cross each place of the forward: a storage does from where it is made to where it is last read."""
        graph, last = self.decisions.graph, dict[Value, int]()
        for value, readers in graph.consumers.items():
            at = [self.position[n.name] for n, _ in readers if n.phase == "forward"]
            last[self.root[value]] = max([last.get(self.root[value], -1), *at])
        changes = [0] * (len(graph.nodes) + 1)
        for storage in self.storages:
            made, read = self.position[storage.node], last.get(storage, -1)
            if read > made:
                changes[made + 1] += graph.meta(storage).bytes
                changes[read + 1] -= graph.meta(storage).bytes
        forward = (i for i, n in enumerate(graph.nodes) if n.phase == "forward" and n.op != "placeholder")
        held = list(accumulate(changes))
        return {p: held[p] for p in forward}

    def spread(self) -> Iterator[Choice]:
        """Chen's rule for more and more pieces."""
        most = max(2, 3 * math.isqrt(len(self.storages)))
        seen: set[frozenset[Value]] = set()
        for pieces in range(1, most + 1):
            kept = self.cuts(pieces)
            if kept not in seen:
                seen.add(kept)
                yield self.choosing(kept)

    @cached_property
    def stretches(self) -> tuple[frozenset[Value], ...]:
        """What is made between two of the narrowest places of the forward: the inside of a block, or of a part."""
        narrowest = min((w for w in self.widths.values() if w), default=0)
        places = [p for p, w in self.widths.items() if w == narrowest]
        made = [
            frozenset(v for v in self.storages if start <= self.position[v.node] < end)
            for start, end in zip(places, places[1:], strict=False)
        ]
        return tuple(m for m in made if len(m) > 1)

    def fill(self, choice: Sequence[int], budget: float, measure: Measure, more: Callable[[], bool]) -> Choice:
        """Of a choice that fits, keep more as long as it does: first what saves most seconds for its bytes, and whole
        stretches before single values, since within one each is made of those before it."""
        kept, best = self.kept_by(choice), tuple(choice)
        singles = [frozenset((v,)) for v in self.storages]
        for values in [*sorted(self.stretches, key=self._worth), *sorted(singles, key=self._worth)]:
            if values <= kept:
                continue
            if not more():
                break
            larger = self.choosing(kept | values)
            if measure(larger)[1].peak_bytes <= budget:
                kept, best = kept | values, larger
        return best

    def _worth(self, values: frozenset[Value]) -> float:
        seconds = sum(self.seconds.get(self.position[v.node], 0.0) for v in values)
        return -seconds / max(sum(self.decisions.graph.meta(v).bytes for v in values), 1)
