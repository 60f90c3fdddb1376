"""The command line: what each command prints, and how it complains."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from autopar import Plan
from autopar.cli import COMMANDS, main
from autopar.cli.plan import constraints_of, mesh_of
from autopar.errors import AutoparError


def small():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.randn(8, 8),)


def no_pair():
    return nn.Linear(1, 1)


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_own_help(command, capsys):
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    assert done.value.code == 0
    assert f"autopar {command}" in capsys.readouterr().out


def test_plan_prints_the_table_and_the_source_and_saves_the_plan(capsys, tmp_path):
    file = tmp_path / "plan.json"
    arguments = ["--mesh", "dp=2", "--cluster", "cpu-2", "--constraint", "*.weight=S0R", "--source"]
    assert main(["plan", f"{__name__}:small", *arguments, "--output", str(file)]) == 0
    text = capsys.readouterr().out
    assert "step time" in text
    assert "def forward(rank, inputs):" in text
    assert str(Plan.load(file).specs["0.weight"]) == "S0R"


def test_plan_builds_a_hugging_face_model_of_a_config_without_allocating_it(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    }))  # fmt: skip
    sizes = ["--batch", "4x16", "--layers", "1", "--budget", "1GiB"]
    assert main(["plan", str(config), *sizes, "--mesh", "2", "--cluster", "cpu-2"]) == 0
    text = capsys.readouterr().out
    assert "LlamaForCausalLM on mesh (2,)" in text
    assert "layers.1" not in text


def test_check_runs_every_rank_and_compares(capsys):
    assert main(["check", "--mesh", "2"]) == 0
    assert "computes what the model computes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "nosuchmodel", "--mesh", "2"], "There is no such model"),
        (["plan", "nosuch.json", "--mesh", "2"], "config cannot be read"),
        (["plan", "nosuch:thing", "--mesh", "2"], "was not found"),
        (["plan", f"{__name__}:no_pair", "--mesh", "2"], "must return the model and its inputs"),
        (["plan", f"{__name__}:small", "--mesh", "2xfour"], "--mesh is no shape"),
        (["plan", "gpt2", "--mesh", "2", "--batch", "2x2048"], "no positions for so many tokens"),
        (["plan", f"{__name__}:small", "--mesh", "2", "--cluster", "nosuch"], "No cluster has this name"),
        (["plan", f"{__name__}:small", "--mesh", "2", "--constraint", "x"], "--constraint is no pair"),
        (["profile", "--nproc", "0"], "--nproc must be at least 1"),
    ],
)
def test_errors_end_the_command_with_one_message(arguments, message, capsys):
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_meshes_and_constraints_are_read_as_they_are_written():
    assert mesh_of(None) is None
    assert mesh_of("2,4") == mesh_of("2x4") == (2, 4)
    assert mesh_of("8") == (8,)
    assert mesh_of("dp=2,tp=4") == {"dp": 2, "tp": 4}
    assert constraints_of(["a.*=S0R", "b=R"]) == {"a.*": "S0R", "b": "R"}
    for text in ("2,tp=4", "two", "dp=x", ""):
        with pytest.raises(AutoparError, match="--mesh is no shape"):
            mesh_of(text)
