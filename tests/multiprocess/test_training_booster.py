"""The Booster's loop on two processes equals plain PyTorch on one, and its files go to and fro."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import AutoparError
from autopar.training import (
    AutoParallelPlugin,
    Booster,
    Engine,
    GradAccumOptimizer,
    MixedPrecisionOptimizer,
    NonPipelineSchedule,
    accumulate_gradient,
    all_reduce_mean,
)
from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_models import SHARDED, Mlp, gpt2, is_cut, seeded, state_distance, tokens, whole

pytestmark = pytest.mark.multiprocess


def boosted(model: nn.Module, batch: Any, kind: str, seed: int = 0, **options: Any) -> tuple[Any, ...]:
    """A Booster, and what it makes of a model with AdamW and a schedule."""
    warnings.simplefilter("ignore")
    precision = options.pop("mixed_precision", None)
    plugin = AutoParallelPlugin(batch, mesh=(2,), constraints=options.pop("constraints", SHARDED[kind]), **options)
    booster = Booster(plugin=plugin, mixed_precision=precision)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    return booster, model, optimizer, scheduler


def pretrain(model: nn.Module, optimizer: Any, scheduler: Any, batches: list[Any], backward: Any) -> list[float]:
    """The loop of page 001, non-pipeline: two batches make one step."""
    losses = []
    for step, batch in enumerate(batches):
        outputs = model(**batch)
        loss = outputs.loss / 2
        backward(loss, optimizer)
        losses.append(float(outputs.loss.detach()))
        if (step + 1) % 2 == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses


def _pretrained() -> dict[str, Any]:
    batches = [seeded(lambda: tokens(4), seed) for seed in range(8)]
    reference = seeded(lambda: gpt2(n_layer=1))
    groups = [[p for p in reference.parameters() if (p.ndim > 1) is d] for d in (True, False)]
    plain = torch.optim.AdamW(
        [{"params": g, "weight_decay": w} for g, w in zip(groups, (0.1, 0.0), strict=True)], lr=1e-2, eps=1e-4
    )
    schedule = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    expected = pretrain(reference, plain, schedule, batches, lambda loss, _: loss.backward())
    booster, model, optimizer, scheduler = boosted(seeded(lambda: gpt2(n_layer=1)), batches[0], "gpt2")
    found = pretrain(model, optimizer, scheduler, batches, booster.backward)
    with booster.no_sync(model):
        held = [p for g in optimizer.param_groups for p in g["params"]]
    return {
        "losses": max(abs(a - b) for a, b in zip(found, expected, strict=True)),
        "state": state_distance(model, reference),
        "same optimizer": type(optimizer) is torch.optim.AdamW,
        "points to the model's": {id(p) for p in held} == {id(p) for p in model.parameters()},
        "rate": scheduler.get_last_lr() == schedule.get_last_lr(),
        "cut": any(map(is_cut, held)),
    }


def test_the_pretraining_loop_equals_one_process(pool: RankPool):
    for found in pool.run(_pretrained):
        assert found.pop("losses") < 1e-4
        assert found.pop("state") < 1e-4
        assert all(found.values()), found


def _accumulated() -> dict[str, Any]:
    """accumulate_gradient around a boosted model: bit for bit no change before the fourth."""
    x = seeded(lambda: torch.randn(8, 8))
    _, model, optimizer, scheduler = boosted(seeded(Mlp), (x[:4],), "mlp", max_norm=0.05)
    reference = seeded(Mlp)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.0)
    wrapped, loader, _, scheduler = accumulate_gradient(model, optimizer, [x[:4], x[4:]] * 3, 4, None, scheduler)
    for group in wrapped.param_groups:
        group["weight_decay"] = 0.0
    engine = Engine(model, wrapped, lambda out, _: out.square().mean())
    changed = []
    schedule = NonPipelineSchedule(lambda batch: ((batch,), [torch.zeros(())]))
    batches = iter(loader)
    for _ in range(len(loader)):
        before = [whole(p).detach().clone() for p in model.parameters()]
        engine.zero_grad()
        schedule.forward_backward_step(engine, batches)
        engine.step()
        scheduler.step()
        changed.append(any(not torch.equal(whole(p), b) for p, b in zip(model.parameters(), before, strict=True)))
    (sum(reference(h).square().mean() for h in (x[:4], x[4:])) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    plain.step()
    kinds = isinstance(wrapped, GradAccumOptimizer) and isinstance(wrapped.optim, MixedPrecisionOptimizer)
    return {
        "changed": changed,
        "state": state_distance(model, reference),
        "clipped": float(norm) > 0.05,
        "kinds": kinds,
    }


def test_accumulation_and_clipping_around_a_boosted_model(pool: RankPool):
    for found in pool.run(_accumulated):
        assert found["changed"] == [False, False, False, True]
        assert found["state"] < 1e-5
        assert found["clipped"]
        assert found["kinds"]


def _fp16(bad_rank: int) -> dict[str, Any]:
    x = seeded(lambda: torch.randn(4, 8))
    booster, model, optimizer, _ = boosted(
        seeded(Mlp), (x,), "mlp", mixed_precision="fp16", scaler={"init_scale": 1024.0}, max_norm=1.0
    )
    moved, scales = [], []
    for step in range(3):
        before = [whole(p).detach().clone() for p in model.parameters()]
        booster.backward(model(x).float().square().mean(), optimizer)
        if step == 1 and dist.get_rank() == bad_rank:
            next(p for p in model.parameters() if is_cut(p)).grad.to_local().fill_(float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        after = [whole(p).detach() for p in model.parameters()]
        moved.append(any(not torch.equal(a, b) for a, b in zip(after, before, strict=True)))
        scales.append(optimizer.scaler.get_scale())
    return {"moved": moved, "scales": scales, "dtypes": {p.dtype for p in model.parameters()}}


def test_fp16_scales_losses_and_skips_a_step_on_all_ranks(pool: RankPool):
    for found in pool.run(_fp16, 1):
        assert found["moved"] == [True, False, True]
        assert found["scales"] == [1024.0, 512.0, 512.0]
        assert found["dtypes"] == {torch.float32}


def _files(folder: str) -> dict[str, Any]:
    """Save one, load another, and let both train on."""
    root = Path(folder)
    batches = [seeded(lambda: tokens(4), seed) for seed in range(8)]
    booster, model, optimizer, scheduler = boosted(seeded(lambda: gpt2(n_layer=1)), batches[0], "gpt2")
    pretrain(model, optimizer, scheduler, batches[:4], booster.backward)
    for name, shard in (("one.safetensors", False), ("one.pt", False), ("several", True)):
        booster.save_model(model, root / name, shard=shard, size_per_shard=0)
    for name, shard in (("optimizer.pt", False), ("optimizers", True)):
        booster.save_optimizer(optimizer, root / name, shard=shard, size_per_shard=0)
    booster.save_lr_scheduler(scheduler, root / "scheduler.pt")
    state = {k: whole(v).detach().clone() for k, v in model.state_dict().items()}
    found: dict[str, Any] = {"state": state, "losses": []}
    expected = pretrain(model, optimizer, scheduler, batches[4:], booster.backward)
    for pair in (("one.safetensors", "optimizer.pt"), ("one.pt", "optimizers"), ("several", "optimizer.pt")):
        # under another plan, which cuts nothing, and with other values
        again = boosted(seeded(lambda: gpt2(n_layer=1), 7), batches[0], "gpt2", constraints={})
        booster, model, optimizer, scheduler = again
        booster.load_model(model, root / pair[0])
        booster.load_optimizer(optimizer, root / pair[1])
        booster.load_lr_scheduler(scheduler, root / "scheduler.pt")
        losses = pretrain(model, optimizer, scheduler, batches[4:], booster.backward)
        found["losses"].append(max(abs(a - b) for a, b in zip(losses, expected, strict=True)))
    return found


def test_files_are_loaded_under_another_plan_and_by_hugging_face(pool: RankPool, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    for found in pool.run(_files, str(tmp_path)):
        assert max(found["losses"]) < 1e-5, found["losses"]
        state = found["state"]
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "several")
    assert type(theirs).__name__ == "GPT2LMHeadModel"
    assert all(torch.equal(v, state[k]) for k, v in theirs.state_dict().items())
    plain = gpt2(n_layer=1)
    plain.load_state_dict(torch.load(tmp_path / "one.pt", weights_only=True))
    assert torch.equal(plain.lm_head.weight, state["lm_head.weight"])
    assert not list(tmp_path.rglob("*.tmp"))


def _refused(folder: str) -> dict[str, str]:
    x = torch.randn(4, 8)
    model, other = Mlp(), Mlp()
    optimizer = torch.optim.AdamW(other.parameters())
    found = {}

    def attempt(name: str, function: Any) -> None:
        try:
            function()
        except AutoparError as error:
            found[name] = str(error)

    attempt("optimizer", lambda: Booster(AutoParallelPlugin((x,), mesh=(2,))).boost(model, optimizer))
    found["unchanged"] = str(type(model) is Mlp)
    plugin = AutoParallelPlugin((x,), mesh=(2,), mixed_precision="bf16")
    attempt("precisions", lambda: Booster(plugin, "fp16").boost(model))
    attempt("no plugin", lambda: Booster(mixed_precision="bf16"))
    booster = Booster()
    attempt("no file", lambda: booster.load_model(model, Path(folder, "nothing")))
    booster.save_model(model, Path(folder, "mlp.pt"))
    attempt("other model", lambda: booster.load_model(nn.Linear(2, 2), Path(folder, "mlp.pt")))
    Path(folder, "empty").mkdir(exist_ok=True)
    attempt("no index", lambda: booster.load_model(model, Path(folder, "empty")))
    attempt("not writable", lambda: booster.save_model(model, Path(folder, "mlp.pt", "below"), shard=True))
    return found


def test_what_does_not_fit_is_refused_on_every_rank(pool: RankPool, tmp_path: Path):
    for found in pool.run(_refused, str(tmp_path)):
        assert "not the model's" in found["optimizer"]
        assert found["unchanged"] == "True"
        assert "different precisions" in found["precisions"]
        assert "part of the program" in found["no plugin"]
        assert "does not exist" in found["no file"]
        assert "missing bias, weight, unexpected down.bias" in found["other model"]
        assert "no index" in found["no index"]
        assert "cannot be written" in found["not writable"]


def _local() -> dict[str, Any]:
    """batch="local" with the plugin's loader: every rank reads its part, and the loss is the whole batch's."""
    warnings.simplefilter("ignore")
    data = seeded(lambda: torch.randn(8, 8))
    plugin = AutoParallelPlugin((torch.empty(2, 8),), mesh=(2,), batch="local")
    loader = plugin.prepare_dataloader(data, 2)
    model = seeded(Mlp)
    reference = copy.deepcopy(model)
    model, *_ = Booster(plugin).boost(model)
    read = [row for batch in loader for row in batch]
    outputs = [all_reduce_mean(model(batch).detach().square().mean(), plugin) for batch in loader]
    expected = [reference(data[i : i + 4]).detach().square().mean() for i in (0, 4)]
    difference = max(float((a - b).abs()) for a, b in zip(outputs, expected, strict=True))
    return {"rows": torch.stack(read), "difference": difference, "data": data}


def test_a_local_batch_is_this_rank_s_part(pool: RankPool):
    found = pool.run(_local)
    data = found[0]["data"]
    assert torch.equal(found[0]["rows"], data[0::2])
    assert torch.equal(found[1]["rows"], data[1::2])
    assert all(f["difference"] < 1e-6 for f in found)


def _moved_state() -> float:
    """An optimizer that has state from its construction, as Adagrad, or from steps before, keeps it."""
    x = seeded(lambda: torch.randn(4, 8))
    reference = seeded(Mlp)
    plain = torch.optim.Adagrad(reference.parameters(), lr=0.1, initial_accumulator_value=0.1)

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step(reference, plain)
    model = copy.deepcopy(reference)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    warnings.simplefilter("ignore")
    model, optimizer, *_ = Booster(AutoParallelPlugin((x,), mesh=(2,), constraints=SHARDED["mlp"])).boost(
        model, optimizer
    )
    for each in ((reference, plain), (model, optimizer)):
        step(*each)
    return state_distance(model, reference)


def test_state_that_an_optimizer_has_goes_with_its_parameters(pool: RankPool):
    assert max(pool.run(_moved_state)) < 1e-6
