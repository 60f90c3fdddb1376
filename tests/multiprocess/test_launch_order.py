"""Every rank launches the same collectives in the order of the plan, whatever the plan: else they wait for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from autopar.spmd import ProcessRank
from tests.multiprocess.training_models import MODELS, gradient_distance, pair

pytestmark = pytest.mark.multiprocess

QUICK = [("llama", (4,), "baseline:ZeRO-3"), ("gpt2", (2, 2), "random:1"), ("resnet", (2, 2), "random:3")]
SLOW = [
    ("llama", (2, 2), "baseline:FSDP x TP+SP"),
    ("resnet", (4,), "baseline:DDP"),
    ("gpt2", (2, 2), "baseline:HSDP"),
    ("llama", (4,), "random:2"),
    ("gpt2", (4,), "random:4"),
]
SEARCHES = [*QUICK, *(pytest.param(*s, marks=pytest.mark.slow) for s in SLOW)]
"""Of different models, meshes and plans. Vocabularies of 66 and heads of 3 cut no axis evenly: shards are padded."""

Launches = list[tuple[str, int]]


@contextmanager
def recording(launched: Launches) -> Iterator[None]:
    launch = ProcessRank.launch

    def recorded(self: ProcessRank, buffer: torch.Tensor, exchange: Any) -> torch.Tensor:
        launched.append((exchange.kind, exchange.axis))
        return launch(self, buffer, exchange)

    ProcessRank.launch = recorded  # type: ignore[method-assign]
    try:
        yield
    finally:
        ProcessRank.launch = launch  # type: ignore[method-assign]


def launches(name: str, mesh: tuple[int, ...], search: str) -> tuple[Launches, Launches, int, float]:
    """What this rank launched in a step, what the plan says, the most tensors of a launch, and the gradients' error."""
    torch.manual_seed(0)
    build, batch = MODELS[name]
    model = build().double()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in batch().items()}
    reference, made = pair(model, inputs, mesh, search=search, cluster="dgx-h100")
    launched: Launches = []
    with recording(launched):
        made(**inputs).loss.backward()
    reference(**inputs).loss.backward()
    planned = [(c.kind, -1 if c.kind == "permute" else c.axis) for c in made.plan.collectives]
    return launched, planned, max(len(c.tensors) for c in made.plan.collectives), gradient_distance(made, reference)


def joined(launches: Launches) -> Launches:
    """Permutes that follow each other as one: a loan sends logarithms apart, which the plan adds to the rows."""
    return [a for a, b in zip(launches, [None, *launches], strict=False) if a != b or a[0] != "permute"]


@pytest.mark.parametrize(("name", "mesh", "search"), SEARCHES)
def test_all_ranks_launch_in_the_order_of_the_plan(four, name, mesh, search) -> None:
    found = four.run(launches, name, mesh, search)
    assert found[0][0]
    for launched, planned, most, error in found:
        assert launched == found[0][0]
        assert joined(launched) == joined(planned)
        assert most > 1
        assert error < 1e-6
