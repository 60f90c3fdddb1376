"""Every example of examples/integrations runs on two ranks, and learns or agrees with one device."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.test_training_examples import run

pytestmark = pytest.mark.multiprocess
FOLDER = Path(__file__).parents[2] / "examples" / "integrations"


def called(name: str, *arguments: Any, **options: Any) -> Any:
    """What ``main`` of an example returns, on a rank of the pool; what it prints stays there."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    module = importlib.import_module(name)
    with contextlib.redirect_stdout(io.StringIO()):
        return module.main(*arguments, **options)


def needs(*names: str) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def test_the_plain_script_learns(pool):
    first, second = pool.run(called, "torchrun_script", 12)
    assert first == second
    assert first[-1] < 0.8 * first[0]


def test_precisions_learn_alike(pool):
    found = pool.run(called, "amp", 6)[0]
    assert found["autocast"] == pytest.approx(found["planned"], rel=0.02)
    assert found["scaled"] == pytest.approx(found["planned"], rel=0.05)
    assert all(losses[-1] < losses[0] for losses in found.values())


def test_optimizers_of_torch_fused_ones_and_8_bits_follow_one_device(pool):
    for name, (ours, plain) in pool.run(called, "optimizers", 4)[0].items():
        tolerance = 0.02 if "8 bits" in name else 1e-4  # blocks of 8-bit state lie otherwise on shards
        assert ours == pytest.approx(plain, rel=tolerance), name


def test_checkpoints_go_between_plans_to_one_device_and_to_safetensors(pool, tmp_path):
    for found in pool.run(called, "checkpoints", str(tmp_path)):
        assert found == pytest.approx(dict.fromkeys(found, found["saved"]), rel=1e-5)


def test_weights_are_read_shard_by_shard(pool, tmp_path):
    needs("safetensors", "transformers")
    sys.path.insert(0, str(FOLDER))
    importlib.import_module("from_safetensors").write_small_model(str(tmp_path))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for loss, expected in pool.run(called, "from_safetensors", str(tmp_path)):
        assert loss == pytest.approx(expected, rel=1e-5)


def test_a_loop_like_torchtitans_learns(pool):
    first, second = pool.run(called, "torchtitan_loop", 8)
    assert first == second
    assert first[-1] < first[0] - 0.1


def test_gpt_with_hybrid_parallelism_is_one_devices(pool):
    needs("transformers")
    for ours, plain in pool.run(called, "colossal_gpt", 3):
        assert ours == pytest.approx(plain, rel=1e-4)


def test_a_compiled_head_trains_with_a_parallel_body(pool):
    losses = pool.run(called, "compiled_parts", 4, "aot_eager")[0]  # Inductor takes far longer to compile
    assert losses[-1] < losses[0]


def test_tensorboard_gets_losses_figures_and_the_plan(pool, tmp_path):
    needs("tensorboard", "matplotlib")
    pool.run(called, "tensorboard_log", str(tmp_path), 3)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path)).Reload()
    assert len(read.Scalars("loss")) == 3
    assert set(read.Tags()["images"]) == {"memory", "timeline"}
    assert (tmp_path / "plan.html").exists()


def test_a_resnet_keeps_within_each_budget():
    needs("transformers")
    rows = called("colossal_resnet", (1.0, 0.9), time_limit=10.0)
    assert len({round(loss, 5) for *_, loss in rows}) == 1
    for budget, planned, measured, _ in rows:
        assert measured <= planned <= budget


