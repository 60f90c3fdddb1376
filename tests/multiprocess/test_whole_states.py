"""States of parallel models in files that other programs write and read: whole tensors, whoever gathers them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import RankError
from autopar.runtime.gathering import gather_state
from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_models import SHARDED, distance, gpt2, is_cut, tokens, whole

pytestmark = pytest.mark.multiprocess
QUICK: dict[str, Any] = {"cluster": "cpu-2", "time_limit": 2}


class Tied(nn.Module):
    """A table that is also the last product, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 12, bias=False)
        self.last.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.norm(self.table(ids)))


def _stepped(model: nn.Module, ids: Tensor, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()


def _goes_to_one_device_and_back(path: str) -> dict[str, Any]:
    torch.manual_seed(0)
    ids = torch.arange(8)
    plain = Tied()
    model = autopar.autoparallelize(copy.deepcopy(plain), ids, mesh=(2,), constraints={"table.weight": "S0R"}, **QUICK)
    model.to("cpu").to(torch.float32)  # as frameworks do
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        _stepped(each, ids, optimizer)
    first = dist.get_rank() == 0
    state = {"model": model.state_dict(), "optimizer": optimizers[0].state_dict(), "epoch": 3}
    assert any(is_cut(t) for t in state["model"].values())
    written = gather_state(state, "a checkpoint", keep=first)
    found: dict[str, Any] = {"kept": sum(t.numel() for t in written["model"].values() if isinstance(t, Tensor))}
    if first:
        found["tied"] = written["model"]["table.weight"].data_ptr() == written["model"]["last.weight"].data_ptr()
        torch.save(written, path)
    dist.barrier()
    read = torch.load(path, weights_only=True)
    found["types"] = {type(t).__name__ for t in read["model"].values()}
    resumed = autopar.autoparallelize(Tied(), ids, mesh=(2,), constraints={"table.weight": "RS0"}, **QUICK)
    again = torch.optim.AdamW(resumed.parameters(), lr=0.1)
    resumed.load_state_dict(read["model"])
    again.load_state_dict(read["optimizer"])  # whole tensors beside cut parameters, as other frameworks load them
    for each, optimizer in ((resumed, again), (plain, optimizers[1])):
        _stepped(each, ids, optimizer, 2)
    found["states"] = {type(again.state[p]["exp_avg"]) for p in resumed.parameters()} == {DTensor}
    found["worst"] = max(distance(p, q) for p, q in zip(resumed.parameters(), plain.parameters(), strict=True))
    return found


def test_a_gathered_state_loads_under_another_plan_and_goes_on_as_on_one_device(pool: RankPool, tmp_path: Path):
    first, second = pool.run(_goes_to_one_device_and_back, str(tmp_path / "state.pt"))
    assert first["tied"]
    assert first["kept"] > 2 * 12 * 8
    assert second["kept"] < first["kept"] - 2 * 12 * 8  # what other ranks need not write they do not hold
    for found in (first, second):
        assert found["types"] == {"Tensor"}
        assert found["states"]
        assert found["worst"] < 1e-4


def _saved_as_pretrained(folder: str) -> float:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = autopar.autoparallelize(gpt2(n_layer=1), tokens(4), mesh=(2,), constraints=SHARDED["gpt2"], **QUICK)
    model.save_pretrained(folder)
    kind = type(model).__name__
    read = AutoModelForCausalLM.from_pretrained(folder)
    assert read.config.architectures == ["GPT2LMHeadModel"]
    assert kind == "ParallelGPT2LMHeadModel"
    model.save_pretrained(f"{folder}/again", state_dict=model.state_dict(), is_main_process=dist.get_rank() == 0)
    again = AutoModelForCausalLM.from_pretrained(f"{folder}/again")
    pairs = zip(model.parameters(), read.parameters(), again.parameters(), strict=True)
    return max(max(distance(whole(p), q), distance(q, r)) for p, q, r in pairs)


def test_save_pretrained_writes_whole_tensors_under_the_models_own_name(pool: RankPool, tmp_path: Path):
    pytest.importorskip("transformers")
    assert pool.run(_saved_as_pretrained, str(tmp_path)) == [0.0, 0.0]
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def _not_writable(folder: str) -> str:
    model: Any = autopar.autoparallelize(gpt2(n_layer=1), tokens(4), mesh=(2,), constraints=SHARDED["gpt2"], **QUICK)
    try:
        model.save_pretrained(f"{folder}/file/inside")
    except (OSError, RankError) as error:
        return type(error).__name__
    return ""


def test_where_rank_0_cannot_write_all_ranks_stop(pool: RankPool, tmp_path: Path):
    pytest.importorskip("transformers")
    (tmp_path / "file").write_text("")
    assert pool.run(_not_writable, str(tmp_path)) == ["NotADirectoryError", "RankError"]
