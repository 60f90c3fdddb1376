"""Tokens that go to the ranks of their experts, on gloo processes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from autopar.errors import InfeasibleError, RankError
from autopar.sharding.strategy import moved_axes
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


def _overflowing(**options: Any) -> tuple[Any, Any]:
    """Routers that send every token to the experts of one rank."""
    reference = _model()
    with torch.no_grad():
        for name, p in reference.named_parameters():
            if name.endswith("gate.weight"):
                p.copy_(torch.zeros_like(p))  # of equal experts, the first are chosen
    mesh = (dist.get_world_size(),)
    return pair(reference, _batch(0, 12), mesh, search="baseline:EP x FSDP", expert_room=1.0, **options)


def _overflows() -> dict[str, Any]:
    """Steps that are run by another program."""
    reference, model = _overflowing()
    found: dict[str, Any] = {"moving": _moving(model)}
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for step in range(2):
            losses = [module(**_batch(step, 12)).loss for module in (reference, model)]
            for loss in losses:
                loss.backward()
            found[f"loss {step}"] = abs(float(losses[0]) - float(losses[1]))
            found[f"gradients {step}"] = gradient_distance(model, reference)
        with torch.no_grad():
            outputs = [module(**_batch(3, 12)).logits for module in (reference, model)]
        found["logits"] = float((outputs[0] - outputs[1]).abs().max())
    found["warnings"] = [str(w.message) for w in given if "more rows than there is room for" in str(w.message)]
    found["programs"] = model._autopar.compiled
    return found


def _overflows_where_nothing_else_fits() -> dict[str, Any]:
    """A step that no program can run."""
    _, model = _overflowing()

    def compile_nothing() -> Any:
        raise InfeasibleError("Nothing fits.")

    for variant in model._autopar.programs:
        object.__setattr__(variant, "without_room", compile_nothing)
    before = [p.to_local().clone() for p in model.parameters()]
    found: dict[str, Any] = {"error": ""}
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


def test_a_step_with_rows_beyond_the_room_is_run_by_another_program(pool) -> None:
    for rank, found in enumerate(pool.run(_overflows)):
        assert found.pop("moving") > 0
        told, compiled = found.pop("warnings"), found.pop("programs")
        assert all("model.layers.0.mlp" in text and "expert_room=" in text for text in told)
        assert bool(told) == (rank == 0)
        assert compiled == 2  # with room and without
        assert max(found.values()) < FLOAT, found


def test_rows_beyond_the_room_raise_on_all_ranks_and_change_nothing_where_nothing_else_fits(pool) -> None:
    for found in pool.run(_overflows_where_nothing_else_fits):
        assert found["kept"]
        assert "model.layers.0.mlp" in found["error"], found["error"]
        assert "expert_room=" in found["error"]


def test_an_emitted_file_runs_without_autopar(tmp_path) -> None:
    plan = checked((_model().float(), _batch(0)), 2, tmp_path, search="baseline:EP x FSDP", expert_room=4.0)
    assert any(op.strategy and moved_axes(op.strategy) for op in plan.program.ops)
