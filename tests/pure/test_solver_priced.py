"""The search by prices: its moves are exact, its bound is one, its choices keep the limit, and work only helps."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError, SolverError
from autopar.solver import Edge, Problem, Solution, evaluate, solve
from autopar.solver.clock import counted, limited, only_counted
from autopar.solver.priced.core import Core
from autopar.solver.priced.crossover import crossover
from autopar.solver.priced.elimination import plan
from autopar.solver.priced.network import Network
from autopar.solver.priced.search import PricedSearch
from autopar.solver.problem import IndexArray
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.incumbent import Incumbent
from benchmarks.planted import planted
from tests.brute_force import brute_force
from tests.pure.solver_problems import problems
from tests.pure.test_solver import hard_problem

seeds = st.integers(0, 2**32 - 1)


def network_of(problem: Problem) -> Network | None:
    try:
        graph = Graph(problem)
    except InfeasibleError:
        return None
    return Network(graph)


def any_choice(network: Network, seed: int) -> IndexArray:
    return np.random.default_rng(seed).integers(0, network.sizes)


@settings(max_examples=80, deadline=None)
@given(problems(limited=True), seeds)
def test_flat_arrays_say_what_the_problem_says(problem: Problem, seed: int) -> None:
    network = network_of(problem)
    if network is None:
        return
    choice = any_choice(network, seed)
    whole = network.expand(choice)
    objective, feasible = evaluate(problem, whole)
    value = network.value(choice, network.cost) + network.graph.offset
    if math.isfinite(objective):
        assert value == pytest.approx(objective)
        assert bool((network.excess(choice) <= 0).all()) == feasible
    else:
        assert value >= network.barred / 2
    assert (network.project(whole) == choice).all()


@settings(max_examples=80, deadline=None)
@given(problems(limited=False), seeds)
def test_a_move_never_costs_more_and_messages_are_a_bound(problem: Problem, seed: int) -> None:
    network = network_of(problem)
    if network is None:
        return
    core = Core(network, np.random.default_rng(seed))
    core.add_program(0.5)
    core.price(network.cost)
    choice = any_choice(network, seed)
    moved = core.move(choice, rounds=seed % 3)
    assert network.value(moved, network.cost) <= network.value(choice, network.cost) + 1e-6
    for forward in (True, False, True, False):
        bound = core.sweep(forward=forward)
        assert bound <= network.value(moved, network.cost) + 1e-6


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_every_node_leaves_or_is_fixed(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 30))
    pairs = {(u, v) for u, v in random.integers(0, count, (2 * count, 2)).tolist() if u < v}
    slots = {pair: 9 * i for i, pair in enumerate(sorted(pairs))}
    made = plan([3] * count, range(count), slots, 9 * len(slots), 100.0, weight=lambda node, others: float(others))
    left = [step.node for steps in made.rounds for step in steps]
    assert sorted([*left, *made.fixed]) == list(range(count))
    assert not made.left


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_the_best_parts_of_another_choice_fit(seed: int) -> None:
    network = network_of(hard_problem(20, 4, limit_share=0.7))
    assert network is not None
    choices = [any_choice(network, seed + i) for i in range(2)]
    network.limits = np.maximum(network.limits, network.used(choices[0]))
    prices = np.random.default_rng(seed).random(len(network.limits))
    for free in (False, True):
        found, used, change = crossover(
            network, choices[0], network.used(choices[0]), choices[1], prices, free_room=free
        )
        assert used == pytest.approx(network.used(found))
        assert (used <= network.limits * (1 + 1e-9)).all()
        values = [network.value(c, network.cost) for c in (choices[0], found)]
        assert change == pytest.approx(values[1] - values[0])
        assert free or change <= 0
        assert np.isin(found, np.stack(choices)).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [(300, 6, 0), (400, 5, 3), (200, 12, 1)])
def test_a_planted_optimum_is_approached_from_both_sides(seed: int, shape: tuple[int, int, int]) -> None:
    nodes, options, hubs = shape
    problem, optimum = planted(nodes, options=options, hubs=hubs, seed=seed)
    with limited(60.0):
        incumbent = Incumbent(problem, 60.0, 0.0, None)
        search = PricedSearch(Graph(problem), incumbent)
        search.first()
        assert incumbent.choice is not None, "a choice within the limit is there at once"
        search.run(lambda: search.rounds > 40 or incumbent.proven())
    assert incumbent.lower_bound <= optimum * (1 + 1e-9)
    assert optimum * (1 - 1e-9) <= incumbent.objective <= 1.03 * optimum


def disguised(nodes: int, options: int, seed: int) -> tuple[Problem, float]:
    """A grid without a limit and its optimum: the planted choice costs nothing, all others something, and then every
    node hands random parts of its costs to its edges."""
    random = np.random.default_rng(seed)
    width = int(nodes**0.5)
    chosen = random.integers(0, options, nodes)
    costs = [random.exponential(1.0, options) * (np.arange(options) != c) for c in chosen]
    pairs = [(u, u + 1) for u in range(nodes - 1) if (u + 1) % width] + [(u, u + width) for u in range(nodes - width)]
    edges = []
    for u, v in pairs:
        matrix = random.exponential(1.0, (options, options))
        matrix[chosen[u], chosen[v]] = 0.0
        left, right = random.random(options), random.random(options)
        costs[u], costs[v] = costs[u] - left, costs[v] - right
        edges.append(Edge(u, v, matrix + left[:, None] + right))
    shifts = [min(cost.min(), 0.0) for cost in costs]
    costs = [cost - shift for cost, shift in zip(costs, shifts, strict=True)]
    return Problem(tuple(costs), tuple(edges)), -sum(shifts)


def test_a_large_problem_without_a_limit_is_approached_from_both_sides() -> None:
    problem, optimum = disguised(1_600, 6, seed=0)
    with only_counted():
        found = solve(problem, time_limit=3.0, gap=1e-3, folding=lambda _: None)
    assert evaluate(problem, found.choice) == (found.objective, True)
    assert found.lower_bound <= optimum * (1 + 1e-9) <= found.objective * (1 + 2e-9)
    assert found.gap <= 1e-3
    assert "prices" in found.method


def test_more_work_never_gives_a_worse_choice() -> None:
    problem, _ = planted(400, options=8, hubs=2, seed=5)
    found = [solve(problem, time_limit=seconds, gap=0.0) for seconds in (0.02, 0.2, 1.0, 3.0)]
    costs = [solution.objective for solution in found]
    assert costs == sorted(costs, reverse=True)
    for solution in found:
        assert evaluate(problem, solution.choice) == (solution.objective, True)
        lines = [(entry.objective, -entry.lower_bound, -entry.seconds) for entry in solution.trace]
        assert all(lines[i][k] >= lines[i + 1][k] for i in range(len(lines) - 1) for k in range(3))


def test_a_warm_start_is_the_worst_that_is_found() -> None:
    problem, optimum = planted(300, options=6, hubs=1, seed=1)
    good = solve(problem, time_limit=5.0)
    assert good.objective <= 1.03 * optimum
    assert solve(problem, time_limit=0.01, warm_starts=[good.choice]).objective <= good.objective


def test_where_nothing_is_found_a_fallback_is_the_worst_that_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = planted(300, options=6, hubs=1, seed=1)
    good = solve(problem, time_limit=5.0).choice
    monkeypatch.setattr(PricedSearch, "_repair", lambda *_: None)
    monkeypatch.setattr("autopar.settings.REPAIR_ROUNDS", 1)
    with pytest.raises(SolverError):
        solve(problem, time_limit=0.0)
    found = solve(problem, time_limit=0.0, fallback=lambda: good)
    assert evaluate(problem, found.choice) == (found.objective, True)
    assert found.objective <= evaluate(problem, good)[0]


def test_a_fallback_that_does_not_fit_is_no_choice() -> None:
    problem, _ = planted(300, options=6, hubs=1, seed=1)
    tight = replace(problem, limit=0.5 * problem.limit)
    large = tuple(int(np.argmin(cost)) for cost in problem.costs)
    assert not evaluate(tight, large)[1]
    with pytest.raises((SolverError, InfeasibleError)):
        solve(tight, time_limit=0.0, fallback=lambda: large)


@settings(max_examples=60, deadline=None)
@given(problems(limited=True))
def test_small_problems_under_a_limit_are_solved_to_the_end(problem: Problem) -> None:
    try:
        best = brute_force(problem).objective
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            solve(problem, gap=0.0)
        return
    found = solve(problem, gap=0.0)
    assert found.proven
    assert found.objective == pytest.approx(best)
    assert found.lower_bound <= best * (1 + 1e-9)


def test_a_busy_machine_finds_the_same() -> None:
    """The limit is one of work: on the wall there is more than enough for all of it."""
    problem, _ = planted(300, options=8, hubs=2, seed=3)

    def solved() -> tuple[Solution, float]:
        with limited(300.0):
            solution = solve(problem, time_limit=2.0, gap=0.0)
            return solution, counted()

    first, work = solved()
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=spin) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        second, again = solved()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert (first.choice, first.lower_bound, work) == (second.choice, second.lower_bound, again)
    assert first.trace == second.trace


def test_the_trace_names_the_phases() -> None:
    problem, _ = planted(300, options=8, hubs=2, seed=3)
    names = [entry.phase for entry in solve(replace(problem), time_limit=3.0, gap=0.0).trace]
    assert {"first choice", "reductions"} <= set(names)


def test_without_room_for_the_tables_of_all_edges_other_phases_find_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Graph] = []

    def counted_search(graph: Graph, incumbent: Incumbent) -> PricedSearch:
        made.append(graph)
        return PricedSearch(graph, incumbent)

    monkeypatch.setattr("autopar.solver.phases.PricedSearch", counted_search)
    problem = hard_problem(60, 20, limit_share=0.5)
    solve(problem, time_limit=2.0)
    assert made
    made.clear()
    monkeypatch.setattr("autopar.settings.TABLE", 10)
    solution = solve(problem, time_limit=2.0)
    assert not made
    assert evaluate(problem, solution.choice) == (solution.objective, True)
