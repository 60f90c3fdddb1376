"""The smallest limit that some choice meets: an ILP that minimises the peak usage and ignores costs."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.solver import highs
from autopar.solver.folding import MARGIN, foldable
from autopar.solver.ilp import IlpLimits, IlpResult, Model
from autopar.solver.parts import take_apart, tie
from autopar.solver.problem import Edge, IndexArray, Problem, Usage, peak_usage
from autopar.solver.pulp_backend import solve_pulp
from autopar.solver.repetition import find_runs


def minimum_limit(problem: Problem, time_limit: float = 30.0, *, backend: str = "auto") -> float:
    """Bytes; exact when the ILP ends in time, else a limit that is known to be enough.

    Where blocks repeat they choose alike: the limit is enough, and the least that equal blocks need.

    Raises:
        InfeasibleError: no choice is allowed at any limit.
    """
    return peak_usage(problem, smallest_choice(problem, time_limit, backend=backend))


def smallest_choice(problem: Problem, time_limit: float = 30.0, *, backend: str = "auto") -> tuple[int, ...]:
    """A choice that ``minimum_limit`` is the peak usage of.

    Raises:
        InfeasibleError: no choice is allowed at any limit.
    """
    from autopar.solver.pipeline import solve

    runs = foldable(find_runs(problem))
    if runs:
        tied = tie(take_apart(problem, runs, MARGIN))
        with contextlib.suppress(InfeasibleError):
            return tied.expand(smallest_choice(tied.problem, time_limit, backend=backend))
    problem = _only_forbidden(problem)
    began_with = solve(replace(problem, limit=math.inf), time_limit=time_limit, backend=backend)
    peak = peak_usage(problem, began_with.choice)
    lowest = _sum_of_least(problem)
    if peak <= lowest:
        return began_with.choice
    result = _minimise_peak(problem, peak, IlpLimits(time_limit, 0.0), backend)
    if result.choice is None:
        return began_with.choice
    choice = tuple(result.choice[node] for node in range(len(problem.costs)))
    return min(began_with.choice, choice, key=lambda c: peak_usage(problem, c))


def _only_forbidden(problem: Problem) -> Problem:
    """The same choices at no cost."""
    costs = tuple(np.where(np.isfinite(cost), 0.0, math.inf) for cost in problem.costs)
    # Edges share matrices, and so must these.
    plain = {id(edge.cost): np.where(np.isfinite(edge.cost), 0.0, math.inf) for edge in problem.edges}
    return replace(
        problem, costs=costs, edges=tuple(Edge(edge.u, edge.v, plain[id(edge.cost)]) for edge in problem.edges)
    )


def _sum_of_least(problem: Problem) -> float:
    least = tuple(Usage(u.node, np.full(len(u.option), u.option.min()), u.start, u.end) for u in problem.usages)
    return peak_usage(replace(problem, usages=least), [0] * len(problem.costs))


def _minimise_peak(problem: Problem, peak: float, limits: IlpLimits, backend: str) -> IlpResult:
    model = _model(problem, peak)
    if backend == "highs" or (backend == "auto" and highs.is_installed()):
        return highs.solve_highs(model, limits, None)
    return solve_pulp(model, limits, None, "cbc" if backend == "auto" else backend)


def _model(problem: Problem, peak: float) -> Model:
    """Binary x for each option; the last variable is the peak, as a share of a peak known to be enough."""
    first = np.concatenate([[0], np.cumsum([len(cost) for cost in problem.costs])]).astype(np.int64)
    last = int(first[-1])
    rows: list[dict[int, float]] = []
    upper: list[float] = []
    lower: list[float] = []
    for node in range(len(problem.costs)):
        rows.append(dict.fromkeys(range(first[node], first[node + 1]), 1.0))
        lower.append(1.0)
        upper.append(1.0)
    for row in _implications(problem, first):
        rows.append(row)
        lower.append(-math.inf)
        upper.append(0.0)
    for row in _usage_rows(problem, first, peak):
        rows.append(row | {last: -1.0})
        lower.append(-math.inf)
        upper.append(0.0)
    allowed = np.concatenate([np.isfinite(cost).astype(float) for cost in problem.costs] + [np.ones(1)])
    cost = np.zeros(last + 1)
    cost[last] = 1.0
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    columns = np.array([column for row in rows for column in row], dtype=np.int64)
    values = np.array([value for row in rows for value in row.values()])
    none = np.zeros(0, dtype=np.int64)
    return Model(
        cost, allowed, np.arange(last + 1) < last, starts, columns, values, np.array(lower), np.array(upper), peak,
        tuple(range(len(problem.costs))), first, (none, none),
    )  # fmt: skip


def _implications(problem: Problem, first: IndexArray) -> list[dict[int, float]]:
    """An option needs one of its partners: x[u, a] <= sum of x[v, b] over the allowed pairs (a, b)."""
    rows = []
    for edge in problem.edges:
        allowed = np.isfinite(edge.cost)
        for one, two, matrix in ((edge.u, edge.v, allowed), (edge.v, edge.u, allowed.T)):
            for option in np.flatnonzero(~matrix.all(axis=1)):
                row = dict.fromkeys((int(first[two] + b) for b in np.flatnonzero(matrix[option])), -1.0)
                mine = int(first[one] + option)
                row[mine] = row.get(mine, 0.0) + 1.0
                rows.append(row)
    return rows


def _usage_rows(problem: Problem, first: IndexArray, peak: float) -> list[dict[int, float]]:
    """The usage at each time at which something starts: no other time has a larger one."""
    rows = []
    for time in sorted({usage.start for usage in problem.usages if usage.start < usage.end}):
        row: dict[int, float] = {}
        for usage in problem.usages:
            if usage.start <= time < usage.end:
                for option in np.flatnonzero(usage.option):
                    column = int(first[usage.node] + option)
                    row[column] = row.get(column, 0.0) + float(usage.option[option]) / peak
        rows.append(row)
    return rows
