"""What a kernel for several ops keeps to itself: it runs only where nothing else in the program reads that."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import passes
from autopar.holding import ABSENT, KEEP, RECOMPUTE
from autopar.ir import Output, Value
from autopar.mesh import Mesh
from autopar.planner import Options
from autopar.planner.graphs.kernel_patterns import fusions, inner_values
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.planner.schedule.kernel_marks import mark_kernels
from autopar.program import Program
from tests.cpu.capture_checks import eager
from tests.cpu.model_checks import assert_equal, subject
from tests.cpu.test_kernels_in_plans import calls, cluster, planned, simulated

D = 16
CASES = [("llama", torch.float32), ("llama", torch.bfloat16), ("gpt2", torch.float32)]


@cache
def program_of(name: str, dtype: torch.dtype) -> Program:
    return planned(name, "cuda", dtype).program


def inner_tensors(name: str, dtype: torch.dtype) -> list[tuple[str, str]]:
    """(first op, tensor) of each kernel in the program for each kind of value that it does not write."""
    made, graph = program_of(name, dtype), subject(name, dtype).capture.graph
    kernels = {op.node: op.kernels for op in made.ops if op.kind == "compute"}
    inner, found = inner_values(graph), dict[tuple[str, str], tuple[str, str]]()
    for fusion in fusions(graph):
        if fusion.kernel in kernels[fusion.nodes[0]]:
            values = (Value(n, i) for n in fusion.nodes for i in range(len(graph.by_name[n].outputs)))
            for value in inner.intersection(values):
                kind = fusion.kernel, graph.by_name[value.node].op
                found.setdefault(kind, (fusion.nodes[0], str(value)))
    return sorted(found.values())


def with_reader(made: Program, tensor: str, kernels: bool) -> Program:
    """The caller gets ``tensor``, too."""
    ops = made.ops if kernels else tuple(dataclasses.replace(op, kernels=()) for op in made.ops)
    output = Output(Value(made.ops[made.writer[tensor]].node), "output", "inner")
    return dataclasses.replace(made, ops=ops, results=(*made.results, (output, tensor)))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_plan_gives_no_ops_to_a_kernel_where_a_value_between_them_is_read_elsewhere(name, dtype) -> None:
    made, graph = program_of(name, dtype), subject(name, dtype).capture.graph
    prices = Prices(Mesh((2,)), cluster("cuda"))
    tensors = inner_tensors(name, dtype)
    assert tensors
    whole = {
        op.name
        for op in mark_kernels(with_reader(made, made.results[0][1], False), graph, prices, "|again").ops
        if op.kernels
    }
    for first, tensor in tensors:
        kernel = next(f for f in fusions(graph) if f.nodes[0] == first)
        ops = mark_kernels(with_reader(made, tensor, False), graph, prices, "|again").ops
        assert whole - {op.name for op in ops if op.kernels} == set(kernel.nodes)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_what_is_read_beside_a_kernel_is_computed_beside_it(name, dtype) -> None:
    """Also of programs that are not planned so."""
    of, mesh = subject(name, dtype), Mesh((2,))
    made, graph = program_of(name, dtype), of.capture.graph
    fused = {
        kernel: calls(passes.compose(passes.lower(made, graph, mesh), graph), kernel)
        for kernel in ("add_norm", "norm_backward")
    }
    for _, tensor in inner_tensors(name, dtype):
        composed = passes.compose(passes.lower(with_reader(made, tensor, True), graph, mesh), graph)
        assert {kernel: calls(composed, kernel) for kernel in fused} == fused
    lowered = passes.lower(made, graph, mesh)
    assert_equal(simulated(passes.compose(lowered, graph), of, mesh), simulated(lowered, of, mesh), 3e-2)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_backward_is_kept_nothing_that_a_kernel_would_not_write(name, dtype) -> None:
    graph, mesh = subject(name, dtype).capture.graph, Mesh((2,))
    d = decide(graph, mesh, Options(), resolve(graph, mesh, {}, {}), recompute=True)
    holds = {v.value: set(v.actions) for v in d.variables if v.kind == "hold"}
    assert all(actions <= {RECOMPUTE, ABSENT} for v, actions in holds.items() if v in inner_values(graph))
    outer = [actions for v, actions in holds.items() if v not in inner_values(graph)]
    assert all(KEEP in actions for actions in outer)


class Norm(nn.Module):
    """A residual and the norm behind it, of which the caller gets, or the loss reads, a value in between."""

    def __init__(self, kind: str, inner: str, read: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.weight = nn.Linear(D, D), nn.Parameter(torch.rand(D) + 0.5)
        self.kind, self.inner, self.read = kind, inner, read

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        total = self.lin(x) + x
        found = {"total": total}
        if self.kind == "written out":
            found["square"] = total.pow(2)
            found["mean"] = found["square"].mean(-1, keepdim=True)
            found["shifted"] = found["mean"] + 1e-5
            found["rstd"] = torch.rsqrt(found["shifted"])
            found["hat"] = total * found["rstd"]
            out = self.weight * found["hat"]
        else:
            norm = F.layer_norm if self.kind == "layer norm" else F.rms_norm
            out = norm(total, (D,), self.weight, eps=1e-5)
        loss = self.lin(out).square().sum()
        inner = found[self.inner]
        return {"loss": loss + inner.sin().sum()} if self.read else {"loss": loss, self.inner: inner}


NORMS = [("written out", n) for n in ("total", "square", "mean", "shifted", "rstd", "hat")]
NORMS += [("layer norm", "total"), ("rms norm", "total")]


@pytest.mark.parametrize("read", [False, True], ids=["returned", "read"])
@pytest.mark.parametrize(("kind", "inner"), NORMS)
def test_a_norm_whose_inner_value_is_read_elsewhere_is_exact(kind: str, inner: str, read: bool) -> None:
    torch.manual_seed(1)
    model, x = Norm(kind, inner, read), torch.randn(4, 3, D)
    plan = autopar.plan(model, x, mesh=(2,), cluster=cluster("cuda"), search="random+recompute:1", time_limit=2)
    result = autopar.simulate(model, x, plan=plan)
    output, grads, _ = eager(model, x)
    for name, value in output.items():
        torch.testing.assert_close(result.outputs[name], value.detach(), rtol=1e-5, atol=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(result.grads[name], grad, rtol=1e-4, atol=1e-4)
