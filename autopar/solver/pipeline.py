"""The solver on one page: reduce, bound and search, take out what is superfluous, and leave the rest to an ILP.

Every step before the ILP is exact; the bound that is returned holds for the problem as it was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autopar.errors import InfeasibleError, SolverError
from autopar.solver import highs
from autopar.solver.ascent import ascend, bar_superfluous_pairs, search_from
from autopar.solver.dominance import WorkBudget
from autopar.solver.graph import Graph
from autopar.solver.ilp import IlpLimits, IlpResult, Model, build, flow_count
from autopar.solver.incumbent import Incumbent
from autopar.solver.neighbourhood import improve_parts
from autopar.solver.problem import Array, Problem, Solution, TraceEntry, evaluate
from autopar.solver.pulp_backend import solve_pulp
from autopar.solver.reductions import reduce
from autopar.solver.search import Search

MAX_FLOWS = 400_000
"""Larger integer programs are not tried: their first relaxation alone would outlast the time limit."""

WORK_PER_SECOND = 1e8
ROUNDS = 4
SWEEPS = 200


def solve(
    problem: Problem,
    *,
    time_limit: float = 60.0,
    backend: str = "auto",
    gap: float = 1e-4,
    warm_starts: Sequence[Sequence[int]] = (),
    progress: Callable[[TraceEntry], None] | None = None,
) -> Solution:
    """The cheapest choice, or the best one found in time, with a bound that no choice can beat.

    Args:
        problem: what to choose.
        time_limit: seconds; kept within two.
        backend: of the integer program: "highs", "cbc", any name that PuLP knows, or "auto": HiGHS when installed.
        gap: relative; the search ends when (objective - bound) / objective is no larger.
        warm_starts: choices to begin with; infeasible ones are ignored.
        progress: called with each better objective or bound.

    Raises:
        InfeasibleError: no choice is allowed.
        SolverError: the back end is missing or failed, or time ended before any choice was found.
    """
    incumbent = Incumbent(problem, time_limit, gap, progress)
    for choice in warm_starts:
        incumbent.offer(choice, "warm start")
    graph = Graph(problem)
    size = _sizes("", graph)
    method = ["reductions"]
    try:
        reduce(graph, WorkBudget(WORK_PER_SECOND * max(time_limit, 1.0)))
        _offer_projections(graph, incumbent, warm_starts)
        _search_and_prove(graph, incumbent, backend, size, method)
    except InfeasibleError:
        # With a choice at hand this says that nothing better is left.
        if incumbent.choice is None:
            raise
        incumbent.raise_bound(incumbent.objective)
    if incumbent.choice is None:
        raise SolverError(
            "No choice was found in time.", found=f"{time_limit:g} s", hint="raise time_limit, or pass a warm start"
        )
    return Solution(
        incumbent.choice,
        incumbent.objective,
        incumbent.bound(),
        incumbent.proven(),
        size,
        incumbent.seconds(),
        f"{', '.join(method)}; found by {incumbent.found_by}",
        tuple(incumbent.trace),
    )


def _sizes(prefix: str, graph: Graph) -> dict[str, int]:
    nodes, options, pairs = graph.size()
    names = ("nodes", "options", "edges", "pairs", "times")
    counts = (nodes, options, len(graph.pairs()), pairs, len(graph.limits))
    return {prefix + name: count for name, count in zip(names, counts, strict=True)}


def _offer_projections(graph: Graph, incumbent: Incumbent, choices: Sequence[Sequence[int]]) -> None:
    for choice in choices:
        search_from(graph, graph.project(tuple(choice)), incumbent, "warm start and local search")


def _search_and_prove(
    graph: Graph, incumbent: Incumbent, backend: str, size: dict[str, int], method: list[str]
) -> None:
    prices: Array | None = None
    for _ in range(ROUNDS):
        size.update(_sizes("reduced_", graph))
        if not graph.nodes():
            incumbent.offer(graph.expand({}), "reductions")
            incumbent.raise_bound(graph.offset)
            return
        before = graph.size()
        deadline = incumbent.seconds() + 0.25 * max(incumbent.seconds_left(), 0.0)
        prices = ascend(graph, incumbent, SWEEPS, prices, deadline).prices
        if "message passing" not in method:
            method.append("message passing")
        if incumbent.proven() or incumbent.seconds_left() < 0:
            return
        times = len(graph.limits)
        reduce(graph, WorkBudget(WORK_PER_SECOND * max(incumbent.seconds_left(), 1.0)))
        if len(graph.limits) != times:
            prices = None
        if graph.size()[1] > 0.9 * before[1]:
            break
    _prove(graph, incumbent, backend, prices, size, method)


def _prove(
    graph: Graph,
    incumbent: Incumbent,
    backend: str,
    prices: Array | None,
    size: dict[str, int],
    method: list[str],
) -> None:
    if incumbent.choice is not None and prices is not None and graph.nodes():
        bar_superfluous_pairs(graph, incumbent, prices)
        reduce(graph, WorkBudget(WORK_PER_SECOND))
    size.update(_sizes("reduced_", graph))
    if not graph.nodes():
        incumbent.offer(graph.expand({}), "reductions")
        incumbent.raise_bound(min(graph.offset, incumbent.objective))
        return
    if flow_count(graph) > MAX_FLOWS or incumbent.seconds_left() < 0:
        method.append("solving parts")
        _improve_large(graph, incumbent, backend, prices)
        return
    model = build(graph, incumbent.objective - graph.offset)
    size.update(model.size())
    chosen = _backend_name(backend)
    method.append(f"ILP by {chosen}")
    result = _run(model, graph, incumbent, chosen)
    if result.choice is not None:
        search_from(graph, result.choice, incumbent, f"ILP by {chosen}")
    # Everything at least as dear as the incumbent may have been taken out.
    incumbent.raise_bound(min(result.lower_bound + graph.offset, incumbent.objective))


def _improve_large(graph: Graph, incumbent: Incumbent, backend: str, prices: Array | None) -> None:
    """No single integer program: better choices from parts of it, a better bound from more message passing."""

    def solve_part(part: Problem, seconds: float, warm: Sequence[int]) -> Solution:
        return solve(part, time_limit=seconds, backend=backend, gap=incumbent.gap, warm_starts=[warm])

    deadline = incumbent.seconds() + 0.3 * max(incumbent.seconds_left(), 0.0)
    ascend(graph, incumbent, 10 * SWEEPS, prices, deadline)
    improve_parts(graph, incumbent, solve_part)


def _backend_name(backend: str) -> str:
    if backend != "auto":
        return backend
    return "highs" if highs.is_installed() else "cbc"


def _run(model: Model, graph: Graph, incumbent: Incumbent, backend: str) -> IlpResult:
    start = None
    if incumbent.choice is not None:
        search = Search(graph, graph.project(incumbent.choice))
        start = model.point(search.choice) if search.feasible() else None

    def report(objective: float, bound: float) -> None:
        if math.isfinite(bound):
            incumbent.raise_bound(min(bound + graph.offset, incumbent.objective))

    limits = IlpLimits(max(incumbent.seconds_left(), 0.1), incumbent.gap, report)
    if backend == "highs":
        return highs.solve_highs(model, limits, start)
    return solve_pulp(model, limits, start, backend)


__all__ = ["evaluate", "solve"]
