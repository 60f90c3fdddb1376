"""DDP, ZeRO, HSDP, tensor, sequence and context parallel are what people mean by them, and equal one device."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.planner.baselines.roles import baselines
from tests.baseline_laws import plan_on
from tests.cpu.capture_checks import captured_once
from tests.models import ZOO
from tests.zoo import ZOO as EVERY

NAMES = {b.name for b in baselines(Mesh((2, 2)))}


def baseline(model: str, name: str, mesh: tuple[int, ...], budget: int | None = None):
    module, inputs = ZOO[model].made(torch.float32)
    search = f"baseline:{name}"
    return autopar.plan(module, inputs, mesh=mesh, cluster="dgx-h100", search=search, memory_budget=budget)


def carried(plan) -> Counter:
    """Tensors in collectives, by kind and phase, but for the scalars of the loss."""
    return Counter((c.kind, c.phase) for c in plan.collectives if c.bytes > 64 for _ in c.tensors)


def test_each_mesh_has_the_baselines_that_it_has_axes_for():
    one = {"DDP", "ZeRO-1/2", "ZeRO-3", "EP x FSDP", "TP", "TP+SP", "CP"}
    two = {"HSDP", "DDP x TP", "FSDP x TP", "FSDP x TP+SP", "FSDP x CP"}
    two |= {"EP over axis 0 x FSDP", "EP over axis 1 x FSDP"}
    assert one | two == NAMES
    assert {b.name for b in baselines(Mesh((4,)))} == one
    three = {"FSDP x CP x TP+SP", "EP over axis 2 x FSDP"}
    assert {b.name for b in baselines(Mesh((2, 2, 2)))} == one | two | three
    assert baselines(Mesh((1,))) == ()


def test_ddp_stores_everything_whole_cuts_the_batch_and_sums_gradients():
    plan = baseline("llama", "DDP", (2,))
    assert all(plan.specs[n].is_replicated for n in plan.parameters)
    assert str(plan.specs["input:input_ids"]) == "S0R"
    assert set(carried(plan)) == {("all_reduce", "backward")}
    assert carried(plan)["all_reduce", "backward"] == len(plan.parameters)


def test_zero_3_gathers_where_used_and_zero_2_once():
    zero3, zero2 = baseline("llama", "ZeRO-3", (2,)), baseline("llama", "ZeRO-1/2", (2,))
    for plan in (zero3, zero2):
        assert all(plan.specs[n].ways(plan.mesh) == 2 for n in plan.parameters)
        assert carried(plan)["reduce_scatter", "backward"] == len(plan.parameters)
        assert carried(plan)["all_gather", "forward"] == len(plan.parameters)
    assert carried(zero3)["all_gather", "backward"] > 0
    assert carried(zero2)["all_gather", "backward"] == 0
    assert max(len(c.tensors) for c in zero3.collectives) > 1
    assert zero2.step_time < zero3.step_time
    # Without a budget everything is gathered at once; with one, collectives are put together as far as it allows.
    tight = baseline("llama", "ZeRO-3", (2,), zero2.peak_memory - 1)
    assert tight.peak_memory < zero2.peak_memory
    assert zero3.step_time <= tight.step_time


class Rows(nn.Module):
    """Takes batch and sequence together as rows, which can only be cut evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).flatten(0, 1).square().mean()


def test_what_not_all_ranks_can_divide_is_cut_over_as_many_as_can():
    plan = autopar.plan(Rows(), torch.zeros(28, 5, 64), mesh=(2, 3), cluster="dgx-h100", search="baseline:ZeRO-3")
    assert str(plan.specs["linear"]) == "S01RR"
    assert str(plan.specs["view"]) == "S0R"


def test_hsdp_cuts_parameters_over_one_axis_and_replicates_over_the_other():
    plan = baseline("llama", "HSDP", (2, 2))
    assert all(plan.specs[n].axes == {1} for n in plan.parameters)
    assert str(plan.specs["input:input_ids"]) == "S01R"


