"""Data parallel, fully sharded and tensor parallel, forced by constraints on parameters, inputs and results."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.mesh import Cluster
from tests.cpu.capture_checks import captured_once
from tests.cpu.model_checks import (
    FORCED,
    TOLERANCE,
    Reference,
    assert_equal,
    assert_equals_one_device,
    eager,
    run,
    subject,
)
from tests.models import ZOO

MESHES = [(2,), (4,), (2, 2), (2, 4), (2, 2, 2)]
CASES = [
    (name, form, mesh, dtype)
    for name, model in ZOO.items()
    for form in FORCED
    for mesh in MESHES + [(3,)] * (name in ("cnn", "llama"))
    for dtype in model.dtypes
]


def in_quick_run(name, form, mesh, dtype):
    if name == "mixtral_batched":  # as mixtral
        return False
    return mesh == ((2, 2) if form == "tensor_parallel" else (2,)) and dtype is ZOO[name].dtypes[-1]


@pytest.mark.parametrize(
    ("name", "form", "mesh", "dtype"),
    [pytest.param(*c, id="-".join(map(str, c)), marks=[] if in_quick_run(*c) else [pytest.mark.slow]) for c in CASES],
)
def test_the_forced_step_equals_one_device(name, form, mesh, dtype) -> None:
    of = subject(name, dtype)
    constraints = FORCED[form](name, of, mesh)
    ran = run(of, mesh, constraints, cluster=Cluster.load("dgx-h100"))
    assert_equals_one_device(of, ran.result, dtype)
    stored = {op.node: op.writes[0].spec for op in ran.planned.program.ops if op.kind == "input"}
    for i in of.capture.graph.inputs:
        if i.kind == "parameter":
            assert str(stored[i.node]) == constraints[i.name]
        if i.kind == "input":
            assert str(stored[i.node]) == constraints[f"input:{i.name}"]


@captured_once()
def test_megatron_by_globs_through_the_public_interface() -> None:
    model, inputs = ZOO["gpt2"].made(torch.float32)
    constraints = {
        "transformer.h.*.attn.c_attn.weight": "RS1",
        "transformer.h.*.attn.c_proj.weight": "S1R",
        "transformer.h.*.mlp.c_fc.weight": "RS1",
        "transformer.h.*.mlp.c_proj.weight": "S1R",
        "transformer.wte.weight": "S1R",
        "transformer.h.*.mlp": "S0RR",
        "input:*": "S0R",
        "output:logits": "S0RS1",
    }
    plan = autopar.plan(model, inputs, mesh={"dp": 2, "tp": 2}, cluster="dgx-h100", constraints=constraints)
    result = autopar.simulate(model, inputs, plan=plan)
    found = Reference({"loss": result.outputs.loss, "logits": result.outputs.logits}, result.grads, result.buffers)
    assert_equal(found, eager(model, inputs), TOLERANCE[torch.float32])
    assert str(plan.specs["transformer.h.1.mlp.c_fc.weight"]) == "RS1"
    assert str(plan.specs["lm_head.weight"]) == "S1R"  # tied to the embedding
    assert str(plan.specs["transformer.h.0.mlp"]) == "S0RR"
    assert str(plan.specs["output:logits"]) == "S0RS1"


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_result_that_is_taken_to_its_forced_spec_and_back_is_two_tensors(name) -> None:
    of = subject(name, torch.float64)
    ran = run(of, (2, 2), FORCED["fully_sharded"](name, of, (2, 2)))
    made = [t.name for op in ran.planned.program.ops for t in op.writes]
    assert len(made) == len(set(made))
    assert_equals_one_device(of, ran.result, torch.float64)


@pytest.mark.parametrize("mesh", [(2, 2), (2, 2, 2)])
def test_a_plan_tells_the_spec_to_which_a_constraint_takes_a_module_s_output(mesh) -> None:
    model, inputs = ZOO["cnn"].made(torch.float32)
    of = subject("cnn", torch.float32)
    constraints = FORCED["fully_sharded"]("cnn", of, mesh)
    forced = {n: s for n, s in constraints.items() if n in dict(model.named_modules())}
    assert forced
    plan = autopar.plan(model, inputs, mesh=mesh, constraints=constraints)
    assert {n: str(plan.specs[n]) for n in forced} == forced


@pytest.mark.parametrize(("style", "spec", "bias"), [("column", "S0RR", "S0"), ("row", "RS0R", "R")])
@captured_once()
def test_column_and_row_of_a_convolution_are_its_channels(style: str, spec: str, bias: str) -> None:
    model = torch.nn.Sequential(torch.nn.Conv1d(4, 6, 3), torch.nn.Flatten())
    plan = autopar.plan(model, torch.randn(4, 4, 8), mesh=2, cluster="dgx-h100", constraints={"0": style})
    assert (str(plan.specs["0.weight"]), str(plan.specs["0.bias"])) == (spec, bias)
    by_weight = autopar.plan(model, torch.randn(4, 4, 8), mesh=2, cluster="dgx-h100", constraints={"0.weight": style})
    assert str(by_weight.specs["0.weight"]) == spec
