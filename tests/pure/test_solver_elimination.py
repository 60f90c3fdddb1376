"""Elimination of any degree; prices that pieces trade."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.solver import Edge, Problem, UsagePrices, evaluate, solve
from autopar.solver.blocks.parts import take_apart
from autopar.solver.blocks.pieces import Pieces
from autopar.solver.blocks.relaxation import Relaxation
from autopar.solver.blocks.repetition import find_runs
from autopar.solver.reduce.elimination import Factor, eliminate_all, factors_of, find_order, sizes_of
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.ordering import narrow_order
from tests.brute_force import brute_force
from tests.pure.solver_pieces import priced_block, priced_ends
from tests.pure.solver_problems import problems
from tests.pure.test_solver_folding import chain

seeds = st.integers(0, 2**32 - 1)


def optimum(problem: Problem) -> float:
    try:
        return brute_force(problem).objective
    except InfeasibleError:
        return math.inf


def eliminated(problem: Problem) -> float:
    """The optimum of a narrow problem of any length, without its limit."""
    graph = Graph(problem)
    factors, sizes = factors_of(graph), sizes_of(graph)
    found = eliminate_all(factors, sizes, find_order([f.scope for f in factors], sizes))
    assert found is not None
    return float(found.rest.table) + graph.offset


class TestElimination:
    @given(problems(limited=False))
    @settings(max_examples=60, deadline=None)
    def test_equals_brute_force(self, problem: Problem) -> None:
        graph = Graph(problem)
        factors, sizes = factors_of(graph), sizes_of(graph)
        found = eliminate_all(factors, sizes, find_order([f.scope for f in factors], sizes))
        assert found is not None
        assert float(found.rest.table) + graph.offset == pytest.approx(optimum(problem))
        choice = graph.expand(found.complete({}))
        assert evaluate(problem, choice)[0] == pytest.approx(optimum(problem))

    @given(problems(limited=False), seeds)
    @settings(max_examples=40, deadline=None)
    def test_what_is_kept_is_a_table_of_the_best_of_the_rest(self, problem: Problem, seed: int) -> None:
        random = np.random.default_rng(seed)
        graph = Graph(problem)
        kept = sorted(random.permutation(len(problem.costs))[:2].tolist())
        factors, sizes = factors_of(graph), sizes_of(graph)
        found = eliminate_all(factors, sizes, find_order([f.scope for f in factors], sizes, kept), kept)
        assert found is not None
        assert found.rest.scope == tuple(kept)
        at = tuple(int(random.integers(size)) for size in found.rest.table.shape)
        fixed = tuple(
            np.where(np.arange(len(cost)) == at[kept.index(node)], cost, math.inf) if node in kept else cost
            for node, cost in enumerate(problem.costs)
        )
        expected = optimum(Problem(fixed, problem.edges))
        assert found.rest.table[at] + graph.offset == pytest.approx(expected)
        complete = found.complete(dict(zip(kept, at, strict=True)))
        assert evaluate(problem, [complete[n] for n in range(len(problem.costs))])[0] == pytest.approx(expected)

    def test_tables_of_many_elements_are_made_option_by_option(self) -> None:
        random = np.random.default_rng(0)
        sizes = {0: 3, 1: 80, 2: 90, 3: 70}
        table = random.random((3, 80, 90))
        factors = [Factor((0, 1, 2), table), Factor((0, 3), random.random((3, 70)))]
        found = eliminate_all(factors, sizes, find_order([(0, 1, 2, 3)], sizes, (1, 2, 3)), (1, 2, 3))
        assert found is not None
        whole = table[..., None] + factors[1].table[:, None, None, :]
        assert np.array_equal(found.rest.table, whole.min(axis=0))

    def test_it_stops_when_it_is_late(self) -> None:
        graph = Graph(chain(np.random.default_rng(0), 3))
        factors, sizes = factors_of(graph), sizes_of(graph)
        order = find_order([f.scope for f in factors], sizes)
        assert eliminate_all(factors, sizes, order, (), lambda: True) is None

    def test_the_work_is_counted_before(self) -> None:
        scopes = [(0, 1), (1, 2), (2, 3)]
        order = find_order(scopes, dict.fromkeys(range(4), 10))
        assert order.largest == pytest.approx(100)
        assert order.elements == pytest.approx(100 + 100 + 100 + 10 + 1)


def _with_other_costs(problem: Problem, random: np.random.Generator) -> Problem:
    """Equal costs stay equal."""
    arrays = {id(cost): cost for cost in (*problem.costs, *(edge.cost for edge in problem.edges))}
    scaled = {key: random.uniform(0.5, 2.0) * cost for key, cost in arrays.items()}
    edges = tuple(Edge(edge.u, edge.v, scaled[id(edge.cost)]) for edge in problem.edges)
    return Problem(tuple(scaled[id(cost)] for cost in problem.costs), edges)


class TestPieces:
    @given(seeds)
    @settings(max_examples=25, deadline=None)
    def test_trade_never_lowers_the_bound_and_it_stays_one(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        problem = chain(random, int(random.integers(12, 30)), width=2, hub=bool(seed % 2))
        best = eliminated(problem)
        try:
            relaxation = Relaxation(take_apart(problem, find_runs(problem), 1), UsagePrices())
        except InfeasibleError:
            return
        pieces, last = Pieces(relaxation), -math.inf
        for count in range(12):
            bound = pieces.sweep(forward=count % 2 == 1)
            assert bound >= last - 1e-6
            assert bound <= best + 1e-6
            last = bound
        # The prices that they ended with are prices like any others.
        ends, ends_offset = priced_ends(relaxation, pieces.prices)
        block, block_offset = priced_block(relaxation, 0, pieces.prices)
        total = eliminated(ends) + ends_offset + relaxation.parts.blocks[0].count * (eliminated(block) + block_offset)
        assert last - 1e-6 <= total <= best + 1e-6

    @given(seeds)
    @settings(max_examples=25, deadline=None)
    def test_what_was_traded_under_other_costs_is_a_start(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        problem = chain(random, int(random.integers(12, 30)), width=2, hub=bool(seed % 2))
        other = _with_other_costs(problem, random)
        try:
            one, two = (Relaxation(take_apart(p, find_runs(p), 1), UsagePrices()) for p in (problem, other))
        except InfeasibleError:
            return
        pieces = Pieces(one)
        bound = [pieces.sweep(forward=count % 2 == 1) for count in range(12)][-1]
        assert Pieces(one, pieces.traded()).sweep(forward=False) >= bound - 1e-6
        begun = Pieces(two, pieces.traded())
        for count in range(4):
            assert begun.sweep(forward=count % 2 == 1) <= eliminated(other) + 1e-6

    def test_what_pieces_of_another_shape_have_traded_is_left_alone(self) -> None:
        relaxations = [
            Relaxation(take_apart(problem, find_runs(problem), 1), UsagePrices())
            for problem in (chain(np.random.default_rng(7), 20, options=options) for options in (2, 3))
        ]
        small, large = map(Pieces, relaxations)
        small.sweep(forward=False)
        assert Pieces(relaxations[1], small.traded()).sweep(forward=False) == large.sweep(forward=False)

    @given(seeds)
    @example(190)  # where only the last copy takes an option in which no copy finds the one before
    @settings(max_examples=20, deadline=None)
    def test_wide_blocks_are_solved_to_the_end(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        problem = chain(random, int(random.integers(12, 30)), width=3, options=5, hub=bool(seed % 2))
        best = eliminated(problem)
        try:
            found = solve(problem, gap=0.0)
        except InfeasibleError:
            assert best == math.inf
            return
        assert found.objective == pytest.approx(best)
        assert found.lower_bound == pytest.approx(best)

    def test_blocks_that_do_not_choose_alike(self) -> None:
        """Neighbours that must differ: tied blocks cannot, blocks on their own can."""
        costs = tuple(np.zeros(2) for _ in range(20))
        differ = np.where(np.eye(2) > 0, math.inf, 1.0)
        problem = Problem(costs, tuple(Edge(i, i + 1, differ) for i in range(19)))
        solution = solve(problem)
        assert solution.objective == 19
        assert solution.proven


class TestOrdering:
    @given(problems(limited=False))
    @settings(max_examples=30, deadline=None)
    def test_every_node_once(self, problem: Problem) -> None:
        graph = Graph(problem)
        assert sorted(narrow_order(graph.nodes(), graph.neighbours)) == graph.nodes()

    def test_a_path_is_walked_from_one_end_whatever_its_numbers(self) -> None:
        path = np.random.default_rng(0).permutation(50).tolist()
        around: dict[int, list[int]] = {node: [] for node in path}
        for u, v in zip(path, path[1:], strict=False):
            around[u].append(v)
            around[v].append(u)
        assert narrow_order(sorted(path), around) in (path, path[::-1])


def test_runs_of_two_lengths_that_share_columns_are_both_found() -> None:
    """As an encoder whose blocks are part of the decoder's: some columns go through both, others through the second."""
    random = np.random.default_rng(0)
    own, inside, onward = (random.random((3, 3)) for _ in range(3))
    costs, edges = [], []
    base, more = random.random(3), random.random(3)
    last: int | None = None
    for copy in range(24):
        first = len(costs)
        costs += [base, base + 1]
        edges.append(Edge(first, first + 1, inside))
        end = first + 1
        if copy >= 12:
            costs += [more]
            edges += [Edge(first + 1, first + 2, own)]
            end = first + 2
        if last is not None:
            edges.append(Edge(last, first, onward))
        last = end
    runs = find_runs(Problem(tuple(costs), tuple(edges)))
    assert sorted(run.copies.shape[1] for run in runs) == [2, 3]
    assert all(len(run.copies) >= 9 for run in runs)
