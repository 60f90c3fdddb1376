"""Checkpoints, tied parameters, meta models and errors of parallel models on several processes."""

from __future__ import annotations

import copy
import warnings
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar
from autopar import assembly
from autopar.errors import AutoparError, InfeasibleError, RankError
from autopar.runtime import materialize
from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_models import (
    SHARDED,
    Mlp,
    gpt2,
    images,
    is_cut,
    llama,
    pair,
    resnet,
    seeded,
    state_distance,
    tokens,
    whole,
)

pytestmark = pytest.mark.multiprocess


def _update_ema(ema: nn.Module, model: nn.Module) -> None:
    """As training scripts have it."""
    with torch.no_grad():
        for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
            average.mul_(0.9).add_(parameter, alpha=0.1)


def _averaged() -> dict[str, float]:
    torch.manual_seed(0)
    reference, model = pair(Mlp(), torch.randn(8, 8), (2,), constraints={"up.weight": "S0R", "down.weight": "RS0"})
    before = copy.deepcopy(reference)
    models = (model, copy.deepcopy(model)), (reference, copy.deepcopy(reference))
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m, _ in models]
    for _ in range(2):
        for (trained, ema), average in zip(models, averages, strict=True):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.mul_(1.5)
            _update_ema(ema, trained)
            average.update_parameters(trained)
    ema = models[0][1]
    found = {
        "by hand": state_distance(ema, models[1][1]),
        "by torch": state_distance(averages[0].module, averages[1].module),
        "not cut": float(not is_cut(ema.up.weight)),
    }
    ema.load_state_dict(before.state_dict())
    return found | {"filled from an earlier copy": state_distance(ema, before)}


def test_averages_of_weights_that_are_copied_from_a_parallel_model(pool: RankPool):
    for found in pool.run(_averaged):
        assert max(found.values()) < 1e-6, found


