"""Two plans in one process share nothing: each is what a fresh process makes of it, whatever was planned before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import autopar

MESHES = [(2, 32), (32, 2)]
SCRIPT = """
import sys
from tests.cpu.test_no_shared_state import digest
print(*(digest(tuple(map(int, mesh.split(",")))) for mesh in sys.argv[1:]))
"""


class Model(nn.Module):
    """Wide enough that weights and batch can be cut 64 ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def digest(mesh: tuple[int, ...]) -> str:
    with torch.device("meta"):
        model = Model()
    return autopar.plan(model, torch.empty(1 << 18, 2048, device="meta"), mesh=mesh, cluster="dgx-h100:64").digest


def in_a_fresh_process(*meshes: tuple[int, ...], hash_seed: str = "random") -> list[str]:
    asked = [",".join(map(str, mesh)) for mesh in meshes]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, *asked], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-len(meshes) :]


@pytest.mark.slow
def test_a_plan_does_not_depend_on_what_was_planned_before():
    alone = {mesh: in_a_fresh_process(mesh)[0] for mesh in MESHES}
    assert alone[MESHES[0]] != alone[MESHES[1]]
    for order in (MESHES, MESHES[::-1], [*MESHES, *MESHES]):
        assert in_a_fresh_process(*order) == [alone[mesh] for mesh in order]


@pytest.mark.slow
def test_a_plan_does_not_depend_on_the_order_of_sets():
    assert len({in_a_fresh_process(MESHES[0], hash_seed=seed)[0] for seed in ("0", "1", "77")}) == 1
