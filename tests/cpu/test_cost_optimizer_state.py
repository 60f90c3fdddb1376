"""The table of optimizer states against what torch's optimizers allocate."""

from __future__ import annotations

import inspect
import weakref

import pytest
import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from autopar.cost_models import optimizer_state_bytes, optimizer_step_bytes

SHAPE = (64, 96)
COUNT = 3
CASES = [
    ("AdamW", {}), ("Adam", {}), ("Adam", {"amsgrad": True, "weight_decay": 0.1}), ("NAdam", {"weight_decay": 0.1}),
    ("RAdam", {"weight_decay": 0.1}), ("Adamax", {"weight_decay": 0.1}), ("Adadelta", {"weight_decay": 0.1}),
    ("Adagrad", {"weight_decay": 0.1}), ("ASGD", {"weight_decay": 0.1}), ("RMSprop", {"weight_decay": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.9}), ("Rprop", {}), ("SGD", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}), ("Adafactor", {}), ("Muon", {}),
]  # fmt: skip


class PeakOfNew(TorchDispatchMode):
    """The most bytes held at once by storages that did not exist before."""

    def __init__(self, before):
        super().__init__()
        self.before = {tensor.untyped_storage()._cdata for tensor in before}
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.before and key not in self.live:
                    self.live[key] = storage.nbytes()
                    self.peak = max(self.peak, sum(self.live.values()))
                    weakref.finalize(storage, self.live.pop, key, None)
        return out


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_an_optimizer_holds_the_state_predicted_and_its_step_no_more(name, options):
    if not hasattr(optim, name):
        pytest.skip(f"this torch has no {name}")
    cls = getattr(optim, name)
    foreach = {"foreach": True} if "foreach" in inspect.signature(cls).parameters else {}
    params = [nn.Parameter(torch.randn(SHAPE)) for _ in range(COUNT)]
    optimizer = cls(params, lr=1e-3, **options, **foreach)
    for _ in range(7):  # RAdam's rectification starts at step 6
        for param in params:
            param.grad = torch.randn(SHAPE)
        optimizer.step()

    state = [value for param in params for value in optimizer.state[param].values() if isinstance(value, torch.Tensor)]
    held = sum(tensor.untyped_storage().nbytes() for tensor in state if tensor.numel() > 1)
    numel = params[0].numel()
    assert held == COUNT * optimizer_state_bytes(optimizer, numel, "float32", shape=SHAPE)

    with PeakOfNew([*params, *(param.grad for param in params), *state]) as new:
        optimizer.step()
    scalars = 1024 * COUNT
    assert new.peak <= optimizer_step_bytes(optimizer, COUNT * numel, "float32") + scalars
