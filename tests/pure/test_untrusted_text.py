"""Cluster files, specs and constraints may hold anything: they are read as data, or refused by an error."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import autopar
from autopar.errors import AutoparError, MeshError, PlanError
from autopar.ir import Graph, Input, Node, Output, TensorMeta, Value
from autopar.mesh import Cluster, Mesh
from autopar.planner.problem.constraints import resolve
from autopar.plans.formulas import read_formula
from autopar.sharding import ShardingSpec

MEASURED = """
[measured]
overlap = 0.5
call_s = 1e-6

[[measured.collectives]]
kind = "all_reduce"
ranks_per_node = 8
nodes = 1
alpha_s = 2e-5
beta_s_per_byte = 1e-11
error = 0.05
bytes = [8, 65536]
seconds = [2e-5, 6e-5]
"""
LINES = (Cluster.load("dgx-h100").to_toml() + MEASURED).splitlines()
ODD = (
    "nan",
    "-1",
    "0",
    "1e999",
    "9" * 400,
    "9" * 5000,
    "true",
    '""',
    '"\\u007f\\u0000"',
    '"\U0001f600\\n[device]"',
    "[]",
    "[[1]]",
    "{}",
    "[nan, 1]",
    "1979-05-27",
    '"""',
    "0x10",
    "[" * 3000,
    '"all_reduce"',
    "2.5",
    "1e-320",
    "1e308",
)


