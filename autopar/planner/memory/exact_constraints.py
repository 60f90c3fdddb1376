"""What is held at moments of the backward, exactly, as part of the problem.

When an op is run again depends on the choice itself: just before the first op that needs it, which may be run again in
turn. So for each moment that limits the memory, the problem gets nodes of its own. One for each op that could be run
again tells whether that was before the moment, just before it, is still to come, or is not done; each but the last two
with the reader that asked for it, so that nothing runs again sooner than it is needed. One for each value that the
backward can use tells how it is held and whether it is alive then. All of it is pairs of neighbours, like the rest of
the problem: an op's state goes with those of its operands and its readers.

For a fixed program, Jain et al. (Checkmate, 2020) give every op a variable for every moment; here only those moments
get any at which a schedule was found to exceed the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from autopar.ir import Graph, Value
from autopar.planner.footprint.op_work import local_bytes
from autopar.planner.memory.live_ranges import again
from autopar.planner.memory.usages import static_usages
from autopar.planner.options import Options
from autopar.planner.problem.variables import Decisions, hold_key, rerun_key
from autopar.program import AGAIN, Program
from autopar.solver import Edge, Problem, Usage

Array = npt.NDArray[np.float64]
_Left = TypeVar("_Left")
_Right = TypeVar("_Right")

BEFORE, NOW, LATER, NEVER = "before", "now", "later", "never"
"""When an op is run again: before the node of a moment's burst of ops run again, in it, after it, not at all."""
ORDER = {BEFORE: 0, NOW: 1, LATER: 2}
RETURNING = ("recompute", "offload")
"""What is not on the device all the time: made again, or fetched back."""


@dataclass(frozen=True, order=True)
class Moment:
    """While the graph's node at ``position`` runs; with ``again``, while the node there is run again just before it."""

    position: int
    again: int | None = None

    def place(self, graph: Graph) -> float:
        """Among the positions of the graph: between two nodes for what is run again before the second."""
        return self.position if self.again is None else again(graph, graph.nodes[self.again].name, self.position)


MOST_AT_ONCE = 8


def moments_over(program: Program, graph: Graph, timeline: Sequence[int], budget: float) -> dict[Moment, int]:
    """The moments of ``program`` at which its memory has a local peak over ``budget``, the highest first; and bytes."""
    at = {n.name: i for i, n in enumerate(graph.nodes)}
    following = len(graph.nodes)
    found: dict[Moment, int] = {}
    for i in range(len(timeline) - 1, -1, -1):
        op = program.ops[i] if i < len(program.ops) else None
        rerun = None
        if op is not None and op.kind == "compute":
            if op.name.endswith(AGAIN):
                rerun = at[op.node]
            else:
                following = at[op.node]
        around = [timeline[j] for j in (i - 1, i + 1) if 0 <= j < len(timeline)]
        if timeline[i] > budget and timeline[i] >= max(around, default=0):
            moment = Moment(following, rerun)
            found[moment] = max(found.get(moment, 0), timeline[i])
    highest = sorted(found, key=lambda m: -found[m])[:MOST_AT_ONCE]
    return {m: found[m] for m in highest}


@dataclass(frozen=True)
class _Held:
    """A value that the backward can use: how its options hold it, and who reads it there."""

    variable: int
    value: Value
    maker: int
    actions: tuple[str, ...]
    bytes: tuple[float, ...]
    reads: tuple[int, ...]
    again: tuple[int, ...]
    base: int | None
    until: float


@dataclass(frozen=True)
class _Rerun:
    """An op that can be run again: its place in the graph, and the held values that it makes."""

    variable: int
    position: int
    options: int
    makes: tuple[int, ...]


@dataclass(frozen=True)
class _State:
    """Of an op at a moment; ``asked`` is who asks for it: (held value, reader), the reader None for the backward."""

    when: str
    asked: tuple[int, int | None] | None = None


@dataclass(frozen=True)
class _Life:
    """Of a value at a moment: how it is held, when it was made again, whether it is alive, with how many bytes."""

    action: str
    when: str = NEVER
    alive: bool = False
    bytes: float = 0.0


