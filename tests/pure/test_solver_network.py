"""An edge as a network: the cheapest way between two options costs what the edge says, in fewer arcs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver.integer.network import Network, network_of
from autopar.solver.problem import Array


def distances(arcs: Array) -> Array:
    """Floyd and Warshall's: between all pairs of nodes, by any number of arcs."""
    found = arcs.copy()
    np.fill_diagonal(found, np.minimum(found.diagonal(), 0.0))
    for k in range(len(found)):
        found = np.minimum(found, found[:, k][:, None] + found[k])
    return found


def told(network: Network) -> Array:
    """What the cheapest flow from each option of the first end to each of the second costs."""
    arcs = np.full((network.nodes, network.nodes), math.inf)
    arcs[network.tails, network.heads] = network.costs
    return distances(arcs)[np.ix_(network.leaves, network.arrives)] + network.paid


def steps(random: np.random.Generator, nodes: int, share: float) -> Array:
    """Distances in a random graph, as redistributions between specs have."""
    there = random.random((nodes, nodes)) < share
    return distances(np.where(there, random.integers(1, 9, (nodes, nodes)).astype(float), math.inf))


@given(st.integers(0, 2**32 - 1), st.sampled_from(["steps", "any", "offset", "forward and backward"]))
@settings(max_examples=120, deadline=None)
def test_the_cheapest_way_costs_what_the_edge_says(seed: int, kind: str) -> None:
    random = np.random.default_rng(seed)
    nodes = int(random.integers(1, 9))
    matrix = steps(random, nodes, 0.4)
    if kind == "any":
        matrix = np.where(random.random((nodes, nodes)) < 0.2, math.inf, random.integers(0, 5, (nodes, nodes)))
    elif kind == "offset":
        matrix = matrix + random.random((nodes, 1)) + random.random(nodes)
    elif kind == "forward and backward":
        matrix = matrix + steps(random, nodes, 0.7).T
    matrix = matrix[random.integers(0, nodes, int(random.integers(1, 12)))][:, random.integers(0, nodes, nodes)]
    network = network_of(matrix)
    np.testing.assert_allclose(told(network), matrix, rtol=1e-9, atol=1e-9)
    for a, b in np.argwhere(np.isfinite(matrix)).tolist():
        way = network.way(a, b)
        ends = [int(network.leaves[a]), *network.heads[way].tolist()]
        assert network.tails[way].tolist() == ends[:-1]
        assert ends[-1] == network.arrives[b]
        assert network.costs[way].sum() + network.paid[b] == pytest.approx(matrix[a, b])


def test_what_goes_step_by_step_has_few_arcs() -> None:
    chain = np.abs(np.arange(20.0)[:, None] - np.arange(20.0))
    network = network_of(chain)
    assert network.nodes == 20
    assert len(network.costs) == 2 * 19  # to and from each neighbour


def test_a_way_that_is_forbidden_is_not_opened_by_others() -> None:
    """From 0 to 2 by way of 1 would be finite."""
    matrix = np.array([[0.0, 1.0, math.inf], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    assert told(network_of(matrix))[0, 2] == math.inf
