"""Plans know the kernels of ours: what they cost, where they run, and their source; programs by them are exact."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autopar
from autopar import kernels, passes, planner
from autopar.arguments import canonical_names
from autopar.ir import TensorMeta
from autopar.mesh import Cluster, Mesh
from autopar.planner.footprint.implementations import KERNELS, implementation
from autopar.planner.graphs.kernel_patterns import fusions
from autopar.planner.pricing.prices import Prices
from autopar.planner.schedule.kernel_marks import mark_kernels
from autopar.runtime.simulation import Simulation, simulate_program
from autopar.strategies import strategies
from tests.cpu.model_checks import (
    assert_equal,
    assert_equals_one_device,
    cluster_where_sharding_pays,
    run,
    subject,
    tensor_parallel,
)
from tests.models import ZOO

triton = pytest.importorskip("triton")

from tests import triton_interpreter  # noqa: E402, F401


def cluster(device: str, ranks: int = 2) -> Cluster:
    made = cluster_where_sharding_pays().sized(ranks)
    named = dataclasses.replace(made.device, name="a CPU" if device == "cpu" else "a slow GPU")
    return dataclasses.replace(made, device=named)


def planned(name: str, device: str, dtype=torch.float32) -> planner.Planned:
    of = subject(name, dtype)
    options = planner.Options(
        constraints=tensor_parallel(name, of, (2,)), aliases=canonical_names(of.model), time_limit_s=30, gap=1e-3
    )
    return planner.plan_graph(of.capture.graph, Mesh((2,)), cluster(device), options, compare=False)


def metas_of(of, node) -> list:
    return [of.capture.graph.meta(v) for v in node.inputs]


def used(program) -> set[str]:
    return {name for op in program.ops for name in op.kernels}


def test_a_gpu_runs_kernels_for_a_cut_vocabulary_and_a_cpu_none() -> None:
    on_gpu = used(planned("llama", "cuda").program)
    # Rows of 32 elements are too short for a sort of their indices to pay.
    assert {"lookup", "statistics", "nll", "nll_backward", "add_norm"} <= on_gpu
    assert on_gpu <= set(kernels.KERNELS) - {"lookup_backward", "sumexp"}
    assert not used(planned("llama", "cpu").program)
    assert not used(planned("mlp", "cuda", torch.float64).program)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_of_two_ways_to_run_an_op_the_one_that_moves_less_is_taken(dtype) -> None:
    """And with it no strategy costs more than by the eager one."""
    of, mesh = subject("llama", torch.float32), Mesh((2, 2))
    nodes = [n for n in of.capture.graph.nodes if n.packet in KERNELS]
    assert {n.packet for n in nodes} == set(KERNELS) - {"autopar.linear_nll", "autopar.linear_nll_backward"}
    less = 0
    for node in nodes:
        as_dtype = [m if m.dtype == "int64" else TensorMeta(m.shape, dtype) for m in metas_of(of, node)]
        made = tuple(None if m is None else TensorMeta(m.shape, dtype) for m in node.outputs)
        cast = dataclasses.replace(node, outputs=made)
        for option in strategies(node, tuple(metas_of(of, node)), mesh):
            name, moved = implementation(cast, option, as_dtype, mesh, "cuda")
            assert moved > 0
            assert not (dtype == "float64" and name)
            less += bool(name)
            assert implementation(cast, option, as_dtype, mesh, "cpu")[0] == ""
    assert bool(less) == (dtype != "float64")


def test_the_problem_prices_the_kernel() -> None:
    """On a GPU a cut vocabulary's lookup costs what it moves, in float64 the passes of the eager one."""
    of, mesh = subject("llama", torch.float32), Mesh((2,))
    node = next(n for n in of.capture.graph.nodes if n.packet == "autopar.lookup")
    metas = metas_of(of, node)
    cut = next(o for o in strategies(node, tuple(metas), mesh) if o.inputs[0].dims[0])
    wide = [TensorMeta(m.shape, "float64") if m.dtype == "float32" else m for m in metas]
    double = dataclasses.replace(node, outputs=(TensorMeta(node.outputs[0].shape, "float64"),))
    ours, theirs = implementation(node, cut, metas, mesh, "cuda"), implementation(double, cut, wide, mesh, "cuda")
    assert (ours[0], theirs[0]) == ("lookup", "")
    assert theirs[1] > 3 * ours[1]


