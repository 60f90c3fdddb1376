"""The phases of a search: what each needs, and what it does to the state that they share.

Every phase but the searches is exact; the bound that the incumbent ends with holds for the problem as it was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from autopar import settings
from autopar.errors import InfeasibleError
from autopar.solver.blocks.blocks_linear import relax_blocks
from autopar.solver.blocks.folding import BeginPart, solve_folded
from autopar.solver.blocks.parts import Tied
from autopar.solver.dual import linear
from autopar.solver.dual.ascent import ascend, bar_superfluous_pairs, search_from
from autopar.solver.dual.neighbourhood import improve_parts
from autopar.solver.dual.search import Search
from autopar.solver.integer import highs
from autopar.solver.integer.ilp import (
    IlpLimits,
    IlpResult,
    Model,
    begins_slow,
    build,
    is_slow,
    is_small,
    usage_entries,
)
from autopar.solver.integer.pulp_backend import solve_pulp
from autopar.solver.priced.search import PricedSearch
from autopar.solver.problem import Messages as Known
from autopar.solver.problem import Problem, Solution, relative_gap
from autopar.solver.reduce.dominance import WorkBudget
from autopar.solver.reduce.elimination import eliminate, narrow_elimination
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.greedy import greedy_choice
from autopar.solver.reduce.incumbent import Fallback, Incumbent
from autopar.solver.reduce.reductions import absorb_separable, drop_forbidden, reduce


@dataclass
class State:
    """What the phases know. ``graph``: the problem as far as it is reduced; ``plain``: where only what is forbidden and
    what is separable is gone. Without ``exact`` a good choice is enough. ``done``: nothing is left to do."""

    incumbent: Incumbent
    backend: str
    warm_starts: Sequence[Sequence[int]] = ()
    tied: Tied | None = None
    exact: bool = True
    size: dict[str, int] = field(default_factory=dict)
    method: list[str] = field(default_factory=list)
    solve: Callable[..., Solution] | None = None
    begin_part: BeginPart | None = None
    done: bool = False
    relaxed: bool = False
    search: PricedSearch | None = None
    fallback: Fallback | None = None
    _plain: Graph | None = None
    _graph: Graph | None = None

    @property
    def problem(self) -> Problem:
        return self.incumbent.problem

    @property
    def messages(self) -> Known | None:
        return self.incumbent.messages.get(len(self.problem.costs))

    @messages.setter
    def messages(self, passed: Known) -> None:
        self.incumbent.messages[len(self.problem.costs)] = passed

    @property
    def limited(self) -> bool:
        return bool(self.problem.usages) and math.isfinite(self.problem.limit)

    @property
    def plain(self) -> Graph:
        if self._plain is None:
            self._plain = Graph(self.problem)
            self.size.update(_sizes("", self._plain))
            drop_forbidden(self._plain)
            absorb_separable(self._plain)
        return self._plain

    @property
    def graph(self) -> Graph:
        if self._graph is None:
            self._graph = self.plain.copy() if self.limited else Graph(self.problem)
            self.size.update(_sizes("", self._graph) if not self.size else {})
        return self._graph

    @property
    def searched(self) -> Graph:
        """What a search by prices is about: where usages are limited, reductions leave other choices than it needs."""
        return self.plain if self.limited else self.graph

    def may_search(self) -> bool:
        """Whether a search by prices has room: its messages hold the table of every edge, which edges here share."""
        return bool(self.searched.nodes()) and sum(e.cost.size for e in self.problem.edges) <= settings.TABLE

    def searching(self) -> PricedSearch:
        if self.search is None:
            self.search = PricedSearch(self.searched.copy(), self.incumbent)
        return self.search

    def until(self, share: float) -> float:
        """When such a share of the time left is over."""
        return self.incumbent.seconds() + share * max(self.incumbent.seconds_left(), 0.0)

    def use(self, method: str) -> None:
        if method not in self.method:
            self.method.append(method)


class Phase(Protocol):
    name: ClassVar[str]

    def applies(self, state: State) -> bool: ...

    def run(self, state: State) -> None: ...


@dataclass(frozen=True)
class Blocks:
    """The linear program of repeated blocks, where something is limited."""

    name: ClassVar[str] = "linear program of blocks"

    def applies(self, state: State) -> bool:
        return state.tied is not None and state.backend == "highs" and state.limited

    def run(self, state: State) -> None:
        assert state.tied is not None
        state.use(self.name)
        try:
            relax_blocks(state.incumbent, state.tied.parts, (1 - settings.SIDE_SHARE) * state.incumbent.time_limit)
        except InfeasibleError:
            if state.incumbent.choice is None:
                raise


@dataclass(frozen=True)
class First:
    """A first choice: greedy, of equal blocks where there are any; under a limit by prices and exact moves, unless a
    linear program is there as soon."""

    name: ClassVar[str] = "first choice"

    def applies(self, state: State) -> bool:
        return state.incumbent.choice is None

    def run(self, state: State) -> None:
        alike = greedy_choice(state.tied.problem) if state.tied is not None else None
        first = (
            state.tied.expand(alike) if state.tied is not None and alike is not None else greedy_choice(state.problem)
        )
        if first is not None:
            state.incumbent.offer(first, "greedy")
        if not state.limited or state.incumbent.choice is not None or LinearProgram().applies(state):
            return
        if state.may_search():
            state.searching().first()


@dataclass(frozen=True)
class Folding:
    """Repeated blocks that choose alike, and a bound from one block of each run."""

    name: ClassVar[str] = "folding"

    def applies(self, state: State) -> bool:
        return state.tied is not None and not state.limited

    def run(self, state: State) -> None:
        assert state.tied is not None and state.begin_part is not None
        state.size.update(state.problem.size())
        state.use(self.name)
        solve_folded(state.incumbent, state.tied, state.begin_part, state.size, linear=state.backend == "highs")
        if state.incumbent.choice is not None:
            pairs = sum(edge.cost.size for edge in state.problem.edges)
            state.done = state.incumbent.seconds_left() <= 0 or pairs > settings.MAX_FLOWS


@dataclass(frozen=True)
class Reduce:
    """Exact reductions, and what known choices are in the rest."""

    name: ClassVar[str] = "reductions"

    def applies(self, state: State) -> bool:
        return True

    def run(self, state: State) -> None:
        graph, incumbent = state.graph, state.incumbent
        state.use(self.name)
        latest = state.until(settings.PART_SHARE)
        reduce(graph, WorkBudget(settings.WORK, lambda: incumbent.seconds() > latest, settings.EACH))
        # Where time is short, a first choice made better is all that there will be.
        late = math.inf if state.limited else state.until(settings.SIDE_SHARE)
        if not state.limited and incumbent.choice is not None:
            search_from(graph, graph.project(incumbent.choice), incumbent, "local search", late)
        for choice in state.warm_starts:
            search_from(graph, graph.project(tuple(choice)), incumbent, "warm start and local search", late)
        incumbent.raise_bound(graph.least())
        state.size.update(_sizes("reduced_", graph))
        if not graph.nodes():
            _finish(state)


@dataclass(frozen=True)
class Eliminate:
    """The optimum of what is left, where nothing is limited and tables over several nodes stay small."""

    name: ClassVar[str] = "elimination"

    def applies(self, state: State) -> bool:
        return not state.limited

    def run(self, state: State) -> None:
        graph, incumbent = state.graph, state.incumbent
        incumbent.raise_bound(graph.least())
        order = narrow_elimination(graph)
        if order is None:
            return
        state.use(self.name)
        least, choice = eliminate(graph, order)
        if not math.isfinite(least):
            raise InfeasibleError("No choice is allowed.", found="every choice takes a forbidden pair")
        incumbent.offer(graph.expand(choice), self.name)
        incumbent.raise_bound(min(least, incumbent.objective))
        state.done = True


@dataclass(frozen=True)
class LinearProgram:
    """The linear program of what is left, where it is expected to end in a share of the time left."""

    name: ClassVar[str] = "linear program"

    def applies(self, state: State) -> bool:
        graph = state.graph
        if not graph.nodes() or state.backend != "highs" or not (state.exact or not len(graph.limits)):
            return False
        if usage_entries(graph) > settings.MAX_FLOWS:
            return False
        return linear.expected_seconds(graph) <= settings.SIDE_SHARE * state.incumbent.seconds_left()

    def run(self, state: State) -> None:
        state.use(self.name)
        state.relaxed = linear.relax(state.graph, state.incumbent, settings.MAIN_SHARE * state.incumbent.seconds_left())
        state.done = state.incumbent.settled()


@dataclass(frozen=True)
class Prices:
    """Prices of the limit, exact moves under them, and the parts of these that fit; without a limit, exact moves."""

    name: ClassVar[str] = "prices"
    patience: float = settings.IDLE_SHARE
    """It ends when hardly anything of the gap was closed in this share of its time, and in some rounds."""

    def applies(self, state: State) -> bool:
        if not state.limited:
            return not state.relaxed and len(state.graph.nodes()) >= settings.SMALL and state.may_search()
        if not state.may_search() or not len(state.plain.limits):
            return False
        return not state.relaxed or not is_small(state.graph, settings.FLOWS)

    def run(self, state: State) -> None:
        state.use(self.name)
        incumbent, search = state.incumbent, state.searching()
        began = incumbent.seconds()
        since, gap, rounds = began, math.inf, 0

        def enough() -> bool:
            nonlocal since, gap, rounds
            now, left = incumbent.seconds(), incumbent.objective - incumbent.bound()
            if left < (1 - settings.ROUGH) * gap:
                since, gap, rounds = now, left, search.rounds
            stalled = search.rounds - rounds > settings.PATIENCE and now - since > self.patience * (now - began)
            return stalled or incumbent.proven() or incumbent.seconds_left() <= 0

        search.first()
        search.run(enough)
        incumbent.usage_prices = search.usage_prices()


@dataclass(frozen=True)
class KnownChoice:
    """Where nothing is found, a choice that is known, and better ones by prices from there."""

    name: ClassVar[str] = "known choice"

    def applies(self, state: State) -> bool:
        return state.incumbent.choice is None and state.fallback is not None

    def run(self, state: State) -> None:
        assert state.fallback is not None
        known = state.fallback()
        if known is None:
            return
        state.incumbent.offer(known, self.name)
        if state.incumbent.choice is not None and Prices().applies(state):
            Prices().run(state)


@dataclass(frozen=True)
class Messages:
    """Message passing and reductions in turns, each for a share of the time left."""

    name: ClassVar[str] = "message passing"

    def applies(self, state: State) -> bool:
        return not state.relaxed and bool(state.graph.nodes())

    def run(self, state: State) -> None:
        graph, incumbent = state.graph, state.incumbent
        while True:
            if incumbent.seconds_left() < 0:
                state.done = True
                return
            state.size.update(_sizes("reduced_", graph))
            if not graph.nodes():
                _finish(state)
                return
            before = graph.size()
            prices = incumbent.usage_prices.at(graph.times)
            deadline = state.until(settings.SIDE_SHARE if state.exact else 1 - settings.SMALL_SHARE)
            state.messages = ascend(
                graph, incumbent, prices, deadline, choice_only=not state.exact, known=state.messages
            )
            state.use(self.name)
            if incumbent.proven() or incumbent.seconds_left() < 0:
                state.done = True
                return
            if not state.exact and relative_gap(incumbent.objective, incumbent.bound()) < settings.NEAR:
                return
            reduce(graph, WorkBudget(settings.WORK, lambda: incumbent.seconds_left() < 0))
            if graph.size()[1] > (1 - settings.SAVED) * before[1]:
                break


@dataclass(frozen=True)
class Prove:
    """What is left when superfluous pairs are barred too, as an integer program."""

    name: ClassVar[str] = "integer program"

    def applies(self, state: State) -> bool:
        return state.exact

    def run(self, state: State) -> None:
        graph, incumbent = state.graph, state.incumbent
        if incumbent.choice is not None and graph.nodes():
            bar_superfluous_pairs(graph, incumbent, incumbent.usage_prices.at(graph.times), state.messages)
            reduce(graph, WorkBudget(settings.WORK, lambda: incumbent.seconds_left() < 0))
        state.size.update(_sizes("reduced_", graph))
        if not graph.nodes():
            _finish(state)
            return
        if incumbent.seconds_left() < 0 or (is_slow(graph) and incumbent.refused()):
            state.done = True
            return
        most = settings.FLOWS_A_SECOND * max(incumbent.seconds_left(), 0.0)
        if len(graph.limits):
            most = min(most, settings.FLOWS)
        if not is_small(graph, int(most)):
            return
        state.done = True
        model = build(graph, incumbent.objective - graph.offset)
        state.size.update(model.size())
        state.use(f"ILP by {state.backend}")
        result = _run(model, graph, incumbent, state.backend)
        if result.choice is not None:
            search_from(graph, result.choice, incumbent, f"ILP by {state.backend}")
        # Everything at least as dear as the incumbent may have been taken out.
        incumbent.raise_bound(min(result.lower_bound + graph.offset, incumbent.objective))


@dataclass(frozen=True)
class SolveParts:
    """No single integer program: better choices from parts of it."""

    name: ClassVar[str] = "solving parts"

    def applies(self, state: State) -> bool:
        return state.exact and state.solve is not None

    def run(self, state: State) -> None:
        graph, incumbent, solve = state.graph, state.incumbent, state.solve
        assert solve is not None
        state.use(self.name)

        def solve_part(part: Problem, seconds: float, warm: Sequence[int]) -> Solution:
            return solve(part, time_limit=seconds, backend=state.backend, gap=incumbent.gap, warm_starts=[warm])

        improve_parts(graph, incumbent, solve_part)


FLAT: tuple[Phase, ...] = (
    Reduce(),
    Eliminate(),
    LinearProgram(),
    Prices(),
    KnownChoice(),
    Messages(),
    Prove(),
    SolveParts(),
    Prices(patience=1.0),
)
"""Every node on its own."""

PHASES: tuple[Phase, ...] = (Blocks(), First(), Eliminate(), Folding(), *FLAT)


def run_phases(phases: Sequence[Phase], state: State) -> None:
    """Each phase that applies in turn, until a choice is as good as was asked or nothing is left to do.

    Raises:
        InfeasibleError: no choice is allowed.
    """
    incumbent = state.incumbent
    for phase in phases:
        if state.done or incumbent.settled() or incumbent.proven():
            break
        if incumbent.seconds_left() <= 0 and incumbent.choice is not None and state._graph is not None:
            break
        if begins_slow(state.problem) and incumbent.refused():
            break
        try:
            if not phase.applies(state):
                continue
            incumbent.phase = phase.name
            phase.run(state)
        except InfeasibleError:
            # With a choice at hand this says that nothing better is left.
            if incumbent.choice is None:
                raise
            incumbent.raise_bound(incumbent.objective)
            break
        finally:
            incumbent.note()


def _finish(state: State) -> None:
    """Nothing is left of the graph."""
    graph, incumbent = state.graph, state.incumbent
    incumbent.offer(graph.expand({}), "reductions")
    incumbent.raise_bound(min(graph.offset, incumbent.objective))
    state.done = True


def _run(model: Model, graph: Graph, incumbent: Incumbent, backend: str) -> IlpResult:
    start = None
    if incumbent.choice is not None:
        search = Search(graph, graph.project(incumbent.choice))
        start = model.point(search.choice) if search.feasible() else None

    def report(objective: float, bound: float) -> bool:
        if math.isfinite(bound):
            incumbent.raise_bound(min(bound + graph.offset, incumbent.objective))
        objective += graph.offset
        return relative_gap(objective, bound + graph.offset) <= incumbent.gap_at(objective)

    limits = IlpLimits(max(incumbent.seconds_left(), 0.1), incumbent.gap, report)
    if backend == "highs":
        return highs.solve_highs(model, limits, start)
    return solve_pulp(model, limits, start, backend)


def _sizes(prefix: str, graph: Graph) -> dict[str, int]:
    nodes, options, pairs = graph.size()
    names = ("nodes", "options", "edges", "pairs", "times")
    counts = (nodes, options, len(graph.pairs()), pairs, len(graph.limits))
    return {prefix + name: count for name, count in zip(names, counts, strict=True)}
