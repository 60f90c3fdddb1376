"""The command line: what each command prints, and how it complains."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from autopar import Plan
from autopar.cli import COMMANDS, main
from autopar.cli.models import presets
from autopar.cli.plan import constraints_of, mesh_of
from autopar.cli.progress import Progress
from autopar.errors import AutoparError


def small():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.randn(8, 8),)


def broken():
    raise RuntimeError("it fell apart")


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


def test_the_model_may_be_named_by_its_file_and_a_mesh_as_in_python(capsys, tmp_path):
    (tmp_path / "own_model.py").write_text(
        "import torch\ndef made():\n    return torch.nn.Linear(4, 4), torch.empty(4, 4)\n"
    )
    assert main(["plan", f"{tmp_path}/own_model.py:made", "--mesh", "(2, 2)", "--cluster", "cpu-2"]) == 0
    assert "Linear on mesh (2, 2)" in capsys.readouterr().out


def test_a_saved_plan_is_no_model(capsys, tmp_path):
    (tmp_path / "plan.json").write_text('{"format": "autopar-plan"}')
    assert main(["explain", f"{tmp_path}/plan.json", "--mesh", "2"]) == 1
    assert "saved plan" in capsys.readouterr().err


def test_plan_builds_a_hugging_face_model_of_a_config_without_allocating_it(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 64,
            }
        )
    )
    sizes = ["--batch", "4x16", "--layers", "1", "--budget", "1GiB"]
    assert main(["plan", str(config), *sizes, "--mesh", "2", "--cluster", "cpu-2"]) == 0
    text = capsys.readouterr().out
    assert "LlamaForCausalLM on mesh (2,)" in text
    assert "layers.1" not in text


def test_check_says_what_it_finds_runs_every_rank_and_compares(capsys):
    assert main(["check", "--mesh", "2"]) == 0
    said = capsys.readouterr().out
    assert torch.__version__ in said
    assert "HiGHS" in said
    assert "gloo" in said
    assert "computes what the model computes" in said


def test_a_report_a_plan_a_program_and_a_difference(capsys, tmp_path):
    report, first, other, program = (tmp_path / n for n in ("p.html", "a.json", "b.json", "p.py"))
    model = [f"{__name__}:small", "--cluster", "cpu-2"]
    assert main(["plan", *model, "--mesh", "2", "--report", str(report), "--output", str(first)]) == 0
    assert report.read_text().startswith("<!doctype html>")
    assert main(["plan", *model, "--mesh", "2", "--constraint", "0.weight=S0R", "--output", str(other)]) == 0
    capsys.readouterr()
    assert main(["diff", str(first), str(other)]) == 0
    assert "0.weight" in capsys.readouterr().out
    assert main(["emit", str(first), "--output", str(program)]) == 0
    assert program.read_text() == Plan.load(first).emit(program).read_text() != Plan.load(first).source
    assert f"torchrun --nproc-per-node 2 {program}" in capsys.readouterr().out
    assert main(["emit", str(first)]) == 0
    assert "def backward(rank, inputs):" in capsys.readouterr().out


def test_explain_takes_the_name_as_the_last_word(capsys):
    arguments = ["explain", f"{__name__}:small", "--mesh", "2", "--cluster", "cpu-2"]
    assert main([*arguments, "0.weight"]) == 0
    assert "0.weight" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*arguments, "0.weight", "2.weight"])
    assert "unrecognized arguments: 0.weight 2.weight" in capsys.readouterr().err


def test_published_models_are_known_by_name():
    assert "llama-3-405b" in presets()
    transformers = pytest.importorskip("transformers")
    for name, values in presets().items():
        kind = {k: v for k, v in values.items() if k not in ("model_type", "dtype")}
        config = transformers.AutoConfig.for_model(values["model_type"], **kind)
        assert all(getattr(config, k) == v for k, v in kind.items()), name


def test_progress_is_a_line_a_stage_where_it_is_no_terminal():
    out = io.StringIO()
    progress = Progress(out)
    for stage in ("capture", "strategies", "solve", "solve: 2 ms, gap 5.00%", "solve: 2 ms, gap 4.00%", "solve"):
        progress(stage)
    progress.close()
    lines = out.getvalue().splitlines()
    assert [line.split()[2].strip(":") for line in lines] == ["capture", "strategies", "solve"]


def test_progress_stays_on_one_line_of_a_terminal():
    out = io.StringIO()
    out.isatty = lambda: True
    progress = Progress(out)
    progress("solve")
    progress("solve: 2 ms, gap 5.00%")
    progress.close()
    assert "\n" not in out.getvalue()
    assert "gap 5.00%" in out.getvalue()


def test_an_error_of_the_users_model_is_told_without_a_traceback(capsys):
    assert main(["plan", f"{__name__}:broken", "--mesh", "2"]) == 1
    said = capsys.readouterr().err
    assert "RuntimeError: it fell apart" in said
    assert "test_cli.py" in said
    assert "Traceback" not in said


HARD = """
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
def model():
    with torch.device("meta"):
        made = GPT2LMHeadModel(GPT2Config(n_layer=2, use_cache=False))
    ids = torch.empty(4, 128, dtype=torch.long, device="meta")
    return made, dict(input_ids=ids, labels=ids)
