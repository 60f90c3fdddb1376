"""The solver on one page: reduce, bound and search, take out what is superfluous, and leave the rest to an ILP.

Every step before the ILP is exact; the bound that is returned holds for the problem as it was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autopar.errors import InfeasibleError, SolverError
from autopar.solver.blocks.blocks_linear import relax_blocks
from autopar.solver.blocks.folding import Part, SolvePart, fold, solve_folded
from autopar.solver.blocks.parts import Tied
from autopar.solver.clock import limited
from autopar.solver.dual import linear
from autopar.solver.dual.ascent import SMALL_GAP, ascend, bar_superfluous_pairs, search_from
from autopar.solver.dual.dual import Pushes
from autopar.solver.dual.greedy import frugal_choice, greedy_choice
from autopar.solver.dual.neighbourhood import improve_parts
from autopar.solver.dual.search import Search
from autopar.solver.integer import highs
from autopar.solver.integer.ilp import (
    FLOWS_A_SECOND,
    LIMITED_FLOWS_A_SECOND,
    IlpLimits,
    IlpResult,
    Model,
    build,
    is_slow,
    is_small,
)
from autopar.solver.integer.pulp_backend import check_solver, solve_pulp
from autopar.solver.problem import Basis, Problem, Solution, TraceEntry, UsagePrices, evaluate, relative_gap
from autopar.solver.reduce.dominance import WorkBudget
from autopar.solver.reduce.elimination import eliminate_all, factors_of, find_order, sizes_of
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.incumbent import Incumbent, Refuses
from autopar.solver.reduce.reductions import drop_forbidden, reduce

MAX_FLOWS = 400_000
"""Larger integer programs, and those that are larger for the time left, are not tried."""

MAX_FLAT_PAIRS = 1_500_000
"""Pairs of options of a repetitive problem up to which, after folding, every node is also looked at on its own."""

WORK = 1.5e8
"""Element operations that looking for dominated options may take: some tenths of a second."""

EACH = 3e5
"""Of them one product of two matrices, as long as message passing has not told which options are superfluous."""

AT_ONCE = 2e7
MOST_ELEMENTS = 2e8
"""Elements of tables up to which a narrow rest is eliminated, before message passing and after it."""

MAX_UNFOLDED_PAIRS = 500_000
"""Pairs of options up to which a problem with a limit is not folded."""

BLOCKS_SHARE = 0.8
"""Of the time, for the linear program of repeated blocks."""

REDUCING_SHARE = 0.6
"""Of the time, for the first reductions: huge problems leave it to messages and local search."""

SEARCHING_SHARE = 0.2
FRUGAL_SHARE = 0.2
"""Of the time, for making a first choice better, and for finding one within the limit."""

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
    folding: Callable[[Problem], Tied | None] = fold,
    usage_prices: UsagePrices | None = None,
    basis: Basis | None = None,
    refuses: Refuses | None = None,
) -> Solution:
    """The cheapest choice, or the best one found in time, with a bound that no choice can beat.

    Args:
        problem: what to choose.
        time_limit: seconds; kept within two.
        backend: of the integer program: "highs", "cbc", any name that PuLP knows, or "auto": HiGHS when installed.
        gap: relative; the search ends when (objective - bound) / objective is no larger.
        warm_starts: choices to begin with; infeasible ones are ignored.
        progress: called with each better objective or bound.
        folding: what ties repeated blocks together, for who has done so already or knows that there are none.
        usage_prices: of the limit in a similar problem, to begin with.
        basis: of the linear program of the blocks of one.
        refuses: is asked about a choice that is nearly the best before that is proven; where it says yes the search
            ends.

    Raises:
        InfeasibleError: no choice is allowed.
        SolverError: the back end is missing or failed, or time ended before any choice was found.
    """
    chosen = _backend_name(backend)
    if chosen != "highs":
        check_solver(chosen)
    with limited(time_limit):
        incumbent = Incumbent(problem, time_limit, gap, progress, refuses)
        incumbent.usage_prices = usage_prices or UsagePrices()
        incumbent.basis = basis
        for choice in warm_starts:
            incumbent.offer(choice, "warm start")
        size: dict[str, int] = {}
        method: list[str] = []
        tied = folding(problem)
        if tied is not None and chosen == "highs" and _is_limited(problem):
            method.append("linear program of blocks")
            try:
                relax_blocks(incumbent, tied.parts, BLOCKS_SHARE * time_limit)
            except InfeasibleError:
                if incumbent.choice is None:
                    raise
        if incumbent.choice is None:
            _offer_greedy(problem, tied, incumbent)
        if incumbent.settled() or _is_limited_and_small(problem, chosen):
            tied = None
        if tied is not None:
            size.update(problem.size())
            method.append("folding")
            solve_folded(incumbent, tied, _part_solver(backend), size, warm_starts)
        if not incumbent.settled() and (tied is None or _flat_is_worth_trying(incumbent)):
            _solve_flat(incumbent, backend, warm_starts, size, method)
        return _solution(incumbent, size, method)


def _offer_greedy(problem: Problem, tied: Tied | None, incumbent: Incumbent) -> None:
    """The greedy choice, of equal blocks where there are any, or one that a limit allows."""
    alike = greedy_choice(tied.problem) if tied is not None else None
    first = tied.expand(alike) if tied is not None and alike is not None else greedy_choice(problem)
    if first is None:
        return
    incumbent.offer(first, "greedy")
    if incumbent.choice is None:
        latest = FRUGAL_SHARE * incumbent.seconds_left()
        cost, _ = evaluate(problem, first)
        frugal = frugal_choice(problem, first, cost, lambda: incumbent.seconds() > latest)
        if frugal is not None:
            incumbent.offer(frugal, "greedy")


def _is_limited(problem: Problem) -> bool:
    return bool(problem.usages) and math.isfinite(problem.limit)


def _is_limited_and_small(problem: Problem, backend: str) -> bool:
    """Whether one linear program tells more than that of a block: where blocks choose alike, they waste room."""
    pairs = sum(edge.cost.size for edge in problem.edges)
    return backend == "highs" and _is_limited(problem) and pairs <= MAX_UNFOLDED_PAIRS


def _part_solver(backend: str) -> SolvePart:
    """What solves the tied problem and its parts: everything here but folding."""

    def solve_part(part: Part) -> Incumbent:
        incumbent = Incumbent(part.problem, part.seconds, part.gap, None)
        incumbent.aim = part.aim
        for choice in part.warm_starts:
            incumbent.offer(choice, "warm start")
        _solve_flat(incumbent, backend, part.warm_starts, part.size, [], exact=part.exact, pushes=part.pushes)
        return incumbent

    return solve_part


def _flat_is_worth_trying(incumbent: Incumbent) -> bool:
    if incumbent.choice is None:
        return True
    pairs = sum(edge.cost.size for edge in incumbent.problem.edges)
    return incumbent.seconds_left() > 0 and pairs <= MAX_FLAT_PAIRS


def _solve_flat(
    incumbent: Incumbent,
    backend: str,
    warm_starts: Sequence[Sequence[int]],
    size: dict[str, int],
    method: list[str],
    *,
    exact: bool = True,
    pushes: Pushes | None = None,
) -> None:
    """Every node on its own; without ``exact``, message passing alone. ``pushes``: messages to begin with, where the
    problem is reduced already."""
    try:
        graph = Graph(incumbent.problem)
        size.update(_sizes("", graph))
        if pushes is not None:
            drop_forbidden(graph)
        else:
            method.append("reductions")
            latest = incumbent.seconds() + REDUCING_SHARE * max(incumbent.seconds_left(), 0.0)
            reduce(graph, WorkBudget(WORK, lambda: incumbent.seconds() > latest, EACH))
        if incumbent.choice is not None and pushes is None:
            # Where time is short, a first choice made better is all that there will be.
            late = incumbent.seconds() + SEARCHING_SHARE * max(incumbent.seconds_left(), 0.0)
            search_from(graph, graph.project(incumbent.choice), incumbent, "local search", pairs=False, until=late)
        _offer_projections(graph, incumbent, warm_starts)
        incumbent.raise_bound(graph.least())
        if incumbent.seconds_left() <= 0 or _eliminate(graph, incumbent, AT_ONCE, method):
            return
        relaxed = False
        if linear.applies(graph, _backend_name(backend)) and not incumbent.proven():
            method.append("linear program")
            relaxed = linear.relax(graph, incumbent, 0.6 * max(incumbent.seconds_left(), 0.0))
        if incumbent.settled():
            return
        left = relaxed or _pass_messages(graph, incumbent, size, method, exact=exact, pushes=pushes)
        if left and exact:
            _prove(graph, incumbent, backend, size, method)
    except InfeasibleError:
        # With a choice at hand this says that nothing better is left.
        if incumbent.choice is None:
            raise
        incumbent.raise_bound(incumbent.objective)


def _solution(incumbent: Incumbent, size: dict[str, int], method: list[str]) -> Solution:
    if incumbent.choice is None:
        spent = f"{incumbent.seconds():.3g} s"
        raise SolverError("No choice was found in time.", found=spent, hint="raise time_limit, or pass a warm start")
    return Solution(
        incumbent.choice,
        incumbent.objective,
        incumbent.bound(),
        incumbent.proven(),
        size,
        incumbent.seconds_on_the_wall(),
        f"{', '.join(method)}; found by {incumbent.found_by}",
        tuple(incumbent.trace),
        incumbent.usage_prices,
        incumbent.basis,
    )


def _sizes(prefix: str, graph: Graph) -> dict[str, int]:
    nodes, options, pairs = graph.size()
    names = ("nodes", "options", "edges", "pairs", "times")
    counts = (nodes, options, len(graph.pairs()), pairs, len(graph.limits))
    return {prefix + name: count for name, count in zip(names, counts, strict=True)}


def _offer_projections(graph: Graph, incumbent: Incumbent, choices: Sequence[Sequence[int]]) -> None:
    for choice in choices:
        search_from(graph, graph.project(tuple(choice)), incumbent, "warm start and local search")


def _pass_messages(
    graph: Graph,
    incumbent: Incumbent,
    size: dict[str, int],
    method: list[str],
    *,
    exact: bool,
    pushes: Pushes | None = None,
) -> bool:
    """Message passing and reductions in turns, each for a share of the time left; whether anything is left to do."""
    share = 0.25 if exact else 0.9
    for _ in range(ROUNDS):
        if incumbent.seconds_left() < 0:
            return False
        size.update(_sizes("reduced_", graph))
        if not graph.nodes():
            incumbent.offer(graph.expand({}), "reductions")
            incumbent.raise_bound(graph.offset)
            return False
        before = graph.size()
        deadline = incumbent.seconds() + share * max(incumbent.seconds_left(), 0.0)
        times = graph.times
        prices = ascend(
            graph, incumbent, SWEEPS, incumbent.usage_prices.at(times), deadline, choice_only=not exact, start=pushes
        ).prices
        pushes = None
        incumbent.usage_prices = UsagePrices(times.astype(float), prices)
        if "message passing" not in method:
            method.append("message passing")
        if incumbent.proven() or incumbent.seconds_left() < 0:
            return False
        if not exact and relative_gap(incumbent.objective, incumbent.bound()) < SMALL_GAP:
            return True
        reduce(graph, WorkBudget(WORK, lambda: incumbent.seconds_left() < 0))
        if graph.size()[1] > 0.9 * before[1]:
            break
    return True


def _prove(graph: Graph, incumbent: Incumbent, backend: str, size: dict[str, int], method: list[str]) -> None:
    if incumbent.choice is not None and graph.nodes():
        bar_superfluous_pairs(graph, incumbent, incumbent.usage_prices.at(graph.times))
        reduce(graph, WorkBudget(WORK, lambda: incumbent.seconds_left() < 0))
    size.update(_sizes("reduced_", graph))
    if not graph.nodes():
        incumbent.offer(graph.expand({}), "reductions")
        incumbent.raise_bound(min(graph.offset, incumbent.objective))
        return
    if incumbent.seconds_left() < 0 or _eliminate(graph, incumbent, MOST_ELEMENTS, method):
        return
    if is_slow(graph) and incumbent.refused():
        return
    a_second = LIMITED_FLOWS_A_SECOND if len(graph.limits) else FLOWS_A_SECOND
    most = min(MAX_FLOWS, a_second * max(incumbent.seconds_left(), 0.0))
    if not is_small(graph, int(most)):
        method.append("solving parts")
        _improve_large(graph, incumbent, backend)
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


def _eliminate(graph: Graph, incumbent: Incumbent, most: float, method: list[str]) -> bool:
    """The optimum of what is left, where nothing is limited and tables over several nodes stay small.

    Raises:
        InfeasibleError: nothing is allowed, or nothing better than the incumbent is left.
    """
    if len(graph.limits):
        return False
    factors, sizes = factors_of(graph), sizes_of(graph)
    order = find_order([factor.scope for factor in factors], sizes, most=most)
    if order.elements > most:
        return False
    found = eliminate_all(factors, sizes, order, late=lambda: incumbent.seconds_left() < 0)
    if found is None:
        return False
    value = float(found.rest.table) + graph.offset
    if not math.isfinite(value):
        raise InfeasibleError("No choice is allowed.", found="every choice takes a forbidden pair")
    method.append("elimination")
    incumbent.offer(graph.expand(found.complete({})), "elimination")
    incumbent.raise_bound(min(value, incumbent.objective))
    return True


def _improve_large(graph: Graph, incumbent: Incumbent, backend: str) -> None:
    """No single integer program: better choices from parts of it, a better bound from more message passing."""

    def solve_part(part: Problem, seconds: float, warm: Sequence[int]) -> Solution:
        return solve(part, time_limit=seconds, backend=backend, gap=incumbent.gap, warm_starts=[warm])

    deadline = incumbent.seconds() + 0.3 * max(incumbent.seconds_left(), 0.0)
    ascend(graph, incumbent, 10 * SWEEPS, incumbent.usage_prices.at(graph.times), deadline)
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
