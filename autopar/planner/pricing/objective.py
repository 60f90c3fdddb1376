"""What the search minimises: the seconds of a step in which communication hides behind computation where it can.

With ``W`` the seconds that are in no phase (launches, and transfers to and from the host), ``T[p]`` those of each path
through a phase (see ``critical_paths``), ``S`` those of all its work, and ``o`` the share of a collective's time that
overlapping computation does not pay for (see ``schedule.timeline``)::

    F(x) = W(x) + sum over phases of (1 - o) S(x) + o max over p of T[p](x)

or a little more, where gathers would run far ahead for that (see ``streams``).

The solver minimises sums. For any weights of a phase's paths that sum to 1, the weighted sum of the paths is at most
their maximum, so the minimum of this linear problem is a bound on F (a Lagrangian relaxation, Geoffrion 1974). The
bound is concave in the weights, and each choice found on the way is a plane above it. Cutting planes find the best
weights (Kelley 1960), taken towards the best so far, which steadies them (Ben-Ameur and Neto 2007).

Where gradients accumulate over n micro-batches, F is the mean of their seconds: the backward is one phase with its
reductions in one of n micro-batches, and one without them in the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from autopar.planner.pricing.critical_paths import (
    CostTerm,
    PhasePaths,
    Sections,
    TermAssignment,
    assign_terms,
    cost_terms,
    phase_paths,
    sections,
)
from autopar.planner.pricing.mixing import Entries, Mixing, Segments, segments
from autopar.planner.pricing.prices import Array, Prices, costs, edges, use_seconds
from autopar.planner.pricing.streams import PhaseStreams, streams
from autopar.planner.problem.fewer_layers import FewerLayers, with_fewer_layers
from autopar.planner.problem.variables import Decisions, Use
from autopar.solver import (
    Edge,
    Gap,
    Problem,
    Run,
    Solution,
    Tied,
    Usage,
    find_runs,
    fold,
    gap_of,
    highest_point,
    shift_of,
)
from autopar.solver.clock import tick
from autopar.solver.problem import IndexArray

Solve: TypeAlias = Callable[[Problem, Sequence[Sequence[int]]], Solution]

MAX_SOLVES = 6
"""The number of weightings to try. More than two are hardly ever needed."""

NEAR_PATH = 0.1
NEAR_PATH_WEIGHT = 0.05
"""When weights are carried over to a problem with more decisions, paths shorter than the longest by at most the share
``NEAR_PATH`` get the share ``NEAR_PATH_WEIGHT`` of all weight. Choices that tie under the weights differ in these paths
by a percent of a step, and the bound loses less than the product of the two."""

STEP = 0.75
"""How far the weights that are tried next are from the best ones so far, as a share of the way to those that are
highest under all planes; half as far after weights whose bound is lower."""

WORTH_GAPS = 4.0
"""Factor on the requested gap: weights are tried as long as they may raise the bound by this much."""


MIXTURES = 3
"""Mixtures of known choices to try, with less and less of what is limited."""


class ChoiceSeconds(NamedTuple):
    """The seconds of a choice: those that nothing hides, and those of each cost term."""

    exposed_s: float
    term_s: Array


class _Kinds(NamedTuple):
    """Equal items by kind: the first item of each kind, and the kind of each item."""

    first: list[int]
    of: IndexArray

    @classmethod
    def by(cls, looks: Iterable[object]) -> _Kinds:
        numbers: dict[object, int] = {}
        of = np.array([numbers.setdefault(look, len(numbers)) for look in looks], dtype=np.int64)
        return cls(np.unique(of, return_index=True)[1].tolist(), of)

    def members(self) -> list[IndexArray]:
        """Return the items of each kind, in ascending order."""
        return np.split(np.argsort(self.of, kind="stable"), np.cumsum(np.bincount(self.of))[:-1])


@dataclass(eq=False)
class _TermSeconds:
    """Seconds by option, or by pair of options, each assigned to one cost term."""

    count: int
    _tables: dict[int, tuple[int, Array]] = field(default_factory=dict)
    _size: int = 0
    _locations: list[IndexArray] = field(default_factory=list)

    def add(self, term: int, seconds: Array, rows: IndexArray, columns: IndexArray | None = None) -> None:
        """Add the seconds of each of the variables ``rows``, or of each pair with one of ``columns``, to a cost
        term."""
        width = 1 if columns is None else seconds.shape[1]
        others = np.full(len(rows), -1) if columns is None else columns
        start, _ = self._tables.setdefault(id(seconds), (self._size, seconds))
        self._size += seconds.size if start == self._size else 0
        same = (np.full(len(rows), number) for number in (term, start, width))
        self._locations.append(np.stack([*same, rows, others]))

    @cached_property
    def _flat(self) -> tuple[Array, IndexArray]:
        flat = np.concatenate([np.zeros(0), *(t.ravel() for _, t in self._tables.values())])
        return flat, np.concatenate([np.zeros((5, 0), dtype=np.int64), *self._locations], axis=1)

    def seconds(self, choice: Sequence[int]) -> Array:
        """Return the seconds of each cost term under a choice."""
        flat, (term, start, width, row, column) = self._flat
        chosen = np.array([*choice, 0], dtype=np.int64)  # the last is no variable's
        at = start + width * chosen[row] + chosen[column]
        return np.bincount(term, flat[at], self.count).astype(np.float64)


@dataclass(eq=False)
class Objective:
    """The objective over the variables of ``decisions``, with what has been computed for it.

    Args:
        launch_share: the share of each reduction's launch that counts.
        within: the sections of the phases, where those of another problem of the same graph are taken over. Costs of
            both can be compared then, and a bound on one without a budget is one on the other.
        weights: the weights of the paths of all phases in turn to start from, later the best that were found.
    """

    decisions: Decisions
    prices: Prices
    launch_share: float = 1.0
    within: Sections | None = None
    weights: Array = field(init=False)
    _sums: dict[bytes, Problem] = field(default_factory=dict)
    _tied: dict[int, tuple[Problem, Tied | None]] = field(default_factory=dict)
    _fewer: dict[int, FewerLayers | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = self._compute_only()

    def start_from(self, other: Objective, choice: Sequence[int] | None = None) -> None:
        """Start with the weights found for a problem of the same graph, if its phases have the same sections.

        With that problem's best ``choice`` given, some weight goes to the paths that are nearly the longest under it.
        """
        if self.sections != other.sections:
            return
        self.weights = other.weights.copy()
        seconds = np.zeros(0) if choice is None else other.path_seconds(choice)
        for paths in self.ranges if len(seconds) else ():
            near = seconds[paths] >= (1 - NEAR_PATH) * seconds[paths].max()
            self.weights[paths] = (1 - NEAR_PATH_WEIGHT) * self.weights[paths] + NEAR_PATH_WEIGHT * near / near.sum()

    # The phases.

    @cached_property
    def _option_seconds(self) -> tuple[Array, ...]:
        """Seconds of every option without any hiding."""
        return costs(self.decisions, self.prices)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Runs of equal blocks, where equal layers of the graph also cost the same without any hiding."""
        d = self.decisions
        tick("priced use", len(d.uses))
        tick("node of runs", d.graph.repetition.looks)
        return find_runs(Problem(self._option_seconds, edges(d, self.prices), shift=d.shift))

    @cached_property
    def _shift(self) -> dict[int, int]:
        return shift_of(self.runs)

    @property
    def depth(self) -> int:
        """The number of layers in the longest run of equal ones."""
        return max((len(run.copies) for run in self.runs), default=0)

    def with_fewer_layers(self, layers: int) -> FewerLayers | None:
        """Return the decisions with only this many layers; None if they have no more, or depend on all of them."""
        if layers not in self._fewer:
            self._fewer[layers] = with_fewer_layers(self.decisions, self.runs, layers)
        return self._fewer[layers]

    @cached_property
    def sections(self) -> Sections:
        """Where the sections of each phase start."""
        return self.within or sections(self.decisions, self.runs)

    @cached_property
    def _terms(self) -> TermAssignment:
        return assign_terms(self.decisions, self.sections)

    @cached_property
    def _order(self) -> dict[CostTerm, int]:
        return {term: i for i, term in enumerate(cost_terms(self.sections, self.decisions.mesh.ndim))}

    @cached_property
    def _phases(self) -> list[PhasePaths]:
        return phase_paths(self.sections, self.decisions.mesh.ndim, self.decisions.accumulation_steps)

    @cached_property
    def _unhidden(self) -> Array:
        """What a second of each cost term counts however it hides."""
        plain = np.stack([(1 - self.prices.overlap) * g.share * g.works for g in self._phases])
        return np.asarray(plain.sum(axis=0), dtype=np.float64)

    @cached_property
    def _paths(self) -> Array:
        """The paths of all phases: what a second of each cost term on a path counts."""
        return np.concatenate([self.prices.overlap * g.share * g.paths for g in self._phases])

    @cached_property
    def ranges(self) -> list[slice]:
        """The paths of each phase."""
        ends = np.cumsum([0, *(len(g.paths) for g in self._phases)]).tolist()
        return [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]

    @cached_property
    def _streams(self) -> tuple[PhaseStreams, ...]:
        d = self.decisions
        return streams(list(self._order), self.sections, d.mesh.ndim, d.accumulation_steps)

    def _compute_only(self) -> Array:
        """Return weights that are all on the paths that only compute."""
        return np.concatenate([np.eye(len(g.paths), dtype=float)[g.computing] for g in self._phases])

    # The sums.

    def problem(self, usages: tuple[Usage, ...] = (), limit: float = math.inf, weights: Array | None = None) -> Problem:
        """Return the linear problem for ``weights`` of the paths, by default the weights to start from."""
        asked = self.weights if weights is None else weights
        key = asked.tobytes()
        if key not in self._sums:
            counts = self._unhidden + asked @ self._paths
            self._sums[key] = self._sum({term: float(counts[i]) for term, i in self._order.items()})
        free = self._sums[key]
        return replace(free, usages=usages, limit=limit) if usages or math.isfinite(limit) else free

    def _sum(self, of: Mapping[CostTerm | None, float]) -> Problem:
        """Return the problem in which each cost term counts by its weight. Equal costs are one array."""
        d, prices, variables, uses = self.decisions, self.prices, *self._kinds
        tick("use", len(d.uses))
        found = self._terms
        own = [prices.weighted(self._option_seconds[i], of.get(found.variables[i], 1.0)) for i in variables.first]
        sent = []
        for i in uses.first:
            cost_terms = found.uses[i]
            weight = (cost_terms[0].work, tuple(of[b] for b in cost_terms)) if cost_terms else None
            sent.append(use_seconds(d, prices, d.uses[i], weight, self.launch_share))
        joined = zip(d.uses, uses.of.tolist(), strict=True)
        return Problem(
            tuple([own[kind] for kind in variables.of.tolist()]),
            tuple([Edge(use.source, use.target, sent[kind]) for use, kind in joined if use.source != use.target]),
            shift=self._shift,
            trusted=True,  # `runs` has looked at what is weighted here
        )

    @cached_property
    def _kinds(self) -> tuple[_Kinds, _Kinds]:
        """The kinds of variables and of uses that cost the same under any weights: those of a run's sections alike."""
        cut = self.sections
        return self._alike(lambda term: term and term._replace(section=cut.whole(term.section, term.phase)))

    def _alike(self, within: Callable[[CostTerm | None], CostTerm | None]) -> tuple[_Kinds, _Kinds]:
        """Variables and uses by kind, those of terms apart that are told apart."""
        d, prices, found = self.decisions, self.prices, self._terms

        def look(use: Use, cost_terms: tuple[CostTerm, ...]) -> object:
            told = within(cost_terms[0] if cost_terms else None)
            if told is None or told.work == "wait":
                return id(prices.blocking_seconds(d, use)), told
            return id(prices.hideable(d.variables[use.source], d.variables[use.target], use)[0]), told

        variables = zip(map(id, self._option_seconds), map(within, found.variables), strict=True)
        return _Kinds.by(variables), _Kinds.by(map(look, d.uses, found.uses))

    def fold(self, problem: Problem) -> Tied | None:
        """Return ``problem`` with repeated blocks tied together. Its blocks are found once for each set of weights."""
        if not any(problem is free for free in self._sums.values()):
            return fold(problem)
        if id(problem) not in self._tied:
            self._tied[id(problem)] = problem, fold(problem, self.runs)
        return self._tied[id(problem)][1]

    def seconds(self, choice: Sequence[int]) -> float:
        """Return F of a choice."""
        return self._seconds(self.seconds_by_term(choice))

    def path_seconds(self, choice: Sequence[int]) -> Array:
        """Return the seconds of each path under a choice, counting what can hide."""
        return np.asarray(self._paths @ self.seconds_by_term(choice).term_s, dtype=np.float64)

    def _seconds(self, seconds_by_term: ChoiceSeconds) -> float:
        return float(self._total(np.append(seconds_by_term.term_s, seconds_by_term.exposed_s)))

    def _total(self, seconds: Array) -> Array:
        """Return F for the seconds of the cost terms, and of what nothing hides, in the last dimension."""
        term_s, overlap = seconds[..., :-1], self.prices.overlap
        longest = sum(overlap * phase.share * phase.seconds(term_s) for phase in self._streams)
        return np.asarray(seconds[..., -1] + term_s @ self._unhidden + longest, dtype=np.float64)

    def seconds_by_term(self, choice: Sequence[int]) -> ChoiceSeconds:
        """Return the seconds of a choice by cost term."""
        *term_s, exposed_s = self._term_seconds.seconds(choice)
        return ChoiceSeconds(float(exposed_s), np.array(term_s))

    @cached_property
    def _term_seconds(self) -> _TermSeconds:
        """Seconds by cost term; the seconds that nothing hides come last."""
        d, prices, variables, uses = self.decisions, self.prices, *self._alike(lambda term: term)
        tick("use", len(d.uses))
        found, exposed = _TermSeconds(len(self._order) + 1), len(self._order)
        for first, alike in zip(variables.first, variables.members(), strict=True):
            term = self._terms.variables[first]
            found.add(exposed if term is None else self._order[term], self._option_seconds[first], alike)
        ends = np.array([(use.source, use.target) for use in d.uses], dtype=np.int64).reshape(-1, 2)
        for first, alike in zip(uses.first, uses.members(), strict=True):
            use, terms = d.uses[first], self._terms.uses[first]
            rows, columns = ends[alike].T
            if use.source == use.target:
                continue
            if not terms:
                found.add(exposed, prices.blocking_seconds(d, use), rows, columns)
                continue
            if terms[0].work == "wait":
                for term, seconds in zip(terms, prices.blocking_seconds_by_axis(d, use), strict=False):
                    found.add(self._order[term], seconds, rows, columns)
                continue
            launches, sent = prices.hideable(d.variables[use.source], d.variables[use.target], use)
            share = self.launch_share / d.accumulation_steps if terms[0].work == "reduce" else 1.0
            found.add(exposed, share * launches, rows, columns)
            for term, seconds in zip(terms, sent, strict=True):
                found.add(self._order[term], seconds, rows, columns)
        return found

    def mixed(
        self, choices: Sequence[Sequence[int]], usages: Sequence[Usage] = (), limit: float = math.inf
    ) -> Sequence[int] | None:
        """Return a choice in which every block follows one of ``choices``, with a low F; None where none of them is
        within the limit."""
        flat, located = self._term_seconds._flat
        entries = Entries(self._term_seconds.count, flat, *located)
        return Mixing(self._segments, entries, self._total, choices, usages, limit).best()

    @cached_property
    def _segments(self) -> Segments:
        return segments(self.decisions, self.runs)

    # The minimum.

    def minimize(
        self,
        asked: Problem,
        solve: Solve,
        gap: float | Gap,
        known: Sequence[Sequence[int]] = (),
        most: int = MAX_SOLVES,
        out_of_time: Callable[[tuple[int, ...]], bool] = lambda _: False,
        bound: float = -math.inf,
        used: Callable[[Sequence[int]], float] = lambda _: 0.0,
    ) -> Solution:
        """Find the best choice under F within the usages and limit of ``asked``, with a bound on F.

        Args:
            asked: the problem for the weights to start from.
            solve: solves a problem, given choices to start from.
            gap: the relative gap at which no more weights are tried.
            known: choices that determine the first weights, and that may be mixed with those that are found.
            most: the number of weightings to try; if one, it is the weights to start from.
            out_of_time: whether there is no time for another weighting, given the best choice.
            bound: a known bound on F.
            used: the most that a choice uses of what is limited, where that is more than its ``usages`` say.
        """
        enough = gap_of(gap)
        choices = list(known)
        known_seconds = [self.seconds_by_term(choice) for choice in known]
        step = STEP
        weights = self.weights
        if known_seconds and most > 1:
            weights = self._towards(self._best_weights(known_seconds)[1], step)
        best = self._best_of(known, known_seconds) if not asked.usages else None
        raised = -math.inf
        for turn in range(most):
            problem = asked if weights is self.weights else self.problem(asked.usages, asked.limit, weights)
            at = solve(problem, () if best is None else (best.choice,))
            seconds_by_term = self.seconds_by_term(at.choice)
            known_seconds.append(seconds_by_term)
            choices.append(at.choice)
            if at.lower_bound > raised:
                raised, self.weights = at.lower_bound, weights
                bound = max(bound, raised)
            else:
                step /= 2
            best = _better(best, replace(at, objective=self._seconds(seconds_by_term)))
            if best.objective - bound > enough(best.objective) * best.objective:
                best = _better(best, self._mixture(choices, asked, used))
            left = enough(best.objective) * best.objective
            if best.objective - bound <= left or turn == most - 1 or out_of_time(best.choice):
                break
            ceiling, highest = self._best_weights(known_seconds)
            last, weights = weights, self._towards(highest, step)
            if ceiling - raised <= WORTH_GAPS * left or (np.allclose(last, weights) and not at.cut_off):
                break
        assert best is not None
        bound = min(bound, best.objective)
        return replace(
            best, lower_bound=bound, proven=best.objective - bound <= enough(best.objective) * best.objective
        )

    def _mixture(
        self, choices: Sequence[Sequence[int]], asked: Problem, used: Callable[[Sequence[int]], float]
    ) -> Solution | None:
        """Return the best mixture of ``choices`` within the limit of ``asked``; None where none is found."""
        limit = asked.limit
        for _ in range(MIXTURES):
            choice = self.mixed(choices, asked.usages, limit)
            if choice is None:
                return None
            over = used(choice) - asked.limit
            if over <= 0:
                return Solution(tuple(choice), self.seconds(choice), -math.inf, proven=False, method="mixing")
            limit -= over
        return None

    def _best_of(self, known: Sequence[Sequence[int]], known_seconds: Sequence[ChoiceSeconds]) -> Solution | None:
        """Return the known choice that is cheapest under F; the weighted sums do not see F."""
        found = [(self._seconds(p), i) for i, p in enumerate(known_seconds)]
        if not found:
            return None
        seconds, i = min(found)
        return Solution(tuple(known[i]), seconds, -math.inf, proven=False, method="known")

    def _towards(self, weights: Array, step: float) -> Array:
        return (1 - step) * self.weights + step * weights

    def _best_weights(self, known_seconds: Sequence[ChoiceSeconds]) -> tuple[float, Array]:
        """Return the highest value of the lowest plane of ``points``, and the weights there."""
        constants = [p.exposed_s + float(self._unhidden @ p.term_s) for p in known_seconds]
        return highest_point(constants, [self._paths @ p.term_s for p in known_seconds], self.ranges)


def _better(best: Solution | None, other: Solution | None) -> Solution:
    """Return the solution with the lower objective, with the solver's seconds of both."""
    if best is None or other is None:
        found = best or other
        assert found is not None
        return found
    least = other if other.objective < best.objective else best
    return replace(least, seconds=best.seconds + other.seconds)