@dataclass
class Exact:
    """The problem of ``decisions`` with exact memory at chosen moments.

    ``tied``: views are held as the value is whose memory they share, which on one device is best.
    """

    decisions: Decisions
    options: Options
    tied: bool
    _shared: dict[tuple[tuple[int, ...], bytes], Array] = field(default_factory=dict)

    @cached_property
    def held(self) -> tuple[_Held, ...]:
        d = self.decisions
        at = {n.name: i for i, n in enumerate(d.graph.nodes)}
        found = [v for v in d.variables if v.kind == "hold" and v.value is not None]
        order = {v.value: i for i, v in enumerate(found)}
        ends = _ends(d)
        held = []
        for v in found:
            assert v.value is not None
            node, meta = d.graph.by_name[v.value.node], d.graph.meta(v.value)
            readers = [n for n, _ in d.graph.consumers.get(v.value, ())]
            free = self.tied and node.name in d.views
            specs = [o.inputs[0] if o.inputs and not free else None for o in v.options]
            sizes = tuple(float(local_bytes(meta, s, d.mesh)) if s is not None else 0.0 for s in specs)
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
                    ends.get(v.value, -1),
                )
            )
        return tuple(held)

    @cached_property
    def reruns(self) -> Mapping[int, _Rerun]:
        """By the op's position in the graph."""
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
    def ties(self) -> tuple[Edge, ...]:
        """A view is held as its base is."""
        edges = []
        for h in self.held:
            if h.base is not None:
                base = self.held[h.base]
                fits = [[b in (a, "absent") for b in h.actions] for a in base.actions]
                edges.append(Edge(base.variable, h.variable, self._pairs(fits)))
        return tuple(edges)

    def extend(self, problem: Problem, moments: Mapping[Moment, float]) -> Problem:
        """``problem`` with rows at ``moments``, all within its limit. With each go the bytes that rows do not know of,
        such as those that an op holds while it runs."""
        turn = _turn(self.decisions.graph)
        grown = _Grown(problem, list(problem.costs), [*problem.edges, *self.ties], [])
        d = self.decisions
        for time, (moment, unseen) in enumerate(moments.items()):
            if unseen > 0:
                grown.usages.append(Usage(0, self.numbers([unseen] * len(problem.costs[0])), time, time + 1))
            exact = turn <= moment.position < len(d.graph.nodes)
            grown.usages += static_usages(d, self.options, moment.place(d.graph), time, holds=not exact, tied=self.tied)
            if exact:
                _Row(self, moment, time, grown).build()
        return Problem(tuple(grown.costs), tuple(grown.edges), tuple(grown.usages), problem.limit)

    def used(self, choice: Sequence[int], moment: Moment) -> float:
        """Bytes that the row of ``moment`` sees of a choice."""
        costs = tuple(self.numbers([0.0] * len(v.options)) for v in self.decisions.variables)
        row = self.extend(Problem(costs, ()), {moment: 0.0})
        extended = self.states(choice, [moment])
        return math.fsum(float(u.option[extended[u.node]]) for u in row.usages)

    def states(self, choice: Sequence[int], moments: Iterable[Moment]) -> tuple[int, ...]:
        """``choice`` with the states that it has at ``moments``: a choice of the extended problem."""
        turn = _turn(self.decisions.graph)
        extended = list(choice)
        for moment in moments:
            if turn <= moment.position < len(self.decisions.graph.nodes):
                extended += _Row(self, moment, 0, None).states(choice)
        return tuple(extended)

    def first_asked(self, choice: Sequence[int]) -> dict[int, tuple[int, tuple[int, int | None]]]:
        """For each op that is run again, the position before which it is, and who asks for it."""
        found: dict[int, tuple[int, tuple[int, int | None]]] = {}
        for position in sorted(self.reruns, reverse=True):
            asking: list[tuple[int, tuple[int, int | None]]] = []
            for i in self.reruns[position].makes:
                h = self.held[i]
                if h.actions[choice[h.variable]] != "recompute":
                    continue
                asking += [(q, (i, None)) for q in h.reads]
                asking += [(found[w][0], (i, w)) for w in h.again if w in found]
            if asking and choice[self.reruns[position].variable]:
                found[position] = min(asking, key=lambda a: a[0])
        return found

    def _pairs(self, fits: Sequence[Sequence[bool]]) -> Array:
        """0 where a pair fits, else forbidden; equal ones are one array, by which the solver finds repeated blocks."""
        cost = np.where(np.array(fits, dtype=bool), 0.0, math.inf)
        return self._shared.setdefault((cost.shape, cost.tobytes()), cost)

    def numbers(self, values: Sequence[float]) -> Array:
        array = np.array(values, dtype=np.float64)
        return self._shared.setdefault((array.shape, array.tobytes()), array)