def test_the_slurm_script_starts_torchrun_with_what_slurm_says(tmp_path):
    """``srun`` and ``scontrol`` are stood in for; torchrun and the training are real."""
    for name, text in {"srun": 'exec "$@"', "scontrol": "echo localhost"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "torchrun").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    environment["SLURM_JOB_NODELIST"] = "localhost"
    command = ["bash", str(FOLDER / "slurm.sh"), "train.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for said in ("--nnodes 2", "--nproc-per-node 8", "--rdzv-id 7", "localhost:29500", "train.py"):
        assert said in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "libraries"),
    [
        ("torchrun_script", ()),
        ("checkpoints", ()),
        ("from_safetensors", ("transformers",)),
        ("compiled_parts", ()),
        ("colossal_gpt", ("transformers",)),
    ],
)
def test_examples_run_under_torchrun(script, libraries):
    needs(*libraries)
    said = run(f"integrations/{script}.py", torchrun=2)
    assert "loss" in said or "[" in said


@pytest.mark.slow
def test_the_trainer_evaluates_resumes_and_saves_as_on_one_device(tmp_path):
    needs("accelerate", "transformers")
    said = []
    for folder, resume in (("whole", ()), ("again", (f"--resume={tmp_path}/whole/checkpoint-2",))):
        out = run("integrations/hf_trainer.py", f"--folder={tmp_path}/{folder}", *resume, torchrun=2)
        said += [json.loads(line) for line in out.splitlines() if line.startswith('{"loss"')]
    assert len(said) == 4
    for found in said:
        assert found == {name: pytest.approx(values, rel=1e-5) for name, values in said[0].items()}
    assert set(said[0]["eval_samples"]) == {11.0}
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "whole").config.architectures == ["GPT2LMHeadModel"]
    one_device = _trained_by_the_trainer_on_one_device(tmp_path / "one")
    for name, values in one_device.items():
        assert said[0][name] == pytest.approx(values, rel=1e-4), name


def _trained_by_the_trainer_on_one_device(folder: Path) -> dict[str, list[float]]:
    """The example's losses and accuracies for a plain model, with the batch of both ranks."""
    program = f"""
import json, sys; sys.path.insert(0, {str(FOLDER)!r})
import torch, hf_trainer as h
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments(
    {str(folder)!r}, max_steps=6, per_device_train_batch_size=8, per_device_eval_batch_size=8, learning_rate=1e-2,
    logging_steps=1, eval_strategy="steps", eval_steps=2, save_strategy="no", report_to=[], use_cpu=True,
    disable_tqdm=True, seed=0,
)
torch.manual_seed(0)
trainer = Trainer(
    model=h.build_model(), args=arguments, train_dataset=h.Counting(64), eval_dataset=h.Counting(11),
    compute_metrics=h.metrics,
)
trainer.train()
history = trainer.state.log_history
print(json.dumps({{n: [e[n] for e in history if n in e] for n in ("loss", "eval_accuracy")}}))
"""
    environment = {n: v for n, v in os.environ.items() if n not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_lightning_validates_resumes_and_keeps_the_best(tmp_path):
    needs("lightning")
    whole = run("integrations/lightning_module.py", f"--folder={tmp_path}/whole", "--epochs=2", torchrun=2)
    run("integrations/lightning_module.py", f"--folder={tmp_path}/half", "--epochs=1", torchrun=2)
    last = f"--resume={tmp_path}/half/checkpoints/last.ckpt"
    half = run("integrations/lightning_module.py", f"--folder={tmp_path}/half", "--epochs=2", last, torchrun=2)
    assert whole.partition("last ")[2] == half.partition("last ")[2] != ""
    import torch

    saved = torch.load(tmp_path / "half" / "checkpoints" / "last.ckpt", weights_only=False)
    assert saved["state_dict"]["network.0.weight"].shape == (128, 32)
    assert saved["optimizer_states"][0]["state"][0]["exp_avg"].shape == (128, 32)


@pytest.mark.slow
def test_accelerate_learns_goes_on_from_its_state_and_saves_whole_tensors(tmp_path):
    needs("accelerate")
    said = run("integrations/accelerate_loop.py", f"--folder={tmp_path}", torchrun=2)
    assert "accuracy 1.0000" in said
    from safetensors.torch import load_file

    assert load_file(tmp_path / "model.safetensors")["0.weight"].shape == (128, 32)
