"""The emitted files of a pipeline under torchrun, in an environment that lacks autopar."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests import zoo
from tests.models import ZOO
from tests.multiprocess.test_emitted_files import imports, torchrun


def checked(
    of: str | tuple[nn.Module, dict[str, Tensor]], mesh: dict[str, int], folder: Path, steps: int = 1, **pipeline: Any
) -> autopar.PipelinePlan:
    """The files' outputs, gradients and new buffers are those of the plan; of several calls the sum of gradients."""
    model, inputs = ZOO[of].made(torch.float32, 0.1) if isinstance(of, str) else of
    asked = autopar.Pipeline(**pipeline)
    plan = autopar.plan(
        model, inputs, mesh=mesh, cluster="cpu-2", time_limit=10.0, pipeline=asked, accumulation_steps=steps
    )
    assert isinstance(plan, autopar.PipelinePlan)
    plan.save(folder / "plan.json")
    script = autopar.PipelinePlan.load(folder / "plan.json").emit(folder / "step.py")
    calls = [{k: t.roll(i, 0) for k, t in inputs.items()} for i in range(steps)]
    torch.save({**model.state_dict(), **dict(model.named_buffers())}, folder / "state.pt")
    torch.save({k: torch.cat([c[k] for c in calls]) for k in inputs}, folder / "batch.pt")
    files = [f"--{kind}={folder / f'{kind}.pt'}" for kind in ("state", "batch", "out")]
    ran = torchrun(script, plan.mesh.size, *files, "--seed=7")
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = torch.load(folder / "out.pt")
    expected = []
    for i, call in enumerate(calls):
        expected.append(autopar.simulate(model, call, plan=plan, seed=7 + i))
        model.load_state_dict(expected[-1].buffers, strict=False)
    assert set(found["grads"]) == set(expected[0].grads)
    for parameter in expected[0].grads:
        total = torch.stack([e.grads[parameter] for e in expected]).sum(0)
        torch.testing.assert_close(found["grads"][parameter], total, rtol=1e-4, atol=1e-6)
    for buffer, value in expected[-1].buffers.items():
        torch.testing.assert_close(found["buffers"][buffer], value)
    losses = [t for t in found["outputs"].values() if t.numel() == 1]
    assert losses
    assert all(f"{loss.item():.6f}" in ran.stdout for loss in losses)
    for file in folder.glob("step*.py"):
        assert "autopar" not in {line.split()[1].split(".")[0] for line in imports(file)}
    return plan


def test_tied_weights_and_backwards_in_two_parts(tmp_path: Path) -> None:
    plan = checked("gpt2", {"pp": 2, "dp": 2}, tmp_path, micro_batches=4, schedule="zbv", chunks=2)
    assert "transformer.wte.weight" in plan.tied
    assert {file.name for file in tmp_path.glob("step_stage*.py")} >= {f"step_stage{s}.py" for s in range(4)}
    assert list(tmp_path.glob("step_stage*_split.py"))


def test_buffers_and_several_calls_a_step(tmp_path: Path) -> None:
    plan = checked("cnn", {"pp": 2}, tmp_path, steps=2, micro_batches=2, schedule="1f1b")
    assert plan.buffers


def test_a_gradient_that_is_of_no_received_activation_goes_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = zoo.ZOO["flow"].made()
    inputs = {name: t.float() for name, t in inputs.items()}
    plan = checked((model.float(), inputs), {"pp": 2}, tmp_path, micro_batches=2, split=["couplings.1"])
    received = {i.node for i in plan.stages[1].program.ops if i.kind == "input"}
    back = {o.name.removeprefix("input:") for o, _ in plan.stages[1].program.results if o.kind == "gradient"}
    assert any(name not in received and "." not in name for name in back)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    model, inputs = ZOO["mlp"].made(torch.float32, 0.0)
    plan = autopar.plan(model, inputs, mesh={"pp": 2}, cluster="cpu-2", pipeline=autopar.Pipeline(micro_batches=2))
    script = plan.emit(tmp_path / "step.py")
    (tmp_path / "step_stage1.py").unlink()
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode != 0
    assert "step_stage1.py is missing" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "pipeline"),
    [
        ("llama", {"pp": 2}, {"micro_batches": 4, "schedule": "zb"}),
        ("t5", {"pp": 2, "tp": 2}, {"micro_batches": 2, "schedule": "interleaved", "chunks": 2}),
        ("vit", {"pp": 2, "dp": 2}, {"micro_batches": 4, "schedule": "gpipe"}),
        ("mixtral", {"pp": 2, "ep": 2}, {"micro_batches": 2, "schedule": "1f1b"}),
    ],
)
def test_models(name: str, mesh: dict[str, int], pipeline: dict[str, Any], tmp_path: Path) -> None:
    checked(name, mesh, tmp_path, **pipeline)
