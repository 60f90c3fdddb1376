"""The backward holds nothing that its kernels make again: the normalized rows of an RMS norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir import Graph, Value
from autopar.planner.graphs.kernel_patterns import fusions
from autopar.planner.graphs.remade import with_remade_values
from autopar.plans import Plan
from tests.cpu.capture_checks import eager
from tests.cpu.model_checks import subject
from tests.cpu.test_kernels_in_plans import cluster

DTYPES = [torch.float32, torch.bfloat16]


def read_in_vain(graph: Graph) -> list[Value]:
    """Return values of the forward that ops of a kernel in the backward read, and the kernel does not."""
    found = []
    for fusion in (f for f in fusions(graph) if f.kernel == "norm_backward"):
        reads = {v for _, v in fusion.reads}
        for node in map(graph.by_name.__getitem__, fusion.nodes):
            values = (v for v in node.inputs if v.node not in fusion.nodes and v not in reads)
            found += [v for v in values if graph.by_name[v.node].phase == "forward"]
    return found


def gradients_of_norms(graph: Graph) -> list[set[str]]:
    return [{role for role, _ in f.writes} for f in fusions(graph) if f.kernel == "norm_backward"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_kernel_of_the_backward_is_handed_only_what_it_reads(dtype) -> None:
    graph = subject("llama", dtype).capture.graph
    remade = with_remade_values(graph)
    assert read_in_vain(graph) and not read_in_vain(remade)
    assert gradients_of_norms(remade) == gradients_of_norms(graph)
    assert remade.outputs == graph.outputs
    assert len({n.name for n in remade.nodes}) == len(remade.nodes)
    assert with_remade_values(remade) is remade


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_a_graph_without_such_norms_stays_as_it_is(name) -> None:
    graph = subject(name, torch.float32).capture.graph
    assert with_remade_values(graph) is graph


class Norms(nn.Module):
    """RMS norms as models write them, whose rows only the gradient of the weight reads in the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.rand(16) + 0.5 for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight, linear in zip(self.weights, self.linears, strict=True):
            x = linear(weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)))
        return x.square().sum()


def test_a_plan_holds_less_and_computes_the_same() -> None:
    model, x = Norms(), torch.randn(64, 3, 16)
    on_gpu, on_cpu = (
        autopar.plan(model, x, mesh=(2,), cluster=cluster(kind), time_limit=5) for kind in ("cuda", "cpu")
    )
    rows = x.numel() // 2 * 4
    assert on_gpu.memory["activations"] <= on_cpu.memory["activations"] - 2 * rows
    output, grads, _ = eager(model, x)
    for plan in (on_gpu, Plan.from_json(on_gpu.to_json())):
        result = autopar.simulate(model, x, plan=plan)
        torch.testing.assert_close(result.outputs, output.detach())
        assert result.grads.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(result.grads[name], grad)
