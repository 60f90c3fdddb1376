"""Hand-made training steps, in units of memory and time, for property tests of recomputation."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from autopar.ir import Graph, Input, Node, Output, TensorMeta, Value
from autopar.mesh import Cluster, Mesh
from autopar.planner import Options, Planned, plan_graph

UNIT = 1 << 20
SLACK = 1 << 10
"""Bytes that a budget allows for scalars, which nothing else counts."""

SCALAR = TensorMeta((), "float32")


def device() -> Cluster:
    """Return one device with a host that is too slow for offloading."""
    cluster = Cluster.load("dgx-h100").sized(1)
    return replace(cluster, host=replace(cluster.host, bandwidth_bytes_per_s=1.0))


def tensor(units: float) -> TensorMeta:
    return TensorMeta((int(units * UNIT) // 4,), "float32")


def planned(graph: Graph, budget: float | None = None, **options) -> Planned:
    asked = Options(memory_budget_bytes=None if budget is None else int(budget), gap=1e-9, **options)
    return plan_graph(graph, Mesh((1,)), device(), asked, compare=False)


def runs_again(plan: Planned) -> list[str]:
    return [op.node for op in plan.program.ops if op.kind == "compute" and op.name != op.node]


def chain(length: int) -> Graph:
    """Return ``length`` forward steps, of which the last gives the loss; each backward reads what its step read.

    A state takes one unit and a gradient half a unit, so the two gradients of a backward take as much as the state that
    a forward step makes.
    """
    nodes = [Node("a0", "placeholder", outputs=(tensor(1),))]
    nodes += [Node(f"a{i}", "test.step.default", (Value(f"a{i - 1}"),), outputs=(tensor(1),)) for i in range(1, length)]
    nodes.append(Node("loss", "test.step.default", (Value(f"a{length - 1}"),), outputs=(SCALAR,)))
    nodes.append(Node("tangent", "placeholder", outputs=(SCALAR,), phase="backward"))
    gradient = "tangent"
    for i in reversed(range(length)):
        reads = (Value(gradient), Value(f"a{i}"))
        gradient = f"g{i}"
        nodes.append(Node(gradient, "test.back.default", reads, outputs=(tensor(0.5),), phase="backward"))
    return Graph(
        tuple(nodes),
        (Input("a0", "input", "x"), Input("tangent", "tangent", "loss")),
        (Output(Value("loss"), "output", "loss"), Output(Value("g0"), "gradient", "input:x")),
        "chain",
    )


@st.composite
def steps(draw: st.DrawFn, most: int = 8) -> Graph:
    """Draw up to ``most`` forward ops of any size, some of them views, with a backward that reads any values."""
    sizes = st.sampled_from((1, 1, 2, 3, 5))
    units = {"x": draw(sizes)}
    nodes = [Node("x", "placeholder", outputs=(tensor(units["x"]),))]
    for i in range(draw(st.integers(2, most))):
        reads = draw(st.lists(st.sampled_from(sorted(units)), min_size=1, max_size=2, unique=True))
        name, view = f"f{i}", draw(st.integers(0, 5)) == 0
        units[name] = units[reads[0]] if view else draw(sizes)
        op, reads = ("aten.alias.default", reads[:1]) if view else ("test.step.default", reads)
        nodes.append(Node(name, op, tuple(map(Value, reads)), outputs=(tensor(units[name]),)))
    made = [n.name for n in nodes[1:]]
    nodes.append(Node("loss", "test.step.default", (Value(made[-1]),), outputs=(SCALAR,)))
    nodes.append(Node("tangent", "placeholder", outputs=(SCALAR,), phase="backward"))
    gradient = "tangent"
    for i in range(draw(st.integers(1, len(made)))):
        reads = draw(st.lists(st.sampled_from(made), max_size=2, unique=True))
        size = tensor(draw(sizes))
        nodes.append(
            Node(f"b{i}", "test.back.default", (Value(gradient), *map(Value, reads)), outputs=(size,), phase="backward")
        )
        gradient = f"b{i}"
    return Graph(
        tuple(nodes),
        (Input("x", "input", "x"), Input("tangent", "tangent", "loss")),
        (Output(Value("loss"), "output", "loss"), Output(Value(gradient), "gradient", "input:x")),
        "steps",
    )
