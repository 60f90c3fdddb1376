"""Constraints in words: what replicate, shard, column and row mean for weights, biases and activations."""

from __future__ import annotations

import pytest

from autopar.errors import ConstraintError, SpecError
from autopar.ir import Graph, Input, Node, Output, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.planner.graphs.dataflow import Dataflow
from autopar.planner.problem.constraints import resolve, without_constraint
from autopar.planner.problem.styles import weight_dims

MESH = Mesh((2, 4), ("dp", "tp"))


def tensor(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "float32")


def linear() -> Graph:
    """x[8, 12] @ t(weight[16, 12]) + bias[16], as a linear layer stores its weight; and a table that is looked up."""
    v = Value
    nodes = (
        Node("weight", "placeholder", outputs=(tensor(16, 12),)),
        Node("bias", "placeholder", outputs=(tensor(16),)),
        Node("table", "placeholder", outputs=(tensor(40, 12),)),
        Node("ids", "placeholder", outputs=(TensorMeta((8,), "int64"),)),
        Node("x", "autopar.lookup.default", (v("table"), v("ids")), outputs=(tensor(8, 12),), module="embed"),
        Node("t", "aten.t.default", (v("weight"),), outputs=(tensor(12, 16),)),
        Node("mm", "aten.mm.default", (v("x"), v("t")), outputs=(tensor(8, 16),)),
        Node("add", "aten.add.Tensor", (v("mm"), v("bias")), outputs=(tensor(8, 16),), module="layer"),
    )
    inputs = (
        Input("weight", "parameter", "layer.weight", trainable=True),
        Input("bias", "parameter", "layer.bias"),
        Input("table", "parameter", "embed.weight"),
        Input("ids", "input", "ids"),
    )
    return Graph(nodes, inputs, (Output(v("add"), "output", "0"),))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return linear()


def spec_of(graph: Graph, name: str, style: str) -> str:
    forced = resolve(graph, MESH, {name: style}, {})
    (spec,) = (*forced.placeholders.values(), *forced.outputs.values(), *forced.values.values())
    return str(spec)


@pytest.mark.parametrize(
    ("name", "style", "spec"),
    [
        ("layer.weight", "column", "S1R"),  # stored [out, in], read transposed: out is what the product keeps
        ("layer.weight", "row", "RS1"),
        ("layer.weight", "replicate", "RR"),
        ("layer.weight", "shard", "S01R"),
        ("layer.weight", "column dp", "S0R"),
        ("layer.weight", "row 0 1", "RS01"),
        ("layer.bias", "column", "S1"),
        ("layer.bias", "row", "R"),
        ("embed.weight", "row", "S1R"),  # by vocabulary
        ("embed.weight", "column", "RS1"),
        ("embed.weight", "shard", "S01R"),
        ("input:ids", "shard", "S01"),
        ("input:ids", "shard dp", "S0"),
        ("layer", "shard dp", "S0R"),
        ("output:0", "shard tp", "S1R"),
        ("mm", "column", "RS1"),  # a node
    ],
)
def test_a_style_means_a_spec(graph: Graph, name: str, style: str, spec: str):
    assert spec_of(graph, name, style) == spec


def test_shard_takes_the_largest_dim_that_divides_evenly(graph: Graph):
    assert spec_of(graph, "embed.weight", "shard") == "S01R"  # 40 and 12 by 8
    assert spec_of(graph, "layer.bias", "shard") == "S01"


def test_the_dims_of_a_weight_are_found_through_its_transpose(graph: Graph):
    assert weight_dims(Dataflow(graph), Value("weight")) == (0, 1)
    assert weight_dims(Dataflow(graph), Value("table")) == (1, 0)


def test_column_and_row_of_a_module_are_of_its_parameters_too(graph: Graph):
    column, row = (resolve(graph, MESH, {"layer": style}, {}) for style in ("column", "row"))
    assert {k: str(s) for k, s in column.placeholders.items()} == {"weight": "S1R", "bias": "S1"}
    assert [str(s) for s in column.values.values()] == ["RS1"]
    assert {k: str(s) for k, s in row.placeholders.items()} == {"weight": "RS1", "bias": "R"}
    assert [str(s) for s in row.values.values()] == ["RR"]
    with pytest.raises(ConstraintError, match=r"contradict each other on layer\.weight"):
        resolve(graph, MESH, {"layer": "column", "layer.weight": "row"}, {})


