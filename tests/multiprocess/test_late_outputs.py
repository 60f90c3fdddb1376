"""The forward does not wait for a loss that the ranks add up: whoever reads it does, or the backward."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.late import Late
from autopar.spmd import ProcessRank

pytestmark = pytest.mark.multiprocess


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.last(self.first(x).tanh()), y)


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=g).double(), torch.randint(4, (8,), generator=g)


def both() -> tuple[nn.Module, Any]:
    """The model of one device, and the same cut by the batch."""
    torch.manual_seed(0)
    net = Net().double()
    x, y = inputs(0)
    model = autopar.autoparallelize(
        copy.deepcopy(net), {"x": x, "y": y}, mesh=(2,), cluster="cpu-2", time_limit=5, search="baseline:DDP"
    )
    return net, model


def _scripted(loss: Tensor) -> Tensor:
    """Below Python, where no method of a subclass is called."""
    twice: Any = torch.jit.script(_twice)
    return twice(loss) / 2  # type: ignore[no-any-return]


def _twice(x: Tensor) -> Tensor:
    return x * 2


def _retained(loss: Tensor) -> Tensor:
    loss.retain_grad()
    return loss


def _inferred(loss: Tensor) -> Tensor:
    """Values that are computed in inference mode could not be saved for a backward."""
    with torch.inference_mode():
        value = loss.item()
    return loss.square() / (2 * value)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda loss: loss,
    "scaled": lambda loss: loss / 4 * 4,
    "in place": lambda loss: loss.mul_(2).div_(2),
    "stacked": lambda loss: torch.stack([loss, loss]).mean(),
    "copied": lambda loss: loss.clone(),
    "converted": lambda loss: loss.to(torch.float32).to(torch.float64),
    "own function": lambda loss: Doubled.apply(loss) / 2,  # type: ignore[no-untyped-call, no-any-return]
    "script": _scripted,
    "retained": _retained,
    "read in inference": _inferred,
    "checkpoint": lambda loss: torch.utils.checkpoint.checkpoint(torch.neg, -loss, use_reentrant=False),
}

READS: dict[str, Callable[[Tensor], float]] = {
    "item": lambda loss: loss.item(),
    "float": float,
    "print": lambda loss: float(repr(loss).split("(")[1].split(",")[0]),
    "format": lambda loss: float(f"{loss:.12f}"),
    "detach": lambda loss: loss.detach().numpy().item(),
    "list": lambda loss: loss.tolist(),  # type: ignore[no-any-return]
    "data": lambda loss: loss.data.item(),
    "deepcopy": lambda loss: copy.deepcopy(loss.detach()).item(),
    "sum": lambda loss: sum([loss, loss]).item() / 2,  # type: ignore[union-attr]
    "into another": lambda loss: torch.zeros((), dtype=torch.float64).add_(loss.detach()).item(),
    "script": lambda loss: _scripted(loss).item(),
    "compared": lambda loss: loss.item() if loss > 0 else -1.0,
    "in a cast": torch.autocast("cpu", dtype=torch.bfloat16)(float),
    "in inference": torch.inference_mode()(lambda loss: loss.item()),
}


def _used() -> dict[str, tuple[str, str, float, float]]:
    """For each use: the type that the caller gets, that after the backward, and errors of loss and gradients."""
    net, model = both()
    assert "late=True" in model.plan.source
    found = {}
    for seed, (name, use) in enumerate(USES.items()):
        one, loss = net(*inputs(seed)), model(*inputs(seed))
        kind = type(loss).__name__
        one.backward()
        use(loss).backward()
        pairs = zip(net.parameters(), model.parameters(), strict=True)
        error = max((a.grad - b.grad.full_tensor()).abs().max().item() for a, b in pairs)
        if name == "in place":
            one, loss = one.detach(), loss.detach()
        found[name] = kind, type(loss).__name__, abs(one.item() - loss.item()), error
        net.zero_grad()
        model.zero_grad()
    return found


def test_a_loss_and_its_gradients_are_those_of_one_device_however_it_is_used(pool) -> None:
    for found in pool.run(_used):
        assert {first for first, _, _, _ in found.values()} == {"Late"}
        for name, (_, after, loss, gradient) in found.items():
            assert after == "Tensor" or name == "script", name
            assert loss < 1e-12, name
            assert gradient < 1e-12, name


def _read() -> dict[str, tuple[float, float, float]]:
    """For each way to read a loss, its error before the backward, after it, and without one."""
    net, model = both()
    found = {}
    for seed, (name, read) in enumerate(READS.items()):
        one = net(*inputs(seed)).item()
        before, after, never = (model(*inputs(seed)) for _ in range(3))
        said = read(before)
        before.backward()
        after.backward()
        with torch.no_grad():
            without = read(model(*inputs(seed)))
        found[name] = (abs(said - one), abs(read(after) - one), abs(without - one))
        del never
    gc.collect()
    return found


def test_a_loss_that_is_read_is_there(pool) -> None:
    for found in pool.run(_read):
        for name, errors in found.items():
            assert max(errors) < (1e-4 if name == "print" else 1e-11), name


def _waits() -> dict[str, Any]:
    """Which of a step's waits come before the forward returns, and what is known of the loss then."""
    _, model = both()
    model(*inputs(0)).backward()
    finish, waits = ProcessRank.finish, list[str]()

    def counted(self: ProcessRank, received: Tensor) -> Tensor:
        waits.append("wait")
        return finish(self, received)

    with patch.object(ProcessRank, "finish", counted):
        loss = model(*inputs(0))
        in_forward = len(waits)
        known = loss.shape, loss.dtype, loss.requires_grad, isinstance(loss, Tensor), loss.grad_fn is not None
        asked = len(waits)
        loss.backward()
        in_step = len(waits)
        value = loss.item()
        read = len(waits)
        model(*inputs(1))
        gc.collect()
        dropped = len(waits) - read
    return {
        "in forward": in_forward, "asked": asked, "in step": in_step, "read": read, "dropped": dropped,
        "known": known, "of forward": sum(c.phase == "forward" for c in model.plan.collectives),
        "late": isinstance(loss, Late), "positive": value > 0,
    }  # fmt: skip


def test_the_forward_does_not_wait_and_every_collective_is_waited_for_once(pool) -> None:
    for found in pool.run(_waits):
        assert found["in forward"] == found["asked"] == 0
        assert found["in step"] == found["read"] > 0
        assert found["dropped"] == found["of forward"] > 0
        assert found["known"] == ((), torch.float64, True, True, True)
        assert not found["late"]
        assert found["positive"]
