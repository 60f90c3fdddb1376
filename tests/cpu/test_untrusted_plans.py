"""A plan is data: whatever a file of one holds, it is the same plan or an error, and nothing in it is executed."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from autopar.arguments import as_constraints
from autopar.cli import main
from autopar.emission import SOURCE_DIFFERS
from autopar.errors import AutoparError, PlanError
from autopar.plans.plan import Plan, _plan_from
from autopar.training import Checkpointer
from autopar.training.files import read_plain

MARKER = "AUTOPAR_TEST_MARKER"
CODE = f"__import__('os').environ.update({MARKER}='1')"
TEXTS_WITH_CODE = (
    CODE,
    f'"""\n{CODE}\n"""',
    f"x\n{CODE}\n",
    f'"); {CODE}; ("',
    f"x\r{CODE}",
    f"a\u2028{CODE}",
    "\ud800",
)
ODD = (
    None,
    True,
    -1,
    0,
    1,
    3,
    10**30,
    1e308,
    -0.5,
    math.inf,
    math.nan,
    "",
    "R",
    "S0",
    "S0R",
    "forward",
    "float32",
    "all_gather",
    [],
    {},
    [[]],
    {"a": 1},
    *TEXTS_WITH_CODE,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("scale", torch.rand(8), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


IDS = torch.arange(24).reshape(4, 6) % 16


@cache
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@cache
def planned(mesh: tuple[int, ...] = (2, 2)) -> Plan:
    cut = {"embed.weight": "S0R", "up.weight": "S1R", "input:ids": "S0R"} if mesh == (2, 2) else {}
    return autopar.plan(net(), (IDS,), mesh=mesh, cluster="cpu-2", constraints=cut, time_limit=2)


@cache
def expected() -> autopar.Simulation:
    return autopar.simulate(net(), (IDS,), plan=planned())


@pytest.fixture(autouse=True)
def _nothing_runs() -> Any:
    os.environ.pop(MARKER, None)
    yield
    assert MARKER not in os.environ, "a text of a file was executed"


def paths(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where everything of a tree of JSON lies."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [at, *(path for key, value in items for path in paths(value, (*at, key)))]


def found(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


@st.composite
def damaged(draw: st.DrawFn, whole: str, part: str = "") -> dict[str, Any]:
    """A saved plan of which one or two places were changed, left out, repeated or exchanged, and its digest mended."""
    data = json.loads(whole)
    for _ in range(draw(st.integers(1, 2))):
        every = [p for p in paths(data) if p and (not part or p[0] == part)]
        path = draw(st.sampled_from(every))
        place, key = found(data, path[:-1]), path[-1]
        what = draw(st.sampled_from(["odd", "odd", "gone", "twice", "other"]))
        if what == "gone":
            del place[key]
        elif what == "twice" and isinstance(place, list):
            place.append(copy.deepcopy(place[key]))
        elif what == "other":
            place[key] = copy.deepcopy(found(data, draw(st.sampled_from(every))))
        else:
            place[key] = draw(st.sampled_from(ODD))
    return mended(data)


def mended(data: dict[str, Any]) -> dict[str, Any]:
    """With the digest of its program, as whoever changes a plan would write it."""
    try:
        return data | {"digest": _plan_from(data).digest}
    except Exception:  # noqa: BLE001  there is no program
        return data


def said(error: AutoparError) -> bool:
    return bool(error.what and error.found and error.hint)


def shown(plan: Plan) -> None:
    """All that a plan shows without its model."""
    assert Plan.from_json(plan.to_json()) == plan
    assert str(plan) and plan.diff(planned()) and plan._repr_html_()
    for ask in (lambda: plan.symbolic, lambda: plan.explain("up.weight")):
        try:
            ask()
        except AutoparError as error:
            assert said(error)  # noqa: PT017


@given(st.data())
@settings(max_examples=150)
def test_what_loads_is_a_plan_that_reads_back_and_shows_itself(data) -> None:
    text = json.dumps(data.draw(damaged(planned().to_json())))
    try:
        plan = Plan.from_json(text)
    except AutoparError as error:
        assert said(error)  # noqa: PT017
        return
    shown(plan)


@given(st.data())
@settings(max_examples=60)
def test_a_program_that_loads_computes_what_the_model_computes_or_is_refused(data) -> None:
    text = json.dumps(data.draw(damaged(planned().to_json(), "program")))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = autopar.simulate(net(), (IDS,), plan=Plan.from_json(text))
    except AutoparError as error:
        assert said(error)  # noqa: PT017
        return
    torch.testing.assert_close(made.outputs, expected().outputs)
    torch.testing.assert_close(dict(made.grads), dict(expected().grads))


def edited(change: Any) -> str:
    data = json.loads(planned().to_json())
    change(data["program"]["ops"], data)
    return json.dumps(mended(data))


def other_step(ops: list[dict[str, Any]], data: dict[str, Any]) -> None:
    gather = next(op for op in ops if op.get("step", {}).get("kind") == "all_gather")
    gather["step"]["axis"] = 1 - gather["step"]["axis"]


def other_operand(ops: list[dict[str, Any]], data: dict[str, Any]) -> None:
    op = next(op for op in ops if op["kind"] == "compute" and len(op["reads"]) == 2)
    op["reads"] = op["reads"][::-1]


def other_spec(ops: list[dict[str, Any]], data: dict[str, Any]) -> None:
    data["specs"]["down.weight"] = "S01R"


def overwrites(ops: list[dict[str, Any]], data: dict[str, Any]) -> None:
    op = next(op for op in ops if op["node"].startswith("mul") and op["kind"] == "compute")
    op |= {"in_place": True, "operand": 0}


@pytest.mark.parametrize("change", [other_step, other_operand, other_spec, overwrites], ids=lambda c: c.__name__)
def test_an_edited_program_that_computes_something_else_is_refused(change) -> None:
    with pytest.raises(PlanError, match=r"does not compute what the model computes|is damaged"):
        autopar.simulate(net(), (IDS,), plan=Plan.from_json(edited(change)))


def test_every_text_of_a_plan_may_hold_code(tmp_path) -> None:
    """One place of each kind, in the plan that this one process runs."""
    whole = json.loads(planned((1,)).to_json())
    texts = [p for p in paths(whole) if isinstance(found(whole, p), str)]
    kinds = {(*(k for k in p if p[0] == "program" and isinstance(k, str)), p[0], len(p), type(p[-1])): p for p in texts}
    for at, path in enumerate(kinds.values()):
        data = copy.deepcopy(whole)
        found(data, path[:-1])[path[-1]] = TEXTS_WITH_CODE[at % len(TEXTS_WITH_CODE)]
        try:
            plan = Plan.from_json(json.dumps(mended(data)))
            shown(plan)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = autopar.autoparallelize(copy.deepcopy(net()), (IDS,), plan=plan)
            model(IDS).backward()
            plan.emit(tmp_path / "step.py")
        except AutoparError:
            continue


FILES = {
    "nothing": "",
    "half": planned,
    "list": "[1]",
    "deep": '{"format": "autopar-plan", "version": 2, "x": ' + "[" * 100_000,
    "deep options": lambda: json.dumps(json.loads(planned().to_json()) | {"options": None}).replace(
        '"options": null', '"options": {"a": ' + '{"a": ' * 900 + "1" + "}" * 901
    ),
    "twins": lambda: planned().to_json().replace('"model": "Net"', '"model": "Net", "model": "Other"'),
    "nan": lambda: planned().to_json().replace(f'"step_time": {planned().step_time!r}', '"step_time": NaN'),
    "digits": lambda: planned().to_json().replace('"version": 2', '"version": 2, "x": ' + "9" * 5000),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_plan_is_refused(name, tmp_path) -> None:
    text = planned().to_json()[:-200] if name == "half" else FILES[name]
    path = tmp_path / "plan.json"
    path.write_text(text if isinstance(text, str) else text())
    with pytest.raises(PlanError) as error:
        Plan.load(path)
    assert str(path) in error.value.found and error.value.hint


@pytest.mark.parametrize("path", [".", "missing.json", "a\0b", "x" * 5000, 7, None])
def test_a_path_that_is_no_file_is_refused(path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(path)


def with_source(plan: Plan, change: Any) -> Plan:
    data = json.loads(plan.to_json())
    data["source"] = change(data["source"])
    return Plan.from_json(json.dumps(data))


CHANGES = {
    "appended": lambda s: f"{s}\n{CODE}\n",
    "in a function": lambda s: s.replace("    inputs.clear()\n", f"    inputs.clear()\n    {CODE}\n", 1),
    "in the constants": lambda s: s.replace("CONSTANTS = {", f'CONSTANTS = {{\n    "x": {CODE},'),
    "in a comment's line": lambda s: s.replace("\n    ) = inputs", f" \u2028{CODE}\n    ) = inputs", 1),
    "instead": lambda s: CODE,
    "an import": lambda s: s.replace("import torch\n", "import torch\nimport this  # registers torch.ops.a.b\n", 1),
    "another name": lambda s: s.replace("    inputs.clear()\n", "    inputs.clear()\n    spmd = torch\n", 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_edited_source_is_told_and_does_not_run(name, tmp_path) -> None:
    plan = with_source(planned((1,)), CHANGES[name])
    with pytest.warns(UserWarning, match="does not run") as told:
        model = autopar.autoparallelize(copy.deepcopy(net()), (IDS,), plan=plan)
    assert [str(w.message) for w in told].count(SOURCE_DIFFERS) == 1 and "source=" in SOURCE_DIFFERS
    torch.testing.assert_close(model(IDS), net()(IDS))
    assert model.plan.source == planned((1,)).source
    assert model.plan.emit(tmp_path / "step.py").exists()
    with pytest.raises(PlanError, match="not what autopar emits"):
        plan.emit(tmp_path / "edited.py")
    plan.save(tmp_path / "plan.json")
    assert main(["emit", str(tmp_path / "plan.json")]) != 0


def test_an_edited_source_runs_where_its_file_is_given(tmp_path) -> None:
    (tmp_path / "step.py").write_text(CHANGES["appended"](planned((1,)).source))
    model = autopar.autoparallelize(copy.deepcopy(net()), (IDS,), plan=planned((1,)), source=tmp_path / "step.py")
    assert os.environ.pop(MARKER) == "1"
    torch.testing.assert_close(model(IDS), net()(IDS))


ASKED: dict[str, dict[str, Any]] = {
    "plainly": {},
    "local": {"batch": "local"},
    "accumulated": {"accumulation_steps": 2},
    "bf16": {"mixed_precision": "bf16"},
    "ranged": {"dynamic_shapes": {"ids": {0: ("batch", 2, 8)}}},
    "dtensor": {"outputs": "dtensor"},
}


@pytest.mark.parametrize("name", [*ASKED, "without values"])
@pytest.mark.filterwarnings("error")
def test_a_saved_plan_runs_without_a_word(name, tmp_path) -> None:
    model, ids = copy.deepcopy(net()), IDS
    if name == "without values":
        model, ids = copy.deepcopy(net()).to("meta"), IDS.to("meta")
    plan = autopar.plan(model, (ids,), mesh=(1,), cluster="cpu-2", time_limit=2, **ASKED.get(name, {}))
    plan.save(tmp_path / "plan.json")
    again = autopar.autoparallelize(copy.deepcopy(net()), (IDS,), plan=tmp_path / "plan.json")
    again(IDS).backward()
    if name == "ranged":
        again(IDS[:2]).backward()


class Reaching:
    """What a pickle runs when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.putenv, (MARKER, "1")


