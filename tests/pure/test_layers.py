"""The direction of imports, and how little an import of the torch-free half brings in."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH_FREE = ["errors", "ir", "mesh", "sharding", "program", "pipelines", "plans", "strategies"]
TORCH_FREE += ["cost_models", "solver", "planner"]
ON_FIRST_USE = {"torch", "pulp", "highspy", "networkx", "sympy", "transformers", "triton"}
MODULES = sorted(path.relative_to(ROOT) for path in (ROOT / "autopar").rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def package(path: Path) -> str:
    """The entry of the layering that a module belongs to."""
    return path.with_suffix("").parts[1]


def test_a_module_imports_only_from_the_layers_below_its_own():
    importlinter = pytest.importorskip("importlinter.cli")
    if importlinter.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) != 0:
        pytest.fail("run `make layers` to see the imports that break the layering")


def test_the_torch_free_half_starts_without_torch_or_any_solver():
    modules = [dotted(path) for path in MODULES if package(path) in TORCH_FREE]
    assert modules, "no torch-free module found"
    program = "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ON_FIRST_USE & set(done.stdout.split()) == set()


def names_used(tree: ast.Module) -> Iterator[str]:
    """Every dotted name that a module imports or reads an attribute by."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and is_dotted(node):
            yield ast.unparse(node)


def is_dotted(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and is_dotted(node.value))


def is_private_to_torch(name: str) -> bool:
    """Names of ops may begin with _, and pytree has no public name though torch.export's specs are its types."""
    if not name.startswith("torch.") or name.startswith(("torch.ops.", "torch.utils._pytree")):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@pytest.mark.parametrize("path", [p for p in MODULES if package(p) != "_torch"], ids=dotted)
def test_only_one_module_touches_what_torch_keeps_private(path: Path):
    private = {name for name in names_used(ast.parse((ROOT / path).read_text())) if is_private_to_torch(name)}
    assert private == set(), "reach these through autopar._torch"


@pytest.mark.parametrize(
    ("name", "private"),
    [
        ("torch._subclasses.FakeTensorMode", True),
        ("torch.utils.data._utils", True),
        ("torch.utils._pytree.tree_map", False),
        ("torch", False),
        ("torch.ops.aten._softmax", False),
        ("torch.fx.GraphModule.__init__", False),
        ("autopar._torch.storage_key", False),
    ],
)
def test_what_counts_as_private_to_torch(name: str, private: bool):
    assert is_private_to_torch(name) is private


def test_arguments_of_a_call_are_not_part_of_the_name_of_its_result():
    assert set(names_used(ast.parse("torch.stack([_split(v) for v in values]).flatten"))) == {"torch.stack"}
