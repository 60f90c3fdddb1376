"""The public functions as the design writes them: what each argument may be."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar


def test_a_saved_plan_is_simulated_by_its_path(tmp_path: Path):
    model, x = nn.Linear(4, 4), torch.randn(4, 4)
    plan = autopar.plan(model, x, (2,), "cpu-2")
    plan.save(tmp_path / "plan.json")
    for given in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        torch.testing.assert_close(autopar.simulate(model, x, given).outputs, model(x))


def test_a_mesh_of_numpys_integers():
    np = pytest.importorskip("numpy")
    for mesh in ((np.int64(2), 2), {"dp": np.int32(2), "tp": 2}, np.int64(4)):
        assert autopar.plan(nn.Linear(4, 4), torch.empty(4, 4), mesh=mesh, cluster="cpu-2").mesh.size == 4


def test_a_mesh_that_is_given_counts_for_a_local_batch_whatever_job_this_process_is_in():
    model, x = nn.Linear(4, 4), torch.empty(3, 4)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plan = autopar.plan(model, x, mesh=(4,), cluster="cpu-2", batch="local")
    finally:
        dist.destroy_process_group()
    assert plan.facts.samples == 12


def test_a_bias_that_arrives_late_does_not_keep_the_weight_longer_than_planned():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).requires_grad_(False)
    x = torch.randn(8, 8)
    free = autopar.plan(model, x, mesh=(2, 2), cluster="cpu-2")
    plan = autopar.plan(model, x, mesh=(2, 2), cluster="cpu-2", memory_budget=int(0.6 * free.peak_memory))
    assert autopar.simulate(model, x, plan).peak_memory <= plan.peak_memory


def test_recurrent_layers_are_planned_without_a_warning_of_their_lists_of_weights():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*_flat_weights")
        autopar.ColoTracer().trace(nn.LSTM(4, 4), torch.randn(3, 2, 4))
