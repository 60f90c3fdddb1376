"""Low-rank adapters on a frozen base, as peft puts them in: nothing but the adapters is trained, or costs state."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.cpu.capture_checks import captured_once
from tests.cpu.model_checks import Promoted

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

IDS = torch.randint(64, (8, 6), generator=torch.Generator().manual_seed(1))
BATCH = dict(input_ids=IDS, labels=IDS)
SIZES = dict(vocab_size=64, bos_token_id=1, eos_token_id=2)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        **SIZES,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=4, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **SIZES
    )
    return transformers.GPT2LMHeadModel(config)


def adapted(base: Callable[[], nn.Module], **options: object) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
        model = peft.get_peft_model(base(), config)
    for parameter in model.parameters():
        if parameter.requires_grad:  # adapters begin at zero, where half of the gradients are zero
            nn.init.normal_(parameter, std=0.1)
    return model.double()


CASES = {
    "llama": (llama, dict(target_modules=["q_proj", "v_proj"])),
    "gpt2, whose weights are transposed": (gpt2, dict(target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)),
    "a head that is trained too": (llama, dict(target_modules=["up_proj"], modules_to_save=["lm_head"])),
    "a scale of each column": (llama, dict(target_modules=["q_proj"], use_dora=True)),
}


@pytest.mark.parametrize(("name", "search"), [*((n, "random:1") for n in CASES), ("llama", "joint")])
@captured_once()
def test_adapters_get_the_gradients_of_one_device_and_nothing_else_gets_any(name: str, search: str) -> None:
    base, options = CASES[name]
    model = adapted(base, **options)
    with Promoted():
        reference = copy.deepcopy(model)
        loss = reference(**BATCH).loss
        loss.backward()
        plan = autopar.plan(model, BATCH, mesh=(2, 2), search=search, time_limit=5)
        result = autopar.simulate(model, BATCH, plan=plan)
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    torch.testing.assert_close(result.outputs.loss, loss.detach(), rtol=1e-9, atol=1e-9)
    assert set(result.grads) == set(expected) == {n for n, p in model.named_parameters() if p.requires_grad}
    for fqn, grad in expected.items():
        torch.testing.assert_close(result.grads[fqn], grad, rtol=1e-7, atol=1e-9)


def test_a_frozen_base_has_neither_gradients_nor_state() -> None:
    """AdamW keeps two numbers beside each trained parameter and its gradient."""
    model = adapted(llama, target_modules=["q_proj", "v_proj"])
    trained = sum(p.numel() * p.itemsize for p in model.parameters() if p.requires_grad)
    plan = autopar.plan(model, BATCH, mesh=(1,), cluster="dgx-h100:1", time_limit=5)
    assert plan.memory.get("gradients", 0) <= trained
    assert 2 * trained <= plan.memory["optimizer"] < 2 * trained + 1024


def test_adapters_train_and_the_base_stays() -> None:
    reference, model = (adapted(llama, target_modules=["q_proj", "v_proj"]) for _ in range(2))
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    parallel = autopar.autoparallelize(model, BATCH, mesh=(1,), time_limit=5)
    losses: list[list[float]] = []
    for module in (reference, parallel):
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], 1e-2)
        losses.append([])
        for _ in range(3):
            loss: Tensor = module(**BATCH).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][2] < losses[0][0]
    state = parallel.state_dict()
    for name, value in before.items():
        assert torch.equal(state[name].full_tensor(), value), name
