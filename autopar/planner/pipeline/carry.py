"""The plan of a stage with the choices of the plan of the whole model."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh
from autopar.planner.answers.nearby import same_option
from autopar.planner.footprint.transients_of_losses import CHUNKS
from autopar.planner.graphs.chunked import with_chunked_losses
from autopar.planner.options import Options
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.planner.problem.restricted import solve_sliced
from autopar.planner.schedule.copied_parts import copied_seconds
from autopar.planner.search.candidates import Candidate, budget_bytes
from autopar.planner.search.fitting import scheduled
from autopar.planner.search.forms import for_kernels
from autopar.planner.search.search import Planned
from autopar.solver import Solution, fold

LIMIT_S = 5.0
"""Seconds for what the whole plan leaves open: the boundaries of the stage."""


def carried(planned: Planned, graph: Graph, mesh: Mesh, cluster: Cluster, options: Options) -> Planned | None:
    """Return the plan of ``graph``, a part of what ``planned`` plans, with the same choices; None if they do not fit
    together with ``options.constraints``, or hold more than the budget.

    What is not decided in ``planned``, such as the spec of what crosses a seam, is decided anew.
    """
    graph = for_kernels(graph, cluster, options.backend)
    chunked = with_chunked_losses(graph, CHUNKS[cluster.device.kind])
    graph = max(graph, chunked, key=lambda form: _shared(planned, form))
    options = replace(options, device=cluster.device.kernels)
    forced = resolve(graph, mesh, options.constraints, options.aliases)
    d = decide(graph, mesh, options, forced, recompute=planned.decisions.recomputes)
    prices, budget = Prices(mesh, cluster, options.backend, options.decomposed), budget_bytes(cluster, options)
    objective = Objective(d, prices)
    same = [same_option(planned.decisions, planned.solution.choice, v) for v in d.variables]
    kept = [np.arange(len(v.options)) if o is None else np.array([o]) for v, o in zip(d.variables, same, strict=True)]
    choice = solve_sliced(objective.problem(), kept, LIMIT_S, options.solver, options.gap, fold)
    if choice is None:
        return None
    program, memory = scheduled(d, choice, prices, options, budget)
    if memory.peak_bytes > budget:
        return None
    cost = objective.seconds(choice) + copied_seconds(program)
    if not math.isfinite(cost):
        return None
    solution = Solution(choice, cost, 0.0, proven=False, method="choices of the whole model")
    found = Candidate.of("carried", d, solution, program, prices, options)
    return replace(
        planned,
        program=found.program,
        decisions=d,
        solution=solution,
        memory=found.memory,
        timeline=found.timeline,
        timings=dict(planned.timings),
        baselines=(),
        trace=(),
    )


def _shared(planned: Planned, graph: Graph) -> int:
    """Return how many nodes of ``graph`` the whole plan knows."""
    return len(planned.decisions.graph.by_name.keys() & graph.by_name.keys())
