"""The table of optimizer states and steps against what torch's optimizers allocate."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from torch import nn, optim

from autopar.arguments import as_optimizer
from autopar.cost_models import optimizer_scalar_bytes, optimizer_state_bytes, optimizer_step_bytes
from autopar.runtime.meter import MemoryMeter, held_by

SHAPES = {
    "matrices": [(64, 96), (64, 96), (128, 96), (32, 96)],
    "of all kinds": [(64, 96), (9000,), (16, 8, 3, 3), (128, 96), (10,)],
    "the largest first": [(128, 96), (64, 96), (10,)],
}
CASES = [
    ("AdamW", {}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("NAdam", {"weight_decay": 0.1}),
    ("NAdam", {}),
    ("RAdam", {"weight_decay": 0.1}),
    ("RAdam", {}),
    ("Adamax", {"weight_decay": 0.1}),
    ("Adamax", {}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("Adadelta", {}),
    ("Adagrad", {"weight_decay": 0.1}),
    ("Adagrad", {}),
    ("ASGD", {"weight_decay": 0.1}),
    ("ASGD", {}),
    ("RMSprop", {"weight_decay": 0.1}),
    ("RMSprop", {}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("SGD", {"weight_decay": 0.1}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Rprop", {}),
    ("Adafactor", {}),
    ("Muon", {}),
]
BOUNDED = {"Muon": 1.4}
"""Optimizers whose steps are bounded, by how much; the others' are exact but for scalars."""
SCALARS = 1024


def modes(name):
    """The ways of this optimizer to step, in this torch."""
    cls = getattr(optim, name, None)
    known = inspect.signature(cls).parameters if cls is not None else ()
    return ["for-loop", *(mode for mode in ("foreach", "fused") if mode in known)] if cls is not None else []


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    ("name", "options", "mode"), [(name, options, mode) for name, options in CASES for mode in modes(name)], ids=str
)
def test_an_optimizer_holds_the_state_predicted_and_its_step_what_is_predicted(name, options, mode, kind):
    shapes = [s for s in SHAPES[kind] if name != "Muon" or len(s) == 2]
    cls = getattr(optim, name)
    has_modes = "foreach" in inspect.signature(cls).parameters
    chosen = {"foreach": False} if mode == "for-loop" and has_modes else {mode: True} if mode != "for-loop" else {}
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = cls(params, lr=1e-3, **options, **chosen)
    for _ in range(7):  # RAdam's rectification starts at step 6
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()

    meter = MemoryMeter()
    meter.hold([*params, *(param.grad for param in params)])
    before = meter.held
    meter.hold(held_by(nn.ParameterList(params), optimizer))
    states = [optimizer_state_bytes(optimizer, p.numel(), "float32", shape=tuple(p.shape)) for p in params]
    scalars = len(params) * optimizer_scalar_bytes(optimizer)
    assert 0 <= sum(states) + scalars - (meter.held - before) <= 4 * len(params)

    held = meter.held
    with meter:
        optimizer.step()
    predicted = optimizer_step_bytes(
        optimizer if chosen else f"{name} {mode}", [p.numel() for p in params], "float32", device="cpu", shapes=shapes
    )
    made = meter.peak - held
    assert made <= predicted + SCALARS
    assert predicted <= BOUNDED.get(name, 1.0) * made + SCALARS


@pytest.mark.parametrize("mode", ["for-loop", "foreach", "fused"])
def test_an_optimizer_as_users_give_it_keeps_its_options(mode):
    params = [nn.Parameter(torch.zeros(10))]
    chosen = {"foreach": False} if mode == "for-loop" else {mode: True}
    for given in (
        optim.SGD(params, momentum=0.9, weight_decay=0.1, **chosen),
        optim.Adam(params, amsgrad=True, **chosen),
        optim.RMSprop(params, momentum=0.9, centered=True, foreach=mode == "foreach"),
        optim.AdamW(params),
    ):
        name = as_optimizer(given)
        assert optimizer_state_bytes(name, 10, "float32") == optimizer_state_bytes(given, 10, "float32")
        assert optimizer_step_bytes(name, [10, 20], "float32") == optimizer_step_bytes(given, [10, 20], "float32")


def test_a_subclass_of_an_optimizer_is_known_by_it():
    class MyAdamW(optim.AdamW):
        pass

    assert as_optimizer(MyAdamW) == "AdamW"
    assert as_optimizer(functools.partial(optim.SGD, momentum=0.9)) == "SGD momentum"
