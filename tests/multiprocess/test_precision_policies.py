"""Parameters in bfloat16, reductions in float32, master weights: on two processes and on paper."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.training import AutoParallelPlugin, Booster, Checkpointer, MasterWeights
from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_models import SHARDED, Mlp, distance, pair, whole

pytestmark = pytest.mark.multiprocess

POLICY = autopar.MixedPrecision(parameter="bf16", reduce="fp32", master="fp32")
CUT_BATCH = {"input:x": "S0R", "up.weight": "RR", "down.weight": "RS0"}


def _batches(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(16, 8) for _ in range(count)]


def _trained(model: nn.Module, optimizer: Any, batches: list[torch.Tensor]) -> None:
    for x in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=not hasattr(model, "plan")):
            out = model(x)
        (out.float() - 1).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _by_hand(model: nn.Module, batches: list[torch.Tensor], lr: float) -> dict[str, torch.Tensor]:
    """Master weights as the paper has them, on one device. Returns them."""
    model.to(torch.bfloat16)
    masters = {n: p.detach().float().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(masters.values(), lr=lr, momentum=0.9)
    for x in batches:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        (out.float() - 1).pow(2).mean().backward()
        for name, p in model.named_parameters():
            masters[name].grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    return masters


def _steps_on_masters() -> dict[str, Any]:
    torch.manual_seed(0)
    model, lr, batches = Mlp(), 1e-3, _batches(6)
    expected = _by_hand(copy.deepcopy(model), batches, lr)
    start, model = pair(model, (batches[0],), (2,), mixed_precision=POLICY, constraints=CUT_BATCH)
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))
    _trained(model, optimizer, batches)
    names = {id(p): n for n, p in model.named_parameters()}
    masters = {names[id(p)]: optimizer.state[p]["master"] for p in model.parameters()}
    return {
        "dtypes": {str(p.dtype) for p in model.parameters()},
        "state": {str(t.dtype) for s in optimizer.state.values() for t in s.values()},
        "placed": all(masters[n].placements == p.placements for n, p in model.named_parameters()),
        "rounded": all(torch.equal(whole(masters[n]).bfloat16(), whole(p)) for n, p in model.named_parameters()),
        "masters": max(distance(masters[n], expected[n]) for n in expected),
        "moved": min(distance(masters[n], p) for n, p in start.named_parameters()),
    }


def test_the_optimizer_steps_on_float32_copies_of_bfloat16_parameters(pool: RankPool) -> None:
    for found in pool.run(_steps_on_masters):
        assert found["dtypes"] == {"torch.bfloat16"}
        assert found["state"] == {"torch.float32"}
        assert found["placed"]
        assert found["rounded"]
        assert found["masters"] < 1e-3 < found["moved"]


def _boosted_and_resumed(folder: str) -> dict[str, Any]:
    """Four steps; and two, a checkpoint, another plan, and two."""
    batches = _batches(4)

    def made(constraints: dict[str, str]) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Mlp()
        plugin = AutoParallelPlugin((batches[0],), mesh=(2,), constraints=constraints, max_norm=1.0)
        booster = Booster(plugin=plugin, mixed_precision=POLICY)
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        return model, optimizer

    model, optimizer = made(CUT_BATCH)
    _trained(model, optimizer, batches)
    part, part_optimizer = made(CUT_BATCH)
    _trained(part, part_optimizer, batches[:2])
    checkpointer = Checkpointer(folder)
    checkpointer.save(2, part, part_optimizer)
    checkpointer.wait()
    dist.barrier()
    found = {}
    for name, constraints in {"same": CUT_BATCH, "other": SHARDED["mlp"]}.items():
        again, again_optimizer = made(constraints)
        Checkpointer(folder).load(again, again_optimizer)
        _trained(again, again_optimizer, batches[2:])
        found[name] = max(distance(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
        masters = zip(again.parameters(), model.parameters(), strict=True)
        found[f"{name} masters"] = max(
            distance(again_optimizer.state[a]["master"], optimizer.state[b]["master"]) for a, b in masters
        )
    return found


def test_master_weights_are_saved_and_loaded_with_the_optimizer(pool: RankPool, tmp_path: Path) -> None:
    for found in pool.run(_boosted_and_resumed, str(tmp_path / "run")):
        assert found["same"] == found["same masters"] == 0
        assert found["other masters"] < 1e-3
        assert found["other"] < 1e-2


def _planned(policy: Any, **options: Any) -> autopar.Plan:
    torch.manual_seed(0)
    return autopar.plan(
        Mlp(),
        torch.randn(16, 8),
        mesh=(2,),
        constraints=CUT_BATCH,
        cluster="dgx-h100",
        mixed_precision=policy,
        **options,
    )


def test_the_plan_counts_the_dtypes_that_are_used() -> None:
    full, narrow, master = (_planned(p) for p in (None, dict(parameter="bf16"), POLICY))
    assert narrow.parameters == {n: size // 2 for n, size in full.parameters.items()}
    for plan, state in ((full, 8), (narrow, 4), (master, 12)):
        elements = sum(full.parameters.values()) // 4
        scalars = 4 * len(full.parameters)
        assert plan.memory["optimizer"] == elements * state + scalars
    assert str(POLICY) in master.to_json()


@pytest.mark.parametrize(("reduce", "dtype"), [(None, "bfloat16"), ("fp32", "float32")])
def test_gradients_are_reduced_in_the_dtype_asked_for(reduce, dtype) -> None:
    with torch.device("meta"):
        model, x = nn.Linear(1024, 1024, bias=False), torch.empty(2**17, 1024)
    plan = autopar.plan(
        model,
        x,
        mesh=(8,),
        cluster="dgx-h100",
        constraints={"weight": "RR"},
        outputs="dtensor",
        mixed_precision=dict(parameter="bf16", reduce=reduce),
    )
    reduced = [op for op in plan.program.collectives if op.phase == "backward"]
    assert [op.step.kind for op in reduced] == ["all_reduce"]
    assert {t.meta.dtype for op in reduced for t in op.writes} == {dtype}


def test_what_is_predicted_is_not_exceeded() -> None:
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(16, 8)
    plan = _planned(POLICY, accumulation_steps=2)
    result = autopar.simulate(model, x, plan=autopar.Plan.from_json(plan.to_json()))
    assert result.peak_memory <= plan.peak_memory
    half = copy.deepcopy(model).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        half(x).sum().backward()
    for name, p in half.named_parameters():
        assert distance(result.grads[name], p.grad) < 2e-2


@pytest.mark.parametrize(
    "policy", ["int3", dict(parameter="fp16"), dict(stored="bf16"), dict(master="bf16"), 3, "fp32"]
)
def test_a_policy_that_cannot_be_is_refused(policy) -> None:
    with pytest.raises(AutoparError, match=r"precision|Precision"):
        _planned(policy)


def test_master_weights_of_full_parameters_are_refused() -> None:
    with pytest.raises(AutoparError, match="higher precision"):
        MasterWeights(torch.optim.SGD(Mlp().parameters()))


def test_policies_are_text_and_back() -> None:
    for policy in (POLICY, autopar.MixedPrecision(compute="fp16"), autopar.MixedPrecision("float32", "bf16")):
        assert autopar.MixedPrecision.parse(str(policy)) == policy
    assert str(autopar.MixedPrecision(compute=torch.bfloat16)) == "bf16"
