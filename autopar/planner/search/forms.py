"""One model as several graphs, and the best plan of all.

Experts are planned with routed rows where ranks may send each other tokens: that has the strategies of the other form,
in which each token has its rows, and those that cut experts. The other is planned where a constraint or a baseline
needs it.

Losses are planned over whole logits and in chunks. Over whole logits costs less, in chunks holds less: so only where
the first's free optimum is over the budget is the second planned too, in half of the time that is left. It is the root
of a branch and bound: a binary choice whose two problems are solved apart. The bound of the pair is the smaller one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar import settings
from autopar.errors import ConstraintError, InfeasibleError, PlanError
from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh
from autopar.planner.footprint.transients_of_losses import CHUNKS
from autopar.planner.graphs.chunked import with_chunked_losses
from autopar.planner.graphs.remade import with_remade_values
from autopar.planner.graphs.routed import room_of, with_routed_experts
from autopar.planner.options import Options
from autopar.planner.pricing.prices import Prices
from autopar.planner.search.phases import Phase, Reruns
from autopar.planner.search.search import Planned, plan_graph
from autopar.planner.search.state import Progress, Search, SearchState
from autopar.program import Program
from autopar.solver.clock import limited, now

ALL = 0
"""Logits beyond which a loss is taken in chunks where the plan is for a range of sizes."""


def plan_forms(
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    progress: Progress | None = None,
    *,
    before: Mapping[type[Phase], Phase] | None = None,
    prices: Prices | None = None,
) -> Planned:
    """``plan_graph``, also with routed experts, and where the budget binds with losses in chunks.

    ``decisions.graph`` is what was planned.

    Args:
        before, prices: see there.

    Raises:
        InfeasibleError, ConstraintError: see there.
    """
    room = options.room
    graph = for_kernels(graph, cluster, options.backend)
    routed = with_routed_experts(graph, room) if room is not None and _may_route(mesh, options) else graph
    first, other = (graph, routed) if str(options.search).startswith("baseline:") else (routed, graph)
    plan = _Losses(mesh, cluster, options, progress, before or {}, prices)
    try:
        return plan.best_for(first)
    except (ConstraintError, PlanError):  # they may name what is in the other form alone, as "EP x FSDP" does
        if other is first:
            raise
        return plan.best_for(other)


def for_kernels(graph: Graph, cluster: Cluster, backend: str) -> Graph:
    """Return ``graph`` as the kernels of the device read it, where they run."""
    return with_remade_values(graph) if cluster.device.kind == "cuda" and backend != "inductor" else graph


def _may_route(mesh: Mesh, options: Options) -> bool:
    """Whether ranks may send each other rows: how many is only known at run time, so Inductor cannot compile it, and
    there is no formula for a range of sizes."""
    searches = options.search in ("joint", "two-stage") or str(options.search).startswith("baseline:")
    return mesh.size > 1 and options.backend == "eager" and options.ranges is None and searches


@dataclass(frozen=True)
class OtherForm:
    """The plan of the other form, which one of this form has to beat.

    Args:
        plan: plans it within a time limit in seconds, and returns its cost in seconds, infinite where nothing fits.
    """

    plan: Callable[[float], float]
    name: str = "logits in chunks"

    def applies(self, search: Search, state: SearchState) -> bool:
        return state.best is None

    def run(self, search: Search, state: SearchState, until: float) -> SearchState:
        cost = self.plan(max((until - now()) / 2, settings.LEAST_S) / settings.WORK_SHARE)
        return replace(state, cutoff=min(state.cutoff, cost))


@dataclass(frozen=True)
class _Losses:
    """Plans a graph over whole logits and in chunks. See ``plan_graph`` for its fields."""

    mesh: Mesh
    cluster: Cluster
    options: Options
    progress: Progress | None
    before: Mapping[type[Phase], Phase]
    prices: Prices | None

    def best_for(self, graph: Graph) -> Planned:
        other = with_chunked_losses(graph, CHUNKS[self.cluster.device.kind])
        if other is graph or self.options.search not in ("joint", "two-stage"):
            return self._planned(graph)
        if self.options.ranges is not None:
            other = with_chunked_losses(graph, ALL)  # one form at every size
        with limited(self.options.time_limit_s):
            return self._better_of(graph, other)

    def _planned(self, graph: Graph, more: Mapping[type[Phase], Phase] | None = None, **changed: Any) -> Planned:
        options, before = replace(self.options, **changed), {**self.before, **(more or {})}
        return plan_graph(graph, self.mesh, self.cluster, options, self.progress, before=before, prices=self.prices)

    def _better_of(self, graph: Graph, other: Graph) -> Planned:
        found: list[Planned] = []
        refused: list[InfeasibleError] = []

        def in_other_form(seconds: float) -> float:
            try:
                with contextlib.suppress(ConstraintError):  # they may name what is in the other form alone
                    found.append(self._planned(other, time_limit_s=seconds))
            except InfeasibleError as error:
                refused.append(error)
            return min((p.solution.objective for p in found), default=math.inf)

        try:
            own = self._planned(graph, {Reruns: OtherForm(in_other_form)})
        except InfeasibleError as error:
            if not found:
                raise min((*refused, error), key=lambda error: error.least_bytes) from None
            return found[0]
        best = min((own, *found), key=lambda p: (p.solution.objective, p.timeline.seconds))
        return _bounded_by_all(best, (own, *found), self.options)


def _bounded_by_all(best: Planned, found: Sequence[Planned], options: Options) -> Planned:
    """The best plan, with the smallest bound of the forms."""
    cost, bound = best.solution.objective, min(p.solution.lower_bound for p in found)
    proven = cost - bound <= options.gap * cost
    return replace(best, solution=replace(best.solution, lower_bound=bound, proven=proven))


def as_planned(graph: Graph, digest: str, program: Program) -> Graph:
    """The form of ``graph`` that a plan knows by this digest; of another size of its range, that whose nodes its
    program runs. Itself where the plan is for neither."""
    graphs = (with_remade_values(graph), graph)
    forms = [
        form
        for own in (*graphs, *(with_routed_experts(g, room_of(program)) for g in graphs))
        for form in (own, *(with_chunked_losses(own, least) for least in (*CHUNKS.values(), ALL)))
    ]
    nodes = {op.node for op in program.ops if op.kind == "compute"}
    known = next((form for form in forms if form.digest == digest), None)
    return known or next((form for form in forms if nodes <= form.by_name.keys()), graph)
