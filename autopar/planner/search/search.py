"""The search: decide, price, choose within the budget, and take the best of that plan and the baselines."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import PlanError
from autopar.garbage import collected_later
from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh
from autopar.planner.memory.exact import MemoryProfile
from autopar.planner.options import Options
from autopar.planner.overlap.arrange import UNSURE_SHARE
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import Decisions, decide
from autopar.planner.schedule.timeline import Timeline
from autopar.planner.search.budget_rounds import bounded
from autopar.planner.search.budget_search import BudgetSearch
from autopar.planner.search.candidates import (
    BaselineCandidate,
    Candidate,
    baseline_candidates,
    budget_bytes,
    settled,
    undominated,
)
from autopar.planner.search.rounds import Progress
from autopar.planner.search.shared_launches import sharing_launches
from autopar.plans.records import BaselineRecord
from autopar.program import Program
from autopar.solver import Solution
from autopar.solver.clock import keep_back, limited, now
from autopar.strategies import find_rule, missing_rule


@dataclass(frozen=True)
class Planned:
    """A planned program and how good it is. Seconds and bytes. ``baselines`` is what it was compared with."""

    program: Program
    decisions: Decisions
    solution: Solution
    memory: MemoryProfile
    timeline: Timeline
    timings: dict[str, float] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    baselines: tuple[BaselineRecord, ...] = ()


@collected_later()
def plan_graph(
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    progress: Progress | None = None,
    *,
    compare: bool = True,
    over_budget: Callable[[float], float] | None = None,
) -> Planned:
    """Plan ``graph`` on ``mesh``; with ``compare`` beside those baselines that may be better, or, with
    ``options.compare``, beside all. Where the free optimum is over the budget, ``over_budget`` is called with the
    search's deadline, and gives the one that holds from then on.

    Raises:
        InfeasibleError: nothing fits the memory budget; the hint names the smallest that would.
        ConstraintError: a constraint names nothing or contradicts another.
    """
    with limited(options.time_limit_s):
        return _planned(
            graph,
            mesh,
            cluster,
            replace(options, device=cluster.device.kind),
            progress or (lambda _: None),
            compare=compare,
            over_budget=over_budget or (lambda deadline: deadline),
        )


def _planned(
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    say: Progress,
    *,
    compare: bool,
    over_budget: Callable[[float], float],
) -> Planned:
    started, began = time.perf_counter(), now()
    forced = resolve(graph, mesh, options.constraints, options.aliases)
    notices = warn_of_missing_rules(graph)
    say("strategies")
    recomputing = options.search.startswith("random+recompute")
    decisions = decide(graph, mesh, options, forced, recompute=recomputing)
    listed = time.perf_counter()
    say("build")
    objective = Objective(decisions, Prices(mesh, cluster, options.backend, options.decomposed))
    search = _Search(
        graph,
        objective,
        options,
        budget_bytes(cluster, options),
        say,
        with_reruns=lambda: decide(graph, mesh, options, forced, recompute=True),
        over_budget=over_budget,
        began=began,
    )
    objective.problem()
    search.timings["build"] = time.perf_counter() - listed
    say("baselines")
    arranging_s = min(ARRANGING * (now() - began), ARRANGING_SHARE * options.time_limit_s)
    keep_back(arranging_s)
    priced = time.perf_counter()
    compared = _rivals(objective, options) if compare else []
    search.timings["baselines"] = time.perf_counter() - priced
    best = search.best(compared, began + options.time_limit_s - arranging_s)
    search.timings["strategies"] = listed - started
    looked_at = [r for r in compared if options.compare or "candidate" in vars(r)]
    return Planned(
        best.program,
        best.decisions,
        best.solution,
        best.memory,
        best.timeline,
        search.timings,
        notices,
        tuple(r.candidate.record(search.budget) for r in looked_at),
    )


HOPELESS = (1.02, 1.1)
"""A step takes hardly less than its cost, unless what the program waits for on several axes runs beside each other: of
baselines that cost so many times our step, on one axis and on several, none is looked at."""

ARRANGING = 4.0
"""Times what it took to list and price the decisions: so long it may take to schedule, measure and emit a program."""
ARRANGING_SHARE = 0.2
"""Of the time limit, the most that is kept back for that."""

ROUGH, SURE = (0.005, 0.03), (1e-4, 5e-4)
"""Where fewer layers tell that a baseline's step is longer than ours by more than this share, on one axis and on
several, it is; the latter where programs of three depths agree. Of 125 programs of five models on nine meshes at most
.45 % and 2.4 % too much was told; where three depths agree, .003 % and, of steps near the shortest, .04 %."""


LATE_S = 1.0
"""So long after the search's end known ways to train are still looked at, the cheapest first: one may be better."""


