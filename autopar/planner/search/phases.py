"""The phases of the search. Each is a frozen dataclass: whether it applies to a state, and the state that it leaves.

A phase gets counted work (``clock.now``) until which it may run, and ends by itself once what is left to gain is worth
less than the search. One phase more never makes the best plan worse: states only take better ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Protocol, runtime_checkable

from autopar import settings
from autopar.errors import InfeasibleError, SolverError
from autopar.planner.memory.active_set import ActiveSet
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.transfers import forward_seconds
from autopar.planner.problem.variables import Decisions
from autopar.planner.search.candidates import Candidate
from autopar.planner.search.rounds import (
    constrained,
    hides_more,
    solve_open,
    solve_open_alike,
    solve_round,
    solve_with_shardings,
)
from autopar.planner.search.smallest_peak import search_smallest_peak
from autopar.planner.search.state import Choice, Result, Search, SearchState, first_constraints
from autopar.planner.search.two_stage import (
    Checkpointed,
    CheckpointSearch,
    Open,
    axes_as_one,
    recomputed,
    sharded_as,
    with_lean_sums,
)
from autopar.solver import sum_of_least
from autopar.solver.clock import now


@runtime_checkable
class Phase(Protocol):
    """One phase of the search."""

    @property
    def name(self) -> str:
        """What progress and traces call it."""

    def applies(self, search: Search, state: SearchState) -> bool:
        """Whether it has anything to do."""

    def run(self, search: Search, state: SearchState, until: float) -> SearchState:
        """The state after it; ``until`` is on ``clock.now``."""


@dataclass(frozen=True)
class Free:
    """The optimum without a budget: the plan where it fits, and a bound on every other."""

    name: str = "without a budget"

    def applies(self, search: Search, state: SearchState) -> bool:
        return state.free is None

    def run(self, search: Search, state: SearchState, until: float) -> SearchState:
        tight = bool(search.baselines) and search.fitting_way is None
        began = now()
        enough = until if search.budget == math.inf else began + settings.PART_SHARE * (until - began)
        seeds = (*_choices(state.best, search.objective), *(b.choice for b in search.baselines))
        gap = state.wanted_gap(search)
        coarse_at = began + settings.SMALL_SHARE * (until - began)

        def coarser(_: float) -> float:
            return max(gap, settings.NEAR) if tight and now() > coarse_at else gap

        def longer(best: Choice) -> float:
            """What fits is the plan, so nothing else has to be looked for."""
            _, memory = search.within(search.objective, best, search.budget)
            return until if memory.peak_bytes <= search.budget else enough

        objective = search.objective
        free, state = solve_round(
            search, state, objective, None, math.inf, enough, seeds=seeds, gap=coarser, longer=longer
        )
        bound = free.solution.lower_bound
        if search.budget < free.memory.peak_bytes <= settings.NEARLY * search.budget:
            free = _arranged(search, free)
        state = replace(state, free=free, free_s=now() - began, bound=max(bound, state.bound))
        state = replace(state, hideable_s=forward_seconds(free.program))
        return state.with_plan(search, free)


def _arranged(search: Search, free: Result) -> Result:
    """With its collectives arranged as where there is no budget, where it fits then."""
    options = replace(search.options, memory_budget_bytes=None)
    told = Candidate.of("free", free.objective.decisions, free.solution, free.program, search.prices, options)
    return replace(free, memory=told.memory) if told.memory.peak_bytes <= search.budget else free


@dataclass(frozen=True)
class Given:
    """Instead of the optimum without a budget, the best with choices that are known from another plan.

    Args:
        still: the options of each variable that they leave open; None if they are of other variables.
    """

    still: Callable[[Decisions], Open | None]
    name: str = "given choices"

    def applies(self, search: Search, state: SearchState) -> bool:
        return True

    def run(self, search: Search, state: SearchState, until: float) -> SearchState:
        objective, began, options = search.objective, now(), search.options
        still = self.still(objective.decisions)
        if still is None:
            return state
        solved = solve_open(objective.problem(), still, until - began, options.solver, settings.NEAR)
        if solved is None or not math.isfinite(objective.seconds(solved.choice)):
            return state
        found = search.measure(objective, solved.choice, self.name, search.budget)
        hideable_s = forward_seconds(found.program)
        state = replace(state, free=found, given=True, free_s=now() - began, hideable_s=hideable_s)
        return state.with_plan(search, found)


@dataclass(frozen=True)
class Baselines:
    """The cheapest known way to train that fits: a plan is there, and a worse one need not be looked for."""

    name: str = "baselines within the budget"

    def applies(self, search: Search, state: SearchState) -> bool:
        return state.best is None and bool(search.baselines)

    def run(self, search: Search, state: SearchState, until: float) -> SearchState:
        fitting = search.fitting_way
        if fitting is None:
            return state
        search.report(f"{fitting.name}: {fitting.candidate.timeline.seconds * 1e3:.4g} ms")
        return replace(state, cutoff=min(state.cutoff, fitting.objective))


@dataclass(frozen=True)
class Reruns:
    """Lists the decisions once more, with what can be run again among them."""

    name: str = "keep, recompute or offload"

    def applies(self, search: Search, state: SearchState) -> bool:
        return state.best is None and not state.is_done(search)

    def run(self, search: Search, state: SearchState, until: float) -> SearchState:
        assert state.free is not None
        began = now()
        joint = Objective(search.with_reruns(), search.prices, within=search.objective.sections)
        ties = len(joint.decisions.variables) >= settings.SMALL
        joint.start_from(search.objective, state.free.solution.choice if ties else None)
        return replace(state, joint=joint, listed_s=now() - began)


@dataclass(frozen=True)
class Rules:
    """On one device: keep what crosses evenly spaced cuts of the forward (Chen et al. 2016)."""

    name: str = "checkpoint rules"

    def applies(self, search: Search, state: SearchState) -> bool:
        return search.one_device and state.joint is not None

    def run(self, search: Search, state: SearchState, until: float) -> SearchState:
        assert state.joint is not None
        for found in checkpoints(search, state).by_rules(state.joint.depth, until):
            state = state.with_leaner(search, checkpointed(state.joint, found))
        return state


def lean_first(
    search: Search, state: SearchState, *, only_free: bool = False, together: bool = True
) -> Iterator[tuple[float, Open]]:
    """The known shardings, each with its cost without a budget: of the free optimum where that holds little more
    than the budget, then the cheapest of those that hold little, then by what they hold. What holds much has much
    to recompute and offload, which takes long to plan and costs more.

    Args:
        only_free: whether those of the free optimum are all.
        together: whether any that take the axes as one are among them.
    """
    assert state.free is not None and state.joint is not None
    plain, joint = search.objective, state.joint.decisions

    def sharded(choice: Choice) -> tuple[float, Open]:
        return plain.seconds(choice), sharded_as(plain.decisions, choice, joint)

    free = state.free.memory.peak_bytes, state.free.cost, state.free.solution.choice
    if only_free or state.free_comes_first(search):
        yield sharded(free[2])
    if only_free:
        return
    known = [free, *((b.least_bytes, b.objective, b.choice) for b in search.known_ways)]
    lean = settings.LEAN * min(peak for peak, _, _ in known)
    ranked: list[tuple[float, float, Callable[[], tuple[float, Open]]]] = []
    among, still = (axes_as_one(plain.decisions), axes_as_one(joint)) if together else (None, None)
    least_s = _together(search, among)
    if among is not None and still is not None and least_s is not None:
        # Fully sharded ones are among them, so they count as lean. The best may cost less, by the gap.
        ranked.append((lean, least_s / (1 + settings.NEAR), lambda: (least_s, still)))
        # A known sharding that takes the axes as one need not be tried by itself.
        known = [k for k in known if not all(o in options for o, options in zip(k[2], among, strict=True))]
    ranked += [(max(peak, lean), cost, partial(sharded, choice)) for peak, cost, choice in known]
    for _, _, way in sorted(ranked, key=itemgetter(0, 1)):
        yield way()


def _together(search: Search, among: Open | None) -> float | None:
    """The cost without a budget of the best shardings ``among`` those that take the axes as one."""
    if among is None:
        return None
    until = max(search.ends, now())
    found = solve_open_alike(search.objective, among, until, search.options, settings.NEAR)
    return None if found is None else search.objective.seconds(found)


@dataclass(frozen=True)
class KnownShardings:
    """What to keep, recompute and offload with the shardings of the free optimum, of a baseline, or with any that take
    the axes of the mesh as one.

    Args:
        only_free: whether all others are left out.
    """

    only_free: bool = False
    name: str = "known shardings"

    def applies(self, search: Search, state: SearchState) -> bool:
        return state.joint is not None and not (search.one_device and state.best is not None)

    def run(self, search: Search, state: SearchState, until: float) -> SearchState:
        assert state.joint is not None
        enough = min(until, now() + max(settings.KNOWN_TIMES * state.free_s, settings.LEAST_S))
        tried: set[tuple[object, ...]] = set()
        first_s = state.cost  # of layers that are recomputed, where no baseline fits: that is hardly decent
        for seconds, still in lean_first(search, state, only_free=self.only_free):
            decent = math.isfinite(state.cutoff) or state.cost < first_s
            until = min(until, state.worth_until(search), enough if decent else until)
            if now() > until or state.is_done(search):
                break
            if seconds > state.cost or (seconds == state.cost and state.best is not None) or still in tried:
                continue
            tried.add(still)
            state = self._kept(search, state, still, until)
        return state

    def _kept(self, search: Search, state: SearchState, still: Open, until: float) -> SearchState:
        """With a margin everywhere, where a plan is there soon, and then as much less of it as the plan does not need;
        else as tight as it can be."""
        objective = state.joint
        assert objective is not None
        boundaries = search.boundaries(objective)
        margin, began, before = settings.MARGIN * search.budget, now(), state.cost
        wide = first_constraints(state, search, objective)
        wide.equalise(margin)
        state, found = self._solved(search, state, still, wide, until, boundaries)
        if found is None or found.memory.peak_bytes > search.budget:
            for kept in dict.fromkeys((boundaries, frozenset[int]())):
                if now() > until or state.cost < before:
                    break
                tight = first_constraints(state, search, objective)
                state, _ = self._solved(search, state, still, tight, until, kept)
            return state
        mostly_used = 2 * (search.budget - found.memory.peak_bytes) < margin
        takes_long = now() - began > settings.SMALL_SHARE * (search.ends - now())
        if mostly_used or takes_long or state.is_done(search) or now() > until:
            return state
        needed = wide.as_held(found.solution.choice, found.program, found.memory.timeline)
        return self._solved(search, state, still, needed, until, boundaries, found.solution.choice)[0]

    def _solved(
        self,
        search: Search,
        state: SearchState,
        still: Open,
        active: ActiveSet,
        until: float,
        boundaries: Collection[int],
        known: Choice | None = None,
    ) -> tuple[SearchState, Result | None]:
        """The best under these constraints, from a ``known`` one, and the state with it. Where none is found, it is
        looked for from that in which all is recomputed but what crosses from layer to layer, which mostly fits."""
        objective = state.joint
        assert objective is not None
        layers = recomputed(objective.decisions, still, search.boundaries(objective))

        found = solve_with_shardings(
            search,
            state,
            still,
            active,
            until,
            gap=settings.REPAIR_GAP if self.only_free else settings.NEAR,
            method=self.name,
            boundaries=boundaries,
            known=known,
            fallback=partial(_recomputed, search, objective, layers, until),
        )
        state = replace(state, points=state.points | active.margins.keys())
        if found is None:
            return state, None
        if state.best is None or found.cost < state.cost:
            state = replace(state, prices=active.prices_by_point(found.solution.duals.usage_prices))
        if found.memory.peak_bytes <= search.budget:
            return state.with_plan(search, found), found
        return replace(state, near=(*state.near, found.solution.choice)), found


@dataclass(frozen=True)
class Layers:
    """A first plan of equal layers, with a known sharding: all is recomputed but what crosses from layer to layer (Chen
    et al. 2016). That takes no constraints, so it is there soon, however deep the model. Where that does not fit, sums
    of gradients are held in the least bytes too.
    """

    name: str = "layers recomputed"

    def applies(self, search: Search, state: SearchState) -> bool:
        if state.joint is None or search.one_device or math.isfinite(state.cost):
            return False
        return state.joint.depth > 0

    def run(self, search: Search, state: SearchState, until: float) -> SearchState:
        if until - now() < settings.LAYERS_TIMES * state.listed_s:
            return state
        for found in layers_recomputed(search, state, until):
            state = state.with_plan(search, found)
            if state.best is not None:
                break
        return state


def layers_recomputed(search: Search, state: SearchState, until: float) -> Iterator[Result]:
    """With each of the first known shardings: all is recomputed but what crosses from layer to layer; and then sums of
    gradients are held in the least bytes too."""
    objective = state.joint
    assert objective is not None
    kept = search.boundaries(objective)
    for _, still in itertools.islice(lean_first(search, state, together=False), settings.FEW):
        way = recomputed(objective.decisions, still, kept)
        for among in dict.fromkeys((way, with_lean_sums(objective.decisions, way))):
            if now() > until:
                return
            choice = _recomputed(search, objective, among, until)
            if choice is not None:
                yield search.measure(objective, choice, Layers.name, search.budget)


def _recomputed(search: Search, objective: Objective, among: Open, until: float) -> Choice | None:
    """The cheapest choice ``among`` those that recompute layers."""
    ask = partial(solve_open_alike, objective, among, until, search.options, settings.NEAR)
    return search.memo.of("layers", (objective.decisions,), ask, among)


@dataclass(frozen=True)
class Joint:
    """Shardings and what to keep, recompute and offload in one problem. While a choice holds more than the budget, the
    points at which it does become constraints; meanwhile it is repaired with its shardings fixed.

    Args:
        per_option: whether margins are set aside for single options, and the weights of paths are tried anew. That
            takes more rounds, and bars less.
    """

    per_option: bool = False
    name: str = "joint"

    def applies(self, search: Search, state: SearchState) -> bool:
        if state.joint is None or state.is_done(search):
            return False
        least_gap = settings.NEAR if self.per_option else 0.0
        return math.isinf(state.cost) or state.cost - state.bound > least_gap * state.cost

    def run(self, search: Search, state: SearchState, until: float) -> SearchState:
        objective = state.joint
        assert objective is not None
        active = first_constraints(state, search, objective)
        if sum_of_least(constrained(search, state, objective, active, search.budget)) > search.budget:
            return state
        exposed, boundaries = 0, frozenset[int]()
        seeds = (*_choices(state.best, objective), *state.near)
        weigh, unequal = self.per_option, None
        for _ in range(settings.ROUNDS):
            began, until = now(), min(until, state.worth_until(search))
            if until - began <= settings.LEAST_ROUND * state.round_s or state.is_done(search):
                break
            gap = state.wanted_gap(search)
            one = began + settings.MAIN_SHARE * (until - began)
            reweigh = max(settings.REPAIR_GAP, gap) if weigh else None
            try:
                found, state = solve_round(
                    search,
                    state,
                    objective,
                    active,
                    search.budget,
                    one,
                    seeds=seeds,
                    gap=gap,
                    reweigh=reweigh,
                    boundaries=boundaries,
                )
            except (InfeasibleError, SolverError):
                if unequal is None:
                    break
                active.margins, unequal = unequal, None
                continue
            state = replace(state, round_s=now() - began)
            least_s = found.solution.lower_bound
            if not any(active.margins.values()) and not active.option_margins and not boundaries:
                state = replace(state, bound=max(state.bound, least_s))
            over = found.memory.peak_bytes - search.budget
            state = state.with_plan(search, found)
            if over <= 0 and not weigh and found.cost - least_s > max(gap, settings.NEAR) * found.cost:
                weigh, seeds = True, (found.solution.choice, *seeds)
                search.report("weights of the paths")
                continue
            if over <= 0:
                more, state = hides_more(search, state, active, found)
                if not more or exposed == settings.FEW:
                    break
                exposed += 1
                search.report("transfers that cannot hide")
                continue
            search.report(f"over the budget by {over / 2**20:.0f} MiB")
            tighter = active.separate(
                found.solution.choice, found.program, found.memory.timeline, search.budget, per_option=self.per_option
            )
            if not boundaries and max(active.margins.values()) > settings.MARGIN * search.budget:
                # More than a layer is recomputed at once, which no constraint sees.
                boundaries = search.boundaries(objective)
                variables, choice = found.objective.decisions.variables, found.solution.choice
                if any(variables[i].actions[choice[i]].remakes for i in boundaries):
                    margins, active = active.margins, active.emptied()
                    active.add_points(margins)
                    search.report("layers recomputed one by one")
                    continue
            if found.cost < state.cost:
                state = state.with_plan(search, self._repaired(search, state, active, found, until))
            # Constraints only become tighter, so no later round finds what costs less than this one's bound.
            if not tighter or (state.cost < math.inf and state.cost - least_s <= gap * state.cost):
                break
            seeds = (found.solution.choice, *_choices(state.best, objective), *state.near)
            few = not self.per_option and now() - began > settings.SIDE_SHARE * (until - now())
            unequal = active.equalise() if few else None
        return state

    def _repaired(
        self, search: Search, state: SearchState, active: ActiveSet, found: Result, until: float
    ) -> Result | None:
        """The shardings of a choice that is over the budget, with other ways to keep, recompute and offload."""
        objective = state.joint
        assert objective is not None
        decisions = objective.decisions
        still = tuple(sharded_as(decisions, found.solution.choice, decisions))
        undecided = sum(len(s or v.options) > 1 for s, v in zip(still, decisions.variables, strict=True))
        if undecided > settings.EXACT_MOST and objective.fold(objective.problem()) is None:
            return None
        return solve_with_shardings(
            search,
            state,
            still,
            active.copy(),
            until,
            gap=settings.REPAIR_GAP,
            method=f"{found.solution.method}; repaired",
        )


def _choices(best: Result | None, objective: Objective) -> tuple[Choice, ...]:
    return (best.solution.choice,) if best is not None and best.objective is objective else ()


@dataclass(frozen=True)
class Exact:
    """Keep, recompute or offload with exact memory and the free optimum's shardings. On one device, where there are no
    others, it proves its result and breaks ties by the lower peak."""

    name: str = "exact memory"

    def applies(self, search: Search, state: SearchState) -> bool:
        if state.joint is None or not (search.one_device or search.options.search == "two-stage"):
            return False
        if state.is_done(search):
            return False
        return len(state.joint.decisions.variables) <= settings.EXACT_MOST

    def run(self, search: Search, state: SearchState, until: float) -> SearchState:
        objective = state.joint
        assert objective is not None
        starts = _choices(state.best, objective)
        found = checkpoints(search, state).within(search.budget, until, starts)
        if found is None:
            return state
        if found.exact and search.one_device:
            state = replace(state, bound=max(state.bound, found.solution.lower_bound))
        return state.with_plan(search, checkpointed(objective, found))


@dataclass(frozen=True)
class SmallestPeak:
    """The plan of the smallest peak, where no other fits. The way to it does not depend on the budget, so a budget that
    an error names is met by the same plan."""

    name: str = "smallest peak"

    def applies(self, search: Search, state: SearchState) -> bool:
        return state.joint is not None and not math.isfinite(state.cost)

    def run(self, search: Search, state: SearchState, until: float) -> SearchState:
        assert state.joint is not None and state.free is not None
        # It starts afresh: what earlier phases have left depends on the budget and on the time that they took.
        objective = Objective(state.joint.decisions, search.prices, within=search.objective.sections)
        state = replace(state, joint=objective)
        fresh = SearchState(free=state.free, given=state.given, joint=objective, hideable_s=state.hideable_s)
        layers: list[Result] = []
        if objective.depth and not search.one_device:
            # Most of it is known by now: it takes no work from what follows, which ends soon enough.
            began = now()
            layers += layers_recomputed(replace(search, budget=0.0), fresh, until)
            until += now() - began
        search = replace(search, began=now())
        small = search.one_device and len(objective.decisions.variables) <= settings.EXACT_MOST
        began, exact = now(), checkpoints(search, state)
        rows_until = began + (1 - settings.SIDE_SHARE if small else 1.0) * (until - began)

        begin = exact.smallest_by_rules() if search.one_device else None

        def by(way: Joint | KnownShardings, best: Result, budget: float) -> Result | None:
            near = replace(fresh, near=(best.solution.choice,))
            return way.run(replace(search, budget=budget), near, rows_until).best

        ways: list[Joint | KnownShardings] = [Joint(per_option=each) for each in (False, True)]
        if not search.one_device:
            ways.append(KnownShardings())
        within = [partial(by, way) for way in ways]
        for found in search_smallest_peak(search, fresh, rows_until, within, layers, begin):
            state = state.with_leaner(search, found)
            if state.best is not None:
                return state
        if small:
            lean = None if state.leanest is None else _of_joint(state)
            state = state.with_leaner(search, checkpointed(objective, exact.smallest(until, lean)))
        return state


def _of_joint(state: SearchState) -> Choice | None:
    """The choice of the smallest peak, where it is one of the joint problem."""
    assert state.joint is not None and state.leanest is not None
    found = state.leanest
    return found.solution.choice if len(found.solution.choice) == len(state.joint.decisions.variables) else None


def checkpoints(search: Search, state: SearchState) -> CheckpointSearch:
    """The search that leaves the shardings of the free optimum as they are."""
    assert state.joint is not None and state.free is not None
    still = sharded_as(search.objective.decisions, state.free.solution.choice, state.joint.decisions)
    return CheckpointSearch(state.joint, search.options, still, state.hideable_s)


def checkpointed(objective: Objective, found: Checkpointed) -> Result:
    return Result(objective, found.program, found.solution, found.memory)