@pytest.mark.parametrize("name", [".metadata", "common.pt", "rank-0.pt", "plan.json"])
def test_nothing_of_a_checkpoint_is_executed(name, tmp_path) -> None:
    model = autopar.autoparallelize(copy.deepcopy(net()), (IDS,), plan=planned((1,)))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model, wait=True)
    assert checkpointer.load(model).step == 1 and checkpointer.plan() == model.plan
    file = tmp_path / "step-00000001" / name
    os.unsetenv(MARKER)
    pickle.dump(Reaching(), file.open("wb")) if name == ".metadata" else torch.save({"extra": Reaching()}, file)
    with pytest.raises(AutoparError):
        checkpointer.plan() if name == "plan.json" else checkpointer.load(model)
    assert not os.popen(f"echo ${MARKER}").read().strip()


def test_a_checkpoint_names_no_file_elsewhere(tmp_path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"up.weight": "../other.safetensors"}}')
    with pytest.raises(AutoparError, match="index"):
        autopar.load_safetensors(copy.deepcopy(net()), tmp_path)
    (tmp_path / "model.bin").write_bytes(pickle.dumps(Reaching()))
    with pytest.raises(AutoparError, match="tensors and plain data"):
        read_plain(Path(tmp_path / "model.bin"))


def test_names_of_a_cluster_and_a_mesh_stay_text_in_the_program(tmp_path) -> None:
    name = json.dumps(f'"""\n{CODE}\n\\')
    cluster = autopar.Cluster.load("cpu-2").to_toml().replace('name = "cpu-2"', f"name = {name}", 1)
    (tmp_path / "cluster.toml").write_text(cluster)
    named = {f'"""\n{CODE}\n': 1}
    file = tmp_path / "cluster.toml"
    model = autopar.autoparallelize(copy.deepcopy(net()), (IDS,), mesh=named, cluster=file, time_limit=2)
    model(IDS).backward()
    text = model.plan.emit(tmp_path / "step.py").read_text()
    compile(text, "step.py", "exec")
    assert "weights_only=True" in text


KEYS = st.one_of(st.text(), st.integers())


@given(st.one_of(st.none(), st.text(), st.dictionaries(KEYS, KEYS)))
def test_constraints_are_texts_by_name_or_an_error(constraints) -> None:
    try:
        assert as_constraints(constraints) == (constraints or {})
    except AutoparError as error:
        assert said(error)  # noqa: PT017
