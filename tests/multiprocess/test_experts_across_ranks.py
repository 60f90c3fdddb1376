"""Tokens that go to the ranks of their experts, on gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from autopar.errors import RankError
from autopar.strategies import moved_axes
from tests.multiprocess.test_emitted_files import checked
from tests.multiprocess.training_models import gradient_distance, pair
from tests.ranks import run_ranks

pytestmark = pytest.mark.multiprocess
FLOAT = 1e-5
EXPERTS = 4


def _model() -> torch.nn.Module:
    config = transformers.Qwen3MoeConfig(
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=24,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        use_cache=False,
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config).double()


def _batch(seed: int, length: int = 8) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 24, (4, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def _moving(model: Any) -> int:
    return sum(bool(op.strategy and moved_axes(op.strategy)) for op in model.plan.program.ops)


def _trains(mesh: tuple[int, ...], search: str) -> dict[str, float]:
    reference, model = pair(_model(), _batch(0), mesh, search=search, expert_room=4.0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (reference, model)]
    found: dict[str, float] = {"moving": _moving(model)}
    for step in range(2):
        losses = []
        for module in (reference, model):
            loss = module(**_batch(step)).loss
            loss.backward()
            losses.append(float(loss))
        found[f"loss {step}"] = abs(losses[0] - losses[1])
        found[f"gradients {step}"] = gradient_distance(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


def _overflows() -> dict[str, Any]:
    """A router that sends every token to the experts of one rank."""
    _, model = pair(_model(), _batch(0, 12), (dist.get_world_size(),), search="baseline:EP x FSDP", expert_room=1.0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("gate.weight"):
                p.copy_(torch.zeros_like(p))  # of equal experts, the first are chosen
    before = [p.to_local().clone() for p in model.parameters()]
    found: dict[str, Any] = {"moving": _moving(model), "error": ""}
    try:
        model(**_batch(0, 12)).loss.backward()
    except RankError as error:
        found["error"] = str(error)
    kept = zip(before, model.parameters(), strict=True)
    found["kept"] = all(torch.equal(a, p.to_local()) and p.grad is None for a, p in kept)
    return found


def test_a_model_trains_as_on_one_device(pool) -> None:
    for found in pool.run(_trains, (2,), "baseline:EP x FSDP"):
        assert found.pop("moving") > 0
        assert max(found.values()) < FLOAT, found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "search", ["baseline:EP x FSDP", "baseline:EP over axis 0 x FSDP", "baseline:EP over axis 1 x FSDP"]
)
def test_a_model_trains_on_four_processes(mesh, search) -> None:
    if "over" in search and len(mesh) == 1:
        pytest.skip("it is the same on one axis")
    for found in run_ranks(4, _trains, mesh, search):
        assert found.pop("moving") > 0
        assert max(found.values()) < FLOAT, found


def test_rows_beyond_the_room_raise_on_all_ranks_and_change_nothing(pool) -> None:
    for found in pool.run(_overflows):
        assert found["moving"] > 0
        assert found["kept"]
        assert "model.layers.0.mlp" in found["error"], found["error"]
        assert "expert_room=" in found["error"]


def test_an_emitted_file_runs_without_autopar(tmp_path) -> None:
    plan = checked((_model().float(), _batch(0)), 2, tmp_path, search="baseline:EP x FSDP", expert_room=4.0)
    assert any(op.strategy and moved_axes(op.strategy) for op in plan.program.ops)
