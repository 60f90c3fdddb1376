"""A search for tests that run its phases one by one."""

from __future__ import annotations

from autopar.planner import Options
from autopar.planner.pricing.objective import Objective
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.planner.search.candidates import baseline_candidates
from autopar.planner.search.state import Search
from autopar.solver.clock import now


def search_for(objective: Objective, options: Options, budget: float, *, baselines: bool = False) -> Search:
    """The search for the best plan of ``objective`` within ``budget`` bytes."""
    graph, mesh = objective.decisions.graph, objective.decisions.mesh
    found = baseline_candidates(objective, options) if baselines else []
    return Search(
        graph,
        objective,
        options,
        budget,
        lambda _: None,
        with_reruns=lambda: decide(graph, mesh, options, resolve(graph, mesh, {}, {}), recompute=True),
        began=now(),
        ends=now() + options.time_limit_s,
        baselines=sorted(found, key=lambda b: b.objective),
    )
