"""Plans know the kernels of ours: what they cost, where they run, and their source; programs by them are exact."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import autopar
from autopar import kernels, passes, planner
from autopar.arguments import canonical_names
from autopar.ir import TensorMeta
from autopar.mesh import Cluster, Mesh
from autopar.planner.implementations import KERNELS, implementation
from autopar.runtime.simulation import Simulation, simulate_program
from autopar.strategies import strategies
from tests.cpu.model_checks import assert_equal, cluster_where_sharding_pays, subject, tensor_parallel

triton = pytest.importorskip("triton")


def cluster(device: str) -> Cluster:
    made = cluster_where_sharding_pays().sized(2)
    named = dataclasses.replace(made.device, name="a CPU" if device == "cpu" else "a slow GPU")
    return dataclasses.replace(made, device=named)


def planned(name: str, device: str, dtype=torch.float32) -> planner.Planned:
    of = subject(name, dtype)
    options = planner.Options(
        constraints=tensor_parallel(name, of, (2,)), aliases=canonical_names(of.model), time_limit_s=30, gap=0.05
    )
    return planner.plan_graph(of.capture.graph, Mesh((2,)), cluster(device), options, compare=False)


def metas_of(of, node) -> list:
    return [of.capture.graph.meta(v) for v in node.inputs]


def used(program) -> set[str]:
    return {name for op in program.ops for name in op.kernels}


def test_a_gpu_runs_kernels_for_a_cut_vocabulary_and_a_cpu_none() -> None:
    on_gpu = used(planned("llama", "cuda").program)
    # Rows of 32 elements are too short for a sort of their indices to pay.
    assert {"lookup", "sumexp", "nll", "nll_backward"} <= on_gpu <= set(kernels.KERNELS) - {"lookup_backward"}
    assert not used(planned("llama", "cpu").program)
    assert not used(planned("mlp", "cuda", torch.float64).program)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_of_two_ways_to_run_an_op_the_one_that_moves_less_is_taken(dtype) -> None:
    """And with it no strategy costs more than by the eager one."""
    of, mesh = subject("llama", torch.float32), Mesh((2, 2))
    nodes = [n for n in of.capture.graph.nodes if n.packet in KERNELS]
    assert {n.packet for n in nodes} == set(KERNELS)
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


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_program_by_kernels_is_the_eager_program(name) -> None:
    """On the interpreter, whole steps with cut vocabularies and packed exchanges."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported before TRITON_INTERPRET was set")
    of, mesh = subject(name, torch.float32), Mesh((2,))
    plan = planned(name, "cuda")
    lowered = passes.lower(plan.program, of.capture.graph, mesh)

    def simulated() -> Simulation:
        outputs, rest = simulate_program(lowered, of.capture.graph, mesh, of.named(), 0)
        return dataclasses.replace(rest, outputs=outputs)

    eager = simulated()
    launched = []
    run = kernels.run
    with kernels.forced(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "run", lambda kernel, *a, **k: launched.append(kernel) or run(kernel, *a, **k))
        by_kernels = simulated()
    assert set(launched) >= {"lookup", "lookup_backward", "sumexp", "nll", "nll_backward"}
    assert_equal(by_kernels, eager, 2e-5)


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