def test_tensor_parallel_finds_megatrons_pairs():
    plan = baseline("llama", "TP", (2,))
    for layer in (0, 1):
        at = f"model.layers.{layer}"
        column = [f"self_attn.{n}_proj" for n in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
        assert {str(plan.specs[f"{at}.{n}.weight"]) for n in column} == {"S0R"}
        assert {str(plan.specs[f"{at}.{n}.weight"]) for n in ("self_attn.o_proj", "mlp.down_proj")} == {"RS0"}
        assert str(plan.specs[f"{at}.input_layernorm.weight"]) == "R"
    assert str(plan.specs["model.embed_tokens.weight"]) == "S0R"
    assert str(plan.specs["lm_head.weight"]) == "S0R"
    # One sum a block each way: attention and feed-forward of two layers, and the ends at the vocabulary.
    assert carried(plan)["all_reduce", "forward"] >= 4
    assert "all_gather" not in {kind for kind, _ in carried(plan)}


@pytest.mark.parametrize(
    ("model", "columns"),
    [("mixtral", ["q_proj", "k_proj", "v_proj"]), ("deepseek_v3", ["q_b_proj", "kv_b_proj"])],
)
def test_experts_leave_what_is_between_layers_whole(model: str, columns: list[str]) -> None:
    module, inputs = EVERY[model].made()
    plan = autopar.plan(module, inputs, mesh=(2,), cluster="dgx-h100", search="baseline:TP")
    attention = [n for n in plan.parameters if ".self_attn." in n]
    assert {str(plan.specs[n]) for n in attention if n.split(".")[-2] in columns} == {"S0R"}
    assert {str(plan.specs[n]) for n in attention if "o_proj" in n} == {"RS0"}
    assert {str(plan.specs[n]) for n in plan.parameters if n.endswith("layernorm.weight")} == {"R"}


def test_sequence_parallel_scatters_sums_and_gathers_before_columns():
    plan = baseline("llama", "TP+SP", (2,))
    assert carried(plan)["reduce_scatter", "forward"] >= 4
    assert carried(plan)["all_gather", "forward"] >= 4
    assert str(plan.specs["model.layers.0"]) == "RS0R"
    assert plan.peak_memory < baseline("llama", "TP", (2,)).peak_memory


def test_two_dimensional_cuts_weights_by_tensor_and_stores_them_by_data():
    plan = baseline("llama", "FSDP x TP", (2, 2))
    assert str(plan.specs["model.layers.0.mlp.gate_proj.weight"]) == "S1S0"
    assert str(plan.specs["model.layers.0.mlp.down_proj.weight"]) == "S0S1"


def test_context_parallel_cuts_the_sequence_and_stores_weights_cut():
    plan = baseline("llama", "CP", (2,))
    assert str(plan.specs["input:input_ids"]) == "RS0"
    assert str(plan.specs["model.layers.0"]) == str(plan.specs["model.layers.1.mlp"]) == "RS0R"
    assert all(plan.specs[n].ways(plan.mesh) == 2 for n in plan.parameters)
    assert carried(plan)["reduce_scatter", "backward"] >= len(plan.parameters)
    both = baseline("llama", "FSDP x CP", (2, 2))
    assert str(both.specs["input:input_ids"]) == "S0S1"
    assert str(both.specs["model.layers.0"]) == "S0S1R"


def test_context_parallel_is_of_models_in_which_a_sequence_is_attended():
    for model in ("mlp", "cnn"):
        with pytest.raises(PlanError, match="does not apply"):
            baseline(model, "CP", (2,))


QUICK = [("gpt2", "FSDP x TP+SP"), ("gpt2", "ZeRO-1/2"), ("cnn", "HSDP"), ("cnn", "TP"), ("mlp", "FSDP x TP")]
REST = [
    (m, n)
    for m in ("gpt2", "cnn", "t5", "mixtral")
    for n in sorted(NAMES)
    # test_routed_experts.py has experts; and four ranks cannot cut six tokens, test_context_parallel.py has more.
    if (m, n) not in QUICK and not n.startswith("EP") and n != "CP"
]


@pytest.mark.parametrize(("model", "name"), [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in REST)])
@captured_once()
def test_a_baseline_computes_what_one_device_does(model: str, name: str):
    # The grouped product of torch takes no float64.
    module, inputs = ZOO[model].made(torch.float32 if model == "mixtral" else torch.float64)
    try:
        plan = autopar.plan(module, inputs, mesh=(2, 2), cluster="dgx-h100", search=f"baseline:{name}")
    except PlanError as error:
        assert model == "cnn" and ("SP" in name or "CP" in name), error  # noqa: PT017  images have no sequence
        return
    alone = copy.deepcopy(module)
    output = alone(**inputs)
    (output[0] if isinstance(output, tuple) else getattr(output, "loss", output)).backward()
    result = autopar.simulate(module, inputs, plan=plan)
    for key, parameter in alone.named_parameters():
        if parameter.grad is not None:
            # Language models' losses are computed in float32 whatever their dtype.
            torch.testing.assert_close(result.grads[key], parameter.grad, rtol=1e-4, atol=1e-6)


