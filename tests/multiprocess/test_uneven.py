"""Sizes that do not divide, and ranks that do not agree on them, on real processes."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from tests.cpu.test_uneven import COLUMNS, Uneven, ids
from tests.cut_models import Norms
from tests.halo_models import Resizing, Sliding, image
from tests.multiprocess.pool import RankPool

VOCABULARY, HEADS, HEAD = 257, 5, 3


class Small(nn.Module):
    """An odd vocabulary and an odd number of heads."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD
        self.embed = nn.Embedding(VOCABULARY, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) + h
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), ids.roll(-1, 1).flatten())


def _ids(batch: int, length: int, seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def _train() -> list[tuple[float, float]]:
    torch.manual_seed(0)
    reference = Small().double()
    torch.manual_seed(0)
    cut = {"embed.weight": "S0R"}
    model = autopar.autoparallelize(Small().double(), _ids(6, 8, 0), mesh=(2,), constraints=cut, time_limit=5)
    stored = {n: p.placements for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (reference, model)]
    losses = []
    for step, (batch, length) in enumerate([(6, 8), (3, 8), (6, 7), (1, 8), (6, 8)]):
        each = []
        for module, optimizer in zip((reference, model), optimizers, strict=True):
            loss = module(_ids(batch, length, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            each.append(loss.item())
        losses.append((each[0], each[1]))
    assert {n: p.placements for n, p in model.named_parameters()} == stored  # type: ignore[attr-defined]
    assert len(model._autopar.programs) == 4
    return losses


def test_odd_sizes_and_smaller_batches_train_as_on_one_device(pool: RankPool):
    for losses in pool.run(_train):
        assert all(abs(a - b) < 1e-12 * abs(a) for a, b in losses)


def _alone() -> dict[str, Any]:
    """One rank calls with another batch, in another mode, and with one that it cannot be called with at all."""
    torch.manual_seed(0)
    model = autopar.autoparallelize(Small(), _ids(4, 6, 0), mesh=(2,), time_limit=5)
    odd = dist.get_rank() == 1
    wrong = {
        "size": lambda: model(_ids(3 if odd else 4, 6, 0)),
        "mode": lambda: model.train(not odd)(_ids(4, 6, 0)),
        "gradients": lambda: torch.no_grad()(model)(_ids(4, 6, 0)) if odd else model(_ids(4, 6, 0)),
        "kind": lambda: model(_ids(4, 6, 0).float() if odd else _ids(4, 6, 0)),
    }
    said: dict[str, Any] = {}
    started = time.perf_counter()
    for name, call in wrong.items():
        try:
            call()
        except AutoparError as error:
            said[name] = type(error).__name__, str(error)
        model.train()
    said["seconds"] = time.perf_counter() - started
    said["loss"] = model(_ids(4, 6, 0)).item()
    return said


def test_a_rank_alone_with_another_call_stops_all_ranks_at_once(pool: RankPool):
    first, second = pool.run(_alone)
    for said in (first, second):
        assert said.pop("seconds") < 20
        for name in ("size", "mode", "gradients"):
            kind, text = said[name]
            assert kind == "RankError"
            assert "drop_last=True" in text
        assert "ids: (4, 6) torch.int64 on rank 0, (3, 6) torch.int64 on rank 1" in said["size"][1]
        assert "training: True on rank 0, False on rank 1" in said["mode"][1]
        assert "gradients: True on rank 0, False on rank 1" in said["gradients"][1]
    assert (first["kind"][0], second["kind"][0]) == ("RankError", "InputError")
    assert first["loss"] == second["loss"]


def _exchanged_inside() -> dict[str, Any]:
    """Random plans in which ops exchange rows, or summaries, with other ranks: what they give, beside one device."""
    found: dict[str, Any] = {"permute": 0, "all_gather": 0, "worst": 0.0}
    cases: list[tuple[type[torch.nn.Module], torch.Tensor]] = [
        (Sliding, image(33, 2)),
        (Resizing, image(16)),
        (Norms, torch.arange(240).double().sin().view(2, 6, 4, 5)),
    ]
    for seed, (kind, x) in enumerate(cases * 2):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(kind().double())
        reference, model = models
        model = autopar.autoparallelize(model, x, mesh=(2,), search=f"random:{seed}", time_limit=2)
        losses = [m(x) for m in (reference, model)]
        for loss in losses:
            loss.backward()
        for op in model.plan.program.ops:
            for sent in op.sent:
                found[sent.kind] += 1
        pairs = [
            (p.grad, q.grad.full_tensor()) for p, q in zip(reference.parameters(), model.parameters(), strict=True)
        ]
        distances = [((p - q).abs().max() / max(p.abs().max(), 1e-3)).item() for p, q in pairs]
        found["worst"] = max(found["worst"], abs((losses[0] - losses[1]).item() / losses[0].item()), *distances)
    return found


def test_halos_and_summaries_are_exchanged(pool: RankPool):
    for found in pool.run(_exchanged_inside):
        assert found["permute"] > 3
        assert found["all_gather"] > 3
        assert found["worst"] < 1e-9


def _on_four() -> list[tuple[float, float]]:
    """25 heads over 4 and a vocabulary of 1,021 over 4 ranks, and a last batch of 3 after batches of 6."""
    reference, model = (Uneven(1021).double() for _ in range(2))
    cut = {"embed.weight": "S0R", **COLUMNS}
    model = autopar.autoparallelize(model, ids(6, 1021), mesh=(4,), constraints=cut, time_limit=5)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (reference, model)]
    losses = []
    for batch in (6, 6, 3):
        each = []
        for module, optimizer in zip((reference, model), optimizers, strict=True):
            loss = module(ids(batch, 1021))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            each.append(loss.item())
        losses.append((each[0], each[1]))
    pairs = zip(reference.parameters(), model.parameters(), strict=True)
    worst = max((p - q.full_tensor()).abs().max().item() for p, q in pairs)
    rows = model.embed.weight.to_local().shape[0]
    return [*losses, (worst, 0.0), (float(rows), 256.0 if dist.get_rank() < 3 else 253.0)]


def test_heads_and_vocabulary_that_do_not_divide_train_on_four_processes(four: RankPool):
    for found in four.run(_on_four):
        *losses, (worst, _), (rows, expected) = found
        assert all(abs(a - b) < 1e-12 * abs(a) for a, b in losses)
        assert worst < 1e-12
        assert rows == expected