def _rivals(objective: Objective, options: Options) -> list[BaselineCandidate]:
    """What the plan is compared with; under constraints nothing, since they may exclude every baseline."""
    kind, _, name = options.search.partition(":")
    if kind == "baseline":
        found = baseline_candidates(objective, options, name)
        if found:
            return found
        raise PlanError(
            f"The baseline {name!r} does not apply.",
            found=f"mesh {objective.decisions.mesh}, model {objective.decisions.graph.name}",
            hint="it needs the mesh axes and dims that it cuts; autopar.compare lists those that apply.",
        )
    if kind != "joint" or options.constraints:
        return []
    return baseline_candidates(objective, options)


def warn_of_missing_rules(graph: Graph) -> tuple[str, ...]:
    """One warning for each op without a rule: it is replicated."""
    notices = []
    seen: set[str] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or node.packet in seen or find_rule(node) is not None:
            continue
        seen.add(node.packet)
        line = missing_rule(node, tuple(graph.meta(v) for v in node.inputs))
        notices.append(f"{node.packet} has no sharding rule, so every rank runs it whole. To shard it, add: {line}")
        warnings.warn(notices[-1], stacklevel=3)
    return tuple(notices)


@dataclass
class _Search(BudgetSearch):
    """The search, and the baselines that its plan is compared with."""

    def best(self, compared: Sequence[BaselineCandidate], deadline: float) -> Candidate:
        """The search's own plan, or a baseline that fits and is better.

        Raises:
            InfeasibleError: nothing fits the budget.
        """
        if self.options.search.startswith("baseline"):
            return compared[0].candidate
        self.baselines = sorted(compared, key=lambda r: r.objective)
        self.seeds = tuple(r.choice for r in self.baselines)
        result = self.run(deadline)
        if result is None:
            known = [r.candidate for r in self.baselines if r.name == self.baseline]  # whatever time it is
            fitting = [*known, *(f for f in self._fitting(math.inf, deadline) if f not in known)]
            return self._bounded(settled(fitting, fitting, self.options.gap), self.bound, "nothing was found that fits")
        self.say("collectives")
        started = time.perf_counter()
        own = Candidate.of("chosen", self.decisions, result.solution, result.program, self.prices, self.options)
        self.timings["arrange"] = time.perf_counter() - started
        fitting = list(self._fitting(own.arranged_s, deadline, own.solution.objective))
        candidates = [own, *fitting]
        if not undominated(candidates, fitting, self.options.gap) and now() < deadline:
            candidates += sharing_launches(self, fitting, deadline)
        best = settled(candidates, fitting, self.options.gap)
        return own if best is own else self._bounded(best, own.solution.lower_bound, own.solution.method)

    def _fitting(self, step_s: float, deadline: float, cost: float = 0.0) -> Iterator[Candidate]:
        """The baselines that fit, the cheapest first: all where all are compared, else while time is left those that
        cost no more than ``cost``, or whose step may take no longer than ``step_s``; the shortest step at any rate, and
        whatever time it is the first of those that cost no more."""
        if self.options.compare:
            yield from (baseline.candidate for baseline in self.baselines if self.fits(baseline))
            return
        most_s = max(cost, HOPELESS[self.decisions.mesh.ndim > 1] * step_s)
        # Where one is cheaper and taken for that, no other may have a shorter step: then near ones count too.
        outdone = any((1 + self.options.gap) * r.objective < cost for r in self.baselines)
        steps: dict[str, float] = {}
        for baseline in self.baselines:
            if baseline.objective > most_s or now() > deadline + LATE_S:
                continue
            if self._may_be_shorter(baseline, step_s, outdone):
                steps[baseline.name] = baseline.least_s
        known = False
        may_win_s = max(step_s, min(steps.values(), default=0.0)) if outdone else step_s
        for baseline in self.baselines:
            seen, least_s = "candidate" in vars(baseline), steps.get(baseline.name, math.inf)
            cheaper = baseline.objective <= cost
            wins = least_s <= may_win_s or (
                least_s <= (1 + UNSURE_SHARE) * may_win_s and (outdone or baseline.may_defer)
            )
            looked_at = (cheaper or wins) and now() < deadline + LATE_S
            if (seen or looked_at or (cheaper and not known)) and self.fits(baseline):
                known = True
                yield baseline.candidate

    def _may_be_shorter(self, baseline: BaselineCandidate, step_s: float, nearly: bool) -> bool:
        """Whether its step may be shorter than ``step_s``, or with ``nearly`` about as long, by what fewer layers tell
        of it."""
        axes = self.decisions.mesh.ndim > 1
        if baseline.estimated_s > (1 + ROUGH[axes]) * step_s:
            return False
        short = baseline.estimated_s <= (1 + SURE[axes]) * step_s
        return nearly or short or not baseline.is_exact or baseline.may_defer

    def _bounded(self, found: Candidate, bound: float, method: str) -> Candidate:
        """A baseline as the chosen plan, with the search's bound."""
        solution = bounded(found.solution, bound, self.options.gap)
        return replace(found, solution=replace(solution, method=f"{method}; {solution.method}"))
