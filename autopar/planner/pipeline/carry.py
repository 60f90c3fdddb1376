"""The plan of a stage with the choices, or the shardings, of the plan of the whole model."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from autopar.ir import Graph
from autopar.planner.answers.nearby import candidate_of, same_option, solved_within, with_candidate
from autopar.planner.footprint.transients_of_losses import CHUNKS
from autopar.planner.graphs.chunked import with_chunked_losses
from autopar.planner.memory.active_set import ActiveSet
from autopar.planner.options import Options
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.planner.problem.variables import Decisions, InternedOptions, Variable
from autopar.planner.search.candidates import budget_bytes
from autopar.planner.search.fitting import scheduled
from autopar.planner.search.forms import for_kernels
from autopar.planner.search.rounds import solve_open
from autopar.planner.search.search import Planned
from autopar.planner.search.two_stage import Open

LIMIT_S = 5.0
"""Seconds for what the whole plan leaves open: the boundaries of the stage, and each round of what is to be held."""

SAME_CHOICES, SAME_SHARDINGS = "choices of the whole model", "shardings of the whole model"
"""The methods by which a stage is planned, as its solution tells."""

HOW_HELD = frozenset({"copy", "hold", "rerun"})
"""Kinds of variables that say how values are held and handed on, and not how they are sharded."""


@dataclass(frozen=True)
class Priced:
    """Prices of stages, and the options that they are prices of: what equal stages have in common is priced once."""

    prices: Prices
    interned: InternedOptions = field(default_factory=InternedOptions)


def carried(
    planned: Planned, like: Mapping[str, str], graph: Graph, priced: Priced, options: Options
) -> Planned | None:
    """Return the plan of ``graph``, a part of what ``planned`` plans, with the same choices or, where they hold more
    than the budget, with the same shardings; None if they do not fit together with ``options.constraints``, or nothing
    fits.

    What is not decided in ``planned``, such as the spec of what crosses a seam, is decided anew.

    Args:
        like: for nodes of ``graph`` that ``planned`` lacks those that stand for them.
    """
    prices, interned = priced.prices, priced.interned
    mesh, cluster = prices.mesh, prices.cluster
    graph = for_kernels(graph, cluster, options.backend)
    chunked = with_chunked_losses(graph, CHUNKS[cluster.device.kind])
    graph = max(graph, chunked, key=lambda form: _shared(planned, like, form))
    options = replace(options, device=cluster.device.kernels)
    forced = resolve(graph, mesh, options.constraints, options.aliases)
    d = decide(graph, mesh, options, forced, recompute=planned.decisions.recomputes, interned=interned)
    budget = budget_bytes(cluster, options)
    objective = Objective(d, prices)
    choice = solve_open(objective.problem(), _same(planned, like, d), LIMIT_S, options.solver, options.gap)
    if choice is None or not math.isfinite(objective.seconds(choice)):
        return None
    program, memory = scheduled(d, choice, prices, options, budget)
    if memory.peak_bytes <= budget:
        found = candidate_of(objective, choice, program, memory, options, SAME_CHOICES)
    else:
        if not d.recomputes:
            objective = Objective(decide(graph, mesh, options, forced, recompute=True, interned=interned), prices)
        active = ActiveSet(objective.decisions, options)
        active.add_peaks_of(program, memory.timeline, budget, objective.depth)
        shardings = _same(planned, like, objective.decisions, HOW_HELD)
        left_s = min(LIMIT_S, options.time_limit_s)
        held = solved_within(objective, shardings, active, options, budget, left_s, SAME_SHARDINGS)
        if held is None:
            return None
        found = held
    return replace(with_candidate(planned, found), timings=dict(planned.timings), baselines=(), trace=())


def _same(planned: Planned, like: Mapping[str, str], d: Decisions, but: Collection[str] = ()) -> Open:
    """Return for each variable the option of ``planned``; None, for all, where it has none, or for kinds ``but`` and,
    with these, sums of gradients."""
    before, chosen = planned.decisions, planned.solution.choice
    still = {v.key for v in d.variables if v.kind in but} | (d.summing if but else frozenset())
    same = [None if v.key in still else same_option(before, chosen, v, _key(v, like)) for v in d.variables]
    return tuple(None if option is None else (option,) for option in same)


def _key(v: Variable, like: Mapping[str, str]) -> str:
    """Return the key of the variable that stands for ``v``."""
    name = v.value.node if v.value is not None else v.node.name if v.node is not None else ""
    return v.key.replace(name, like[name], 1) if name in like else v.key


def _shared(planned: Planned, like: Mapping[str, str], graph: Graph) -> int:
    """Return how many nodes of ``graph`` the whole plan knows."""
    return len(planned.decisions.graph.by_name.keys() & {like.get(name, name) for name in graph.by_name})
