"""Repeated blocks: found by structure, tied to give choices, bounded by one of them; the answer stays the whole's."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.repetition import minimum_cut, shift_of
from autopar.repetition.minimum_cut import least_crossing
from autopar.settings import FOLDED_LEAST
from autopar.solver import Edge, Problem, Usage, UsagePrices, evaluate, solve
from autopar.solver.blocks.bounds import Bounds
from autopar.solver.blocks.folding import fold
from autopar.solver.blocks.parts import take_apart, tie
from autopar.solver.blocks.pieces import Pieces
from autopar.solver.blocks.relaxation import Relaxation
from autopar.solver.blocks.repetition import find_runs
from autopar.solver.integer import highs
from autopar.solver.phases import FLAT, State, run_phases
from autopar.solver.reduce.incumbent import Incumbent
from tests.brute_force import brute_force
from tests.pure.solver_pieces import priced_block, priced_ends


def chain(
    random: np.random.Generator,
    copies: int,
    *,
    width: int = 2,
    options: int = 3,
    hub: bool = False,
    hubs: int = 1,
    limit: float = math.inf,
) -> Problem:
    """Equal blocks in a row with seams in both directions, a head and a tail, and perhaps a node that all read, or
    several that they read in turns."""

    def matrix() -> np.ndarray:
        values = random.integers(0, 20, (options, options)).astype(float)
        values[random.random(values.shape) < 0.1] = math.inf
        return values

    block = [random.integers(0, 10, options).astype(float) for _ in range(width)]
    inside = [(u, v, matrix()) for u in range(width) for v in range(u)]
    onward, back, shared, used = matrix(), matrix(), matrix(), random.integers(0, 5, options).astype(float)
    costs = [random.integers(0, 10, options).astype(float)] * hubs
    edges: list[Edge] = []
    usages: list[Usage] = []
    for copy in range(copies):
        first = len(costs)
        costs += block
        edges += [Edge(first + u, first + v, cost) for u, v, cost in inside]
        if copy:
            edges.append(Edge(first - 1, first, onward))
            edges.append(Edge(first + width - 1, first - width, back))
        if hub:
            edges.append(Edge(copy % hubs, first, shared))
        usages.append(Usage(first, used, 0, 1))
    edges += [Edge(0, hubs, matrix()), Edge(len(costs) - 1, len(costs), matrix())]
    costs.append(random.integers(0, 10, options).astype(float))
    return Problem(tuple(costs), tuple(edges), tuple(usages) if math.isfinite(limit) else (), limit)


class Stack:
    """The ops of a network as nodes: equal kinds cost alike, and so do equal reads. Layers are like those of a
    transformer: each reads a cast of its input once, and ends with a norm."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.costs: list[np.ndarray] = []
        self.edges: list[Edge] = []
        self.known: dict[tuple[str, int], np.ndarray] = {}

    def op(self, kind: str, *reads: int) -> int:
        self.costs.append(self.known.setdefault((kind, -1), self.random.integers(0, 10, 3).astype(float)))
        for at, read in enumerate(reads):
            matrix = self.known.setdefault((kind, at), self.random.integers(0, 20, (3, 3)).astype(float))
            self.edges.append(Edge(read, len(self.costs) - 1, matrix))
        return len(self.costs) - 1

    def product(self, read: int) -> int:
        return self.op("product", read, self.op("weight"))

    def added(self, to: int, read: int) -> int:
        return self.op("norm", self.op("add", to, read), self.op("scale"))

    def embedded(self) -> int:
        return self.op("norm", self.op("embedding", self.op("tokens")), self.op("scale"))

    def attention(self, x: int, cast: int | None = None) -> int:
        own = self.op("cast", x)
        operands = (self.product(own if at == 0 or cast is None else cast) for at in range(3))
        return self.added(x, self.op("attention", *operands))

    def perceptron(self, x: int) -> int:
        return self.added(x, self.product(self.op("activation", self.product(self.op("cast", x)))))

    def problem(self, x: int) -> Problem:
        self.op("loss", x)
        return Problem(tuple(self.costs), tuple(self.edges))


