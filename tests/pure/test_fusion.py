"""What a fusing back end keeps in registers, on small graphs with the answer written out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.ir import Graph, Node, Output, TensorMeta, Value
from autopar.mesh import Cluster, Mesh
from autopar.planner.graphs.fused_chains import FusedTraffic, fused_traffic
from autopar.planner.pricing.prices import Prices
from autopar.strategies import strategies

META = TensorMeta((64, 64), "float32")


def node(name, op, *inputs, phase="forward", **kwargs):
    args = tuple(Value(i) if isinstance(i, str) else i for i in inputs)
    return Node(name, op, args, tuple(kwargs.items()), (META,), phase)


def graph(*nodes, results=()):
    return Graph(tuple(nodes), (), tuple(Output(Value(r), "output", r) for r in results))


X = node("x", "placeholder")


def test_a_chain_reads_its_input_and_writes_its_result_once():
    g = graph(
        X,
        node("a", "aten.tanh.default", "x"),
        node("b", "aten.exp.default", "a"),
        node("c", "aten.mul.Tensor", "b", "x"),
        results=["c"],
    )
    assert fused_traffic(g) == {
        "a": FusedTraffic(frozenset({0}), frozenset(), leads=True),
        "b": FusedTraffic(frozenset(), frozenset(), leads=False),
        "c": FusedTraffic(frozenset(), frozenset({0}), leads=False),
    }


def test_a_contraction_parts_two_groups_even_where_another_path_joins_them():
    g = graph(
        X,
        node("a", "aten.tanh.default", "x"),
        node("m", "aten.mm.default", "a", "x"),
        node("b", "aten.add.Tensor", "m", "a"),
        results=["b"],
    )
    found = fused_traffic(g)
    assert "m" not in found
    assert found["a"] == FusedTraffic(frozenset({0}), frozenset({0}), leads=True)
    assert found["b"] == FusedTraffic(frozenset({0, 1}), frozenset({0}), leads=True)


def test_a_view_inside_a_chain_costs_nothing():
    g = graph(
        X,
        node("a", "aten.tanh.default", "x"),
        node("v", "aten.transpose.int", "a", 0, 1),
        node("b", "aten.exp.default", "v"),
        results=["b"],
    )
    assert fused_traffic(g)["b"] == FusedTraffic(frozenset(), frozenset({0}), leads=False)
    assert fused_traffic(g)["a"].writes == frozenset()


def test_what_the_backward_reads_is_written_and_read_again():
    g = graph(
        X,
        node("a", "aten.tanh.default", "x"),
        node("b", "aten.exp.default", "a"),
        node("c", "aten.neg.default", "a", phase="backward"),
        results=["b", "c"],
    )
    found = fused_traffic(g)
    assert found["a"].writes == {0}
    assert found["c"] == FusedTraffic(frozenset({0}), frozenset({0}), leads=True)


def test_a_reduction_joins_the_chain_before_it():
    g = graph(X, node("a", "aten.tanh.default", "x"), node("s", "aten.sum.dim_IntList", "a", (0,)), results=["s"])
    assert fused_traffic(g)["s"] == FusedTraffic(frozenset(), frozenset({0}), leads=False)


def chain(length):
    nodes = [X]
    for i in range(length):
        nodes.append(node(f"n{i}", "aten.tanh.default", nodes[-1].name))
    return graph(*nodes, results=[nodes[-1].name])


def seconds(g, backend, cluster="dgx-h100"):
    prices = Prices(Mesh((1,)), Cluster.load(cluster), backend)
    compute = [n for n in g.nodes if n.op != "placeholder"]
    return math.fsum(prices.node_seconds(g, n, strategies(n, (META,), Mesh((1,))))[0] for n in compute)


@pytest.mark.parametrize("cluster", ["dgx-h100", "cpu-2"])
def test_a_fused_chain_costs_what_its_first_op_costs_however_long_it_is(cluster):
    one = seconds(chain(1), "eager", cluster)
    assert seconds(chain(1), "inductor", cluster) == pytest.approx(one)
    assert seconds(chain(9), "inductor", cluster) == pytest.approx(one)
    assert seconds(chain(9), "eager", cluster) == pytest.approx(9 * one)


def test_the_eager_back_end_fuses_nothing():
    prices = Prices(Mesh((1,)), Cluster.load("dgx-h100"))
    g = chain(3)
    each = [prices.node_seconds(g, n, strategies(n, (META,), Mesh((1,)))) for n in g.nodes[1:]]
    assert np.ptp(np.concatenate(each)) == 0
