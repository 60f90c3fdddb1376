"""The smallest limit that some choice meets: by prices of the times, and by halving what they leave open."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar import settings
from autopar.errors import InfeasibleError, SolverError
from autopar.solver.blocks.parts import take_apart, tie
from autopar.solver.blocks.repetition import find_runs
from autopar.solver.clock import now
from autopar.solver.dual.planes import highest_point
from autopar.solver.problem import Edge, Problem, Usage, UsagePrices, evaluate, peak_usage
from autopar.solver.reduce.usage import UsageTable, with_usages_priced


def smallest_choice(
    problem: Problem,
    time_limit: float = 30.0,
    *,
    backend: str = "auto",
    known: Sequence[Sequence[int]] = (),
    gap: float = 1e-4,
) -> tuple[int, ...]:
    """A choice of the smallest peak usage, to within ``gap`` when the search ends in time; none of the choices
    ``known`` has a smaller one. Where blocks repeat they choose alike, so others may have.

    Raises:
        InfeasibleError: no choice is allowed at any limit.
    """
    runs = find_runs(problem)
    found = [tuple(c) for c in known]
    if runs:
        tied = tie(take_apart(problem, runs, settings.FOLDED_MARGIN))
        with contextlib.suppress(InfeasibleError):
            # Blocks of a known choice may differ, so that there need be no choice of equal blocks like it.
            alike = [c for c in map(tied.project, found) if math.isfinite(evaluate(tied.problem, c)[0])]
            found.append(tied.expand(_smallest(tied.problem, time_limit, backend, alike, gap)))
            return min(found, key=lambda c: peak_usage(problem, c))
    return _smallest(problem, time_limit, backend, found, gap)


def _smallest(
    problem: Problem, time_limit: float, backend: str, known: Sequence[tuple[int, ...]], gap: float
) -> tuple[int, ...]:
    """By prices of the times first, then between what they prove and what they find."""
    from autopar.solver.pipeline import solve

    deadline = now() + time_limit
    problem = _only_forbidden(problem)
    choice, bound = _by_prices(problem, known, settings.MAIN_SHARE * time_limit, backend, gap)
    low, peak = max(bound, sum_of_least(problem)), peak_usage(problem, choice)
    while peak > low * (1 + gap) and now() < deadline:
        limit = (low + peak) / 2
        try:
            choice = solve(
                replace(problem, limit=limit, trusted=True), time_limit=deadline - now(), backend=backend
            ).choice
        except InfeasibleError:
            low = limit
        except SolverError:  # in time neither a choice nor a proof that there is none
            break
        peak = min(peak, peak_usage(problem, choice))
    return choice


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
        return solve(replace(problem, usages=(), trusted=True), time_limit=seconds, backend=backend).choice, 0.0
    shares = best = np.full(len(table.times), 1 / len(table.times))
    for _ in range(settings.ROUNDS):
        scale = max((float(p.max()) for p in planes), default=1.0) or 1.0
        priced = with_usages_priced(problem, UsagePrices(table.times.astype(float), shares / scale))
        found = solve(
            priced,
            time_limit=max(deadline - now(), settings.LEAST_S),
            backend=backend,
            gap=gap,
            warm_starts=choices[-2:],
        )
        choices.append(found.choice)
        planes.append(table.of(found.choice))
        if found.lower_bound * scale > bound:
            bound, best = found.lower_bound * scale, shares
        least = min(float(p.max()) for p in planes)
        if least <= bound * (1 + gap) or now() > deadline:
            break
        scale = max(float(p.max()) for p in planes) or 1.0
        _, highest = highest_point([0.0] * len(planes), [p / scale for p in planes], [slice(0, len(planes[0]))])
        shares = (best + highest) / 2
    return min(choices, key=lambda c: float(table.of(c).max())), bound


def _only_forbidden(problem: Problem) -> Problem:
    """The same choices at no cost."""
    costs = tuple(np.where(np.isfinite(cost), 0.0, math.inf) for cost in problem.costs)
    # Edges share matrices, and so must these.
    plain = {id(edge.cost): np.where(np.isfinite(edge.cost), 0.0, math.inf) for edge in problem.edges}
    edges = tuple(Edge(edge.u, edge.v, plain[id(edge.cost)]) for edge in problem.edges)
    return replace(problem, costs=costs, edges=edges, trusted=True)


def sum_of_least(problem: Problem) -> float:
    """The highest usage where every node uses the least that it can at each time: none is below it."""
    options = {id(u.option): u.option for u in problem.usages}  # several times share one
    least = {key: np.array([option.min()]) for key, option in options.items()}
    usages = tuple(Usage(u.node, least[id(u.option)], u.start, u.end) for u in problem.usages)
    return peak_usage(replace(problem, usages=usages, trusted=True), [0] * len(problem.costs))