"""


@pytest.mark.slow
def test_an_interrupt_gives_the_best_plan_so_far(tmp_path):
    (tmp_path / "hard.py").write_text(HARD)
    command = [sys.executable, "-m", "autopar", "plan", "hard:model", "--mesh", "2x2x2", "--cluster", "dgx-h100"]
    asked = [*command, "--time-limit", "1000"]
    process = subprocess.Popen(asked, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = ""
    while "solve: " not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, rest = process.communicate(timeout=120)
    assert process.returncode == 0, rest
    assert "stopped: this is the best plan" in rest
    assert "step time" in out
    assert time.monotonic() - began < 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "nosuchmodel", "--mesh", "2"], "There is no such model"),
        (["plan", "nosuch.json", "--mesh", "2"], "config cannot be read"),
        (["plan", "nosuch:thing", "--mesh", "2"], "was not found"),
        (["plan", f"{__name__}:no_pair", "--mesh", "2"], "must return the model and its inputs"),
        (["plan", f"{__name__}:small", "--mesh", "2xfour"], "--mesh is not a mesh shape"),
        (["plan", "gpt2", "--mesh", "2", "--batch", "2x2048"], "more tokens per sample than the model has positions"),
        (["plan", f"{__name__}:small", "--mesh", "2", "--cluster", "nosuch"], "No cluster has this name"),
        (["plan", f"{__name__}:small", "--mesh", "2", "--constraint", "x"], "--constraint is not a GLOB=SPEC pair"),
        (["plan", f"{__name__}:small", "--output", "nosuchfolder/plan.json"], "file cannot be written"),
        (["plan", f"{__name__}:small", "--optimizer", "nosuch"], "optimizer is not known"),
        (["plan", f"{__name__}:small", "--mesh", "2", "--search", "nosuch"], "There is no search"),
        (["diff", "a.json", "b.json"], "The plan cannot be read"),
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
        with pytest.raises(AutoparError, match="--mesh is not a mesh shape"):
            mesh_of(text)


@pytest.mark.parametrize(
    ("said", "options"), [([], "auto"), (["--expert-room", "2"], 2.0), (["--expert-room", "none"], None)]
)
def test_the_room_for_rows_of_experts_is_a_number_or_none(said, options, tmp_path):
    path = tmp_path / "plan.json"
    command = ["plan", "tests.cpu.test_cli:small", "--mesh", "2", "--cluster", "cpu-2", "--output", str(path)]
    assert main([*command, *said]) == 0
    assert Plan.from_json(path.read_text()).options.get("expert_room", "auto") == options


def test_the_solver_is_chosen_by_one_argument(capsys):
    arguments = ["plan", f"{__name__}:small", "--mesh", "2", "--cluster", "cpu-2", "--solver"]
    assert main([*arguments, "cbc"]) == 0
    assert main([*arguments, "none"]) == 1
    assert "There is no solver 'none' here." in capsys.readouterr().err