def test_other_styles_of_a_module_are_of_what_it_returns(graph: Graph):
    assert not resolve(graph, MESH, {"layer": "shard"}, {}).placeholders


def test_leaving_one_name_out_keeps_the_rest_of_what_covers_it(graph: Graph):
    kept = without_constraint(graph, MESH, {"layer": "column", "embed.*": "row"}, {}, "layer.weight")
    assert kept == {"layer": "RS1", "layer.bias": "S1", "embed.*": "row"}
    assert without_constraint(graph, MESH, {"*.weight": "S1R"}, {}, "layer.weight") == {"embed.weight": "S1R"}


def test_a_glob_gives_each_tensor_its_own_spec(graph: Graph):
    forced = resolve(graph, MESH, {"*.weight": "row", "layer.bias": "row"}, {})
    assert {k: str(s) for k, s in forced.placeholders.items()} == {"weight": "RS1", "table": "S1R", "bias": "R"}


def test_an_axis_that_the_mesh_lacks_is_refused(graph: Graph):
    with pytest.raises(ConstraintError, match="names an axis that the mesh does not have") as error:
        resolve(graph, MESH, {"layer.weight": "column pp"}, {})
    assert "one of dp, tp" in error.value.hint


def test_a_style_and_a_spec_that_differ_contradict_each_other(graph: Graph):
    resolve(graph, MESH, {"layer.weight": "column", "layer.w*": "S1R"}, {})
    with pytest.raises(ConstraintError, match="contradict"):
        resolve(graph, MESH, {"layer.weight": "column", "layer.w*": "RS1"}, {})


def test_a_word_that_is_neither_spec_nor_style_gets_the_style_that_was_meant():
    with pytest.raises(SpecError, match="neither a spec nor a style") as caught:
        resolve(linear(), MESH, {"layer.weight": "colum"}, {})
    assert "did you mean 'column'" in caught.value.hint


def test_a_spec_that_is_wrong_says_what_is_wrong_with_it():
    with pytest.raises(SpecError, match="used twice"):
        resolve(linear(), MESH, {"layer.weight": "S0S0"}, {})


def test_equal_ops_have_equal_kinds_whatever_their_operands():
    graph = linear()
    again = Node("add_1", "aten.add.Tensor", (Value("add"), Value("bias")), outputs=(tensor(8, 16),))
    kinds = Graph((*graph.nodes, again), graph.inputs, graph.outputs).kinds
    assert kinds["add"] == kinds["add_1"]
    assert len({kinds[n] for n in ("t", "mm", "add", "x")}) == 4


def test_what_no_placements_say_is_refused_of_what_users_hold_alone(graph: Graph):
    assert spec_of(graph, "layer.weight", "S10R") == "S10R"
    assert spec_of(graph, "embed", "RS10") == "RS10"
    with pytest.raises(ConstraintError, match=r"No DTensor has the spec of the constraint on layer\.weight"):
        resolve(graph, MESH, {"layer.weight": "RS10"}, {})


def test_of_a_tied_weight_the_module_by_which_it_is_named_tells_what_its_columns_are():
    v = Value
    nodes = (
        Node("table", "placeholder", outputs=(tensor(40, 16),)),
        Node("ids", "placeholder", outputs=(TensorMeta((8,), "int64"),)),
        Node("x", "autopar.lookup.default", (v("table"), v("ids")), outputs=(tensor(8, 16),), module="embed"),
        Node("t", "aten.t.default", (v("table"),), outputs=(tensor(16, 40),)),
        Node("mm", "aten.mm.default", (v("x"), v("t")), outputs=(tensor(8, 40),), module="head"),
    )
    inputs = Input("table", "parameter", "embed.weight", trainable=True), Input("ids", "input", "ids")
    tied, aliases = Graph(nodes, inputs, (Output(v("mm"), "output", "0"),)), {"head.weight": "embed.weight"}
    for name, spec in {"embed": "RS1", "embed.weight": "RS1", "head": "S1R", "head.weight": "S1R"}.items():
        forced = resolve(tied, MESH, {name: "column"}, aliases)
        assert str(forced.placeholders["table"]) == spec