def test_batch_sequence_and_weights_are_each_cut_over_an_axis():
    """The only baseline of a batch that two axes cannot cut."""
    module, inputs = ZOO["llama"].made(torch.float32)
    plan = baseline("llama", "FSDP x CP x TP+SP", (2, 2, 2))
    assert str(plan.specs["input:input_ids"]) == "S0S1"
    assert str(plan.specs["model.layers.0"]) == "S0S12R"
    assert {plan.specs[n].ways(plan.mesh) for n in plan.parameters if plan.specs[n].ndim == 2} == {8}
    loss = copy.deepcopy(module)(**inputs)
    torch.testing.assert_close(
        autopar.simulate(module, inputs, plan=plan).outputs["loss"], loss.loss, rtol=1e-5, atol=0
    )


def test_a_baseline_that_does_not_apply_is_refused():
    with pytest.raises(PlanError, match="does not apply"):
        baseline("mlp", "HSDP", (2,))


def test_the_plan_remembers_what_it_was_compared_with():
    module, inputs = ZOO["mlp"].made(torch.float32)
    plan = autopar.plan(module, inputs, mesh=(2, 2), cluster="dgx-h100", compare=True)
    assert {"DDP", "ZeRO-3", "TP"} < {b.name for b in plan.baselines} <= NAMES
    assert autopar.Plan.from_json(plan.to_json()).baselines == plan.baselines
    for record in plan.baselines:
        alone = baseline("mlp", record.name, (2, 2))
        assert (alone.objective, alone.step_time, alone.peak_memory) == pytest.approx(
            (record.objective, record.step_time, record.peak_memory)
        )


def test_compare_prints_the_plan_first_then_every_baseline():
    module, inputs = ZOO["mlp"].made(torch.float32)
    found = autopar.compare(module, inputs, mesh=(2,), cluster="dgx-h100", memory_budget=20_000, time_limit=5)
    assert found.rows[0].name == "autopar"
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[2:3]] == ["autopar"]
    assert len(lines) == 2 + len(found.rows)
    for row in found.baselines:
        (line,) = (text for text in lines if text.startswith(f"  {row.name}  "))
        assert ("over budget" in line) != row.fits
    assert all(len(line) <= 100 for line in lines)


def test_under_constraints_compare_still_shows_the_baselines():
    module, inputs = ZOO["mlp"].made(torch.float32)
    found = autopar.compare(module, inputs, mesh=(2,), cluster="dgx-h100", constraints={"layers.0.weight": "column"})
    assert str(found.plan.specs["layers.0.weight"]) == "S0R"
    assert {"DDP", "TP"} <= {b.name for b in found.baselines}


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_the_same_input_gives_the_same_decisions(name: str):
    module, inputs = ZOO[name].made(torch.float32)
    first, second = (autopar.plan(module, inputs, mesh=(2, 2), cluster="dgx-h100") for _ in range(2))
    assert first.digest == second.digest


def test_plans_of_one_process_share_no_state():
    """(2, 4) and then (4, 2) give what each gives alone."""
    alone = {mesh: plan_on("mlp", mesh) for mesh in ((2, 4), (4, 2))}
    again = {mesh: plan_on("mlp", mesh) for mesh in ((4, 2), (2, 4))}
    for mesh, planned in alone.items():
        assert again[mesh].program == planned.program


@pytest.mark.parametrize("model", ["gpt2", "llama", "vit"])
def test_ranks_of_tensor_parallel_send_between_ops_and_never_inside_one(model: str) -> None:
    """Norms and softmax see whole rows, as Megatron's do, although their rules could cut them."""
    plan = baseline(model, "TP", (2,))
    assert not [op.name for op in plan.program.ops if op.sent]
