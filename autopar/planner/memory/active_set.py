"""The moments that limit the memory, as rows of the problem, each with room for what rows cannot see.

A row adds up what options hold by themselves, and redistributed copies. What only a whole program holds (what an op
takes while it runs, a value that is there again sooner than it is read) is read off the last program that was over the
budget and set aside at that moment alone: other moments keep the whole budget. Where the smallest peak is looked for,
it is set aside for the one option that is behind it, since others may hold less there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.ir import Graph
from autopar.planner.memory.live_ranges import BEFORE, again
from autopar.planner.memory.redistributed_operands import Copies
from autopar.planner.memory.usages import Holdings
from autopar.planner.options import Options
from autopar.planner.problem.variables import Decisions
from autopar.program import AGAIN, Op, Program
from autopar.solver import Problem, Usage

Array = npt.NDArray[np.float64]

MOST_AT_ONCE = 4
"""So many moments over the budget become rows together, the highest ones."""

LEVEL_TIMES = 1.1
"""Times what rows did not see of one program, for where there is time for one more: of 70B on (8, 8) the next was over
its budget by 18 MiB, where 5 GiB were set aside."""


@dataclass
class Rows:
    """Places of the program, and for each the bytes to set aside there; that of the graph's length is the end of the
    step. ``behind``: bytes to set aside at a place for one option of a variable alone."""

    decisions: Decisions
    options: Options
    unseen: dict[float, float] = field(default_factory=dict)
    behind: dict[tuple[float, int, int], float] = field(default_factory=dict)
    copies: Copies = field(init=False)

    def __post_init__(self) -> None:
        self.copies = Copies(self.decisions)
        nodes = self.decisions.graph.nodes
        backward = (i for i, n in enumerate(nodes) if n.phase == "backward" and n.op != "placeholder")
        # Memory is usually highest as the backward begins, and at the end.
        self.unseen = self.unseen or {next(backward, len(nodes)): 0.0, len(nodes): 0.0}

    @cached_property
    def holdings(self) -> Holdings:
        return Holdings.of(self.decisions, self.options)

    def afresh(self) -> Rows:
        """Rows that set nothing aside, of the same decisions."""
        rows = Rows(self.decisions, self.options)
        rows.copies, rows.holdings = self.copies, self.holdings
        return rows

    def copied(self) -> Rows:
        """The same rows, that become tighter on their own."""
        rows = self.afresh()
        rows.unseen, rows.behind = dict(self.unseen), dict(self.behind)
        return rows

    def usages(self) -> tuple[Usage, ...]:
        """The rows, at times 0, 1, ..."""
        alike = len(self.decisions.variables[0].options)
        aside = [
            Usage(0, np.full(alike, size), time, time + 1) for time, size in enumerate(self.unseen.values()) if size
        ]
        time_of = {place: time for time, place in enumerate(self.unseen)}
        for (place, variable, option), size in self.behind.items():
            held = np.zeros(len(self.decisions.variables[variable].options))
            held[option] = size
            aside.append(Usage(variable, held, time_of[place], time_of[place] + 1))
        return (*self.holdings.usages(tuple(self.unseen)), *aside)

    def extend(self, problem: Problem) -> Problem:
        """A problem that has the rows, with the copies that they do not see."""
        return self.copies.extend(problem, tuple(self.unseen))

    def states(self, choice: Sequence[int]) -> tuple[int, ...]:
        """``choice`` as one of the extended problem."""
        return self.copies.states(choice, tuple(self.unseen))

    def own(self, choice: Sequence[int]) -> tuple[int, ...]:
        """A choice of the extended problem as one of the decisions."""
        return tuple(choice[: len(self.decisions.variables)])

    def watch(self, program: Program, timeline: Sequence[int], budget: float, depth: int) -> None:
        """Rows for the moments at which a program of other decisions is over ``budget``, and, of a model of ``depth``
        layers, those about the turn: however much is made again, what is kept is held there."""
        nodes = self.decisions.graph.nodes
        turn = min(self.unseen)
        layer = (len(nodes) - turn) / max(depth, 1)
        over = _peaks(program, self.decisions.graph, timeline, budget)
        about = [p for p in _peaks(program, self.decisions.graph, timeline, 0) if abs(p[0] - turn) < layer]
        for place, _ in (*over[:MOST_AT_ONCE], *about[:MOST_AT_ONCE]):
            self.unseen.setdefault(place, 0.0)

    def tighten(
        self, choice: Sequence[int], program: Program, timeline: Sequence[int], budget: float, *, alone: bool = False
    ) -> bool:
        """Rows for the moments at which ``program`` is over ``budget``; whether any row is new or tighter. With
        ``alone`` what rows do not see is set aside for the option behind it alone."""
        changed = False
        for place, (held, op) in _peaks(program, self.decisions.graph, timeline, budget)[:MOST_AT_ONCE]:
            rows = self.holdings.usages((place,))
            modelled = sum(float(u.option[choice[u.node]]) for u in rows) + self.copies.bytes(choice, place)
            new = place not in self.unseen
            # Where the row alone bars this program, nothing is set aside yet: so far its bound holds for all.
            unseen = 0.0 if new and modelled > budget else max(held - modelled, 0.0)
            at = self._variable_behind(place, op) if alone and unseen else None
            if at is not None and unseen > self.behind.get((place, at, choice[at]), 0.0):
                self.behind[place, at, choice[at]] = unseen
                self.unseen.setdefault(place, 0.0)
                changed = True
                continue
            changed |= unseen > self.unseen.get(place, -1.0)
            self.unseen[place] = max(unseen, self.unseen.get(place, 0.0))
        return changed

    def highest(self, program: Program, timeline: Sequence[int]) -> float:
        """The place at which ``program`` holds most."""
        return _peaks(program, self.decisions.graph, timeline, max(timeline) - 1)[0][0]

    def more_at(self, place: float, choice: Sequence[int]) -> Callable[[Sequence[int]], float]:
        """How much more other choices hold at ``place`` than ``choice`` does, as far as rows see."""
        held: dict[int, Array] = {}
        for used in self.holdings.usages((place,)):
            held[used.node] = held.get(used.node, 0.0) + used.option
        copies = self.copies.by_variable(place)

        def more(other: Sequence[int]) -> float:
            changed = [v for v, (a, b) in enumerate(zip(other, choice, strict=True)) if a != b]
            own = sum(float(held[v][other[v]] - held[v][choice[v]]) for v in changed if v in held)
            touched = dict(copy for v in changed for copy in copies.get(v, ()))
            return own + sum(bytes_of(other) - bytes_of(choice) for bytes_of in touched.values())

        return more

    def _variable_behind(self, place: float, op: Op) -> int | None:
        """The one whose option tells most of what is held while ``op`` runs: a parameter's where its gradient is on the
        way, else that of the node that runs there or next."""
        d, at = self.decisions, math.ceil(place)
        if op.kind != "compute" and op.node in self._parameters:
            return self._parameters[op.node]
        return d.index.get(d.graph.nodes[at].name) if at < len(d.graph.nodes) else None

    @cached_property
    def _parameters(self) -> dict[str, int]:
        """The variable of each parameter, by the node that makes its gradient."""
        d = self.decisions
        named = {meaning.name: node for node, meaning in d.graph.input_of.items()}
        gradients = (o for o in d.graph.outputs if o.kind == "gradient" and not o.name.startswith("input:"))
        return {o.value.node: d.index[named[o.name]] for o in gradients}

    def level(self, least: float = 0.0) -> None:
        """Set aside at every moment what is at one, and a little more; ``least`` bytes at any rate."""
        most = max(least, LEVEL_TIMES * max(self.unseen.values(), default=0.0))
        self.unseen = {place: max(most, aside) for place, aside in self.unseen.items()}


class Held(NamedTuple):
    """Bytes, and the op that runs or was the last to run while they are held."""

    bytes: int
    op: Op


def _peaks(program: Program, graph: Graph, timeline: Sequence[int], budget: float) -> list[tuple[float, Held]]:
    """What is held at the places of every local peak over ``budget``, the highest first."""
    held = held_at(program, graph, timeline)
    sizes = [at.bytes for at in held.values()]
    found = [
        (place, at)
        for i, (place, at) in enumerate(held.items())
        if at.bytes > budget and at.bytes >= max(sizes[max(i - 1, 0) : i + 2])
    ]
    return sorted(found, key=lambda peak: -peak[1].bytes)


def held_at(program: Program, graph: Graph, timeline: Sequence[int]) -> dict[float, Held]:
    """The most that ``program``, whose ops hold ``timeline``, holds at each place, the last first."""
    following: float = len(graph.nodes)
    held = {following: Held(timeline[-1], program.ops[-1])}
    place = following
    for op, size in zip(program.ops[::-1], timeline[-2::-1], strict=True):
        if op.kind != "compute":
            place = following - BEFORE if place == following else place
        elif op.name.endswith(AGAIN):
            place = again(graph, op.node, following)
        else:
            place = following = graph.order[op.node]
        if place not in held or size > held[place].bytes:
            held[place] = Held(size, op)
    return held
