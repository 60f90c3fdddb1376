"""Attention whose queries are cut by their sequence, on gloo processes that lend each other rows or pass keys round."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.spmd import ProcessRank
from autopar.spmd.ranks import Exchange
from tests.favoured import RING, attention_by, on_rings
from tests.multiprocess.test_emitted_files import checked
from tests.multiprocess.training_models import gpt2, gradient_distance, llama, pair, tokens
from tests.ranks import run_ranks

pytestmark = pytest.mark.multiprocess
FLOAT = 1e-5
MODELS = {
    "gpt2": lambda: gpt2(n_head=1, n_layer=1, n_positions=32),
    "llama": lambda: llama(num_key_value_heads=1, num_hidden_layers=1),
}


def counting(permuted: list[int]) -> Any:
    """Return a launch that adds the bytes of permutes to the last entry."""
    launch = ProcessRank.launch

    def counted(self: ProcessRank, buffer: Tensor, exchange: Exchange) -> Tensor:
        permuted[-1] += buffer.nbytes if exchange.kind == "permute" else 0
        return launch(self, buffer, exchange)

    return counted


def _trains(name: str, ways: int, length: int, *, on_ring: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    model, batch = MODELS[name]().double(), tokens(2, length)
    with attention_by(RING) if on_ring else nullcontext():
        reference, model = pair(model, batch, (ways,), search="baseline:CP", cluster="dgx-h100")
    permuted, launch = [0], ProcessRank.launch
    program = model.plan.program
    sharing = on_rings(program) if on_ring else [op for op in program.ops if op.loan]
    found: dict[str, Any] = {"sent": [[s.bytes for s in op.sent] for op in sharing]}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (reference, model)]
    errors = []
    for step in range(3):
        ProcessRank.launch = counting(permuted) if step == 0 else launch  # type: ignore[method-assign]
        losses = []
        for module in (reference, model):
            loss = module(**batch).loss
            loss.backward()
            losses.append(float(loss))
        errors += [abs(losses[0] - losses[1]), gradient_distance(model, reference)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found | {"permuted": permuted[0], "error": max(errors)}


@pytest.mark.parametrize(("name", "length"), [("llama", 16), ("gpt2", 15)])
def test_two_processes_train_as_one_device_and_send_what_the_plan_says(pool, name, length) -> None:
    light, heavy = pool.run(_trains, name, 2, length)
    assert len(heavy["sent"]) == 2
    assert heavy["permuted"] == sum(there for there, _ in heavy["sent"])
    assert light["permuted"] == sum(back for _, back in light["sent"])
    assert max(light["error"], heavy["error"]) < FLOAT


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_four_processes_train_as_one_device(name) -> None:
    for found in run_ranks(4, _trains, name, 4, 18):
        assert found["sent"]
        assert found["error"] < FLOAT


@pytest.mark.parametrize(("name", "length"), [("llama", 16), ("gpt2", 15)])
def test_two_processes_on_a_ring_train_as_one_device_and_send_what_the_plan_says(pool, name, length) -> None:
    first, last = pool.run(partial(_trains, on_ring=True), name, 2, length)
    assert [len(sent) for sent in first["sent"]] == [3, 3]
    assert max(first["error"], last["error"]) < FLOAT
    if length % 4 == 0:
        # Half of a rank's rows stay where they are, and of its block the last half, if later rows read it.
        keys = [sent[1] for sent in first["sent"]]
        moved = sum(there + back for there, _, back in first["sent"])
        assert first["permuted"] + last["permuted"] == 2 * (moved * 2) + 2 * sum(keys) - sum(keys) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_four_processes_on_a_ring_train_as_one_device(name) -> None:
    for found in run_ranks(4, partial(_trains, on_ring=True), name, 4, 18):
        assert found["sent"]
        assert found["error"] < FLOAT


def test_an_emitted_file_passes_keys_round_without_autopar(tmp_path) -> None:
    torch.manual_seed(0)
    with attention_by(RING):
        plan = checked((MODELS["llama"](), tokens(2, 16)), 2, tmp_path, search="baseline:CP")
    assert len(on_rings(plan.program)) == 2
    assert "def ring_attention(" in (tmp_path / "step.py").read_text()


def test_an_emitted_file_lends_rows_without_autopar(tmp_path) -> None:
    torch.manual_seed(0)
    plan = checked((MODELS["llama"](), tokens(2, 16)), 2, tmp_path, search="baseline:CP")
    assert sum(op.loan is not None for op in plan.program.ops) == 2
    assert "def balanced_attention(" in (tmp_path / "step.py").read_text()


def _compiled(*, on_ring: bool) -> dict[str, float]:
    torch.manual_seed(0)
    model, batch = MODELS["llama"](), tokens(2, 16)
    with attention_by(RING) if on_ring else nullcontext():
        reference, model = pair(model, batch, (2,), search="baseline:CP", cluster="dgx-h100", backend="inductor")
    for module in (reference, model):
        module(**batch).loss.backward()
    program = model.plan.program
    sharing = on_rings(program) if on_ring else [op for op in program.ops if op.loan]
    return {"sharing": len(sharing), "gradients": gradient_distance(model, reference)}


@pytest.mark.slow
@pytest.mark.parametrize("on_ring", [False, True])
def test_inductor_compiles_them(pool, on_ring) -> None:
    for found in pool.run(partial(_compiled, on_ring=on_ring), timeout=300.0):
        assert found["sharing"] == 2
        assert found["gradients"] < FLOAT * 10, found
