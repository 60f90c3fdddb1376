"""Attention whose queries are cut by their sequence: ranks lend rows, and everything equals one device."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.plans.plan import _plan_from
from autopar.plans.table import utilization
from autopar.sharding.loan import share, work
from tests.cpu.model_checks import Promoted, Reference, assert_equal, eager

WIDTH, VOCABULARY = 32, 50


def llama(dropout: float = 0.0) -> nn.Module:
    """Four query heads read one head of keys, which no axis can cut."""
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        attention_dropout=dropout,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(dropout: float = 0.0) -> nn.Module:
    dropped = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=WIDTH,
        n_head=1,
        vocab_size=VOCABULARY,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        **dropped,
    )
    return transformers.GPT2LMHeadModel(config)


def made(build, tokens: int, rows: int = 1, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = build(dropout).double().train(dropout > 0)
    ids = torch.randint(VOCABULARY, (rows, tokens))
    return model, {"input_ids": ids, "labels": ids}


def planned(model: nn.Module, inputs: dict[str, Tensor], mesh: tuple[int, ...], search: str = "CP") -> autopar.Plan:
    with Promoted():
        return autopar.plan(model, inputs, mesh=mesh, cluster="dgx-h100", search=f"baseline:{search}")


def loans(plan: autopar.Plan) -> list:
    return [op.loan for op in plan.program.ops if op.node.startswith("attention") and op.loan is not None]


def simulated(model: nn.Module, inputs: dict[str, Tensor], plan: autopar.Plan) -> tuple[Reference, int]:
    with Promoted():
        found = autopar.simulate(model, inputs, plan=plan)
    outputs = {"loss": found.outputs.loss, "logits": found.outputs.logits}
    return Reference(outputs, found.grads, found.buffers), found.peak_memory


@pytest.mark.parametrize(
    ("build", "mesh", "tokens", "search"),
    [
        (llama, (2,), 16, "CP"),
        (gpt2, (2,), 17, "CP"),
        (llama, (4,), 30, "CP"),
        (llama, (2, 2), 24, "FSDP x CP"),
        (gpt2, (2, 2), 24, "CP"),
        pytest.param(gpt2, (8,), 61, "CP", marks=pytest.mark.slow),
        pytest.param(llama, (2, 4), 64, "CP", marks=pytest.mark.slow),
        pytest.param(llama, (3,), 32, "CP", marks=pytest.mark.slow),
    ],
)
def test_a_sequence_cut_by_context_parallelism_equals_one_device(build, mesh, tokens, search) -> None:
    model, inputs = made(build, tokens, rows=2)
    with Promoted():
        expected = eager(model, inputs)
    plan = planned(model, inputs, mesh, search)
    axes = tuple(range(len(mesh))) if search == "CP" else (1,)
    assert [(l.n, l.axes) for l in loans(plan)] == [(tokens, axes)] * 4
    found, peak = simulated(model, inputs, plan)
    assert_equal(found, expected, 1e-9)
    assert peak <= plan.peak_memory


def test_no_rank_attends_more_than_its_share() -> None:
    model, inputs = made(llama, 512)
    plan, mesh = planned(model, inputs, (8,)), Mesh((8,))
    loan = loans(plan)[0]
    shares = [share(loan.n, loan.axes, loan.lent, mesh, (r,)) for r in range(8)]
    most = max(work(s.start, s.start + s.kept) + work(s.first, s.first + s.guests) for s in shares)
    assert most <= (1 + 1 / 64) * work(0, 512) / 8
    strategies = [op.strategy for op in plan.program.ops if op.loan is not None]
    assert all(s is not None and s.work == 1 / 8 for s in strategies)


def test_utilization_counts_what_a_causal_mask_leaves() -> None:
    model, inputs = made(llama, 64)
    plan = planned(model, inputs, (4,))
    assert plan.facts is not None
    pairs, head = 64 * 63 / 2, WIDTH // 4
    assert plan.facts.hidden_flops == 2 * (1 + 2.5) * 2 * 4 * pairs * 2 * head  # of layers, both ways, 2 products
    assert plan.mfu_of_all_pairs / plan.mfu == pytest.approx(plan.facts.flops / plan.facts.needed_flops)
    assert "with what causal masks hide" in utilization(dataclasses.replace(plan, step_time=1e-6))


def test_dropout_in_lent_rows_is_that_of_one_device() -> None:
    model, inputs = made(llama, 32, dropout=0.3)
    with Promoted():
        whole = autopar.plan(model, inputs, mesh=(1,), cluster="dgx-h100")
    cut = planned(model, inputs, (4,))
    assert loans(cut)
    assert_equal(simulated(model, inputs, cut)[0], simulated(model, inputs, whole)[0], 1e-9)


def test_a_plan_with_loans_is_saved_and_read_and_says_what_it_sends() -> None:
    model, inputs = made(llama, 32)
    plan = planned(model, inputs, (4,))
    again = autopar.Plan.from_json(plan.to_json())
    assert again.program == plan.program
    assert again.digest == plan.digest
    assert "self_attn_attention_lse = spmd.balanced_attention(" in plan.source.replace("\n", " ")
    assert "spmd.balanced_attention_backward(" in plan.source
    itemsize, head, rows = 8, WIDTH // 4, loans(plan)[0].most
    each = {op.node: [s.bytes for s in op.sent] for op in plan.program.ops if op.loan is not None}
    there, back = rows * 4 * head * itemsize, rows * 4 * (head + 1) * itemsize
    assert each["attention"] == [there, back]
    assert each["attention_backward"] == [3 * there + rows * 4 * itemsize, there]
    assert_equal(simulated(model, inputs, again)[0], simulated(model, inputs, plan)[0], 0.0)


def test_a_changed_loan_is_no_plan_of_the_model() -> None:
    model, inputs = made(llama, 32)
    plan = planned(model, inputs, (4,))
    data = json.loads(plan.to_json())
    of_attention = next(op for op in data["program"]["ops"] if "loan" in op)
    of_attention["loan"][2][-1] += 1
    data["digest"] = _plan_from(data).digest
    with Promoted(), pytest.raises(PlanError, match="another loan than its strategy has"):
        autopar.simulate(model, inputs, plan=autopar.Plan.from_json(json.dumps(data)))
