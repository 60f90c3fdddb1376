"""Local search under a limit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopar.solver.dual.search import Search
from autopar.solver.integer.ilp import build
from autopar.solver.problem import Problem, Usage
from autopar.solver.reduce.graph import Graph, Row


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
