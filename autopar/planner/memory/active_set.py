"""The memory constraints that are in the problem: the program points that limit memory, each with its margin.

A constraint adds up the bytes that options hold by themselves and those of redistributed operands. Some bytes are known
only once a whole program is scheduled: what an op holds while it runs, or a value that comes back before it is read.
They are read off the last program that was over the budget, and set aside as a *margin* at that point alone; all other
points keep the whole budget. The search for the smallest peak uses an *option margin* instead, which counts only under
the option that causes these bytes, since other options may hold less there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.planner.graphs.accumulation import is_gradient
from autopar.planner.memory.in_parts import MayDecompose, no_product
from autopar.planner.memory.live_ranges import replaces_original
from autopar.planner.memory.pair_nodes import PairNodes
from autopar.planner.memory.points import ProgramPoint, end, replaced, rerun
from autopar.planner.memory.redistributed_operands import redistributed_operands
from autopar.planner.memory.usages import MemoryUsages
from autopar.planner.options import Options
from autopar.planner.problem.variables import Decisions
from autopar.program import AGAIN, Op, Program
from autopar.solver import Problem, Usage, UsagePrices

Array = npt.NDArray[np.float64]

MAX_NEW_POINTS = 4
"""The number of highest peaks over the budget that become constraints in one round."""

EQUALISE_FACTOR = 1.1
"""Factor on the largest margin where there is time for only one more round. With a margin of 5 GiB, the next program of
a 70B model on mesh (8, 8) was over its budget by 18 MiB."""


@dataclass
class ActiveSet:
    """Program points whose memory is constrained.

    Args:
        margins: bytes set aside at each point.
        may_decompose: which products may hold an operand or a result in parts.
        option_margins: bytes set aside at a point only if a variable takes an option: (point, variable, option).
    """

    decisions: Decisions
    options: Options
    may_decompose: MayDecompose = no_product
    margins: dict[ProgramPoint, float] = field(default_factory=dict)
    option_margins: dict[tuple[ProgramPoint, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.decisions.graph
        # Memory is usually highest as the backward begins, and at the end.
        self.margins = self.margins or {ProgramPoint(graph.turn): 0.0, end(graph): 0.0}

    @cached_property
    def memory_usages(self) -> MemoryUsages:
        return MemoryUsages.of(self.decisions, self.options, self.may_decompose)

    @cached_property
    def pairs(self) -> PairNodes:
        """The nodes of what depends on two options."""
        redistributed = redistributed_operands(self.decisions, self.may_decompose)
        return PairNodes((*redistributed, *self.memory_usages.pair_nodes))

    def emptied(self) -> ActiveSet:
        """Return an active set of the same decisions with its first points only and no margins."""
        emptied = ActiveSet(self.decisions, self.options, self.may_decompose)
        emptied.memory_usages, emptied.pairs = self.memory_usages, self.pairs
        return emptied

    def copy(self) -> ActiveSet:
        """Return an independent copy."""
        copy = self.emptied()
        copy.margins, copy.option_margins = dict(self.margins), dict(self.option_margins)
        return copy

    def usages(self) -> tuple[Usage, ...]:
        """Return the constraints as usages; the i-th point is time i."""
        count = len(self.decisions.variables[0].options)
        margins = [
            Usage(0, np.full(count, size), time, time + 1) for time, size in enumerate(self.margins.values()) if size
        ]
        time_of = {point: time for time, point in enumerate(self.margins)}
        for (point, variable, option), size in self.option_margins.items():
            held = np.zeros(len(self.decisions.variables[variable].options))
            held[option] = size
            margins.append(Usage(variable, held, time_of[point], time_of[point] + 1))
        return (*self.memory_usages.at_points(tuple(self.margins)), *margins)

    def extend(self, problem: Problem) -> Problem:
        """Add the nodes of what depends on two options to ``problem``, which has the constraints."""
        return self.pairs.extend(problem, tuple(self.margins))

    def extend_choice(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Return ``choice`` as a choice of the extended problem."""
        return self.pairs.extend_choice(choice, tuple(self.margins))

    def restrict(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Return the part of an extended problem's choice that belongs to the decisions."""
        return tuple(choice[: len(self.decisions.variables)])

    def prices_by_point(self, found: UsagePrices) -> Mapping[ProgramPoint | int, float]:
        """Return prices of the limit by the points of their times; times of other limits stay what they are."""
        points, times = list(self.margins), found.times.astype(int).tolist()
        at = (points[time] if time < len(points) else time for time in times)
        return dict(zip(at, found.prices.tolist(), strict=True))

    def usage_prices(self, by_point: Mapping[ProgramPoint | int, float]) -> UsagePrices:
        """Return the prices of the times at which the points of this set are constrained."""
        times = {point: time for time, point in enumerate(self.margins)}
        placed = ((at if isinstance(at, int) else times.get(at), price) for at, price in by_point.items())
        known = sorted((time, price) for time, price in placed if time is not None)
        return UsagePrices(*np.array(known, dtype=float).reshape(-1, 2).T)

    def add_peaks_of(self, program: Program, timeline: Sequence[int], budget: float, depth: int) -> None:
        """Constrain the points at which a program of other decisions is over ``budget``, and its peaks near the turn.

        Near the turn means within one layer of a model of ``depth`` layers. However much is recomputed, what is kept is
        held there.
        """
        nodes = self.decisions.graph.nodes
        turn = min(self.margins).node
        layer = (len(nodes) - turn) / max(depth, 1)
        over = peaks(program, self.decisions, timeline, budget)
        near_turn = [p for p in peaks(program, self.decisions, timeline, 0) if abs(p[0].node - turn) < layer]
        for point, _ in (*over[:MAX_NEW_POINTS], *near_turn[:MAX_NEW_POINTS]):
            self.margins.setdefault(point, 0.0)

    def add_points(self, points: Iterable[ProgramPoint]) -> None:
        """Add constraints at ``points``, without margins."""
        for point in sorted(points):
            self.margins.setdefault(point, 0.0)

    def separate(
        self,
        choice: Sequence[int],
        program: Program,
        timeline: Sequence[int],
        budget: float,
        *,
        per_option: bool = False,
    ) -> bool:
        """Add or tighten the constraints that cut off ``program``, which is over ``budget``.

        Args:
            choice: the choice that ``program`` is scheduled from.
            timeline: the bytes that each of its ops holds.
            per_option: set bytes aside as option margins where one variable is responsible for them.

        Returns:
            Whether any constraint is new or tighter.
        """
        changed = False
        for point, (held, op) in peaks(program, self.decisions, timeline, budget)[:MAX_NEW_POINTS]:
            modelled = self._modelled(choice, point)
            new = point not in self.margins
            # A constraint that cuts off this program without a margin gets none yet: so far its bound holds for all.
            margin = 0.0 if new and modelled > budget else max(held - modelled, 0.0)
            at = self._responsible_variable(point, op) if per_option and margin else None
            if at is not None and margin > self.option_margins.get((point, at, choice[at]), 0.0):
                self.option_margins[point, at, choice[at]] = margin
                self.margins.setdefault(point, 0.0)
                changed = True
                continue
            changed |= margin > self.margins.get(point, -1.0)
            self.margins[point] = max(margin, self.margins.get(point, 0.0))
        return changed

    def as_held(self, choice: Sequence[int], program: Program, timeline: Sequence[int]) -> ActiveSet:
        """Return an active set of the same points, whose margins are what ``program`` holds there beyond what the
        constraints count."""
        found, held = self.copy(), held_by_point(program, self.decisions, timeline)
        for point in found.margins:
            there = held[point].bytes if point in held else 0
            found.margins[point] = max(there - self._modelled(choice, point), 0.0)
        return found

    def _modelled(self, choice: Sequence[int], point: ProgramPoint) -> float:
        """Return the bytes that the constraint at ``point`` counts, without its margin."""
        own = self.memory_usages.at_points((point,))
        return sum(float(u.option[choice[u.node]]) for u in own) + self.pairs.bytes(choice, point)

    def _responsible_variable(self, point: ProgramPoint, op: Op) -> int | None:
        """Return the variable whose option says most about what is held while ``op`` runs.

        This is the parameter's if its gradient is being redistributed, else that of the node that runs at the point or
        next.
        """
        d, at = self.decisions, point.node
        if op.kind != "compute" and op.node in self._parameters_by_gradient:
            return self._parameters_by_gradient[op.node]
        return d.index.get(d.graph.nodes[at].name) if at < len(d.graph.nodes) else None

    @cached_property
    def _parameters_by_gradient(self) -> dict[str, int]:
        """The variable of each parameter, by the node that makes its gradient."""
        d = self.decisions
        named = {meaning.name: node for node, meaning in d.graph.input_of.items()}
        gradients = (o for o in d.graph.outputs if o.kind == "gradient" and not o.name.startswith("input:"))
        return {o.value.node: d.index[named[o.name]] for o in gradients}

    def equalise(self, least: float = 0.0) -> dict[ProgramPoint, float]:
        """Raise every margin to a little more than the largest one, and to at least ``least`` bytes; return those that
        were there."""
        before = self.margins
        most = max(least, EQUALISE_FACTOR * max(self.margins.values(), default=0.0))
        self.margins = {point: max(most, margin) for point, margin in before.items()}
        return before


class Held(NamedTuple):
    """Bytes that are held, and the op that runs meanwhile or ran last."""

    bytes: int
    op: Op


def peaks(program: Program, d: Decisions, timeline: Sequence[int], budget: float) -> list[tuple[ProgramPoint, Held]]:
    """Return every local peak over ``budget`` with its point, the highest first."""
    held = held_by_point(program, d, timeline)
    sizes = [at.bytes for at in held.values()]
    found = [
        (point, at)
        for i, (point, at) in enumerate(held.items())
        if at.bytes > budget and at.bytes >= max(sizes[max(i - 1, 0) : i + 2])
    ]
    return sorted(found, key=lambda peak: -peak[1].bytes)


def held_by_point(program: Program, d: Decisions, timeline: Sequence[int]) -> dict[ProgramPoint, Held]:
    """Return the most that ``program`` holds at each program point, the last point first.

    Args:
        timeline: the bytes that are held while each op runs, and at the end.
    """
    graph = d.graph
    following = point = end(graph)
    held = {point: Held(timeline[-1], program.ops[-1])}
    replacing = dict(_replacing(program, d))
    for op, size in zip(program.ops[::-1], timeline[-2::-1], strict=True):
        if op.kind != "compute":
            point = replacing.get(op.name, point.preparing)
        elif op.name.endswith(AGAIN):
            point = rerun(graph, op.node, following)
        else:
            point = following = ProgramPoint(graph.order[op.node])
        if point not in held or size > held[point].bytes:
            held[point] = Held(size, op)
    return held


def _replacing(program: Program, d: Decisions) -> Iterator[tuple[str, ProgramPoint]]:
    """Yield the ops that follow the maker of a value at once and replace the value, with their points: they make the
    copy that all read, or begin to reduce a gradient."""
    gradients = {str(o.value): o.value for o in d.graph.outputs if is_gradient(o)}
    maker = ""
    for op in program.ops:
        if op.kind == "compute":
            maker = op.name
        elif op.kind == "redistribute" and op.node == maker:
            name = op.name.partition("|")[0]
            copy = d.variables[d.index.get(f"{name}@{op.phase}", 0)]
            value = copy.value if replaces_original(d, copy) else gradients.get(name)
            if value is not None:
                yield op.name, replaced(d.graph.order[op.node], value.index)
