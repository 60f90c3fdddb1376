"""The Inductor backend on two processes, collectives included."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.mesh import Cluster
from autopar.program import AGAIN
from tests.cpu.model_checks import cluster_where_sharding_pays
from tests.cpu.test_inductor import step
from tests.models import ZOO
from tests.multiprocess.pool import RankPool
from tests.ranks import run_ranks

MODELS = ("mlp", "cnn", "gpt2", "llama", "bert", "vit", "resnet")


def _equal(name: str, cluster: Cluster, search: str = "joint") -> tuple[int, int, float]:
    """Number of collectives, of those with several tensors, and the largest difference between the eager and the
    compiled step."""
    model, inputs = ZOO[name].made(torch.float32, 0.1)
    options = {"mesh": (2,), "cluster": cluster, "time_limit": 20.0, "search": search}
    eager = autopar.autoparallelize(copy.deepcopy(model), inputs, **options)
    plan = eager.plan
    compiled = autopar.autoparallelize(copy.deepcopy(model), inputs, plan=plan, backend="inductor")
    (loss, grads), (other, others) = step(eager, inputs), step(compiled, inputs)
    worst = float((loss - other).abs().max())
    for parameter, gradient in grads.items():
        scale = max(1.0, float(gradient.abs().max()))
        worst = max(worst, float((gradient - others[parameter]).abs().max()) / scale)
    again, _ = step(compiled, inputs)
    assert torch.equal(again, other)
    return len(plan.collectives), sum(bool(op.bucket) for op in plan.program.ops), worst


def test_two_compiled_ranks_with_buckets_equal_two_eager_ones(pool: RankPool) -> None:
    for collectives, buckets, worst in pool.run(_equal, "mlp", Cluster.load("cpu-2"), "baseline:DDP"):
        assert collectives >= 2
        assert buckets > 0
        assert worst < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_compiled_ranks_equal_two_eager_ones(name) -> None:
    for collectives, _, worst in run_ranks(2, _equal, name, cluster_where_sharding_pays().sized(2), timeout=600):
        assert collectives > 3
        assert worst < 1e-5


def _trained(name: str, micro_batches: int) -> dict[str, Any]:
    """Two steps on the eager and on the compiled program of the first random plan that offloads something, with equal
    dropout. They are of SGD: where a gradient is next to nothing, AdamW makes of its rounding a whole step."""
    model, inputs = ZOO[name].made(torch.float32, 0.1)
    options = {"mesh": (2,), "accumulation_steps": micro_batches, "mixed_precision": "bf16"}
    searches = (f"random+recompute:{seed}" for seed in itertools.count())
    plans = (autopar.plan(model, inputs, optimizer="sgd", search=search, **options) for search in searches)
    plan = next(plan for plan in plans if any(op.kind == "fetch" for op in plan.program.ops))
    found: list[dict[str, Tensor]] = []
    for backend in ("eager", "inductor"):
        parallel = autopar.autoparallelize(copy.deepcopy(model), inputs, plan=plan, backend=backend)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        torch.manual_seed(1)
        for _ in range(2):
            for _ in range(micro_batches):
                loss = parallel(**inputs)
                (loss if isinstance(loss, Tensor) else loss.loss).backward()
            gradients = {n: p.grad.full_tensor() for n, p in parallel.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        parameters = {n: p.full_tensor() for n, p in parallel.named_parameters()}
        found.append(gradients | {f"{n} stepped": p.detach() for n, p in parameters.items()})
    eager, compiled = found
    off = {n: float((compiled[n] - t).abs().max() / t.abs().max().clamp_min(1e-3)) for n, t in eager.items()}
    program = plan.program
    return {
        "fetched": sum(op.kind == "fetch" for op in program.ops),
        "worst": max(off.values()),
        "compared": len(off),
        "again": sum(op.name.endswith(AGAIN) for op in program.ops),
        "on the host": plan.host_memory,
    }


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_two_compiled_ranks_offload_recompute_and_add_up_in_half_precision(pool: RankPool, name) -> None:
    for found in pool.run(_trained, name, 2, timeout=600):
        assert found["fetched"] > 0
        assert found["compared"] > 8
        assert found["worst"] < 2e-2
