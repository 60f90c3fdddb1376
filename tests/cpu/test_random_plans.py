"""Random plans: every op takes any strategy that can be reached. They find the errors that searched plans avoid."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.model_checks import assert_equals_one_device, run, subject
from tests.models import ZOO

MESHES = [(2, 2), (4,), (2,), (3,), (2, 4), (2, 2, 2)]
QUICK, ALL = 3, 40


def mesh_of(seed):
    """The quick ones take small meshes; the others all of them in turn."""
    return MESHES[seed % (3 if seed < QUICK else len(MESHES))]


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("seed", [pytest.param(s, marks=[] if s < QUICK else [pytest.mark.slow]) for s in range(ALL)])
def test_a_random_plan_is_exact(name, seed) -> None:
    dtype = ZOO[name].dtypes[-1]
    of = subject(name, dtype)
    assert_equals_one_device(of, run(of, mesh_of(seed), search=f"random:{seed}").result, dtype)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_random_plans_differ_and_repeat(name) -> None:
    of = subject(name, torch.float64)
    one, again, other = (run(of, (2, 2), search=f"random:{seed}").planned for seed in (0, 0, 1))
    assert one.program == again.program
    assert one.program != other.program
