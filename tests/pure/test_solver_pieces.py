"""Prices that pieces trade, and the order in which they pass messages."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.solver import Edge, Problem, UsagePrices, solve
from autopar.solver.blocks.parts import take_apart
from autopar.solver.blocks.pieces import Pieces
from autopar.solver.blocks.relaxation import Relaxation
from autopar.solver.blocks.repetition import find_runs
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.ordering import narrow_order
from tests.brute_force import brute_force
from tests.elimination import eliminated
from tests.pure.solver_pieces import priced_block, priced_ends
from tests.pure.solver_problems import problems
from tests.pure.test_solver_folding import chain

seeds = st.integers(0, 2**32 - 1)


def optimum(problem: Problem) -> float:
    try:
        return brute_force(problem).objective
    except InfeasibleError:
        return math.inf


@given(problems(limited=False))
@settings(max_examples=60, deadline=None)
def test_elimination_equals_brute_force(problem: Problem) -> None:
    assert eliminated(problem) == pytest.approx(optimum(problem))


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
