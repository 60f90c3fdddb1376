"""Real models train on several processes as on one: losses, gradients and the gathered state dict."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_models import MODELS, SHARDED, is_cut, pair, seeded, state_distance

pytestmark = pytest.mark.multiprocess
TOLERANCE = 1e-4


@pytest.fixture
def pools(pool: RankPool, four: RankPool) -> dict[int, RankPool]:
    return {2: pool, 4: four}


def _trained(kind: str, mesh: tuple[int, ...], options: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train on all ranks, and on each alone; how far apart they are."""
    make, batch = MODELS[kind]
    batches = [seeded(batch, seed) for seed in range(3)]
    reference, model = pair(seeded(make), batches[0], mesh, **options)
    losses = []
    for module in (reference, model):
        # A large eps, since Adam would blow up the rounding in gradients that are truly zero (a key's bias).
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
        losses.append([])
        for step in range(steps):
            optimizer.zero_grad()
            loss = module(**batches[step % 3]).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    return {
        "losses": max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True)),
        "state": state_distance(model, reference),
        "fell": losses[0][0] - losses[0][-1],
        "cut": sum(is_cut(p) for p in model.parameters()),
        "offloaded": sum(op.kind == "fetch" for op in model.plan.program.ops),
    }


@pytest.mark.parametrize("kind", MODELS)
def test_twenty_steps_on_two_ranks_equal_one_process(pools: dict[int, RankPool], kind: str):
    for found in pools[2].run(_trained, kind, (2,), {"constraints": SHARDED[kind]}, 20):
        assert found["cut"] > 0
        assert found["fell"] > 0
        assert found["losses"] < TOLERANCE
        assert found["state"] < TOLERANCE


@pytest.mark.parametrize("kind", ["gpt2", *(pytest.param(k, marks=pytest.mark.slow) for k in ("llama", "resnet"))])
def test_twenty_steps_of_a_random_plan_on_four_ranks_equal_one_process(pools: dict[int, RankPool], kind: str):
    for found in pools[4].run(_trained, kind, (2, 2), {"search": "random:3"}, 20):
        assert found["cut"] > 0
        assert found["losses"] < TOLERANCE
        assert found["state"] < TOLERANCE


def test_twenty_steps_of_a_plan_that_recomputes_and_offloads_equal_one_process(pools: dict[int, RankPool]):
    for found in pools[2].run(_trained, "gpt2", (2,), {"search": "random+recompute:1"}, 20):
        assert found["cut"] > 0
        assert found["offloaded"] > 0
        assert found["losses"] < TOLERANCE
        assert found["state"] < TOLERANCE
