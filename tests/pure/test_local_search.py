"""Local search keeps what the neighbours of a hub cost it, and finds what it would find by adding up anew."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.dual.search import Search
from autopar.solver.integer.ilp import build
from autopar.solver.problem import Array, Edge, Problem, Usage
from autopar.solver.reduce.graph import Graph, Row

LEAVES = 40


def star(seed: int, barred: float) -> Graph:
    """One node that all others are beside, with some pairs forbidden."""
    random = np.random.default_rng(seed)

    def matrix() -> Array:
        drawn = random.uniform(0.0, 1.0, (3, 2))
        return np.where(random.uniform(size=drawn.shape) < barred, np.inf, drawn)

    costs = (random.uniform(0.0, 1.0, 3), *(random.uniform(0.0, 1.0, 2) for _ in range(LEAVES)))
    return Graph(Problem(costs, tuple(Edge(0, leaf, matrix()) for leaf in range(1, LEAVES + 1))))


def added_up(search: Search, without: int) -> Array:
    around = search.graph.neighbours[0].items()
    columns = [np.minimum(matrix[:, search.choice[leaf]], 1e30) for leaf, matrix in around if leaf != without]
    return np.asarray(search.graph.costs[0] + np.sum(columns, axis=0))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.02]), st.data())
def test_a_hub_knows_its_conditional_costs_after_any_moves(seed: int, barred: float, data: st.DataObject):
    search = Search(star(seed, barred), dict.fromkeys(range(LEAVES + 1), 0))
    for _ in range(12):
        if data.draw(st.booleans()):
            node = data.draw(st.integers(0, LEAVES))
            search.take(node, data.draw(st.integers(0, len(search.graph.costs[node]) - 1)))
        leaf = data.draw(st.integers(1, LEAVES))
        np.testing.assert_allclose(search.conditional(0, (leaf,)), added_up(search, leaf), rtol=1e-12)


@given(left=st.sampled_from([0.0, 1e-305, 1e-12, 1e-3, 1e3]), size=st.floats(1e-3, 1e15))
def test_a_limit_of_which_nothing_is_left_overflows_nowhere(left: float, size: float) -> None:
    problem = Problem((np.array([3.0, 0.0]),) * 2, (), (Usage(0, np.array([0.0, size]), 0, 1),), limit=size)
    graph = Graph(problem)
    graph.add_rows(1, [Row(0, 1, np.array([0.0, size]))])
    graph.limits = np.array([left])
    search = Search(graph, {0: 1, 1: 1})
    with np.errstate(over="raise", invalid="raise"):
        search.improve_nodes()
        assert np.isfinite(build(graph, 3.0).values).all()
