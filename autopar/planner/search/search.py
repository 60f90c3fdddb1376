"""The search: list and price the decisions, run the phases, and take the best of what they found and the baselines."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar import settings
from autopar.errors import AutoparError, InfeasibleError, PlanError
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
from autopar.planner.search.candidates import (
    BaselineCandidate,
    Candidate,
    baseline_candidates,
    budget_bytes,
    settled,
    undominated,
)
from autopar.planner.search.infeasible import infeasible, leanest
from autopar.planner.search.phases import (
    Baselines,
    Exact,
    Free,
    Joint,
    KnownShardings,
    Layers,
    Phase,
    Reruns,
    Rules,
    SmallestPeak,
)
from autopar.planner.search.shared_launches import sharing_launches
from autopar.planner.search.state import Progress, Search, SearchState
from autopar.plans.records import BaselineRecord, SearchRecord
from autopar.program import Program
from autopar.solver import Solution
from autopar.solver.clock import keep_back, limited, now
from autopar.strategies import find_rule, missing_rule

JOINT: tuple[Phase, ...] = (
    Free(),
    Baselines(),
    Reruns(),
    Rules(),
    Layers(),
    KnownShardings(),
    Joint(),
    Exact(),
    Joint(per_option=True),
    SmallestPeak(),
)
TWO_STAGE: tuple[Phase, ...] = (
    Free(),
    Baselines(),
    Reruns(),
    Rules(),
    KnownShardings(only_free=True),
    Exact(),
    SmallestPeak(),
)

SEARCHES: dict[str, Callable[[str], tuple[Phase, ...]]] = {
    "joint": lambda _: JOINT,
    "two-stage": lambda _: TWO_STAGE,
    "baseline": lambda _: (),
}
"""The phases of each kind of search, given its detail: ``options.search`` is ``KIND`` or ``KIND:DETAIL``."""


@dataclass(frozen=True)
class Planned:
    """A planned program and how good it is. Seconds and bytes. ``baselines`` is what it was compared with,
    ``trace`` what each phase of the search left."""

    program: Program
    decisions: Decisions
    solution: Solution
    memory: MemoryProfile
    timeline: Timeline
    timings: dict[str, float] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    baselines: tuple[BaselineRecord, ...] = ()
    trace: tuple[SearchRecord, ...] = ()


@collected_later()
def plan_graph(
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    progress: Progress | None = None,
    *,
    compare: bool = True,
    before: Mapping[type[Phase], Phase] | None = None,
    prices: Prices | None = None,
) -> Planned:
    """Plan ``graph`` on ``mesh``; with ``compare`` beside those baselines that may be better, or, with
    ``options.compare``, beside all.

    Args:
        before: phases that are run before others, by the type of those.
        prices: those of other graphs for this mesh and these options, for what they have in common.

    Raises:
        InfeasibleError: nothing fits the memory budget; the hint names the smallest that would.
        ConstraintError: a constraint names nothing or contradicts another.
        AutoparError: ``options.search`` is no search.
    """
    phases = _phases(options.search, before or {})
    options = replace(options, device=cluster.device.kernels)
    with limited(options.time_limit_s):
        prices = prices or Prices(mesh, cluster, options.backend, options.decomposed)
        return _planned(graph, prices, options, progress or (lambda _: None), phases, compare=compare)


def _phases(search: str, before: Mapping[type[Phase], Phase]) -> tuple[Phase, ...]:
    kind, _, detail = str(search).partition(":")
    if kind not in SEARCHES:
        known = ", ".join(SEARCHES)
        raise AutoparError(f"There is no search={search!r}.", found=repr(search), hint=f"write one of {known}.")
    every = ((before.get(type(phase)), phase) for phase in SEARCHES[kind](detail))
    return tuple(phase for pair in every for phase in pair if phase is not None)


def _planned(
    graph: Graph, prices: Prices, options: Options, report: Progress, phases: Sequence[Phase], *, compare: bool
) -> Planned:
    started, began = time.perf_counter(), now()
    forced = resolve(graph, prices.mesh, options.constraints, options.aliases)
    decided = partial(decide, graph, prices.mesh, options, forced, interned=prices.interned)
    notices = warn_of_missing_rules(graph)
    report("strategies")
    decisions = decided()
    listed = time.perf_counter()
    report("build")
    objective = Objective(decisions, prices)
    objective.problem()
    built = time.perf_counter()
    report("baselines")
    ready_s = now() - began

    def emitting_s(limit_s: float) -> float:
        return min(settings.EMITTING_TIMES * ready_s, settings.SMALL_SHARE * settings.WORK_SHARE * limit_s)

    limits = _limits(options.time_limit_s)
    keep_back(emitting_s(limits[-1]))
    compared = _compared(objective, replace(options, time_limit_s=limits[0])) if compare else []
    search = Search(
        graph,
        objective,
        options,
        budget_bytes(prices.cluster, options),
        report,
        with_reruns=lambda: decided(recompute=True),
        began=began,
        ends=began,
        baselines=sorted(compared, key=lambda b: b.objective),
    )
    search.timings["strategies"] = listed - started
    search.timings["build"] = built - listed
    search.timings["baselines"] = time.perf_counter() - built
    search, state = _searched(search, phases, limits, emitting_s)

    def planned(best: Candidate) -> Planned:
        looked_at = [b for b in search.baselines if options.compare or "candidate" in vars(b)]
        return Planned(
            best.program,
            best.decisions,
            best.solution,
            best.memory,
            best.timeline,
            search.timings,
            notices,
            tuple(b.candidate.record(search.budget) for b in looked_at),
            state.trace,
        )

    try:
        return planned(compared[0].candidate if options.search.startswith("baseline") else choose(search, state))
    except InfeasibleError as error:
        error.leanest = lambda: planned(leanest(search, state))
        raise


def _searched(
    search: Search, phases: Sequence[Phase], limits: Sequence[float], emitting_s: Callable[[float], float]
) -> tuple[Search, SearchState]:
    """Run the phases as if each of the limits were all the time there is; return the last search, and what it found.

    Args:
        emitting_s: seconds that are set aside of a limit for what comes after the search.
    """
    state = SearchState()
    for limit_s in limits:
        if limit_s > limits[0]:
            if state.is_done(search):
                break
            state = state.with_more_time(shortest(search, state) if state.best is not None else None)
        ends = search.began + settings.WORK_SHARE * limit_s - emitting_s(limit_s)
        search = replace(search, options=replace(search.options, time_limit_s=limit_s), ends=ends)
        state = run_phases(search, state, phases)
    return search, state


def _limits(limit_s: float) -> list[float]:
    """Limits up to ``limit_s``, each at least twice the last one, for one of which after the other the phases are run.
    They share out the time that there is, so that with more they come to other plans, which may be worse: this way the
    search finds first what it finds within half of its limit."""
    found, each = [], settings.FIRST_LIMIT_S
    while 2 * each <= limit_s:
        found.append(each)
        each *= 2
    return [*found, limit_s]


def run_phases(search: Search, state: SearchState, phases: Sequence[Phase]) -> SearchState:
    """Run each phase that applies, until the work is used up or what is left to gain is worth less than the search."""
    started = time.perf_counter()
    for phase in phases:
        if not phase.applies(search, state):
            continue
        search.report(phase.name)
        if isinstance(phase, SmallestPeak):
            until = now() + search.smallest_peak_s
        else:
            needless = math.isfinite(state.cost) or state.free is None or isinstance(phase, Reruns | Layers)
            reserved = 0.0 if needless else search.smallest_peak_s
            until = min(search.ends - reserved, state.worth_until(search))
        if now() >= until and state.free is not None:
            continue
        state = phase.run(search, state, until)
        cost = state.cost if math.isfinite(state.cost) else None
        record = SearchRecord(phase.name, now() - search.began, time.perf_counter() - started, cost, state.bound)
        state = replace(state, trace=(*state.trace, record), used_up=now() >= until)
        if cost:
            search.report(f"{phase.name}: {cost * 1e3:.4g} ms, gap {1 - state.bound / cost:.2%}")
    return state


def _compared(objective: Objective, options: Options) -> list[BaselineCandidate]:
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


def choose(search: Search, state: SearchState) -> Candidate:
    """The search's own plan, or a baseline that fits and is better.

    Raises:
        InfeasibleError: nothing fits the budget.
    """
    if state.best is None:
        fitting = [b.candidate for b in search.baselines if b.objective <= state.cutoff and search.fits(b)][:1]
        fitting += [c for c in _fitting(search, math.inf) if c not in fitting]
        if not fitting:
            raise infeasible(search, state)
        best = settled(fitting, fitting, search.options.gap)
        return _bounded(search, best, state.bound, "nothing was found that fits")
    search.report("collectives")
    own = shortest(search, state)
    fitting = list(_fitting(search, own.arranged_s, own.solution.objective))
    candidates = [own, *state.earlier, *fitting]
    if not undominated(candidates, fitting, search.options.gap) and now() < search.ends:
        candidates += sharing_launches(search, state, fitting)
    best = settled(candidates, fitting, search.options.gap)
    return own if best is own else _bounded(search, best, own.solution.lower_bound, own.solution.method)


def shortest(search: Search, state: SearchState) -> Candidate:
    """The plan of the shortest step. A step takes hardly less than its cost, so most plans need not be looked at; the
    second cheapest may be, even when no time is left, and some more where the best step is much longer than they
    cost."""
    best: Candidate | None = None
    for i, plan in enumerate(state.plans):
        if best is not None:
            latest = search.ends + (settings.LATEST_S if best.timeline.seconds > settings.NEARLY * plan.cost else 0.0)
            if plan.cost >= best.timeline.seconds or (i > 1 and now() > latest):
                break
        own = search.arranged(plan)
        best = own if best is None else min(best, own, key=Candidate.rank)
    assert best is not None
    return _bounded(search, best, state.bound)


def _fitting(search: Search, step_s: float, cost: float = 0.0) -> Iterator[Candidate]:
    """The baselines that fit, the cheapest first: all where all are compared, else while time is left those that cost
    no more than ``cost``, or whose step may take no longer than ``step_s``, or than one of the cheaper ones
    takes, which would be taken instead. A little longer than that, they are looked at until one may be quicker."""
    if search.options.compare:
        yield from (baseline.candidate for baseline in search.baselines if search.fits(baseline))
        return
    most_s = max(cost, settings.NEARLY * step_s)
    known = False
    for baseline in search.baselines:
        cheaper = baseline.objective <= cost
        late_s = settings.LEAST_S if known or baseline.objective > step_s else settings.LATEST_S
        is_late = now() > search.ends + late_s and "candidate" not in vars(baseline)
        if baseline.objective > most_s or is_late:
            continue
        may_win = cheaper or baseline.least_s <= (1 + UNSURE_SHARE) * step_s or baseline.may_defer
        if may_win and search.fits(baseline):
            known = True
            step_s = max(step_s, baseline.candidate.timeline.seconds) if cheaper else step_s
            yield baseline.candidate


def _bounded(search: Search, found: Candidate, bound: float, *methods: str) -> Candidate:
    """The chosen plan, with the search's bound, and what led to it."""
    cost = found.solution.objective
    bound = min(bound, cost)
    proven = cost - bound <= search.options.gap * cost
    method = "; ".join((*methods, found.solution.method))
    return replace(found, solution=replace(found.solution, lower_bound=bound, proven=proven, method=method))
