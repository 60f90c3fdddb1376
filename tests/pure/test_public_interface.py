"""The contract of ``import autopar``: its names, and what its functions take. Read from the source, without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from autopar.plans import Plan

SOURCE = Path(autopar.__file__).parent


def function(file: str, name: str) -> ast.FunctionDef:
    tree = ast.parse((SOURCE / file).read_text())
    return next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)


def keywords(found: ast.FunctionDef) -> dict[str, str]:
    """Arguments after ``meta_inputs`` with their defaults as text; ``""`` where there is none."""
    ordered, defaults = found.args.args, found.args.defaults
    padded = [None] * (len(ordered) - len(defaults)) + list(defaults)
    pairs = [*zip(ordered, padded, strict=True)][2:]
    pairs += zip(found.args.kwonlyargs, found.args.kw_defaults, strict=True)
    return {a.arg: ast.unparse(d) if d is not None else "" for a, d in pairs}


def positional(found: ast.FunctionDef) -> list[str]:
    return [a.arg for a in found.args.args if a.arg != "self"]


def test_names() -> None:
    assert set(autopar.__all__) >= {
        "AutoparError",
        "Cluster",
        "ColoTracer",
        "Plan",
        "autoparallelize",
        "plan",
        "register_rule",
        "simulate",
    }
    assert set(dir(autopar)) == set(autopar.__all__)


def test_every_name_has_a_home() -> None:
    assert set(autopar._HOMES) == set(autopar.__all__)
    for name, home in autopar._HOMES.items():
        module = home.replace(".", "/")
        assert any((SOURCE / place).exists() for place in (f"{module}.py", f"{module}/__init__.py")), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="paralelize"):
        autopar.paralelize  # noqa: B018  the access is the test


def test_simulate() -> None:
    found = function("api.py", "simulate")
    assert positional(found) == ["model", "meta_inputs", "plan"]
    assert keywords(found)["plan"] == ""


def test_trace() -> None:
    assert positional(function("tracer/tracer.py", "trace"))[:2] == ["model", "meta_inputs"]


def test_register_rule() -> None:
    """``register_rule(torch.ops.mylib.flash, "b h q d, ... -> ...")``: an op and an equation, by position."""
    found = function("strategies/registry.py", "register_rule")
    names = positional(found)
    assert len(names) - len(found.args.defaults) <= 2 <= len(names)


def test_a_plan_answers() -> None:
    fields = {
        "objective",
        "lower_bound",
        "step_time",
        "peak_memory",
        "memory",
        "specs",
        "activations",
        "source",
        "timings",
    }
    assert fields <= set(Plan.__dataclass_fields__)
    assert all(hasattr(Plan, name) for name in ("gap", "collectives", "explain", "diff", "save", "load"))


def test_names_below_the_planner_come_without_torch() -> None:
    code = (
        "import sys, autopar; autopar.Plan, autopar.Cluster, autopar.AutoparError, autopar.register_rule; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