def by_kernels(lowered, of, mesh: Mesh) -> tuple[Simulation, set[str]]:
    """A program on triton's interpreter, and which kernels were launched."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported before TRITON_INTERPRET was set")
    launched, run_kernel = set(), kernels.run
    with kernels.forced(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "run", lambda kernel, *a, **k: launched.add(kernel) or run_kernel(kernel, *a, **k))
        return simulated(lowered, of, mesh), launched


def simulated(lowered, of, mesh: Mesh) -> Simulation:
    outputs, rest = simulate_program(lowered, of.capture.graph, mesh, of.named(), 0)
    return dataclasses.replace(rest, outputs=outputs)


def calls(lowered, name: str) -> int:
    graphs = (lowered.forward.graph, lowered.backward.graph)
    return sum(str(n.target) == f"autopar.{name}.default" for g in graphs for n in g.nodes)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", "bfloat16"), *(pytest.param(n, "float32", marks=pytest.mark.slow) for n in ("gpt2", "llama"))],
)
def test_a_program_by_kernels_is_the_eager_program(name, dtype) -> None:
    """On the interpreter, whole steps with norms behind residuals, cut vocabularies and packed exchanges."""
    of, mesh = subject(name, getattr(torch, dtype)), Mesh((2,))
    plan = planned(name, "cuda", getattr(torch, dtype))
    lowered = passes.lower(plan.program, of.capture.graph, mesh)
    eager, composed = simulated(lowered, of, mesh), passes.compose(lowered, of.capture.graph)
    found, launched = by_kernels(composed, of, mesh)
    assert launched >= {"lookup", "lookup_backward", "statistics", "nll", "nll_backward", "add_norm", "norm_backward"}
    # Every norm is in a kernel, but that of GPT-2 behind the embeddings, whose sum broadcasts. So is every gradient but
    # that of one, whose sum a plan may take behind a collective.
    norms = {"gpt2": 4, "llama": 5}[name]
    assert calls(composed, "add_norm") == norms and calls(composed, "norm_backward") in (norms - 1, norms)
    # What two bfloat16 programs round apart: a dozen units in the last place of the largest gradient.
    tolerance = 2e-5 if dtype == "float32" else 5e-2
    assert_equal(found, eager, tolerance)
    assert_equal(simulated(composed, of, mesh), eager, tolerance)


def test_a_cut_vocabulary_is_read_once_for_its_statistics() -> None:
    """Each rank's sum is for its own maximum, and follows the maximum of all."""
    of, mesh = subject("llama", torch.float32), Mesh((2,))
    found = run(of, (2,), search="baseline:TP", cluster=cluster("cuda")).planned
    lowered = passes.lower(found.program, of.capture.graph, mesh)
    composed = passes.compose(lowered, of.capture.graph)
    assert calls(composed, "rescaled") == 1
    result, launched = by_kernels(composed, of, mesh)
    assert "statistics" in launched and "sumexp" not in launched
    assert_equal(result, simulated(lowered, of, mesh), 2e-5)


@pytest.mark.parametrize(
    ("name", "search"),
    [
        ("llama", "random:1"),
        ("gpt2", "random+recompute:3"),
        *(
            pytest.param(*c, marks=pytest.mark.slow)
            for c in [
                ("gpt2", "random:1"),
                ("gpt2", "random:2"),
                ("llama", "random:2"),
                ("llama", "random+recompute:3"),
            ]
        ),
    ],
)
def test_any_plan_with_fused_ops_is_exact(name, search) -> None:
    """Where a redistribution stands between the ops of a kernel they run, and cost, one by one."""
    of = subject(name, torch.float32)
    ran = run(of, (2, 2), search=search, cluster=cluster("cuda", 4))
    assert_equals_one_device(of, ran.result, torch.float32)
    graph, prices = of.capture.graph, Prices(Mesh((2, 2)), cluster("cuda", 4))
    apart = 0
    for op in ran.planned.program.ops:
        fusion = prices.fused(graph).of_node.get(op.node) if op.kind == "compute" else None
        if fusion is not None and fusion.kernel not in op.kernels:
            assert op.seconds == prices.seconds_alone(graph, graph.by_name[op.node], op.strategy)
            apart += 1
    assert apart


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_fused_kernel_costs_one_pass_over_memory(name) -> None:
    """What its ops read of others and write for others, and one launch; in float64 each op is by itself."""
    graph, mesh = subject(name, torch.float32).capture.graph, Mesh((2,))
    prices = Prices(mesh, cluster("cuda"))
    launch_s, s_per_byte = prices.compute.copy_line()
    found = [f for f in fusions(graph) if f.kernel != "statistics"]
    assert {f.kernel for f in found} == {"add_norm", "norm_backward"}
    for fusion in found:
        nodes = [graph.by_name[n] for n in fusion.nodes]
        whole = [strategies(n, tuple(map(graph.meta, n.inputs)), mesh)[0] for n in nodes]
        assert all(s.is_replicated for o in whole for s in (*o.inputs, *o.outputs) if s is not None)
        seconds = sum(float(prices.node_seconds(graph, n, (o,))[0]) for n, o in zip(nodes, whole, strict=True))
        moved = sum(graph.meta(v).bytes for _, v in fusion.reads)
        moved += sum(graph.meta(v).bytes for _, v in fusion.writes if _read_elsewhere(graph, fusion, v))
        assert seconds == pytest.approx(launch_s + moved * s_per_byte)
        alone = sum(prices.seconds_alone(graph, n, o) for n, o in zip(nodes, whole, strict=True))
        assert seconds < alone
    assert not fusions(subject(name, torch.float64).capture.graph)
    assert not Prices(mesh, cluster("cpu")).fused(graph).all