def encoder_and_decoder(encoder: int, decoder: int) -> Problem:
    stack = Stack()
    x = stack.embedded()
    for _ in range(encoder):
        x = stack.perceptron(stack.attention(x))
    encoded, x = stack.op("cast", x), stack.embedded()
    for _ in range(decoder):
        x = stack.perceptron(stack.attention(stack.attention(x), encoded))
    return stack.problem(x)


def every_third_layer_differs(layers: int) -> Problem:
    stack = Stack()
    x = stack.embedded()
    for layer in range(layers):
        x = stack.perceptron(stack.added(x, stack.product(x)) if layer % 3 == 2 else stack.attention(x))
    return stack.problem(x)


def optimum(problem: Problem) -> float:
    try:
        return brute_force(problem).objective
    except InfeasibleError:
        return math.inf


def flat_optimum(problem: Problem) -> float:
    """The optimum of a deep chain without limits: what is found when every node is looked at on its own."""
    incumbent = Incumbent(problem, 30.0, 0.0, None)
    run_phases(FLAT, State(incumbent, "highs" if highs.is_installed() else "cbc"))
    assert incumbent.proven()
    return incumbent.objective


seeds = st.integers(0, 2**32 - 1)


class TestRepetition:
    def test_a_chain_is_one_run_of_equal_blocks(self) -> None:
        problem = chain(np.random.default_rng(0), 10, width=3)
        (run,) = find_runs(problem)
        assert run.copies.shape[1] == 3
        assert len(run.copies) >= 8
        assert (np.diff(run.copies, axis=0) == 3).all()

    def test_a_node_that_all_blocks_read_is_no_part_of_them(self) -> None:
        problem = chain(np.random.default_rng(0), 10, width=3, hub=True)
        (run,) = find_runs(problem)
        assert 0 not in run.copies

    @pytest.mark.parametrize("kinds", [2, 3, 6])
    def test_blocks_of_several_kinds_in_turn_are_blocks_of_several_layers(self, kinds: int) -> None:
        problem = chain(np.random.default_rng(0), 12 * kinds, width=3, hub=True, hubs=kinds)
        (run,) = find_runs(problem)
        assert run.layers == kinds
        assert run.copies.shape[1] == 3 * kinds
        assert (np.diff(run.copies, axis=0) == 3 * kinds).all()
        assert (np.diff(run.copies.reshape(-1, 3), axis=0) == 3).all()

    @pytest.mark.parametrize(("encoder", "decoder"), [(6, 6), (8, 8), (12, 12), (8, 6), (4, 8), (3, 10)])
    def test_an_encoder_and_a_decoder_are_a_run_each(self, encoder: int, decoder: int) -> None:
        """Their blocks look much alike, and what all blocks of the decoder read looks like an output of a block."""
        runs = find_runs(encoder_and_decoder(encoder, decoder))
        assert {run.copies.shape[1] for run in runs} == ({20, 31} if encoder > 4 else {31})
        assert all(len(run.copies) >= (encoder if run.copies.shape[1] == 20 else decoder) - 1 for run in runs)

    @pytest.mark.parametrize(("encoder", "decoder"), [(6, 6), (8, 8), (12, 12), (12, 20), (20, 12), (32, 32)])
    def test_runs_are_found_again_by_the_shift_of_their_middle(self, encoder: int, decoder: int) -> None:
        """Whoever knows less of a run than there is gets all of it, though the two towers look alike at their ends."""
        problem = encoder_and_decoder(encoder, decoder)
        runs = find_runs(problem)
        middles = [replace(run, copies=run.copies[1:-1]) for run in runs]
        found = find_runs(replace(problem, shift=shift_of(middles)))
        assert sorted(run.copies.shape for run in found) == sorted(run.copies.shape for run in runs)

    def test_a_layer_that_differs_in_turn_is_part_of_the_block(self) -> None:
        (run,) = find_runs(every_third_layer_differs(24))
        assert len(run.copies) >= 7
        assert run.copies.shape[1] == 20 + 20 + 14

    def test_a_known_shift_is_all_that_is_looked_at(self) -> None:
        problem = chain(np.random.default_rng(0), 10, width=3)
        (run,) = find_runs(problem)
        (known,) = find_runs(replace(problem, shift=shift_of([run])))
        assert (known.copies == run.copies).all()
        assert find_runs(replace(problem, shift={})) == ()

    @pytest.mark.parametrize("seed", range(4))
    def test_blocks_of_two_kinds_give_the_optimum(self, seed: int) -> None:
        problem = chain(np.random.default_rng(seed), 14, hub=True, hubs=2)
        assert fold(problem) is not None
        assert solve(problem, gap=0.0).objective == pytest.approx(flat_optimum(problem))

    def test_the_order_of_nodes_does_not_matter(self) -> None:
        problem = chain(np.random.default_rng(1), 12, width=3)
        order = np.random.default_rng(2).permutation(len(problem.costs))
        at = np.argsort(order)
        shuffled = Problem(
            tuple(problem.costs[i] for i in order),
            tuple(Edge(int(at[e.u]), int(at[e.v]), e.cost) for e in problem.edges),
        )
        # Shuffled seeds pair blocks that do not follow each other: what is found must still be equal blocks.
        for run in find_runs(shuffled):
            costs = {tuple(shuffled.costs[node].tobytes() for node in row) for row in run.copies}
            assert len(costs) == 1

    def test_what_does_not_repeat_gives_no_run(self) -> None:
        random = np.random.default_rng(3)
        costs = tuple(random.random(3) for _ in range(20))
        edges = tuple(Edge(i, i + 1, random.random((3, 3))) for i in range(19))
        assert find_runs(Problem(costs, edges)) == ()

    def test_a_block_that_differs_parts_two_runs(self) -> None:
        problem = chain(np.random.default_rng(4), 20, width=2)
        costs = list(problem.costs)
        costs[1 + 2 * 10] = costs[1 + 2 * 10] + 1
        runs = find_runs(replace(problem, costs=tuple(costs)))
        assert len(runs) == 2
        assert not {*runs[0].copies.flat} & {*runs[1].copies.flat}

    @given(seeds)
    @settings(max_examples=30, deadline=None)
    def test_runs_hold_disjoint_equal_nodes(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        problem = chain(random, int(random.integers(4, 12)), width=int(random.integers(1, 4)), hub=bool(seed % 2))
        nodes = [node for run in find_runs(problem) for node in run.copies.flat]
        assert len(nodes) == len(set(nodes))
        for run in find_runs(problem):
            for column in run.copies.T:
                assert len({problem.costs[node].tobytes() for node in column}) == 1


class TestMinimumCut:
    def test_a_ring_is_cut_where_it_is_thinnest(self) -> None:
        # 0 - 1 - 2 - 3 - and on to 0 of the next row; the thin link joins 1 and 2.
        links = [(0, 1, 0, 5), (1, 2, 0, 1), (2, 3, 0, 5), (3, 0, 1, 5)]
        begins = least_crossing([0, 0, 0, 0], links)
        crossing = [w for p, q, d, w in links if begins[q] - begins[p] + d]
        assert crossing == [1]

    @given(seeds)
    @settings(max_examples=50, deadline=None)
    def test_no_other_placing_of_small_tables_is_better(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        links = [
            (int(p), int(q), int(random.integers(-1, 2)), int(random.integers(1, 5)))
            for p, q in random.integers(0, 4, (6, 2))
        ]

        def crossing(begins: tuple[int, ...] | list[int]) -> int:
            return sum(w * abs(begins[q] - begins[p] + d) for p, q, d, w in links)

        best = min(crossing(begins) for begins in np.ndindex(5, 5, 5, 5))
        assert crossing(least_crossing([0, 0, 0, 0], links)) == best
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(minimum_cut, "MOST_VISITS", int(random.integers(0, 20)))
            assert best <= crossing(least_crossing([0, 0, 0, 0], links)) <= crossing([0, 0, 0, 0])


class TestParts:
    @given(seeds)
    @settings(max_examples=30, deadline=None)
    def test_a_tied_choice_costs_and_uses_the_same_in_the_whole(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        problem = chain(random, int(random.integers(8, 14)), hub=bool(seed % 2), limit=30.0)
        runs = find_runs(problem)
        tied = tie(take_apart(problem, runs, 1))
        assert runs
        assert len(tied.problem.costs) < len(problem.costs)
        for _ in range(5):
            choice = [int(random.integers(len(cost))) for cost in tied.problem.costs]
            objective, fits = evaluate(tied.problem, choice)
            whole, fits_whole = evaluate(problem, tied.expand(choice))
            assert fits == fits_whole
            assert objective == whole or objective == pytest.approx(whole)

    def test_the_size_of_the_parts_does_not_depend_on_depth(self) -> None:
        sizes = set()
        for copies in (10, 40):
            problem = chain(np.random.default_rng(5), copies, width=3, hub=True)
            parts = take_apart(problem, find_runs(problem), 1)
            sizes.add((len(parts.ends.costs), *(len(block.problem.costs) for block in parts.blocks)))
        assert len(sizes) == 1


class TestBound:
    @given(seeds)
    @settings(max_examples=40, deadline=None)
    def test_any_prices_give_a_bound(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        problem = chain(
            random, FOLDED_LEAST + 2, width=1, options=2, hub=bool(seed % 2), limit=float(random.integers(5, 30))
        )
        runs = find_runs(problem)
        parts = take_apart(problem, runs, 1)
        usage_prices = UsagePrices(np.array([0.0]), np.array([float(random.random())]))
        try:
            relaxation = Relaxation(parts, usage_prices)
        except InfeasibleError:
            assert optimum(problem) == math.inf
            return
        prices = [random.normal(size=2) for block in parts.blocks for _ in (*block.seams, *block.outer)]
        bound = -usage_prices.total() * problem.limit
        pieces = [(1, *priced_ends(relaxation, prices))]
        pieces += [(b.count, *priced_block(relaxation, i, prices)) for i, b in enumerate(parts.blocks)]
        for count, part, offset in pieces:
            bound += count * (optimum(part) + offset)
        assert bound <= optimum(problem) + 1e-6

    def test_message_passing_finds_prices_that_close_the_gap_of_a_chain(self) -> None:
        problem = chain(np.random.default_rng(7), 30, width=1)
        relaxation = Relaxation(take_apart(problem, find_runs(problem), 1), UsagePrices())
        pieces = Pieces(relaxation)
        for count in range(100):
            pieces.sweep(forward=count % 2 == 1)
        prices = pieces.prices
        bound = 0.0
        for count, (part, offset) in (
            (1, priced_ends(relaxation, prices)),
            (relaxation.parts.blocks[0].count, priced_block(relaxation, 0, prices)),
        ):
            bound += count * (optimum(part) + offset)
        assert bound <= flat_optimum(problem) + 1e-6
        assert bound >= 0.9 * flat_optimum(problem)

    def test_what_is_cheap_once_on_the_way_into_a_run_is_not_counted_out(self) -> None:
        """Blocks that stay as they are cost 1 each; the first few, which end elsewhere than they began, nothing."""
        free, states = 7, 10
        move = np.full((states, states), 100.0)
        move[range(free), range(1, free + 1)] = 0.0
        move[free, free] = 1.0
        move[[free, free + 1], [free + 1, free + 2]] = 0.0
        first, last = np.full(states, 100.0), np.full(states, 100.0)
        first[0] = last[free + 2] = 0.0
        length = 40
        costs = (first, *[np.zeros(states)] * (length - 2), last)
        problem = Problem(costs, tuple(Edge(i, i + 1, move) for i in range(length - 1)))
        tied = fold(problem)
        assert tied is not None
        best = length - 1 - free - 2
        incumbent = Incumbent(problem, 60.0, 1e-3, None)
        bounds = Bounds(tied.parts, UsagePrices())
        bounds.raise_bound(incumbent, 60.0, 0.003)
        assert incumbent.bound() <= best + 1e-6
        found = solve(problem, gap=1e-3)
        assert found.proven
        assert found.objective == pytest.approx(best)
        assert 0.3 * best <= found.lower_bound <= best + 1e-6


class TestSolve:
    @given(seeds)
    @settings(max_examples=25, deadline=None)
    def test_equals_the_optimum_of_short_chains(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        limit = math.inf if seed % 3 else float(random.integers(5, 40))
        problem = chain(random, FOLDED_LEAST + 3, width=1, options=2, hub=bool(seed % 2), limit=limit)
        expected = optimum(problem)
        try:
            solution = solve(problem, gap=0.0, time_limit=20.0)
        except InfeasibleError:
            assert expected == math.inf
            return
        assert solution.proven
        assert solution.objective == pytest.approx(expected)
        assert solution.lower_bound <= expected * (1 + 1e-9)
        assert evaluate(problem, solution.choice) == (solution.objective, True)

    @given(seeds)
    @settings(max_examples=6, deadline=None)
    def test_equals_the_flat_pipeline_on_deep_chains(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        problem = chain(random, 25, width=3, hub=bool(seed % 2))
        try:
            expected = flat_optimum(problem)
        except InfeasibleError:
            return
        solution = solve(problem, gap=0.0, time_limit=20.0)
        assert solution.proven
        assert solution.objective == pytest.approx(expected)

    def test_folding_is_told(self) -> None:
        problem = chain(np.random.default_rng(8), 40, width=3)
        solution = solve(problem)
        assert "folding" in solution.method
        assert solution.size["folded_nodes"] < solution.size["nodes"] / 3

    def test_what_does_not_repeat_is_solved_as_before(self) -> None:
        problem = chain(np.random.default_rng(8), 3, width=3)
        assert "folding" not in solve(problem).method

    def test_is_deterministic(self) -> None:
        problem = chain(np.random.default_rng(9), 40, width=3, hub=True)
        assert solve(problem).choice == solve(problem).choice


@pytest.mark.parametrize("nodes", [14, 15])
def test_blocks_that_cannot_choose_alike_tell_nothing_about_the_whole(nodes: int) -> None:
    """Neighbours differ in colour, and the first has one colour: the choice at hand is not proven by that."""
    colours, cost = np.array([0, 0, 1, 1]), np.array([1.0, 5.0, 1.0, 5.0])
    differ = np.where(colours[:, None] == colours, math.inf, 0.0)
    costs = (np.where(colours == 0, cost, math.inf), *[cost] * (nodes - 1))
    problem = Problem(costs, tuple(Edge(i, i + 1, differ) for i in range(nodes - 1)))
    assert fold(problem) is not None
    dear = tuple(2 * (i % 2) + 1 for i in range(nodes))
    assert evaluate(problem, dear) == (5.0 * nodes, True)
    found = solve(problem, gap=0.0, warm_starts=[dear])
    assert found.objective == found.lower_bound == nodes


def test_blocks_are_found_where_forward_and_backward_look_alike() -> None:
    """The backward visits the layers in reverse, so its nodes are numbered the other way round."""
    layers, cost, step, saved = 8, np.arange(3.0), np.eye(3), np.ones((3, 3))
    forward, backward = list(range(layers)), list(range(2 * layers - 1, layers - 1, -1))
    edges = [Edge(u, v, step) for u, v in pairwise([*forward, *reversed(backward)])]
    edges += [Edge(u, v, saved) for f, b in zip(forward, backward, strict=True) for u, v in ((f, b), (b, f))]
    (run,) = find_runs(Problem([cost] * 2 * layers, edges))
    assert run.copies.shape[1] == 2 and len(run.copies) >= layers - 3
    assert {tuple(sorted(row)) for row in run.copies.tolist()} <= set(zip(forward, backward, strict=True))


def test_blocks_of_every_tower_are_found() -> None:
    random = np.random.default_rng(0)
    towers = [chain(random, copies, width=width) for copies, width in ((12, 2), (9, 3), (7, 1))]
    costs: list[np.ndarray] = []
    edges: list[Edge] = []
    for tower in towers:
        edges += [Edge(e.u + len(costs), e.v + len(costs), e.cost) for e in tower.edges]
        costs += tower.costs
        edges += [Edge(len(costs) - 1, 0, np.eye(3))] if len(costs) > len(tower.costs) else []
    found = {run.copies.shape[1]: len(run.copies) for run in find_runs(Problem(costs, edges))}
    assert found == {2: 10, 3: 7, 1: 5}, "all but the first and the last block of each"
