"""The examples run, short."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from tests.multiprocess.test_training_faults import finished

pytestmark = pytest.mark.multiprocess
ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str, torchrun: int = 0) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"] if torchrun else []
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    command = [sys.executable, *launcher, str(ROOT / "examples" / script), *arguments]
    done = finished(command, environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(text: str) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in re.findall(r"(?:step|epoch) +(\d+) +loss ([\d.]+)", text)]


@pytest.mark.slow
def test_a_llama_learns_text_is_killed_resumes_and_is_read_by_hugging_face(tmp_path: Path):
    from transformers import LlamaForCausalLM

    said = run("pretrain_llama.py", "--steps=5", "--save-every=2", "--kill-at=3", f"--folder={tmp_path}")
    assert "resumed at step 2" in said
    found = losses(said)
    assert [step for step, _ in found] == [1, 2, 3, 3, 4, 5]
    assert found[2] == found[3]  # the step after the checkpoint repeats itself
    assert found[-1][1] < found[0][1]
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_hidden_layers == 2


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
@pytest.mark.slow
def test_a_vision_transformer_learns_digits():
    said = run("vit_digits.py", "--epochs=2", torchrun=2)
    found = losses(said)
    assert found[1][1] < found[0][1]
    right = re.search(r"accuracy: ([\d.]+)%", said)
    assert right is not None
    assert float(right[1]) > 30
