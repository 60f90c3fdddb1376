"""Whole training steps on this machine's GPU: what the plain model computes, in the memory that was planned."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("pulp", reason="plans need pulp, which this Python lacks")
pytest.importorskip("transformers")

import autopar
from tests.models import ZOO

SLACK = 64 << 20
"""Bytes that no plan knows of: workspaces of the libraries that multiply matrices."""


@pytest.fixture(autouse=True, scope="module")
def _leave_the_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def loss_of(returned) -> Tensor:
    if isinstance(returned, Tensor):
        return returned
    return returned[0] if isinstance(returned, tuple) else returned.loss


def gradients(model: nn.Module, inputs) -> tuple[float, dict[str, Tensor]]:
    loss = loss_of(model(**inputs))
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "resnet", "mixtral"])
def test_a_step_computes_what_the_model_does(name, backend) -> None:
    """Against the model in float64 on the CPU."""
    model, inputs = ZOO[name].made(torch.float32)
    exact = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    reference = copy.deepcopy(model).double()
    if hasattr(reference, "set_experts_implementation"):
        reference.set_experts_implementation("eager")  # torch's grouped products take no float64
    wanted, expected = gradients(reference, exact)
    inputs = {k: t.cuda() for k, t in inputs.items()}
    parallel = autopar.autoparallelize(model.cuda(), inputs, mesh=(1,), backend=backend)
    assert parallel.plan.kernels
    with torch.backends.cudnn.flags(allow_tf32=False):  # as products are by default
        found, grads = gradients(parallel, inputs)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert grads.keys() == expected.keys()
    for n, grad in grads.items():
        assert grad.is_cuda
        scale = max(1e-2, float(expected[n].abs().max()))
        assert float((grad.cpu().double() - expected[n]).abs().max()) < 2e-4 * scale, n


class Blocks(nn.Module):
    """Wide enough for its tensors to outweigh what libraries take for themselves."""

    def __init__(self, width: int = 2048, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def measured_peak(model: nn.Module, x: Tensor) -> int:
    """Bytes that the allocator had given out at the worst moment of the second step."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model(x=x).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("share", [1.0, 0.7], ids=["free", "under a budget"])
def test_the_peak_is_as_planned(share) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model, x = Blocks().cuda(), torch.randn(8192, 2048, device="cuda")
    free = autopar.plan(model, {"x": x}, mesh=(1,))
    budget = int(share * free.peak_memory)
    parallel = autopar.autoparallelize(model, {"x": x}, mesh=(1,), memory_budget=budget, time_limit=20)
    planned = parallel.plan.peak_memory
    measured = measured_peak(parallel, x) - before
    assert planned <= budget
    assert 0.9 * planned <= measured <= planned + SLACK


def test_an_emitted_file_runs_where_autopar_is_not_installed(tmp_path) -> None:
    model, inputs = ZOO["gpt2"].made(torch.float32)
    wanted, _ = gradients(copy.deepcopy(model), inputs)
    script = autopar.plan(model, inputs, mesh=(1,)).emit(tmp_path / "step.py")
    torch.save({**model.state_dict(), **dict(model.named_buffers())}, tmp_path / "state.pt")
    torch.save(inputs, tmp_path / "batch.pt")
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['autopar'] = None\n")
    files = [f"--{kind}={tmp_path / f'{kind}.pt'}" for kind in ("state", "batch", "out")]
    paths = os.pathsep.join([str(tmp_path), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    environment = os.environ | {"PYTHONPATH": paths, "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, script, *files], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(Path(tmp_path) / "out.pt", map_location="cpu")
    (loss,) = [t for t in found["outputs"].values() if t.numel() == 1]
    assert float(loss) == pytest.approx(wanted, rel=1e-3)
