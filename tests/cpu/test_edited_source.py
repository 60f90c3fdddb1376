"""A program that someone edits: it runs, is stepped through, and says what is wrong with it."""

from __future__ import annotations

import bdb
import copy
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


@cache
def planned() -> tuple[Net, Tensor, autopar.Plan]:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(6, 8)
    return model, x, autopar.plan(model, (x,), mesh=(1,))


def parallel(path: Path, change: tuple[str, str] | None, *, emitted: bool = False) -> tuple[nn.Module, Tensor]:
    model, x, plan = planned()
    if emitted:
        plan.emit(path)
    else:
        path.write_text(plan.source)
    if change is not None:
        text = path.read_text()
        assert change[0] in text
        path.write_text(text.replace(*change))
    return autopar.autoparallelize(copy.deepcopy(model), (x,), plan=plan, source=path), x


@pytest.mark.parametrize("emitted", [False, True], ids=["plan.source", "plan.emit"])
def test_an_edit_runs_in_training_and_without_gradients(tmp_path, emitted) -> None:
    plain, x, _ = planned()
    plain = copy.deepcopy(plain)
    expected = plain(x)
    expected.backward()
    model, _ = parallel(tmp_path / "step.py", ("up.relu_()", "up.relu_() * 2"), emitted=emitted)
    loss = model(x)
    loss.backward()
    with torch.no_grad():
        torch.testing.assert_close(model(x), loss.detach())
        doubled = plain.down(torch.relu(plain.up(x)) * 2).square().mean()
    torch.testing.assert_close(loss.detach(), doubled)
    untouched, _ = parallel(tmp_path / "same.py", None, emitted=emitted)
    same = untouched(x)
    same.backward()
    torch.testing.assert_close(same, expected)
    torch.testing.assert_close(untouched.up.weight.grad.full_tensor(), plain.up.weight.grad)


def test_an_error_points_to_the_line_of_the_model_that_called_a_module_of_torch(tmp_path) -> None:
    model, x = parallel(tmp_path / "step.py", ("F.linear(relu, down_weight", "F.linear(relu.t(), down_weight"))
    with pytest.raises(RuntimeError) as error:
        model(x)
    note = error.value.__notes__[-1] if hasattr(error.value, "__notes__") else str(error.value)
    assert "'down' of the model" in note
    assert "test_edited_source.py" in note and "self.down(torch.relu(self.up(x)))" in note


class Visited(bdb.Bdb):
    """A debugger that stops at one line of a file and looks at a variable there."""

    def __init__(self, path: Path, line: int, name: str) -> None:
        super().__init__()
        self.name = name
        self.seen: list[tuple[int, ...]] = []
        assert self.set_break(str(path), line) is None

    def user_line(self, frame) -> None:
        if self.break_here(frame):
            self.seen.append(tuple(frame.f_locals[self.name].shape))
        self.set_continue()


def test_a_debugger_stops_in_the_file_and_sees_its_variables(tmp_path) -> None:
    path = tmp_path / "step.py"
    model, x = parallel(path, None)
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if 'spmd.section("down")' in text)
    debugger = Visited(path, line, "relu")
    with torch.no_grad():
        debugger.runcall(model, x)
    assert debugger.seen == [(6, 16)]


@pytest.mark.parametrize("module", ["down", ""])
def test_an_error_names_the_module_and_the_line_of_the_model(module, tmp_path) -> None:
    edits = {
        "down": (("down_weight, down_bias)", "down_bias, down_bias)"), "'down' of the model"),
        "": (("pow_.sum([0, 1])", "pow_.sum([0, 7])"), "the model's own forward, test_edited_source.py:"),
    }
    edit, said = edits[module]
    model, x = parallel(tmp_path / "step.py", edit)
    with pytest.raises((RuntimeError, IndexError)) as raised:
        model(x)
    note = "\n".join(getattr(raised.value, "__notes__", [str(raised.value)]))
    assert "of the local program, " + said in note


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)).square().mean()


@pytest.mark.parametrize("emitted", [False, True], ids=["plan.source", "plan.emit"])
def test_an_error_inside_what_the_program_calls_names_the_module_that_called(tmp_path, emitted) -> None:
    model, ids, path = Looking(), torch.tensor([[0, 4], [1, 2]]), tmp_path / "step.py"
    plan = autopar.plan(model, (ids,), mesh=(1,))
    text = plan.emit(path).read_text() if emitted else plan.source
    path.write_text(text.replace("vocabulary=5)", 'vocabulary=5, offset="first")'))
    parallel = autopar.autoparallelize(model, (ids,), plan=plan, source=path)
    with pytest.raises((TypeError, RuntimeError)) as raised:
        parallel(ids)
    assert "'embed' of the model" in "\n".join(getattr(raised.value, "__notes__", [str(raised.value)]))


BAD = {
    "syntax": ("def backward(rank, inputs):", "def backward(rank, inputs:", "line "),
    "name": ("aten = torch.ops.aten", "aten = torch.ops.aten\nmissing_name", "NameError: name 'missing_name'"),
    "function": ("def backward(", "def backwards(", "no function backward"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_program_is_refused(case, tmp_path) -> None:
    old, new, said = BAD[case]
    with pytest.raises(PlanError, match="cannot be used") as raised:
        parallel(tmp_path / "step.py", (old, new))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("    return (\n", "    return (\n        x,\n"), "results instead of"),
        (("pow_.sum([0, 1])", "pow_.sum([0, 1]).double()"), "float64[] instead of float32[]"),
    ],
    ids=["another result", "another dtype"],
)
def test_results_that_the_step_cannot_use_are_told(change, said, tmp_path) -> None:
    model, x = parallel(tmp_path / "step.py", change)
    with pytest.raises(PlanError, match="does not return what the plan's program returns") as raised:
        model(x)
    assert said in str(raised.value)


def test_a_missing_file_and_a_missing_plan_are_told(tmp_path) -> None:
    model, x, plan = planned()
    with pytest.raises(PlanError, match="cannot be read"):
        autopar.autoparallelize(copy.deepcopy(model), (x,), plan=plan, source=tmp_path / "none.py")
    with pytest.raises(PlanError, match="belongs to a plan"):
        autopar.autoparallelize(copy.deepcopy(model), (x,), source=tmp_path / "none.py")


def test_ops_that_a_file_brings_are_not_for_inductor(tmp_path) -> None:
    model, ids, path = Looking(), torch.randint(5, (6, 8)), tmp_path / "step.py"
    plan = autopar.plan(model, (ids,), mesh=(1,))
    plan.emit(path)
    with pytest.raises(PlanError, match="brings its own ops") as error:
        autopar.autoparallelize(model, (ids,), plan=plan, source=path, backend="inductor")
    assert "autopar::lookup" in error.value.found and "plan.source" in error.value.hint
