"""Exact memory constraints in the backward: what is held at chosen points, as part of the problem.

When an op runs again depends on the choice itself: just before the first op that needs it, which may be run again in
turn. So the problem gets nodes of its own for each point that limits the memory. One node for each op that could run
again says whether it does so before the point, at it, later or never; for the first two it also names the reader that
asked for it, so that nothing runs again sooner than it is needed. One node for each value that the backward can use
says how the value is held, and whether it is alive at the point. All conditions are on pairs of nodes, as in the rest
of the problem: an op's state must fit those of its operands and its readers.

For a fixed program, Jain et al. (Checkmate, 2020) give every op a variable for every moment. Here only those points get
variables at which a schedule was found to exceed the limit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from autopar.holding import ABSENT, KEEP, Action, Stored
from autopar.ir import TensorMeta, Value
from autopar.mesh import Mesh
from autopar.planner.footprint.op_work import local_bytes
from autopar.planner.graphs.accumulation import is_gradient
from autopar.planner.memory.active_set import peaks
from autopar.planner.memory.points import ProgramPoint, Stage
from autopar.planner.memory.usages import MemoryUsages
from autopar.planner.options import Options
from autopar.planner.problem.variables import Decisions, hold_key, rerun_key
from autopar.program import Program
from autopar.sharding import Strategy
from autopar.solver import Edge, Problem, Usage

Array = npt.NDArray[np.float64]
_Left = TypeVar("_Left")
_Right = TypeVar("_Right")

BEFORE, NOW, LATER, NEVER = "before", "now", "later", "never"
"""When an op is run again: before the reruns that belong to the constrained point, among them, after them, or not at
all."""
ORDER = {BEFORE: 0, NOW: 1, LATER: 2}
MAX_NEW_POINTS = 8
"""The number of highest peaks over the budget that become constraints in one round."""


def points_over(program: Program, d: Decisions, timeline: Sequence[int], budget: float) -> dict[ProgramPoint, int]:
    """Return the points at which ``program`` has a local peak over ``budget``, with their bytes, the highest first.

    What is done for a node counts at the node, but for what is run again.
    """
    found: dict[ProgramPoint, int] = {}
    for point, held in peaks(program, d, timeline, budget):
        found.setdefault(point if point.stage == Stage.RERUN else ProgramPoint(point.node), held.bytes)
    return dict(itertools.islice(found.items(), MAX_NEW_POINTS))


@dataclass(frozen=True)
class _Held:
    """A value that the backward can use.

    Args:
        variable: its hold variable, whose options have these ``actions``, and ``bytes`` on the device: whole, and as
            they are stored.
        maker: the position of the op that makes it.
        reads: positions of its readers in the backward.
        rerun_readers: positions of its readers that can be run again.
        base: the held value that it is a view of, where the two are tied.
        forward_end: the last position up to which it is in memory anyway.
    """

    variable: int
    value: Value
    maker: int
    actions: tuple[Action, ...]
    bytes: tuple[tuple[float, float], ...]
    reads: tuple[int, ...]
    rerun_readers: tuple[int, ...]
    base: int | None
    forward_end: float


@dataclass(frozen=True)
class _Rerun:
    """An op that can be run again: its position in the graph, its number of options, and the held values that it
    makes."""

    variable: int
    position: int
    options: int
    makes: tuple[int, ...]


@dataclass(frozen=True)
class _RerunState:
    """When an op is run again, seen from a point.

    Args:
        requested_by: (held value, reader) that asks for the rerun; the reader is None for the backward itself.
    """

    timing: str
    requested_by: tuple[int, int | None] | None = None


@dataclass(frozen=True)
class _ValueState:
    """How a value is held, seen from a point: when it was made again, whether it is alive, and its bytes."""

    action: Action
    timing: str = NEVER
    alive: bool = False
    bytes: float = 0.0


@dataclass
class ExactMemory:
    """The problem of ``decisions`` with exact memory at chosen points.

    Args:
        views_tied: hold each view as the value whose memory it shares, which is best on one device.
    """

    decisions: Decisions
    options: Options
    views_tied: bool
    _shared: dict[tuple[tuple[int, ...], bytes], Array] = field(default_factory=dict)

    @cached_property
    def held(self) -> tuple[_Held, ...]:
        d = self.decisions
        at = {n.name: i for i, n in enumerate(d.graph.nodes)}
        found = [v for v in d.variables if v.kind == "hold" and v.value is not None]
        order = {v.value: i for i, v in enumerate(found)}
        forward_ends = _forward_ends(d)
        held = []
        for v in found:
            assert v.value is not None
            node, meta = d.graph.by_name[v.value.node], d.graph.meta(v.value)
            readers = [n for n, _ in d.graph.consumers.get(v.value, ())]
            free = self.views_tied and node.name in d.views
            sizes = tuple(
                (0.0, 0.0) if free else _held_bytes(meta, *way, d.mesh)
                for way in zip(v.options, v.actions, strict=True)
            )
            held.append(
                _Held(
                    d.index[hold_key(v.value)],
                    v.value,
                    at[node.name],
                    v.actions,
                    sizes,
                    tuple(sorted(at[n.name] for n in readers if n.phase == "backward")),
                    tuple(sorted({at[n.name] for n in readers if rerun_key(n.name) in d.index})),
                    order.get(node.inputs[0]) if free else None,
                    forward_ends.get(v.value, -1),
                )
            )
        return tuple(held)

    @cached_property
    def reruns(self) -> Mapping[int, _Rerun]:
        """The ops that can be run again, by position in the graph."""
        d = self.decisions
        makes: dict[int, list[int]] = {}
        for i, h in enumerate(self.held):
            makes.setdefault(h.maker, []).append(i)
        found = {}
        for i, n in enumerate(d.graph.nodes):
            at = d.index.get(rerun_key(n.name))
            if at is not None:
                found[i] = _Rerun(at, i, len(d.variables[at].options), tuple(makes.get(i, ())))
        return found

    @cached_property
    def _usages(self) -> MemoryUsages:
        return MemoryUsages.of(self.decisions, self.options, views_tied=self.views_tied)

    @cached_property
    def _usages_alone(self) -> MemoryUsages:
        """Without what is held for the backward, which has nodes of its own."""
        return MemoryUsages.of(self.decisions, self.options, holds=False)

    @cached_property
    def view_edges(self) -> tuple[Edge, ...]:
        """Edges that hold a view as its base is held."""
        edges = []
        for h in self.held:
            if h.base is not None:
                base = self.held[h.base]
                fits = [[b in (a, ABSENT) for b in h.actions] for a in base.actions]
                edges.append(Edge(base.variable, h.variable, self._pairs(fits)))
        return tuple(edges)

    def extend(self, problem: Problem, points: Mapping[ProgramPoint, float]) -> Problem:
        """Return ``problem`` with constraints at ``points``, all within its limit.

        Args:
            points: each with its margin: the bytes that the constraint does not see, such as those an op holds while it
                runs.
        """
        builder = _Builder(problem, list(problem.costs), [*problem.edges, *self.view_edges], [])
        for time, (point, margin) in enumerate(points.items()):
            if margin > 0:
                builder.usages.append(Usage(0, self.numbers([margin] * len(problem.costs[0])), time, time + 1))
            exact = self._is_exact(point)
            builder.usages += (self._usages_alone if exact else self._usages).at_points((point,), time)
            if exact:
                _PointNodes(self, point, time, builder).build()
        added = tuple(builder.costs), tuple(builder.edges), tuple(builder.usages)
        return Problem(*added, problem.limit, problem.shift, trusted=True)

    def used(self, choice: Sequence[int], point: ProgramPoint) -> float:
        """Return the bytes of a choice that the constraint at ``point`` sees."""
        costs = tuple(self.numbers([0.0] * len(v.options)) for v in self.decisions.variables)
        nodes_of_point = self.extend(Problem(costs, ()), {point: 0.0})
        extended = self.extend_choice(choice, [point])
        return math.fsum(float(u.option[extended[u.node]]) for u in nodes_of_point.usages)

    def extend_choice(self, choice: Sequence[int], points: Iterable[ProgramPoint]) -> tuple[int, ...]:
        """Return ``choice`` with its states at ``points``: a choice of the extended problem."""
        extended = list(choice)
        for point in points:
            if self._is_exact(point):
                extended += _PointNodes(self, point, 0, None).states(choice)
        return tuple(extended)

    def first_requests(self, choice: Sequence[int]) -> dict[int, tuple[int, tuple[int, int | None]]]:
        """Return for each op that is run again the position before which it runs, and who asks for it."""
        found: dict[int, tuple[int, tuple[int, int | None]]] = {}
        for position in sorted(self.reruns, reverse=True):
            requests: list[tuple[int, tuple[int, int | None]]] = []
            for i in self.reruns[position].makes:
                h = self.held[i]
                if not h.actions[choice[h.variable]].remakes:
                    continue
                requests += [(q, (i, None)) for q in h.reads]
                requests += [(found[w][0], (i, w)) for w in h.rerun_readers if w in found]
            if requests and choice[self.reruns[position].variable]:
                found[position] = min(requests, key=lambda a: a[0])
        return found

    def _is_exact(self, point: ProgramPoint) -> bool:
        graph = self.decisions.graph
        return graph.turn <= point.node < len(graph.nodes)

    def _pairs(self, fits: Sequence[Sequence[bool]]) -> Array:
        """Return 0 where a pair fits and infinity elsewhere. Equal tables are one array, by which the solver finds
        repeated blocks."""
        cost = np.where(np.array(fits, dtype=bool), 0.0, math.inf)
        return self._shared.setdefault((cost.shape, cost.tobytes()), cost)

    def numbers(self, values: Sequence[float]) -> Array:
        array = np.array(values, dtype=np.float64)
        return self._shared.setdefault((array.shape, array.tobytes()), array)


@dataclass
class _Builder:
    """A problem while nodes are added to it."""

    problem: Problem
    costs: list[Array]
    edges: list[Edge]
    usages: list[Usage]


@dataclass
class _PointNodes:
    """The nodes and edges of one constrained point."""

    exact: ExactMemory
    point: ProgramPoint
    time: int
    builder: _Builder | None

    @property
    def again(self) -> int | None:
        """The index of the node that is run again at the point."""
        return self.point.which if self.point.stage == Stage.RERUN else None

    @cached_property
    def ops(self) -> dict[int, tuple[_RerunState, ...]]:
        """The states that each op can have."""
        return {p: tuple(self._op_states(r)) for p, r in self.exact.reruns.items()}

    @cached_property
    def value_states(self) -> tuple[tuple[_ValueState, ...], ...]:
        """The states that each held value can have."""
        return tuple(tuple(dict.fromkeys(self._value_states(h))) for h in self.exact.held)

    def build(self) -> None:
        assert self.builder is not None
        nodes = {p: self._add(len(states)) for p, states in self.ops.items()}
        values = [self._add(len(value_states)) for value_states in self.value_states]
        for p, r in self.exact.reruns.items():
            self._join(
                r.variable, nodes[p], range(r.options), self.ops[p], lambda o, s: (o == 0) == (s.timing == NEVER)
            )
        for i, h in enumerate(self.exact.held):
            value_states = self.value_states[i]
            self.builder.usages.append(
                Usage(values[i], self.exact.numbers([s.bytes for s in value_states]), self.time, self.time + 1)
            )
            options = tuple(zip(h.actions, h.bytes, strict=True))
            self._join(
                h.variable, values[i], options, value_states, lambda o, s: o[0] == s.action and s.bytes in (0.0, *o[1])
            )
            self._join(values[i], nodes[h.maker], value_states, self.ops[h.maker], self._fits_maker(i))
            for reader in h.rerun_readers:
                self._join(values[i], nodes[reader], value_states, self.ops[reader], self._fits_reader(i, reader))
                self._join(
                    nodes[h.maker],
                    nodes[reader],
                    self.ops[h.maker],
                    self.ops[reader],
                    self._runs_with_reader(i, reader),
                )
            if h.base is not None:
                self._join(
                    values[h.base],
                    values[i],
                    self.value_states[h.base],
                    value_states,
                    lambda b, s: b.alive or not s.alive,
                )

    def states(self, choice: Sequence[int]) -> list[int]:
        """Return the state of each of these nodes under ``choice``, in the order in which ``build`` adds them."""
        requested_by = self.exact.first_requests(choice)
        timings = {p: self._timing_of(requested_by[p][0]) if p in requested_by else NEVER for p in self.ops}
        timings |= {p: LATER for p, r in self.exact.reruns.items() if p not in requested_by and choice[r.variable]}
        found = []
        for p, states in self.ops.items():
            by = requested_by[p][1] if p in requested_by else None
            found.append(
                next((i for i, s in enumerate(states) if s.timing == timings[p] and s.requested_by in (None, by)), 0)
            )
        return found + self._value_states_of(choice, timings)

    def _value_states_of(self, choice: Sequence[int], timings: Mapping[int, str]) -> list[int]:
        held = self.exact.held
        value_states: dict[int, _ValueState] = {}
        for i in range(len(held) - 1, -1, -1):
            h = held[i]
            action, timing = h.actions[choice[h.variable]], self._return_timing(h, choice, timings)
            needed = self._backward_needs(h) or any(self._reads_later(w, timings[w]) for w in h.rerun_readers)
            needed = needed or self._is_running(h.maker, timings[h.maker])
            needed = needed or any(value_states[j].alive for j in range(i + 1, len(held)) if held[j].base == i)
            value_states[i] = self._value_state(
                h, action, timing, needed and self._is_present(h, action, timing), h.bytes[choice[h.variable]]
            )
        return [
            self.value_states[i].index(value_states[i]) if value_states[i] in self.value_states[i] else 0
            for i in range(len(held))
        ]

    def _return_timing(self, h: _Held, choice: Sequence[int], timings: Mapping[int, str]) -> str:
        """Return when a value comes back to the device under ``choice``."""
        action = h.actions[choice[h.variable]]
        if action.remakes:
            return timings[h.maker]
        if not isinstance(action, Stored):
            return NEVER
        reads = [self._timing_of(q) for q in h.reads] + [timings[w] for w in h.rerun_readers if timings[w] != NEVER]
        return min(reads, key=ORDER.__getitem__, default=LATER)

    def _timing_of(self, position: int) -> str:
        """Return the timing of an op that is run again just before ``position``."""
        if self.again is None:
            return BEFORE if position <= self.point.node else LATER
        if position == self.point.node:
            return NOW
        return BEFORE if position < self.point.node else LATER

    def _op_states(self, rerun: _Rerun) -> Iterator[_RerunState]:
        yield _RerunState(NEVER)
        yield _RerunState(LATER)
        for i in rerun.makes:
            h = self.exact.held[i]
            for timing in dict.fromkeys(self._timing_of(q) for q in h.reads):
                if timing != LATER:
                    yield _RerunState(timing, (i, None))
            for reader in h.rerun_readers:
                yield _RerunState(BEFORE, (i, reader))
                if self.again is not None:
                    yield _RerunState(NOW, (i, reader))

    def _value_states(self, h: _Held) -> Iterator[_ValueState]:
        limits = [ORDER[self._timing_of(q)] for q in h.reads]
        latest = min(limits, default=ORDER[LATER])
        needed = self._backward_needs(h)
        for action, size in zip(h.actions, h.bytes, strict=True):
            timings = [w for w in ORDER if ORDER[w] <= latest] if _returns(action) else [NEVER]
            for timing in timings:
                present = self._is_present(h, action, timing)
                for alive in (True,) if present and needed else (False, True) if present else (False,):
                    yield self._value_state(h, action, timing, alive, size)

    def _value_state(
        self, h: _Held, action: Action, timing: str, alive: bool, size: tuple[float, float]
    ) -> _ValueState:
        free = action == KEEP and h.forward_end >= self.point.node
        whole, stored = size
        return _ValueState(action, timing, alive, whole if alive and not free else stored if timing == LATER else 0.0)

    def _is_present(self, h: _Held, action: Action, timing: str) -> bool:
        if action.remakes:
            return self._has_run(h.maker, timing) or self._is_running(h.maker, timing)
        return action.of_forward and timing != LATER

    def _backward_needs(self, h: _Held) -> bool:
        """Whether the backward itself still reads a value."""
        return any(q >= self.point.node for q in h.reads)

    def _is_running(self, op: int, timing: str) -> bool:
        return timing == NOW and op == self.again

    def _has_run(self, op: int, timing: str) -> bool:
        return timing == BEFORE or (timing == NOW and op < (self.again or 0))

    def _reads_later(self, op: int, timing: str) -> bool:
        """Whether an op that is run again reads its operands at the point or after it."""
        return timing == LATER or (timing == NOW and not self._has_run(op, timing))

    def _fits_maker(self, i: int) -> Callable[[_ValueState, _RerunState], bool]:
        """Return whether a state of a value fits one of the op that makes it again."""

        def fits(value_state: _ValueState, op: _RerunState) -> bool:
            if not value_state.action.remakes:
                return op.requested_by is None or op.requested_by[0] != i
            now = self._is_running(self.exact.held[i].maker, op.timing)
            return value_state.timing == op.timing and (value_state.alive or not now)

        return fits

    def _fits_reader(self, i: int, reader: int) -> Callable[[_ValueState, _RerunState], bool]:
        """Return whether a state of a value fits one of an op that reads it when it is run again."""

        def fits(value_state: _ValueState, op: _RerunState) -> bool:
            if op.timing == NEVER:
                return True
            action = value_state.action
            if action == ABSENT or (_returns(action) and ORDER[value_state.timing] > ORDER[op.timing]):
                return False
            present = self._is_present(self.exact.held[i], action, value_state.timing)
            return value_state.alive or not (present and self._reads_later(reader, op.timing))

        return fits

    def _runs_with_reader(self, i: int, reader: int) -> Callable[[_RerunState, _RerunState], bool]:
        """Return whether an op that is run again for a reader has the reader's timing."""
        return lambda maker, read: maker.requested_by != (i, reader) or maker.timing == read.timing

    def _add(self, options: int) -> int:
        assert self.builder is not None
        self.builder.costs.append(self.exact.numbers([0.0] * options))
        return len(self.builder.costs) - 1

    def _join(
        self, u: int, v: int, left: Sequence[_Left], right: Sequence[_Right], fits: Callable[[_Left, _Right], bool]
    ) -> None:
        assert self.builder is not None
        table = [[fits(a, b) for b in right] for a in left]
        if not all(map(all, table)):
            self.builder.edges.append(Edge(u, v, self.exact._pairs(table)))


def _returns(action: Action) -> bool:
    """Whether a value is gone, or stored, and comes back."""
    return action.remakes or isinstance(action, Stored)


def _held_bytes(meta: TensorMeta, option: Strategy, action: Action, mesh: Mesh) -> tuple[float, float]:
    """Return the bytes that a held value takes on a device, whole and as it is stored."""
    if not option.inputs:
        return 0.0, 0.0
    stored = 0
    if isinstance(action, Stored) and any(row.size == "stored" for row in action.lifetimes):
        stored = local_bytes(action.form(meta), option.inputs[0], mesh)
    return float(local_bytes(meta, option.inputs[0], mesh)), float(stored)


def _forward_ends(d: Decisions) -> dict[Value, float]:
    """Return the end of the step for results of the forward and the values that they are views of."""
    found = (o for o in d.graph.outputs if not is_gradient(o) and not d.graph.goes_to_stage(o))
    forward_ends = {o.value: math.inf for o in found}
    for node in reversed(d.graph.nodes):
        if node.name in d.views and Value(node.name) in forward_ends:
            forward_ends[node.inputs[0]] = math.inf
    return forward_ends
