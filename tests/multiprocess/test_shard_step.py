"""Stepping on shards gives what DTensor's own step gives, bit for bit, and leaves DTensors behind."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime import shard_step
from tests.multiprocess.training_models import SHARDED, Mlp, is_cut, pair, whole

pytestmark = pytest.mark.multiprocess

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "two groups": lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.2}, {"params": p[1:]}], lr=0.1),
}
UNTOUCHED = mock.patch.object(shard_step, "_applies", return_value=False)


def batches(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(6, 8) for _ in range(count)]


def parallel() -> Any:
    torch.manual_seed(0)
    return pair(Mlp(), (batches(1)[0],), (2,), constraints=SHARDED["mlp"])[1]


def trained(make: Any) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]], bool]:
    """Parameters and state after three steps, one of them after the state was loaded, and whether state is as cut."""
    model = parallel()
    optimizer = make(list(model.parameters()))
    for turn, x in enumerate(batches(3)):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()
        if turn == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    states = [{k: whole(v) for k, v in optimizer.state[p].items()} for p in model.parameters()]
    as_cut = all(
        isinstance(v, DTensor) and v.placements == p.placements
        for p in model.parameters()
        for v in optimizer.state[p].values()
        if isinstance(v, torch.Tensor) and v.ndim
    )
    return [whole(p).detach() for p in model.parameters()], states, as_cut and any(map(is_cut, model.parameters()))


def compared(name: str) -> tuple[bool, bool, int]:
    with mock.patch.object(shard_step, "_step_group", wraps=shard_step._step_group) as stepped:
        ours, states, as_cut = trained(OPTIMIZERS[name])
    assert stepped.call_count >= 3
    with UNTOUCHED:
        theirs, expected, _ = trained(OPTIMIZERS[name])
    equal = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for one, other in zip(states, expected, strict=True):
        assert one.keys() == other.keys()
        equal = equal and all(torch.equal(one[k], other[k]) for k in one if isinstance(one[k], torch.Tensor))
    return equal, as_cut, sum(map(len, states))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_shards_is_the_step_on_dtensors(pool, name) -> None:
    for equal, as_cut, held in pool.run(compared, name):
        assert equal
        assert as_cut
        assert held > 0


def closures_and_versions() -> tuple[float, bool, str, bool]:
    """Of a step with a closure its loss and whether it moved; what a backward says whose parameters have stepped; and
    whether gradients of shards are gone."""
    model = parallel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = whole(model.up.weight).clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batches(1)[0]).pow(2).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    late = model(batches(1)[0]).pow(2).sum()
    closure()
    optimizer.step()
    said = ""
    try:
        late.backward()
    except AutoparError as error:
        said = str(error)
    shards = [p.to_local() for p in model.parameters()]
    return float(loss), not torch.equal(before, whole(model.up.weight)), said, all(s.grad is None for s in shards)


def test_closures_and_checks_of_changed_parameters_work(pool) -> None:
    for loss, moved, said, gone in pool.run(closures_and_versions):
        assert loss > 0
        assert moved
        assert "changed after the forward" in said
        assert gone
