"""Sizes that do not divide: a vocabulary of 50,257 over 8 devices, 25 heads over 4, a last batch that is smaller."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from tests.cpu.capture_checks import assert_grads, captured_once

VOCABULARY, HEADS, HEAD = 50_257, 25, 2
WIDTH = HEADS * HEAD


class Uneven(nn.Module):
    """GPT-2 XL's heads and vocabulary, tied, in a small width."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        q, k, v = (layer(h).unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        h = h + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return functional.cross_entropy(self.head(h).flatten(0, 1), ids.roll(-1, 1).flatten())


def ids(batch: int, vocabulary: int = VOCABULARY) -> Tensor:
    """The first and the last word of the vocabulary among them."""
    made = torch.randint(0, vocabulary, (batch, 4), generator=torch.Generator().manual_seed(batch))
    made[0, 0], made[-1, -1] = 0, vocabulary - 1
    return made


COLUMNS = {f"{name}.{part}": spec for name in "qkv" for part, spec in (("weight", "S0R"), ("bias", "S0"))}


@pytest.mark.parametrize(
    ("mesh", "batch", "constraints"),
    [
        ((8,), 3, {"embed.weight": "S0R"}),
        ((2, 4), 3, {"embed.weight": "S1R", **{n: s.replace("0", "1") for n, s in COLUMNS.items()}}),
        ((4,), 5, {"embed.weight": "RS0", **COLUMNS, "out.weight": "RS0"}),
    ],
)
@captured_once()
def test_uneven_shards_give_what_one_device_gives(mesh, batch, constraints) -> None:
    model, batch_ids = Uneven().double(), ids(batch)
    plan = autopar.plan(model, batch_ids, mesh=mesh, constraints=constraints, time_limit=5)
    assert {n: str(plan.specs[n]) for n in constraints} == constraints
    result = autopar.simulate(model, batch_ids, plan=plan)
    reference = copy.deepcopy(model)
    loss = reference(batch_ids)
    loss.backward()
    torch.testing.assert_close(result.outputs, loss.detach(), rtol=1e-12, atol=0)
    assert_grads(result.grads, {n: p.grad for n, p in reference.named_parameters()})


def test_uneven_shards_are_not_padded_in_memory() -> None:
    """The fullest of 8 devices holds 6,283 rows of 50,257, an eighth rounded up."""
    plan = autopar.plan(Uneven(), ids(8), mesh=(8,), constraints={"embed.weight": "S0R"}, time_limit=5)
    held = plan.memory["parameters"]
    others = sum(p.numel() * 4 for n, p in Uneven().named_parameters() if n != "embed.weight")
    assert 6283 * WIDTH * 4 <= held <= 6283 * WIDTH * 4 + others + 512 * 16
