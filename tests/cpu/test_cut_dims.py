"""Ops along dims that are cut: whatever a random plan cuts, outputs and every gradient equal one device."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.tracer import ColoTracer
from tests.cpu.capture_checks import captured_once
from tests.cpu.model_checks import Reference, Subject, assert_equals_one_device, eager, predicted_during_the_step, run
from tests.cut_models import FUNCTIONS, Complex, Function, Norms
from tests.halo_models import Resizing, Sliding, Volume

SILENT = ("sorted", "glu", "reads", "writes", "puts", "gathered", "einsum")
"""Ops in which no rank needs a word of another."""

MESHES = [(2,), (2, 2), (3,)]


def subject(model: torch.nn.Module, *shape: int) -> Subject:
    torch.manual_seed(0)
    x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    capture, reference = ColoTracer().capture(model, {"x": x}), eager(model, {"x": x})
    assert x.grad is not None
    found = Reference(reference.outputs, {**reference.grads, "input:x": x.grad}, reference.buffers)
    return Subject(model, {"x": x.detach()}, capture, found)


def heard(of: Subject, mesh: tuple[int, ...], seed: int, *, even: bool = False) -> set[str]:
    """The ops in which ranks told each other something, in a random plan that gives what one device gives."""
    ran = run(of, mesh, search=f"random:{seed}")
    assert_equals_one_device(of, ran.result, torch.float64)
    if even:
        assert ran.result.peak_memory <= predicted_during_the_step(of, ran, mesh)
    return {of.capture.graph.by_name[op.node].packet for op in ran.planned.program.ops if op.sent}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_along_cut_dims_equals_one_device(name: str) -> None:
    of = subject(Function(FUNCTIONS[name], 3, 6, 7).double(), 3, 6, 7)
    found = [heard(of, mesh, seed) for seed, mesh in enumerate(MESHES)]
    assert any(found) or name in SILENT or any(heard(of, MESHES[1], seed) for seed in range(3, 9))


def test_complex_numbers_equal_one_device() -> None:
    torch.manual_seed(0)
    of = subject(Complex(), 4, 5, 6)
    for seed, mesh in enumerate(MESHES):
        heard(of, mesh, seed)


@pytest.mark.parametrize("name", ["softmax", "variance", "topk", "cumulative"])
def test_predicted_memory_holds_what_ranks_tell(name: str) -> None:
    of = subject(Function(FUNCTIONS[name], 4, 6, 8).double(), 4, 6, 8)
    assert any(heard(of, (2,), seed, even=True) for seed in range(6))


@pytest.mark.parametrize("kind", [Sliding, Resizing, Volume])
def test_windows_in_dims_of_space_equal_one_device(kind: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    of = subject(kind().double(), 1, 3, 16, 12)
    found = {op for seed in range(4) for op in heard(of, [(2,), (2, 2)][seed % 2], seed, even=True)}
    assert len(found) > 2, found


def test_norms_of_cut_dims_equal_one_device() -> None:
    torch.manual_seed(0)
    of = subject(Norms().double(), 2, 6, 4, 5)
    found = {op for seed in range(5) for op in heard(of, MESHES[seed % 3], seed)}
    forward = {"aten.native_layer_norm", "aten._fused_rms_norm", "aten.native_group_norm"}
    assert found >= {"aten.native_layer_norm_backward", "aten.native_group_norm_backward"}, found
    assert found & forward


@pytest.mark.parametrize("op", ["layer norm", "softmax", "cumsum"])
@captured_once()
def test_bfloat16_along_a_cut_dim_is_as_close_to_the_truth_as_whole(op: str) -> None:
    """The error of a plan that cuts the dim, beside that of one device, both against float64."""
    functions = {
        "layer norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
        "softmax": lambda x: x.softmax(-1),
        "cumsum": lambda x: x.cumsum(-1),
    }
    model = Function(functions[op], 64)
    torch.manual_seed(0)
    x = torch.randn(4, 8, 64).bfloat16()
    model.bfloat16()
    plans = (autopar.plan(model, x, mesh=(2,), search=f"random:{seed}", time_limit=2) for seed in range(20))
    plan = next(plan for plan in plans if any(op.sent for op in plan.program.ops if op.phase == "forward"))
    found = autopar.simulate(model, x, plan=plan).outputs.double()
    truth, whole = model.double()(x.double()), model.bfloat16()(x).double()
    assert (found - truth).abs().mean() <= 1.5 * (whole - truth).abs().mean()