@st.composite
def files(draw: st.DrawFn) -> str:
    """A cluster file in which some lines were changed, left out, repeated or moved."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        key = lines[at].partition(" = ")[0]
        changed = st.one_of(st.sampled_from(ODD), st.text(max_size=8)).map(lambda value, key=key: f"{key} = {value}")
        replacement = draw(st.one_of(changed, st.just(""), st.sampled_from(LINES), st.text(max_size=12)))
        lines[at : at + draw(st.integers(0, 1))] = [replacement]
    return "\n".join(lines)


@given(st.one_of(files(), files(), st.text()))
@settings(max_examples=60)
@example("\n".join(["a = " + "[" * 100_000]))
def test_a_cluster_file_is_a_cluster_that_reads_back_or_an_error(text) -> None:
    try:
        cluster = Cluster.from_toml(text)
    except AutoparError as error:
        assert error.what and error.hint  # noqa: PT017
        return
    assert Cluster.from_toml(cluster.to_toml()) == cluster


ODD_NAMES = ("x" * 5000, "a\0b", "dgx-h100:" + "9" * 5000, "dgx-h100:\u0663", "a\0.toml", "/")


@given(st.one_of(st.text(), st.sampled_from(ODD_NAMES)))
def test_a_name_is_a_cluster_or_an_error(name) -> None:
    try:
        cluster = Cluster.load(name)
    except AutoparError:
        return
    assert cluster.name == name.partition(":")[0]


@given(st.binary(max_size=64))
@settings(max_examples=20)
def test_a_file_of_any_bytes_is_a_cluster_or_an_error(tmp_path_factory, data) -> None:
    path = tmp_path_factory.mktemp("cluster") / "cluster.toml"
    path.write_bytes(data)
    with pytest.raises(MeshError):
        Cluster.load(path)
    with pytest.raises(MeshError, match="cannot be read"):
        Cluster.load(path.parent / "missing.toml")
    with pytest.raises(MeshError, match="cannot be read"):
        Cluster.load(f"{path.parent}/")


NEARLY = st.text("RS0123456789()P, -summinaxvg²٣", max_size=12)


ODD_SPECS = ("S(" + "9" * 5000 + ")", "S" + "9" * 5000, "R" * 3000, "\u2003", "R P1\n")


@given(st.one_of(NEARLY, st.text(), st.sampled_from(ODD_SPECS)))
def test_a_text_is_a_spec_that_reads_back_or_an_error(text) -> None:
    try:
        spec = ShardingSpec.parse(text)
    except AutoparError:
        return
    assert ShardingSpec.parse(str(spec)) == spec


def product() -> Graph:
    v, f = Value, "float32"
    nodes = (
        Node("w", "placeholder", outputs=(TensorMeta((8, 4), f),)),
        Node("x", "placeholder", outputs=(TensorMeta((2, 8), f),)),
        Node("mm", "aten.mm.default", (v("x"), v("w")), outputs=(TensorMeta((2, 4), f),), module="layer"),
    )
    inputs = (Input("w", "parameter", "layer.weight", trainable=True), Input("x", "input", "x"))
    return Graph(nodes, inputs, (Output(v("mm"), "output", "0"),))


GLOBS = ("layer.*", "*", "layer.weight", "input:x", "output:0", "[", "[z-a]", "[!]*", "?" * 9)
STYLED = ("column", "row 0", "shard 0 1", "column " + "9" * 5000, "row \u00b2", "shard 1 1")
NAMES = st.one_of(st.sampled_from(GLOBS), st.text(max_size=6))
TEXTS = st.one_of(NEARLY, st.sampled_from(STYLED), st.text(max_size=6))


@given(st.dictionaries(NAMES, TEXTS, max_size=3))
def test_constraints_are_specs_that_fit_or_an_error(constraints) -> None:
    graph, mesh = product(), Mesh((2, 2))
    try:
        forced = resolve(graph, mesh, constraints, {})
    except AutoparError:
        return
    for name, spec in (*forced.placeholders.items(), *((v.node, s) for v, s in forced.values.items())):
        spec.check(len(graph.by_name[name].outputs[0].shape), mesh)


BAD_FORMULAS = (
    "__import__('os').getpid()",
    "batch.__class__",
    "().__class__",
    "9**9**9",
    "batch**9999",
    "2**64",
    "f'{batch}'",
    "other",
    "[batch]",
    "lambda: 1",
    "(" * 500,
    "-" * 100_000 + "1",
    "1.5",
    "True",
    "ceiling()",
    "Max(key=batch)",
    "x" * 100_000,
    "\0",
    "batch if batch else 1",
    "(1 + 1)**9",
)


@pytest.mark.parametrize("text", BAD_FORMULAS)
def test_a_text_that_is_no_arithmetic_is_no_formula(text) -> None:
    with pytest.raises(PlanError, match="not a formula"):
        read_formula(text, ["batch"])


def test_formulas_are_read_as_sympy_writes_them() -> None:
    sympy = pytest.importorskip("sympy")
    batch, length = map(sympy.Symbol, ("batch", "length"))
    for formula in (batch**2 * length / 2 - 3 * batch + 4, 8 * sympy.ceiling(batch / 4) * length, sympy.Integer(-7)):
        assert read_formula(str(formula), ["batch", "length"]) == formula


CALLS = re.compile(r"\b(exec|eval|compile|__import__|sympify|parse_expr|pickle\.\w+|(marshal|yaml|torch)\.load)\(")
EXECUTES = {"codegen/load.py": {"exec", "compile"}}
"""The one place that executes a text, which autopar has emitted or a user has given by ``source=``."""


def test_the_package_executes_no_text_and_unpickles_nothing() -> None:
    package = Path(autopar.__file__).parent
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text if CALLS.search(text) else "")
        for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
            name = ast.unparse(call.func)
            executes = name.removeprefix("sympy.") in ("exec", "eval", "compile", "__import__", "sympify", "parse_expr")
            allowed = EXECUTES.get(path.relative_to(package).as_posix(), set())
            assert not executes or name in allowed, f"{path}:{call.lineno}"
            assert name not in ("pickle.load", "pickle.loads", "marshal.loads", "yaml.load"), f"{path}:{call.lineno}"
            if name == "torch.load":
                assert "weights_only=True" in map(ast.unparse, call.keywords), f"{path}:{call.lineno}"
