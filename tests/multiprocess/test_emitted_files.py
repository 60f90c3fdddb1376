"""Emitted files under torchrun, in an environment that lacks autopar."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.codegen.load import load
from tests.cpu.model_checks import cluster_where_sharding_pays
from tests.models import ZOO

WITHOUT_AUTOPAR = "import sys; sys.modules['autopar'] = None\n"
"""As sitecustomize.py: any import of autopar fails, as where it is not installed."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def torchrun(script: Path, processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    folder = script.parent / "site"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(WITHOUT_AUTOPAR)
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(processes),
        "--master-port",
        str(free_port()),
        str(script),
        *arguments,
    ]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def checked(of: object, processes: int, folder: Path, budget: float = 1.0, **options: object) -> autopar.Plan:
    """The file's losses and gradients are those that the plan gives here, of a model of the zoo or with its inputs."""
    model, inputs = ZOO[of].made(torch.float32, 0.1) if isinstance(of, str) else of
    wanted = {"mesh": (processes,), "cluster": cluster_where_sharding_pays(), "time_limit": 20.0, **options}
    plan = autopar.plan(model, inputs, **wanted)
    if budget < 1:
        plan = autopar.plan(model, inputs, **wanted, memory_budget=int(budget * plan.peak_memory))
    script = plan.emit(folder / "step.py")
    torch.save(model.state_dict(), folder / "state.pt")
    torch.save(dict(inputs), folder / "batch.pt")
    files = [f"--{kind}={folder / f'{kind}.pt'}" for kind in ("state", "batch", "out")]
    ran = torchrun(script, processes, *files, "--seed=7")
    assert ran.returncode == 0, ran.stderr[-3000:]
    expected, found = autopar.simulate(model, inputs, plan=plan, seed=7), torch.load(folder / "out.pt")
    assert set(found["grads"]) == set(expected.grads)
    for parameter, gradient in expected.grads.items():
        torch.testing.assert_close(found["grads"][parameter], gradient, rtol=1e-4, atol=1e-6)
    for buffer, value in expected.buffers.items():
        torch.testing.assert_close(found["buffers"][buffer], value)
    losses = [t for t in found["outputs"].values() if t.numel() == 1]
    assert all(f"{loss.item():.6f}" in ran.stdout for loss in losses)
    return plan


def test_dropout_and_a_cut_vocabulary(tmp_path):
    plan = checked("gpt2", 2, tmp_path, constraints={"transformer.wte.weight": "S0R"})
    assert plan.specs["transformer.wte.weight"].dims[0] == (0,)
    assert "autopar" not in {line.split()[1].split(".")[0] for line in imports(tmp_path / "step.py")}


def test_micro_batches_add_up_in_one_step(tmp_path):
    """Three of them, with batch norm's statistics going from one to the next."""
    model, inputs = ZOO["cnn"].made(torch.float32, 0.1)
    parts = [inputs, *({k: t.roll(i, 0) for k, t in inputs.items()} for i in (1, 2))]
    plan = autopar.plan(
        model, inputs, mesh=(2,), cluster=cluster_where_sharding_pays(), time_limit=20.0, accumulation_steps=3
    )
    torch.save(model.state_dict(), tmp_path / "state.pt")
    torch.save({k: torch.cat([p[k] for p in parts]) for k in inputs}, tmp_path / "batch.pt")
    files = [f"--{kind}={tmp_path / f'{kind}.pt'}" for kind in ("state", "batch", "out")]
    ran = torchrun(plan.emit(tmp_path / "step.py"), 2, *files)
    assert ran.returncode == 0, ran.stderr[-3000:]
    model.train()
    for part in parts:
        loss, _ = model(**part)
        loss.backward()
    found = torch.load(tmp_path / "out.pt")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found["grads"][name], parameter.grad, rtol=1e-4, atol=1e-5)
    for name, value in found["buffers"].items():
        torch.testing.assert_close(value, model.get_buffer(name), rtol=1e-4, atol=1e-5)


def imports(script: Path) -> list[str]:
    return [line for line in script.read_text().splitlines() if line.startswith(("import ", "from "))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "processes", "budget"),
    [
        ("resnet", 2, 1.0),
        ("cnn", 2, 0.85),
        ("llama", 3, 1.0),
        ("bert", 2, 0.8),
        ("mixtral", 2, 1.0),
        ("t5", 2, 1.0),
        ("vit", 2, 1.0),
        ("mlp", 2, 1.0),
        ("outside", 2, 1.0),
    ],
)
def test_other_models_uneven_shards_recomputation_and_offloading(name, processes, budget, tmp_path):
    checked(name, processes, tmp_path, budget)


class Masked(nn.Module):
    """A mask and a table that are not in its state, and an input in a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(72, 72)
        self.register_buffer("mask", torch.ones(72, 72, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("table", torch.randn(200, 72), persistent=False)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        x = self.layer(inputs["x"] @ (self.mask * torch.linspace(0, 1, 72)))
        return (x * self.table.mean(0)).square().mean()


def test_constants_of_few_values_are_in_the_file_and_others_are_asked_for(tmp_path):
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(6, 72)
    plan = autopar.plan(model, ({"x": x},), mesh=(2,), cluster="cpu-2")
    script = plan.emit(tmp_path / "step.py")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    name = next(n for kind, n, *_ in load(plan.source)["INPUTS"] if kind == "input")
    torch.save({name: x}, tmp_path / "batch.pt")
    files = [f"--{kind}={tmp_path / f'{kind}.pt'}" for kind in ("state", "batch", "out")]
    asked = torchrun(script, 2, *files)
    assert "The buffer table is in none of the given files" in asked.stderr
    assert "--nproc-per-node 2 step.py" in script.read_text()
    torch.save({**model.state_dict(), **dict(model.named_buffers())}, tmp_path / "state.pt")
    ran = torchrun(script, 2, *files)
    assert ran.returncode == 0, ran.stderr[-3000:]
    model({"x": x}).backward()
    found = torch.load(tmp_path / "out.pt")
    torch.testing.assert_close(found["grads"]["layer.weight"], model.layer.weight.grad, rtol=1e-4, atol=1e-6)


def test_an_error_under_torchrun_names_the_module_of_the_model(tmp_path):
    model, inputs = ZOO["mlp"].made(torch.float32)
    script = autopar.plan(model, inputs, mesh=(1,), cluster="cpu-2:1").emit(tmp_path / "step.py")
    text = script.read_text()
    line = next(x for x in text.splitlines() if "layers2_weight, layers2_bias)" in x)
    script.write_text(text.replace(line, line.replace("layers2_weight", "layers2_bias")))
    ran = torchrun(script, 1)
    assert ran.returncode != 0
    number = text.splitlines().index(line) + 1
    assert f"This is line {number} of the program, 'layers.2' of the model" in ran.stderr


def test_a_job_of_another_size_is_told_what_the_file_needs(tmp_path):
    model, inputs = ZOO["mlp"].made(torch.float32)
    script = autopar.plan(model, inputs, mesh=(2,), cluster="cpu-2").emit(tmp_path / "step.py")
    ran = torchrun(script, 1)
    assert ran.returncode != 0
    assert "This program is for 2 processes, but the job has 1" in ran.stderr