def _read_elsewhere(graph, fusion, value) -> bool:
    return any(n.name not in fusion.nodes for n, _ in graph.consumers.get(value, ())) or any(
        o.value == value for o in graph.outputs
    )


def test_the_search_pays_for_a_redistribution_inside_a_kernel() -> None:
    """The objective is what the program takes: no use inside a kernel is cheaper than the program's ops apart."""
    plan = planned("gpt2", "cuda")
    assert plan.timeline.seconds == pytest.approx(plan.solution.objective, rel=1e-3)


def test_a_plan_shows_the_source_of_its_kernels() -> None:
    model = torch.nn.Embedding(64, 32)
    plan = autopar.plan(
        model, torch.empty(4, 8, dtype=torch.int64), mesh=(2,), cluster="dgx-h100", constraints={"weight": "S0R"}
    )
    assert "lookup" in plan.kernels
    assert "@triton.jit" in plan.kernels["lookup"]
    assert "Triton kernel lookup" in plan.source
    again = autopar.Plan.from_json(plan.to_json())
    assert again.kernels == plan.kernels
    assert not autopar.plan(model, torch.empty(4, 8, dtype=torch.int64), mesh=(2,), cluster="cpu-2").kernels


DRIVER = """
import step
import triton_interpreter  # of tests

launched = set()
for name, (make, *rest) in step.TABLE.items():
    step.TABLE[name] = (lambda name=name, make=make: launched.add(name) or make(), *rest)
step.main(vars(step))
print(*(launched or ["none"]))
"""


@pytest.mark.parametrize("interpreted", [False, True], ids=["eager", "by kernels"])
def test_an_emitted_file_has_its_kernels(interpreted, tmp_path) -> None:
    """With torch and triton alone; where neither GPU nor interpreter is there, by the eager code beside them."""
    model, inputs = ZOO["gpt2"].made(torch.float32, 0.0)
    plan = autopar.plan(model, inputs, mesh=(1,), cluster=cluster("cuda", 1), time_limit=10.0)
    assert {"add_norm", "norm_backward", "statistics"} <= set(plan.kernels)
    script = plan.emit(tmp_path / "step.py")
    text = script.read_text()
    assert all(f"def {name}_kernel(" in text for name in plan.kernels)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    torch.save(dict(inputs), tmp_path / "batch.pt")
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['autopar'] = None\n")
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": paths, "MASTER_PORT": "0", "TRITON_INTERPRET": str(int(interpreted))}
    (tmp_path / "driver.py").write_text(DRIVER)
    files = [f"--{kind}={tmp_path / f'{kind}.pt'}" for kind in ("state", "batch", "out")]
    command = [sys.executable, str(tmp_path / "driver.py"), *files]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    launched = set(ran.stdout.splitlines()[-1].split())
    assert launched == (set(plan.kernels) - {"pack", "unpack"} if interpreted else {"none"})
    expected, found = autopar.simulate(model, inputs, plan=plan), torch.load(tmp_path / "out.pt")
    for name, gradient in expected.grads.items():
        torch.testing.assert_close(found["grads"][name], gradient, rtol=1e-4, atol=1e-6)


def test_ops_that_read_one_tensor_in_two_specs_are_no_kernel() -> None:
    """The kernel would take one of the two for both, and so count a gradient as often as there are ranks."""
    of, made = subject("llama", torch.float32), planned("llama", "cuda").program
    prices, plain = Prices(Mesh((2,)), cluster("cuda")), tuple(dataclasses.replace(op, kernels=()) for op in made.ops)
    whole = mark_kernels(dataclasses.replace(made, ops=plain), of.capture.graph, prices, "|again")
    by_name = {op.name: op for op in whole.ops}
    kernel = next(f for f in fusions(of.capture.graph) if "norm_backward" in by_name[f.nodes[0]].kernels)
    grad = next(value for role, value in kernel.reads if role == "grad")
    readers = [n for n in kernel.nodes if grad in of.capture.graph.by_name[n].inputs]
    assert len(readers) == 2
    other = by_name[readers[1]]
    at = of.capture.graph.by_name[other.name].inputs.index(grad)
    reads = tuple("elsewhere" if i == at else name for i, name in enumerate(other.reads))
    ops = tuple(dataclasses.replace(op, reads=reads) if op.name == other.name else op for op in plain)
    apart = mark_kernels(dataclasses.replace(made, ops=ops), of.capture.graph, prices, "|again")
    assert not any(op.kernels for op in apart.ops if op.name in kernel.nodes)