def _small_gpt2(mesh: tuple[int, ...] = (2,), **options: Any) -> tuple[nn.Module, nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = gpt2(n_layer=1), tokens(4)
    return *pair(model, batch, mesh, constraints=SHARDED["gpt2"], **options), batch


def _kept() -> dict[str, Any]:
    reference, model, batch = _small_gpt2()
    mine, plain = model.state_dict(), reference.state_dict()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(iter(twin.parameters())).zero_()
    return {
        "tied": model.lm_head.weight is model.transformer.wte.weight and is_cut(model.lm_head.weight),
        "keys": list(mine) == list(plain),
        "shapes": all(mine[k].shape == plain[k].shape for k in plain),
        "names": [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()],
        "modules": [n for n, _ in model.named_modules()] == [n for n, _ in reference.named_modules()],
        "class": isinstance(model, type(reference)),
        "config": model.config.n_layer,
        "unchanged by its copy": state_distance(model, reference),
        "the copy runs on its own": float((twin(**batch).loss - model(**batch).loss).abs()) > 1e-3,
    }


def test_names_shapes_ties_and_copies(pool: RankPool):
    for found in pool.run(_kept):
        assert found.pop("config") == 1
        assert found.pop("unchanged by its copy") == 0
        assert all(found.values()), found


def _loaded() -> dict[str, Any]:
    reference, model, _ = _small_gpt2()
    other = seeded(lambda: gpt2(n_layer=1), seed=5)
    found: dict[str, Any] = {}
    given = other.state_dict()
    model.load_state_dict(given)
    found["plain"] = state_distance(model, other)
    found["caller's dict is left alone"] = float(any(is_cut(v) for v in given.values()))
    model.load_state_dict(reference.state_dict(), assign=True)
    found["assigned"] = state_distance(model, reference)
    found["assigned shards"] = float(sum(is_cut(p) for p in model.parameters()) == 0)
    model.transformer.h[0].load_state_dict(other.transformer.h[0].state_dict())
    found["a module alone"] = state_distance(model.transformer.h[0], other.transformer.h[0])
    set_model_state_dict(model, other.state_dict(), options=StateDictOptions(full_state_dict=True))
    found["set_model_state_dict"] = state_distance(model, other)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found["get_model_state_dict"] = max(float((full[k] - v).abs().max()) for k, v in other.state_dict().items())
    return found


def test_whole_state_dicts_go_in_and_out(pool: RankPool):
    for found in pool.run(_loaded):
        assert all(value == 0 for value in found.values()), found


def _shard_given() -> str:
    _, model, _ = _small_gpt2()
    try:
        model.load_state_dict({k: v.to_local() if is_cut(v) else whole(v) for k, v in model.state_dict().items()})
    except AutoparError as error:
        return str(error)
    return ""


def test_a_shard_in_a_state_dict_is_refused(pool: RankPool):
    for text in pool.run(_shard_given):
        assert "not the whole parameter" in text
        assert "torch.distributed.checkpoint" in text


def _checkpointed(folder: str) -> dict[str, float]:
    """Save model and optimizer under one plan, load them under others."""
    torch.manual_seed(0)
    x = torch.randn(6, 8)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    def made(seed: int, constraints: dict[str, str]) -> tuple[nn.Module, torch.optim.Optimizer]:
        _, model = pair(seeded(Mlp, seed), (x,), (2,), constraints=constraints)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    first, optimizer = made(0, SHARDED["mlp"])
    train(first, optimizer, 2)
    dcp.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    train(first, optimizer, 2)
    found = {}
    for name, constraints in {"same plan": SHARDED["mlp"], "other plan": {"up.weight": "RS0"}, "whole": {}}.items():
        second, again = made(1, constraints)
        train(second, again, 1)  # so that the optimizer has state to load into
        state = {"model": second.state_dict(), "optimizer": again.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        second.load_state_dict(state["model"])
        again.load_state_dict(state["optimizer"])
        train(second, again, 2)
        pairs = zip(second.parameters(), first.parameters(), strict=True)
        found[name] = max(float((whole(p) - whole(q)).abs().max()) for p, q in pairs)
    return found


def test_a_checkpoint_of_one_plan_continues_under_another(pool: RankPool, tmp_path: Path):
    for found in pool.run(_checkpointed, str(tmp_path / "saved")):
        assert max(found.values()) < 1e-6, found


# Models on the meta device.


class Live(TorchDispatchMode):
    """Most elements that were alive at once in tensors made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(t) for t in tree_leaves(out) if type(t) is torch.Tensor and t.device.type == "cpu"]
        alive = [t for r in self._made if (t := r()) is not None]
        self._made = [weakref.ref(t) for t in alive]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // t.element_size() for t in alive}
        self.peak = max(self.peak, sum(sizes.values()))
        return out


def _meta_model(kind: str) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        if kind == "gpt2":
            return gpt2(), tokens(4)
        if kind == "llama":
            return llama(), tokens(4)
        if kind == "resnet":
            return resnet(), images(4)
        layers = [nn.Linear(8, 12), nn.BatchNorm1d(12), nn.MultiheadAttention(12, 2), nn.Linear(12, 6)]
        return Chain(layers), (torch.empty(6, 8),)


class Chain(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.up, self.norm, self.attention, self.down = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.up(x))
        return self.down(self.attention(x, x, x)[0])


def _materialised(kind: str, mesh: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    model, batch = _meta_model(kind)
    largest = max(p.numel() for p in model.parameters())
    torch.manual_seed(11)
    live = Live()

    def watched(*args: Any, **options: Any) -> Any:
        with live:
            return materialize.prepare(*args, **options)

    with mock.patch.object(assembly, "prepare", watched):
        model = autopar.autoparallelize(model, batch, mesh=mesh, **options)
    held = sum(p.to_local().numel() for p in model.parameters()) + sum(b.numel() for b in model.buffers())
    state = {k: whole(v).clone() for k, v in model.state_dict().items()}
    buffers = {k: b.clone() for k, b in model.named_buffers()}
    cut = sum(is_cut(p) for p in model.parameters())
    return {"state": {**state, **buffers}, "extra": (live.peak - held) / largest, "cut": cut}


META = {"gpt2": SHARDED["gpt2"], "llama": SHARDED["llama"], "resnet": SHARDED["resnet"], "plain": {"*.weight": "S0R"}}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k == "gpt2")) for k in META])
def test_meta_models_get_the_same_values_on_every_mesh(pool: RankPool, single: RankPool, kind: str):
    alone = single.run(_materialised, kind, (1,), {})[0]["state"]
    for found in pool.run(_materialised, kind, (2,), {"constraints": META[kind]}):
        assert found["cut"] > 0
        assert list(found["state"]) == list(alone)
        assert all(torch.equal(v, alone[k]) for k, v in found["state"].items())
        # One whole parameter, and temporaries of its size while it is drawn and cut.
        assert found["extra"] < 2.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "plain"])
def test_meta_models_get_the_same_values_on_four_ranks(single: RankPool, kind: str):
    four = RankPool(4)
    try:
        alone = single.run(_materialised, kind, (1,), {})[0]["state"]
        for found in four.run(_materialised, kind, (2, 2), {"search": "random:2"}):
            assert all(torch.equal(v, alone[k]) for k, v in found["state"].items())
    finally:
        four.close()


def _spread_of_meta() -> tuple[float, float, float]:
    """Values as the model's own initialisation draws them: GPT-2 scales the projections of its residual paths."""
    warnings.simplefilter("ignore")
    model, batch = _meta_model("gpt2")
    model = autopar.autoparallelize(model, batch, mesh=(2,), constraints=SHARDED["gpt2"])
    block = model.transformer.h[0]
    std = [float(whole(w).std()) for w in (block.attn.c_attn.weight, block.attn.c_proj.weight)]
    return (*std, float((whole(block.ln_1.weight) - 1).abs().max()))


def test_meta_models_are_initialised_as_their_authors_meant(pool: RankPool):
    for inner, residual, norm in pool.run(_spread_of_meta):
        assert inner == pytest.approx(0.02, rel=0.1)
        assert residual == pytest.approx(0.01, rel=0.1)  # 0.02 / sqrt(2 * 2 layers)
        assert norm == 0


def _first_rank_has_the_values() -> tuple[float, float]:
    warnings.simplefilter("ignore")
    reference = seeded(Mlp)
    model = copy.deepcopy(reference)
    if dist.get_rank():
        model = model.to("meta")
    model = autopar.autoparallelize(model, (torch.empty(6, 8),), mesh=(2,), constraints=SHARDED["mlp"])
    torch.manual_seed(dist.get_rank())
    other = Mlp()
    first = [torch.empty_like(p) for p in other.parameters()]
    for buffer, p in zip(first, other.parameters(), strict=True):
        buffer.copy_(p.detach())
        dist.broadcast(buffer, 0)
    other = autopar.autoparallelize(other, (torch.empty(6, 8),), mesh=(2,), constraints=SHARDED["mlp"])
    spread = max(float((whole(p) - b).abs().max()) for p, b in zip(other.parameters(), first, strict=True))
    return state_distance(model, reference), spread


def test_where_ranks_differ_the_values_of_rank_0_count(pool: RankPool):
    for from_meta, from_other in pool.run(_first_rank_has_the_values):
        assert from_meta == 0
        assert from_other == 0


# Errors: on every rank, and the model is as it was.


class Bare(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


class Branching(Bare):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else x


def _failed(case: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    x = torch.randn(6, 8)
    rank = dist.get_rank()
    makers = {"meta": lambda: Bare("meta"), "capture": Branching, "graphs": lambda: Mlp() if rank else Bare()}
    model = makers.get(case, Bare)()
    options: dict[str, Any] = {
        "budget": {"memory_budget": 100},
        "constraint": {"constraints": {"nothing": "S0"}},
        "mesh": {"mesh": (3,)},
        "one rank": {"constraints": {"layer.weight": "S0R"}},
    }.get(case, {})
    inputs = (x[:, :4],) if case == "one rank" and rank == 1 else (x,)
    tensors, values, kind = dict(model.named_parameters()), copy.deepcopy(model.state_dict()), type(model)
    try:
        autopar.autoparallelize(model, inputs, **{"mesh": (2,), **options})
    except AutoparError as error:
        same = type(model) is kind and all(p is tensors[n] for n, p in model.named_parameters())
        equal = all(v.is_meta or torch.equal(v, values[k]) for k, v in model.state_dict().items())
        return {"error": error, "unchanged": same and equal}
    return {"error": None, "unchanged": False}


CASES = {
    "budget": (InfeasibleError, InfeasibleError),
    "constraint": (AutoparError, AutoparError),
    "mesh": (AutoparError, AutoparError),
    "meta": (AutoparError, AutoparError),
    "capture": (AutoparError, AutoparError),
    "graphs": (RankError, RankError),
    "one rank": (RankError, AutoparError),
}


def test_after_an_error_every_rank_has_it_and_the_model_is_as_it_was(pool: RankPool):
    for case, kinds in CASES.items():
        for found, kind in zip(pool.run(_failed, case), kinds, strict=True):
            assert isinstance(found["error"], kind), (case, found)
            assert found["unchanged"], (case, found)
