"""The smallest limit that some choice meets: an ILP that minimises the peak usage and ignores costs."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.solver.blocks.folding import MARGIN, foldable
from autopar.solver.blocks.parts import take_apart, tie
from autopar.solver.blocks.repetition import find_runs
from autopar.solver.clock import now
from autopar.solver.integer import highs
from autopar.solver.integer.ilp import IlpLimits, IlpResult, Model
from autopar.solver.integer.pulp_backend import solve_pulp
from autopar.solver.problem import Array, Edge, IndexArray, Problem, Usage, UsagePrices, evaluate, peak_usage
from autopar.solver.reduce.usage import UsageTable, with_usages_priced

MOST_PRICINGS = 12
PRICING_SHARE = 0.6
"""Of the time, for choices by prices."""

ENTRY_S = 1e-6
"""For making the integer program and handing it over, by entry: of eleven million, seven seconds of the processor."""

CLOSE = 1e-4
"""Relative distance from the least peak at which a choice is taken for the smallest, where none is asked for."""


def minimum_limit(problem: Problem, time_limit: float = 30.0, *, backend: str = "auto") -> float:
    """Bytes; exact when the ILP ends in time, else a limit that is known to be enough.

    Where blocks repeat they choose alike: the limit is enough, and the least that equal blocks need.

    Raises:
        InfeasibleError: no choice is allowed at any limit.
    """
    return peak_usage(problem, smallest_choice(problem, time_limit, backend=backend))


def smallest_choice(
    problem: Problem,
    time_limit: float = 30.0,
    *,
    backend: str = "auto",
    known: Sequence[Sequence[int]] = (),
    gap: float = CLOSE,
) -> tuple[int, ...]:
    """A choice that ``minimum_limit`` is the peak usage of, to within ``gap``; none of the choices ``known`` has a
    smaller one.

    Raises:
        InfeasibleError: no choice is allowed at any limit.
    """
    runs = foldable(find_runs(problem))
    found = [tuple(c) for c in known]
    if runs:
        tied = tie(take_apart(problem, runs, MARGIN))
        with contextlib.suppress(InfeasibleError):
            # Blocks of a known choice may differ, so that there need be no choice of equal blocks like it.
            alike = [c for c in map(tied.project, found) if _is_allowed(tied.problem, c)]
            found.append(tied.expand(_smallest(tied.problem, time_limit, backend, alike, gap)))
            return min(found, key=lambda c: peak_usage(problem, c))
    return _smallest(problem, time_limit, backend, found, gap)


def _is_allowed(problem: Problem, choice: Sequence[int]) -> bool:
    return math.isfinite(evaluate(problem, choice)[0])


def _smallest(
    problem: Problem, time_limit: float, backend: str, known: Sequence[tuple[int, ...]], gap: float
) -> tuple[int, ...]:
    """By prices of the times first, which need no integer program of the whole, then by that."""
    deadline = now() + time_limit
    problem = _only_forbidden(problem)
    choice, bound = _by_prices(problem, known, PRICING_SHARE * time_limit, backend, gap)
    peak = peak_usage(problem, choice)
    if peak <= max(bound, sum_of_least(problem)) * (1 + gap) or now() > deadline:
        return choice
    if _entries(problem) * ENTRY_S > deadline - now():
        return choice
    result = _minimise_peak(problem, peak, IlpLimits(deadline - now(), gap), backend)
    if result.choice is None:
        return choice
    other = tuple(result.choice[node] for node in range(len(problem.costs)))
    return min(choice, other, key=lambda c: peak_usage(problem, c))


def _by_prices(
    problem: Problem, known: Sequence[tuple[int, ...]], seconds: float, backend: str, gap: float
) -> tuple[tuple[int, ...], float]:
    """(a choice of small peak, bytes that no choice's peak is below).

    For any shares that sum to one, the least mean usage under them is at most the least peak, and needs no limit to
    find. Each choice on the way is a plane above that concave function (Kelley 1960); between the highest point under
    all planes and the best shares so far lie the next ones.
    """
    from autopar.solver.pipeline import solve

    deadline, table = now() + seconds, UsageTable(problem)
    planes = [table.of(c) for c in known]
    choices, bound = list(known), 0.0
    if not len(table.times):
        return solve(replace(problem, usages=()), time_limit=seconds, backend=backend).choice, 0.0
    shares = best = np.full(len(table.times), 1 / len(table.times))
    for _ in range(MOST_PRICINGS):
        scale = max((float(p.max()) for p in planes), default=1.0) or 1.0
        priced = with_usages_priced(problem, UsagePrices(table.times.astype(float), shares / scale))
        found = solve(priced, time_limit=max(deadline - now(), 0.5), backend=backend, gap=gap, warm_starts=choices[-2:])
        choices.append(found.choice)
        planes.append(table.of(found.choice))
        if found.lower_bound * scale > bound:
            bound, best = found.lower_bound * scale, shares
        least = min(float(p.max()) for p in planes)
        if least <= bound * (1 + gap) or now() > deadline:
            break
        shares = (best + _highest_shares(planes)) / 2
    return min(choices, key=lambda c: float(table.of(c).max())), bound


def _highest_shares(planes: Sequence[Array]) -> Array:
    """The shares under which the least of the planes' means is largest."""
    import pulp

    rows, scale = len(planes[0]), max(float(p.max()) for p in planes) or 1.0
    with warnings.catch_warnings():
        # PuLP 3.3 deprecates for 4.0 what earlier versions only have.
        warnings.simplefilter("ignore", DeprecationWarning)
        model = pulp.LpProblem("shares", pulp.LpMaximize)
        top = pulp.LpVariable("top")
        shares = [pulp.LpVariable(f"share_{i}", 0.0, 1.0) for i in range(rows)]
        model += top
        model += pulp.lpSum(shares) == 1
        for used in planes:
            model += top - pulp.lpSum(float(u) / scale * s for u, s in zip(used, shares, strict=True)) <= 0
        model.solve(pulp.HiGHS(msg=False) if highs.is_installed() else pulp.PULP_CBC_CMD(msg=False))
    found = np.array([max(float(s.value() or 0.0), 0.0) for s in shares])
    shares_found: Array = found / found.sum()
    return shares_found


def _only_forbidden(problem: Problem) -> Problem:
    """The same choices at no cost."""
    costs = tuple(np.where(np.isfinite(cost), 0.0, math.inf) for cost in problem.costs)
    # Edges share matrices, and so must these.
    plain = {id(edge.cost): np.where(np.isfinite(edge.cost), 0.0, math.inf) for edge in problem.edges}
    return replace(
        problem, costs=costs, edges=tuple(Edge(edge.u, edge.v, plain[id(edge.cost)]) for edge in problem.edges)
    )


def sum_of_least(problem: Problem) -> float:
    """The highest usage where every node uses the least that it can at each time: none is below it."""
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
    return Model(
        cost,
        allowed,
        np.arange(last + 1) < last,
        starts,
        columns,
        values,
        np.array(lower),
        np.array(upper),
        peak,
        tuple(range(len(problem.costs))),
        first,
    )


def _entries(problem: Problem) -> int:
    """How many ``_implications`` has, and one for each option at each time at which it is used."""
    made: dict[int, int] = {}
    for edge in problem.edges:
        if id(edge.cost) not in made:
            allowed = np.isfinite(edge.cost)
            made[id(edge.cost)] = sum(int(a[~a.all(axis=1)].sum()) for a in (allowed, allowed.T))
    starts = np.array(sorted({usage.start for usage in problem.usages if usage.start < usage.end}))
    used = [np.searchsorted(starts, (u.start, u.end)) @ (-1, 1) * np.count_nonzero(u.option) for u in problem.usages]
    return sum(made[id(edge.cost)] for edge in problem.edges) + sum(map(int, used))


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
