"""Bad input is refused in three parts, within seconds, and the model is as it was. One process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import (
    AutoparError,
    CaptureError,
    ConstraintError,
    InfeasibleError,
    InputError,
    MeshError,
    PlanError,
    SolverError,
    SpecError,
)
from autopar.solver.clock import only_counted
from tests.cpu.bad_input_checks import Net, batch, refused, untouched
from tests.cpu.capture_checks import captured_once
from tests.infeasible import smallest_budget


def run(model: nn.Module, **options: Any) -> nn.Module:
    return autopar.autoparallelize(model, batch(), **{"mesh": (1,), **options})


# --- the mesh ---


def test_a_mesh_of_another_size_than_the_world() -> None:
    model = Net()
    with untouched(model), refused(MeshError, "8 ranks", "world size 1", "torchrun --nproc-per-node 8"):
        run(model, mesh=(2, 4))


@pytest.mark.parametrize("mesh", ["2x4", 2.5, object(), (2, "a"), (0, 2), (), (-1,), {"dp": 2, "tp": 0}])
def test_no_mesh(mesh: Any) -> None:
    model = Net()
    with untouched(model), refused(MeshError):
        run(model, mesh=mesh)
    with refused(MeshError):
        autopar.plan(model, batch(), mesh=mesh)


def test_an_unknown_cluster() -> None:
    model = Net()
    with untouched(model), refused(MeshError, "dgx-h10"):
        run(model, cluster="dgx-h10")


def test_constraints_without_a_mesh() -> None:
    model = Net()
    with untouched(model), refused(MeshError, "mesh=(2, 4)"):
        run(model, mesh=None, constraints={"head.weight": "RR"})


# --- the budget ---


@pytest.mark.parametrize("budget", ["much", -1, 0, "60 XB", "", True, 0.8, float("nan"), float("inf"), b"1GiB", [1]])
def test_no_budget(budget: Any) -> None:
    model = Net()
    with untouched(model), refused(AutoparError, "60GiB"):
        run(model, memory_budget=budget)


def test_a_budget_that_nothing_fits_names_the_smallest_that_works() -> None:
    model = Net()
    with untouched(model), refused(InfeasibleError, "memory_budget=", "smallest budget that works") as caught:
        run(model, memory_budget=100)
    smallest = smallest_budget(caught.value)
    assert autopar.plan(model, batch(), mesh=(1,), memory_budget=smallest).peak_memory <= smallest


def mlp(width: int = 64) -> nn.Module:
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(width, width), nn.Tanh())))


SLOW = [pytest.mark.slow]


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        pytest.param(model, mesh, marks=[] if (name, mesh) in (("tied", (1,)),) else SLOW, id=name)
        for name, model in (("mlp", mlp()), ("net", Net()), ("tied", Net(tied=True)))
        for mesh in ((1,), (2,), (4,), (2, 2))
    ],
)
@captured_once()
def test_the_smallest_budget_works_and_less_does_not(model: nn.Module, mesh: tuple[int, ...]) -> None:
    inputs = batch() if isinstance(model, Net) else torch.randn(16, 64)
    with refused(InfeasibleError) as caught:
        autopar.plan(model, inputs, mesh=mesh, memory_budget=10)
    smallest = smallest_budget(caught.value)
    plan = autopar.plan(model, inputs, mesh=mesh, memory_budget=smallest)
    assert plan.peak_memory <= smallest
    less = smallest - max(smallest // 100, 1)
    try:
        found, most = autopar.plan(model, inputs, mesh=mesh, memory_budget=less).peak_memory, less
    except InfeasibleError as error:
        found, most = smallest_budget(error), smallest
    assert found <= most


@captured_once()
def test_of_a_small_model_the_smallest_budget_is_named_to_the_byte() -> None:
    """The first rounds look for what is smaller by a hundredth, and leave 256 bytes more."""
    model, inputs = mlp(), torch.randn(16, 64)
    with refused(InfeasibleError) as caught:
        autopar.plan(model, inputs, mesh=(2,), memory_budget=10)
    smallest = smallest_budget(caught.value)
    with refused(InfeasibleError, f"memory_budget={smallest}"):
        autopar.plan(model, inputs, mesh=(2,), memory_budget=smallest - 1)


@pytest.mark.slow
def test_what_rows_set_aside_hides_no_smaller_budget() -> None:
    """Rows for all options named 1,924 bytes; what is set aside for single options leads to 1,828."""
    with refused(InfeasibleError) as caught, only_counted():
        autopar.plan(Net(tied=True), batch(), mesh=(4,), memory_budget=10)
    assert smallest_budget(caught.value) <= 1828


# --- constraints ---


def test_a_constraint_that_names_nothing_shows_the_nearest() -> None:
    model = Net()
    with untouched(model), refused(ConstraintError, "'head.wieght'", "head.weight"):
        run(model, constraints={"head.wieght": "RR"})


def test_constraints_that_contradict_through_a_tie() -> None:
    model = Net(tied=True)
    constraints = {"embed.weight": "S0R", "head.weight": "RS0"}
    with untouched(model), refused(ConstraintError, "S0R", "RS0", "tied", "embed.weight", "head.weight"):
        run(model, constraints=constraints)


def test_constraints_that_agree_through_a_tie() -> None:
    model = Net(tied=True)
    plan = autopar.plan(model, batch(), mesh=(2,), constraints={"embed.weight": "S0R", "head.weight": "S0R"})
    assert str(plan.specs["embed.weight"]) == "S0R"


def test_constraints_that_contradict_by_globs() -> None:
    model = Net()
    with untouched(model), refused(ConstraintError, "S0R", "RS0"):
        run(model, constraints={"head.*": "S0R", "*.weight": "RS0"})


def test_a_constraint_that_shards_what_the_caller_gets_whole() -> None:
    model, x = torch.nn.Linear(4, 4), torch.zeros(4, 4)
    with refused(ConstraintError, "output:0", "S0R", "RR", 'outputs="dtensor"'):
        autopar.plan(model, x, mesh=(2,), constraints={"output:*": "S0R"})


@pytest.mark.parametrize("text", ["XYZ", "S", "S0", "S0RRR", "S5R", "S00R", "S0S0", ""])
def test_a_spec_that_does_not_fit(text: str) -> None:
    model = Net()
    with untouched(model), refused(SpecError):
        run(model, constraints={"head.weight": text})


def test_a_partial_spec_of_a_parameter() -> None:
    model = Net()
    with untouched(model), refused(ConstraintError, "partial"):
        run(model, constraints={"head.weight": "RR P0"})


# --- the model ---


@pytest.mark.parametrize("model", [lambda x: x, None, nn.Linear])
def test_no_module(model: Any) -> None:
    with refused(InputError, "no module"):
        autopar.plan(model, torch.empty(2, 2), mesh=(2,))
    with refused(InputError, "no module"):
        autopar.autoparallelize(model, torch.empty(2, 2), mesh=(1,))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        if h.sum() > 0:  # the line
            return h
        return -h


def test_a_model_that_cannot_be_captured_names_the_line() -> None:
    model = Branching()
    number = next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the line" in line)
    with untouched(model), refused(CaptureError, f"{Path(__file__).name}:{number}", "if h.sum() > 0"):
        autopar.autoparallelize(model, torch.randn(4, 4), mesh=(1,))


def test_a_model_twice() -> None:
    model = run(Net())
    with refused(PlanError, "already parallel"):
        run(model)


def test_no_backend() -> None:
    model = Net()
    with untouched(model), refused(AutoparError, "backend"):
        run(model, backend="tensorrt")


@pytest.mark.parametrize("optimizer", ["adamm", -3, object()])
def test_no_optimizer(optimizer: Any) -> None:
    model = Net()
    with untouched(model), refused(AutoparError):
        run(model, optimizer=optimizer)


@pytest.mark.parametrize("option", [dict(batch="some"), dict(outputs="none"), dict(search="greedy"), dict(solver="x")])
def test_an_option_that_does_not_exist(option: dict[str, str]) -> None:
    model = Net()
    (value,) = option.values()
    with untouched(model), pytest.raises(AutoparError) as caught:
        run(model, **option)
    assert value in str(caught.value)
    assert caught.value.hint


# --- the inputs ---


def test_meta_inputs_that_do_not_fit_the_signature() -> None:
    model = Net()
    with untouched(model), refused(InputError, "signature"):
        autopar.autoparallelize(model, dict(idss=batch()["ids"]), mesh=(1,))


@pytest.fixture(scope="module")
def parallel() -> nn.Module:
    torch.manual_seed(0)
    return run(Net())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing": (dict(ids=batch()["ids"]), "target"),
    "rank": (dict(ids=batch()["ids"][0], target=batch()["target"]), "ids"),
    "dtype": (dict(ids=batch()["ids"].int(), target=batch()["target"]), "int32"),
    "nested": (dict(ids=batch()["ids"], target=[batch()["target"]]), "target"),
}


@pytest.mark.parametrize("name", WRONG)
def test_inputs_of_another_kind_than_planned(parallel: nn.Module, name: str) -> None:
    inputs, part = WRONG[name]
    with untouched(parallel), refused(InputError, part):
        parallel(**inputs)


def test_unknown_argument(parallel: nn.Module) -> None:
    with untouched(parallel), refused(InputError, "signature", "mask"):
        parallel(**batch(), mask=torch.ones(4))


def test_another_size_compiles_again(parallel: nn.Module) -> None:
    other = batch(8)
    assert torch.isfinite(parallel(**other))


# --- plans ---


def test_a_plan_from_another_model() -> None:
    plan = autopar.plan(Net(hidden=16), batch(), mesh=(1,))
    model = Net()
    with untouched(model), refused(PlanError, "another model", plan.graph_digest):
        run(model, plan=plan)
    with refused(PlanError, "another model"):
        autopar.simulate(model, batch(), plan=plan)


def test_a_plan_from_other_inputs() -> None:
    model = Net()
    plan = autopar.plan(model, batch(8), mesh=(1,))
    with untouched(model), refused(PlanError, "other inputs"):
        run(model, plan=plan)


def test_a_plan_for_another_world() -> None:
    model = Net()
    plan = autopar.plan(model, batch(), mesh=(2,))
    with untouched(model), refused(MeshError, "world size 1"):
        run(model, plan=plan, mesh=None)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 1}', "\x00\x01"])
def test_a_file_that_is_no_plan(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    model = Net()
    with untouched(model), refused(PlanError, "plan.json"):
        run(model, plan=path)


@pytest.mark.parametrize("plan", [3, {}, nn.Linear(1, 1)])
def test_an_object_that_is_no_plan(plan: Any) -> None:
    model = Net()
    with untouched(model), refused(PlanError, "no plan"):
        run(model, plan=plan)
    with refused(PlanError, "no plan"):
        autopar.simulate(model, batch(), plan)


def test_a_simulation_without_values_names_what_lacks_them() -> None:
    model = nn.Linear(4, 4)
    plan = autopar.plan(model, torch.empty(4, 4), mesh=(2,))
    with refused(InputError, "input"):
        autopar.simulate(model, torch.empty(4, 4, device="meta"), plan)
    with refused(InputError, "weight, bias"):
        autopar.simulate(model.to("meta"), torch.empty(4, 4), plan)


def test_a_plan_file_that_does_not_exist(tmp_path: Path) -> None:
    model = Net()
    with untouched(model), refused(PlanError, "nowhere.json"):
        run(model, plan=tmp_path / "nowhere.json")


def test_a_plan_that_was_changed_by_hand(tmp_path: Path) -> None:
    model = Net()
    plan = autopar.plan(model, batch(), mesh=(1,))
    changed = dataclasses.replace(plan, graph_digest="0" * len(plan.graph_digest))
    with untouched(model), refused(PlanError):
        run(model, plan=changed)


# --- the solver ---


def test_no_cbc_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.solver.integer.pulp_backend.os.access", lambda path, mode: False)
    model = Net()
    with untouched(model), refused(SolverError, "CBC", "pip install"):
        run(model, solver="cbc")


def test_names_of_solvers_are_written_in_any_case() -> None:
    asked = [autopar.plan(Net(), batch(), mesh=(2,), cluster="cpu-2", solver=name) for name in ("CBC", "cbc")]
    assert asked[0].digest == asked[1].digest and asked[0].options["solver"] == "cbc"


@pytest.mark.parametrize(
    "wrong",
    [
        dict(time_limit=None),
        dict(time_limit="1"),
        dict(gap=None),
        dict(search=None),
        dict(time_limit=0),
        dict(time_limit=-1.0),
        dict(time_limit=float("nan")),
        dict(gap=-0.1),
        dict(gap=1.0),
    ],
)
def test_a_search_that_cannot_be_is_refused(wrong) -> None:
    with pytest.raises(AutoparError, match=next(iter(wrong))):
        autopar.plan(torch.nn.Linear(2, 2), torch.empty(2, 2), mesh=(2,), cluster="dgx-h100", **wrong)
