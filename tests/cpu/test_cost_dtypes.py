"""The dtypes that costs take to be sent are those that the runtime sends."""

from __future__ import annotations

import torch

from autopar.cost_models.communication import REDUCED_BYTES
from autopar.spmd.collectives import CARRIED_AS, REDUCED_AS


def test_costs_count_reductions_in_the_dtype_that_the_runtime_reduces():
    ratios = {str(d).removeprefix("torch."): r.itemsize // d.itemsize for d, r in REDUCED_AS.items()}
    assert {name: ratio for name, ratio in ratios.items() if ratio > 1} == dict(REDUCED_BYTES)


def test_whatever_is_only_moved_keeps_its_bytes():
    assert all(d.itemsize == c.itemsize for d, c in CARRIED_AS.items())
    assert torch.bool in CARRIED_AS
