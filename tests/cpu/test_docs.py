"""The documentation: its code runs, its pages are reachable, and what it names is there."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import autopar
from autopar import errors
from autopar.cli import COMMANDS, main
from autopar.holding import ACTIONS
from autopar.strategies.registry import registered, remove

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = {"reference/rules.md", "reference/errors.md", "reference/cli.md"}
PAGES = [ROOT / "README.md", *sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)]
FENCE = re.compile(r"^```(\{?[\w-]*\}?)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
RUN = {"python", "console"}
SHOWN = {"", "sh", "text", "toml", "json", "bash", "{toctree}", "{include}", "{literalinclude}", "{eval-rst}"}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str, str]]:
    return FENCE.findall(page.read_text())


@pytest.fixture
def readers_rules() -> Iterator[None]:
    """What a page registers is forgotten after it: other tests count the rules."""
    ours = set(registered())
    yield
    for op in set(registered()) - ours:
        remove(op)


@pytest.mark.usefixtures("readers_rules")
@pytest.mark.parametrize("page", [p for p in PAGES if any(k in RUN for k, _ in blocks(p))], ids=name)
def test_every_block_of_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Blocks of one page share a namespace, as a reader's session does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for kind, text in blocks(page):
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind == "python":
                # padded, so that a traceback names the page's own line
                line = page.read_text()[: page.read_text().index(text)].count("\n")
                exec(compile("\n" * line + text, str(page), "exec", dont_inherit=True), vars(module))
            elif kind == "console":
                for command in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
                    program, *arguments = shlex.split(command)
                    assert program == "autopar"
                    assert main(arguments) == 0, command


@pytest.fixture(autouse=True)
def actions() -> Iterator[None]:
    """What a page registers is gone after it."""
    known = dict(ACTIONS)
    yield
    ACTIONS.clear()
    ACTIONS.update(known)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_are_of_kinds_that_run_or_say_that_they_do_not(page: Path):
    assert {kind for kind, _ in blocks(page)} <= RUN | SHOWN


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_shells_are_told_to_run_is_there(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for kind, text in blocks(page):
        if kind == "sh":
            for script in re.findall(r"\S+\.(?:py|sh)\b", text):
                assert (ROOT / script).exists(), script
            assert set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)) <= targets
            assert set(re.findall(r"^autopar ([a-z]+)", text, re.MULTILINE)) <= set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_to_files_lead_somewhere(page: Path):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        file = (page.parent / target).resolve()
        if "://" not in target and file not in {DOCS / page for page in GENERATED}:
            assert file.exists(), target


def test_every_page_is_in_the_table_of_contents():
    index = (DOCS / "index.md").read_text()
    for page in PAGES[1:]:
        at = str(page.relative_to(DOCS).with_suffix(""))
        assert at == "index" or at in index or at.startswith("integrations/"), f"add {at} to docs/index.md"


def generated() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {page: make() for page, make in module.PAGES.items()}


def test_generated_pages_hold_every_rule_error_and_command():
    pages = generated()
    from autopar.strategies.registry import _rules

    assert all(f"`{op}`" in pages["rules.md"] for op in _rules)
    kinds = [k for k in vars(errors) if k.endswith("Error")]
    assert all(f"## {kind}\n" in pages["errors.md"] for kind in kinds)
    assert pages["errors.md"].count("\n| ") > 150
    assert all(f"## autopar {command}\n" in pages["cli.md"] for command in COMMANDS)


def test_the_api_page_names_everything_that_users_hold():
    text = (DOCS / "reference" / "api.md").read_text()
    assert [n for n in autopar.__all__ if f"autopar.{n}\n" not in text] == []


def test_saved_plans_follow_their_schema():
    import torch

    schema = json.loads((DOCS / "reference" / "plan.schema.json").read_text())
    plan = autopar.plan(torch.nn.Linear(8, 8), torch.empty(4, 8), mesh=(2,), cluster="cpu-2", compare=True)
    follow(json.loads(plan.to_json()), schema, "plan")


KINDS = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def follow(data, schema, where):
    """The part of JSON Schema that the file uses."""
    if "const" in schema:
        assert data == schema["const"], where
    if "enum" in schema:
        assert data in schema["enum"], where
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) and kinds in ("number", "integer") else []:
        assert isinstance(data, (int, float) if kind == "number" else int), where
    plain = [KINDS[k] for k in ([kinds] if isinstance(kinds, str) else kinds) if k in KINDS]
    assert not plain or isinstance(data, tuple(plain)), where
    if isinstance(data, dict):
        assert set(schema.get("required", ())) <= set(data), where
        if where == "plan":
            assert set(data) <= set(schema["properties"]), "document the new key in plan.schema.json"
        for key, value in data.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties", {}))
            follow(value, inner, f"{where}.{key}")
    if isinstance(data, list):
        assert schema.get("minItems", 0) <= len(data) <= schema.get("maxItems", len(data)), where
        for i, value in enumerate(data):
            follow(value, schema.get("items", {}), f"{where}[{i}]")


@pytest.mark.slow
def test_sphinx_builds_the_pages_with_warnings_as_errors(tmp_path: Path):
    for needed in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(needed, reason="make docs installs it")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
