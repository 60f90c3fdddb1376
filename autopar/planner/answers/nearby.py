"""A plan under one more constraint, where a budget binds: what is far from the constraint stays as it is.

A search from the start would have only a share of the time for each of many constraints. It would find no plan as good
as the one that took all the time, and their difference would be due to the search, not to the constraint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh
from autopar.planner.memory.active_set import ActiveSet
from autopar.planner.memory.exact import MemoryProfile
from autopar.planner.options import Options
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import Decisions, Variable, decide
from autopar.planner.schedule.copied_parts import copied_seconds
from autopar.planner.search.candidates import Candidate, budget_bytes
from autopar.planner.search.fitting import scheduled
from autopar.planner.search.rounds import solve_open
from autopar.planner.search.search import Planned
from autopar.planner.search.two_stage import Open
from autopar.program import Program
from autopar.solver import Solution

MAX_DISTANCE = 4
"""The number of uses between a changed variable and one that may change with it."""

MAX_ROUNDS = 4
"""The number of rounds. Each tightens the memory constraints by what the last program held beyond them."""


def replan_nearby(
    planned: Planned, graph: Graph, mesh: Mesh, cluster: Cluster, options: Options, limit_s: float
) -> Planned | None:
    """Return the best plan under ``options.constraints`` that differs from ``planned`` only near them; None if none
    fits.

    Args:
        limit_s: seconds for each round.
    """
    d = decide(graph, mesh, options, resolve(graph, mesh, options.constraints, options.aliases), recompute=True)
    objective = Objective(d, Prices(mesh, cluster, options.backend, options.decomposed))
    kept, budget = _open_options(planned, d), budget_bytes(cluster, options)
    active_set = ActiveSet(d, options, objective.prices.decomposition.may_gain)
    active_set.add_peaks_of(planned.program, planned.memory.timeline, budget, objective.depth)
    for _ in range(MAX_ROUNDS):
        problem = active_set.extend(objective.problem(active_set.usages(), budget))
        solved = solve_open(problem, kept, limit_s, options.solver, options.gap)
        if solved is None:
            return None
        choice = active_set.restrict(solved.choice)
        program, memory = scheduled(d, choice, objective.prices, options, budget)
        if memory.peak_bytes <= budget:
            return with_candidate(
                planned, candidate_of(objective, choice, program, memory, options, "near another plan")
            )
        if not active_set.separate(choice, program, memory.timeline, budget):
            return None
    return None


def candidate_of(
    objective: Objective,
    choice: Sequence[int],
    program: Program,
    memory: MemoryProfile,
    options: Options,
    method: str,
) -> Candidate:
    """Return a choice, scheduled as ``program``, which holds ``memory``, as a complete plan without a bound."""
    cost = objective.seconds(choice) + copied_seconds(program)
    solution = Solution(tuple(choice), cost, 0.0, proven=False, method=method)
    return Candidate.of(method, objective.decisions, solution, program, objective.prices, options, memory=memory)


def with_candidate(planned: Planned, found: Candidate) -> Planned:
    """Return the plan of ``found``, with what ``planned`` tells beside its own."""
    return replace(
        planned,
        program=found.program,
        decisions=found.decisions,
        solution=found.solution,
        memory=found.memory,
        timeline=found.timeline,
    )


def _open_options(planned: Planned, d: Decisions) -> Open:
    """Return for each variable the option of ``planned``; None, for all, near variables that do not have it."""
    before, chosen = planned.decisions, planned.solution.choice
    same = [same_option(before, chosen, v, v.key) for v in d.variables]
    neighbours: list[set[int]] = [set() for _ in d.variables]
    for use in d.uses:
        neighbours[use.source].add(use.target)
        neighbours[use.target].add(use.source)
    reached = frontier = {i for i, option in enumerate(same) if option is None}
    for _ in range(MAX_DISTANCE):
        frontier = {n for i in frontier for n in neighbours[i]} - reached
        reached = reached | frontier
    return tuple(None if option is None or i in reached else (option,) for i, option in enumerate(same))


def same_option(before: Decisions, chosen: Sequence[int], v: Variable, key: str) -> int | None:
    """Return the option of ``v`` that the variable ``key`` had before, if ``v`` has it."""
    at = before.index.get(key)
    if at is None:
        return None
    wanted = _option_key(before.variables[at], chosen[at])
    return next((o for o in range(len(v.options)) if _option_key(v, o) == wanted), None)


def _option_key(v: Variable, o: int) -> tuple[object, ...]:
    """Return all that distinguishes an option of a variable from the others."""
    return v.options[o], v.kept[o : o + 1], v.actions[o : o + 1], tuple(bool(a) for a in v.host_state_bytes[o : o + 1])
