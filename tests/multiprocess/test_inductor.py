"""The Inductor backend on two processes, collectives included."""

from __future__ import annotations

import copy

import pytest
import torch

import autopar
from autopar.mesh import Cluster
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
