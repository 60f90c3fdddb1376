"""The plan of a stage with the choices of the plan of the whole model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.ir import Graph
from autopar.planner.answers.nearby import candidate_of, same_option, with_candidate
from autopar.planner.footprint.transients_of_losses import CHUNKS
from autopar.planner.graphs.chunked import with_chunked_losses
from autopar.planner.options import Options
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.planner.problem.variables import Decisions, Variable
from autopar.planner.search.candidates import budget_bytes
from autopar.planner.search.fitting import scheduled
from autopar.planner.search.forms import for_kernels
from autopar.planner.search.rounds import solve_open
from autopar.planner.search.search import Planned
from autopar.planner.search.two_stage import Open

LIMIT_S = 5.0
"""Seconds for what the other plan leaves open: the boundaries of the stage."""


@dataclass(frozen=True)
class Known:
    """A plan whose choices another may take over.

    Args:
        like: for nodes that it lacks those that stand for them.
    """

    planned: Planned
    like: Mapping[str, str]

    def still(self, d: Decisions) -> Open:
        """Return for each variable of ``d`` the option of this plan; None, for all, where it has none."""
        before, chosen = self.planned.decisions, self.planned.solution.choice
        same = [same_option(before, chosen, v, _key(v, self.like)) for v in d.variables]
        return tuple(None if option is None else (option,) for option in same)

    def form_of(self, graph: Graph, prices: Prices, options: Options) -> Graph:
        """Return the form of ``graph`` that this plan knows."""
        nodes = self.planned.decisions.graph.by_name.keys()

        def shared(form: Graph) -> int:
            return len(nodes & {self.like.get(name, name) for name in form.by_name})

        return max(forms_of(graph, prices, options), key=shared)


def forms_of(graph: Graph, prices: Prices, options: Options) -> tuple[Graph, Graph]:
    """Return the forms in which ``graph`` may be planned: with its losses over whole logits, and in chunks."""
    graph = for_kernels(graph, prices.cluster, options.backend)
    return graph, with_chunked_losses(graph, CHUNKS[prices.cluster.device.kind])


def carried(known: Known, graph: Graph, prices: Prices, options: Options) -> Planned | None:
    """Return the plan of ``graph`` with the choices of another one, whatever it holds; None if they do not fit together
    with ``options.constraints``.

    What is not decided there, such as the spec of what crosses a seam, is decided anew.
    """
    mesh, cluster = prices.mesh, prices.cluster
    graph = known.form_of(graph, prices, options)
    options = replace(options, device=cluster.device.kernels)
    forced, recompute = resolve(graph, mesh, options.constraints, options.aliases), known.planned.decisions.recomputes
    d = decide(graph, mesh, options, forced, recompute=recompute, interned=prices.interned)
    objective = Objective(d, prices)
    solved = solve_open(objective.problem(), known.still(d), LIMIT_S, options.solver, options.gap)
    choice = () if solved is None else solved.choice
    if not choice or not math.isfinite(objective.seconds(choice)):
        return None
    program, memory = scheduled(d, choice, prices, options, budget_bytes(cluster, options))
    found = candidate_of(objective, choice, program, memory, options, "choices of the whole model")
    return replace(with_candidate(known.planned, found), timings=dict(known.planned.timings), baselines=(), trace=())


def _key(v: Variable, like: Mapping[str, str]) -> str:
    """Return the key of the variable that stands for ``v``."""
    name = v.value.node if v.value is not None else v.node.name if v.node is not None else ""
    return v.key.replace(name, like[name], 1) if name in like else v.key
