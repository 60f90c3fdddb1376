"""The tables of a model, which are kept from call to call, follow every change of the model."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.runtime.tables import tables, without_tables


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2, bias=False)))
    made.append(made[0])  # one module at two places
    return made


def check(of: nn.Module) -> None:
    """What torch's own generators say."""
    known = tables(of)
    stored = dict(of.named_parameters()) | dict(of.named_buffers())
    assert all(known.tensor(path) is tensor for path, tensor in stored.items())
    others = {id(known.tensor(path)) for path in known.places if path not in stored} - {id(None)}
    assert others <= {id(t) for t in stored.values()}  # a tied parameter's other names
    assert [id(p) for p in known.parameters] == [id(p) for p in of.parameters()]
    assert known.modes(of) == tuple(m.training for m in of.modules())


def test_they_are_what_torch_finds_and_kept() -> None:
    made = model()
    check(made)
    assert tables(made) is tables(made)


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "a module is replaced": lambda m: setattr(m[2], "0", nn.Linear(2, 2)),
    "a module is added": lambda m: m[2].append(nn.Linear(2, 2)),
    "a parameter is added": lambda m: m[2].register_parameter("extra", nn.Parameter(torch.zeros(3))),
    "an absent one is given": lambda m: setattr(m[2][0], "bias", nn.Parameter(torch.zeros(2))),
    "one is replaced": lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(2, 2))),
    "one goes": lambda m: m[0].register_parameter("bias", None),
    "a buffer is renamed": lambda m: m[1].register_buffer("other", m[1]._buffers.pop("running_mean")),
    "two are tied": lambda m: setattr(m[2][0], "weight", m[0].weight),
    "a table is another": lambda m: setattr(m[0], "_parameters", dict(m[0]._parameters)),
    "a part is frozen": lambda m: m[2].eval(),
    "the model's own mode": lambda m: setattr(m, "training", False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change) -> None:
    made = model()
    check(made)
    CHANGES[change](made)
    check(made)


def test_a_copy_has_its_own() -> None:
    made = model()
    check(made)
    for twin in (copy.copy(made), copy.deepcopy(made)):
        twin.__dict__ = without_tables(twin.__dict__)
        twin.training = False
        check(twin)
    check(made)


def test_they_do_not_keep_a_model_alive() -> None:
    made = model()
    check(made)
    alive = weakref.ref(made)
    gc.disable()
    try:
        del made
        assert alive() is None
    finally:
        gc.enable()