@dataclass
class _Grown:
    """A problem while nodes are added."""

    problem: Problem
    costs: list[Array]
    edges: list[Edge]
    usages: list[Usage]


@dataclass
class _Row:
    """The nodes and edges of one moment."""

    exact: Exact
    moment: Moment
    time: int
    grown: _Grown | None

    @cached_property
    def ops(self) -> dict[int, tuple[_State, ...]]:
        """The states that each op can have."""
        return {p: tuple(self._op_states(r)) for p, r in self.exact.reruns.items()}

    @cached_property
    def lives(self) -> tuple[tuple[_Life, ...], ...]:
        """Those that each held value can have."""
        return tuple(tuple(dict.fromkeys(self._lives(h))) for h in self.exact.held)

    def build(self) -> None:
        assert self.grown is not None
        nodes = {p: self._add(len(states)) for p, states in self.ops.items()}
        values = [self._add(len(lives)) for lives in self.lives]
        for p, r in self.exact.reruns.items():
            self._join(r.variable, nodes[p], range(r.options), self.ops[p], lambda o, s: (o == 0) == (s.when == NEVER))
        for i, h in enumerate(self.exact.held):
            lives = self.lives[i]
            self.grown.usages.append(
                Usage(values[i], self.exact.numbers([s.bytes for s in lives]), self.time, self.time + 1)
            )
            options = tuple(zip(h.actions, h.bytes, strict=True))
            self._join(h.variable, values[i], options, lives, lambda o, s: o[0] == s.action and s.bytes in (0.0, o[1]))
            self._join(values[i], nodes[h.maker], lives, self.ops[h.maker], self._made(i))
            for reader in h.again:
                self._join(values[i], nodes[reader], lives, self.ops[reader], self._read(i, reader))
                self._join(nodes[h.maker], nodes[reader], self.ops[h.maker], self.ops[reader], self._asked(i, reader))
            if h.base is not None:
                self._join(values[h.base], values[i], self.lives[h.base], lives, lambda b, s: b.alive or not s.alive)

    def states(self, choice: Sequence[int]) -> list[int]:
        """The state of every node of this row under ``choice``, in the order in which they are added."""
        asked = self.exact.first_asked(choice)
        whens = {p: self._when(asked[p][0]) if p in asked else NEVER for p in self.ops}
        whens |= {p: LATER for p, r in self.exact.reruns.items() if p not in asked and choice[r.variable]}
        found = []
        for p, states in self.ops.items():
            by = asked[p][1] if p in asked else None
            found.append(next((i for i, s in enumerate(states) if s.when == whens[p] and s.asked in (None, by)), 0))
        return found + self._lives_of(choice, whens)

    def _lives_of(self, choice: Sequence[int], whens: Mapping[int, str]) -> list[int]:
        held = self.exact.held
        lives: dict[int, _Life] = {}
        for i in range(len(held) - 1, -1, -1):
            h = held[i]
            action, when = h.actions[choice[h.variable]], self._returns(h, choice, whens)
            wanted = self._wanted(h) or any(self._uses(w, whens[w]) for w in h.again)
            wanted = wanted or self._is_now(h.maker, whens[h.maker])
            wanted = wanted or any(lives[j].alive for j in range(i + 1, len(held)) if held[j].base == i)
            lives[i] = self._life(h, action, when, wanted and self._there(h, action, when), h.bytes[choice[h.variable]])
        return [self.lives[i].index(lives[i]) if lives[i] in self.lives[i] else 0 for i in range(len(held))]

    def _returns(self, h: _Held, choice: Sequence[int], whens: Mapping[int, str]) -> str:
        """When a value is there again, under ``choice``."""
        action = h.actions[choice[h.variable]]
        if action == "recompute":
            return whens[h.maker]
        if action != "offload":
            return NEVER
        reads = [self._when(q) for q in h.reads] + [whens[w] for w in h.again if whens[w] != NEVER]
        return min(reads, key=ORDER.__getitem__, default=LATER)

    def _when(self, position: int) -> str:
        """The state of an op that is run again just before ``position``."""
        if self.moment.again is None:
            return BEFORE if position <= self.moment.position else LATER
        if position == self.moment.position:
            return NOW
        return BEFORE if position < self.moment.position else LATER

    def _op_states(self, rerun: _Rerun) -> Iterator[_State]:
        yield _State(NEVER)
        yield _State(LATER)
        for i in rerun.makes:
            h = self.exact.held[i]
            for when in dict.fromkeys(self._when(q) for q in h.reads):
                if when != LATER:
                    yield _State(when, (i, None))
            for reader in h.again:
                yield _State(BEFORE, (i, reader))
                if self.moment.again is not None:
                    yield _State(NOW, (i, reader))

    def _lives(self, h: _Held) -> Iterator[_Life]:
        limits = [ORDER[self._when(q)] for q in h.reads]
        latest = min(limits, default=ORDER[LATER])
        wanted = self._wanted(h)
        for action, size in zip(h.actions, h.bytes, strict=True):
            whens = [w for w in ORDER if ORDER[w] <= latest] if action in RETURNING else [NEVER]
            for when in whens:
                there = self._there(h, action, when)
                for alive in (True,) if there and wanted else (False, True) if there else (False,):
                    yield self._life(h, action, when, alive, size)

    def _life(self, h: _Held, action: str, when: str, alive: bool, size: float) -> _Life:
        free = action == "keep" and h.until >= self.moment.position
        return _Life(action, when, alive, size if alive and not free else 0.0)

    def _there(self, h: _Held, action: str, when: str) -> bool:
        if action == "recompute":
            return self._is_past(h.maker, when) or self._is_now(h.maker, when)
        return action == "keep" or (action == "offload" and when != LATER)

    def _wanted(self, h: _Held) -> bool:
        """Whether the backward itself still reads it."""
        return any(q >= self.moment.position for q in h.reads)

    def _is_now(self, op: int, when: str) -> bool:
        return when == NOW and op == self.moment.again

    def _is_past(self, op: int, when: str) -> bool:
        return when == BEFORE or (when == NOW and op < (self.moment.again or 0))

    def _uses(self, op: int, when: str) -> bool:
        """Whether an op that is run again reads its operands at the moment or after."""
        return when == LATER or (when == NOW and not self._is_past(op, when))

    def _made(self, i: int) -> Callable[[_Life, _State], bool]:
        """How a value goes with the op that makes it again."""

        def fits(life: _Life, op: _State) -> bool:
            if life.action != "recompute":
                return op.asked is None or op.asked[0] != i
            now = self._is_now(self.exact.held[i].maker, op.when)
            return life.when == op.when and (life.alive or not now)

        return fits

    def _read(self, i: int, reader: int) -> Callable[[_Life, _State], bool]:
        """How a value goes with an op that reads it when it is run again."""

        def fits(life: _Life, op: _State) -> bool:
            if op.when == NEVER:
                return True
            if life.action == "absent" or (life.action in RETURNING and ORDER[life.when] > ORDER[op.when]):
                return False
            there = self._there(self.exact.held[i], life.action, life.when)
            return life.alive or not (there and self._uses(reader, op.when))

        return fits

    def _asked(self, i: int, reader: int) -> Callable[[_State, _State], bool]:
        """An op that is run again for a reader is so when that reader is."""
        return lambda maker, read: maker.asked != (i, reader) or maker.when == read.when

    def _add(self, options: int) -> int:
        assert self.grown is not None
        self.grown.costs.append(self.exact.numbers([0.0] * options))
        return len(self.grown.costs) - 1

    def _join(
        self, u: int, v: int, left: Sequence[_Left], right: Sequence[_Right], fits: Callable[[_Left, _Right], bool]
    ) -> None:
        assert self.grown is not None
        table = [[fits(a, b) for b in right] for a in left]
        if not all(map(all, table)):
            self.grown.edges.append(Edge(u, v, self.exact._pairs(table)))


def _turn(graph: Graph) -> int:
    backward = (i for i, n in enumerate(graph.nodes) if n.phase == "backward" and n.op != "placeholder")
    return next(backward, len(graph.nodes))


def _ends(d: Decisions) -> dict[Value, float]:
    """To the end for results of the forward and what they are views of."""
    ends = {o.value: math.inf for o in d.graph.outputs if o.kind != "gradient" or o.name.startswith("input:")}
    for node in reversed(d.graph.nodes):
        if node.name in d.views and Value(node.name) in ends:
            ends[node.inputs[0]] = math.inf
    return ends
